"""KV tiles fetched into L2 ahead of the wait for the kernel in front.

Nothing is read: the tiles are loaded behind that wait, from L2 where they are there by then. So
block tables and lengths may still change, and a stale entry costs a useless fetch at most.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from ...plan.self_schedule import BLOCK
from .ptx_sm90 import load_lasting, ptx

#: tiles of the first work tile that are fetched
TILES = 2
#: requests from which on it pays: 64 of 4,096 tokens and 16 heads take 2.9 us less of 84.5,
#: one of 8,192 tokens and 128 heads 1 us more of 15.7, as its consumers start later (H200,
#: 2026-11-22, by hand, 5 rounds in rotation)
LEAST_REQUESTS = 32


@dataclass(frozen=True)
class KvCache:
    """cache [pages, page size, width], block_table int32 [batch, entries]; a CTA takes the tiles
    from `rank` on, so that those of a cluster fetch others."""

    cache: cute.Tensor
    block_table: cute.Tensor
    rank: Int32


@cute.jit
def prefetch_tiles(kv: KvCache, request: Int32, begin: Int32, end: Int32):
    """The first tiles of blocks [begin, end) of a request that is there, as far as its table has
    entries; the blocks may be any numbers. By one warp, a page or less a lane."""
    page, width = kv.cache.shape[1], kv.cache.shape[2]
    rows = min(page, BLOCK)
    held = (kv.block_table.shape[1] * page + (BLOCK - 1)) // BLOCK
    begin, end = [cutlass.max(cutlass.min(block, held), 0) for block in (begin, end)]
    first = begin + kv.rank
    count = cutlass.max(cutlass.min(end - first, TILES), 0)
    lane = cute.arch.lane_idx()
    row = first * BLOCK + lane * rows
    if lane * rows < count * BLOCK:
        entry = cutlass.min(row // page, kv.block_table.shape[1] - 1)
        at = Int64(request) * kv.block_table.stride[0] + entry
        index = load_lasting(kv.block_table.iterator + at)
        if (index >= 0) & (index < kv.cache.shape[0]):
            start = Int64(index) * kv.cache.stride[0] + row % page * width
            size = Int32(rows * width * kv.cache.element_type.width // 8)
            address = (kv.cache.iterator + start).toint()
            ptx("cp.async.bulk.prefetch.L2.global [{$r0}], {$r1};", address, size)
