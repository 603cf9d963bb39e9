"""Tokens fetched one by one: where one lies, and its copies of 16 bytes.

The producer warps of both kernels use it: `producer_gather` of 16 bits, `fp8.producer_gather`.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr

from ..common.ptx_sm90 import ptx
from ..rows_on_m.params import Cta, Work
from .params import PAGED


def copy16(target: Int32, source: cute.Pointer, offset: int, size: Int32, line: int = 64) -> None:
    """16 bytes to shared memory past the L1, zeros where `size` is 0. L2 lines are filled by `line`
    bytes: at the ends of a token that is no multiple of 128 bytes the rest of a line belongs to
    another."""
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
    """Elements from the cache's begin to the token with this table entry; -1 where there is
    none."""
    cache = cta.g.cache
    page_size, found = cache.shape[1], cutlass.max(entry, Int32(0))
    if const_expr(cta.cfg.gather == PAGED):
        page, row = found, Int32(Uint32(token) % Uint32(page_size))
    else:
        page = Int32(Uint32(found) // Uint32(page_size))
        row = found - page * page_size
    at = Int64(page) * cache.stride[0] + Int64(row * cache.shape[2])
    return at if (token < work.kv_len) & (entry >= 0) else Int64(-1)
