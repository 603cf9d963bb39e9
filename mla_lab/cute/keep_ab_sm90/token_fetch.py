"""Tokens fetched one by one: where a token lies, its copies of 16 bytes, the mask of missing ones.

Both kernels use it: `producer_gather` and the mainloop of 16-bit elements, and those of `fp8`.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr

from ..common.ptx_sm90 import ptx
from ..rows_on_m.mask import apply_mask, apply_valid
from ..rows_on_m.params import PAGED, SPARSE, Cta, Work


def copy16(target: Int32, source: cute.Pointer, offset: int, size: Int32, line: int = 64) -> None:
    """Copy 16 bytes to shared memory past the L1, or write zeros where `size` is 0. `line` is the
    number of bytes that L2 prefetches: a token that is no multiple of 128 bytes shares its last
    line with another one."""
    ptx(
        f"cp.async.cg.shared.global.L2::{line}B [{{$r0}}], [{{$r1}}+{offset}], 16, {{$r2}};",
        target,
        source,
        size,
    )


@cute.jit
def load_entry(cta: Cta, work: Work, token: Int32):
    """The table entry of a token: a page id or a token slot; past the length it is undefined."""
    column = token
    if const_expr(cta.cfg.gather == PAGED):
        column = Int32(Uint32(token) // Uint32(cta.g.cache.shape[1]))
    table = cta.g.block_table
    return table[work.request, cutlass.min(column, table.shape[1] - 1)]


@cute.jit
def token_offset(cta: Cta, work: Work, token: Int32, entry: Int32):
    """Elements from the start of the cache to the token with this table entry; -1 where there is
    none. Those from the start of a page have 32 bits (`backends.cute.token_gather`)."""
    cache = cta.g.cache
    page_size, found = cache.shape[1], cutlass.max(entry, Int32(0))
    if const_expr(cta.cfg.gather == PAGED):
        page, row = found, Int32(Uint32(token) % Uint32(page_size))
    else:
        page = Int32(Uint32(found) // Uint32(page_size))
        row = found - page * page_size
    at = Int64(page) * cache.stride[0] + Int64(row * cache.shape[2])
    return at if (token < work.kv_len) & (entry >= 0) else Int64(-1)


def load_valid(cta: Cta, stage, exists: Any = 1):
    """Both words of bits of the tile in a stage, if it `exists`, else 0; loaded where this
    stands."""
    return ptx(
        "{ .reg .pred p; setp.ne.s32 p, {$r1}, 0; mov.b32 {$w0}, 0; mov.b32 {$w1}, 0; "
        "@p ld.shared.v2.b32 { {$w0}, {$w1} }, [{$r0}]; }",
        Int32(cta.s.valid.iterator.toint()) + 8 * stage,
        Int32(exists),
        out=[Int32] * 2,
    )


def mask_scores(cta: Cta, scores: cute.Tensor, tile: Any, stage, tiles_left, valid: Any = None):
    """Mask the scores of a tile, `tiles_left` before the end of its work tile: by the bits of its
    stage where slots may be empty, in `valid` if they are loaded."""
    if cta.cfg.gather == SPARSE:
        apply_valid(scores, list(load_valid(cta, stage) if valid is None else valid))
    else:
        apply_mask(cta, scores, tile.index, tile.mask_free, tiles_left)
