"""Step 63: the page of a tile by TMA, and out again row by row.

The copy engine puts three boxes of 64 x 64 into shared memory, each swizzled as in step 62, and
counts their bytes on an mbarrier.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int64
from cutlass.cute.nvgpu import cpasync, warpgroup

from mla_lab.cute.steps.shape import BOX, BOXES, TILE, WARP_GROUP, WIDTH
from mla_lab.cute.steps.swizzled_tile import VECTOR


@dataclass(frozen=True)
class PageCopy:
    """A TMA descriptor of the cache, and the cache as coordinates (row, column, page)."""

    atom: cute.CopyAtom
    coordinates: cute.Tensor


def page_of(block_table, tile):
    """The page of the cache that holds tile `tile` of the request."""
    return block_table[tile]


def tile_bytes():
    """Bytes of a whole tile: what the barrier waits for."""
    return TILE * WIDTH * 2


def tile_layout(stages=1):
    """(64, 192, stages) in shared memory: swizzled boxes, each 64 rows of 128 bytes."""
    kind = warpgroup.SmemLayoutAtomKind.K_SW128
    atom = warpgroup.make_smem_layout_atom(kind, cutlass.BFloat16)
    return cute.tile_to_shape(atom, (TILE, WIDTH, stages), (0, 1, 2))


@cute.jit
def page_copy(cache: cute.Tensor) -> PageCopy:
    """Host code: the descriptor, for boxes of 64 rows x 64 numbers."""
    view = cute.make_tensor(cache.iterator, cute.select(cache.layout, mode=[1, 2, 0]))
    kind = warpgroup.SmemLayoutAtomKind.K_SW128
    atom = warpgroup.make_smem_layout_atom(kind, cache.element_type)
    box = cute.tile_to_shape(atom, (TILE, BOX), (0, 1))
    load = cpasync.CopyBulkTensorTileG2SOp()
    return PageCopy(*cpasync.make_tiled_tma_atom(load, view, box, (TILE, BOX)))


@cute.jit
def load_page(copy: PageCopy, tile: cute.Tensor, page, barrier: cute.Pointer):
    """Three boxes of a page into `tile` (64, 192), by one warp."""
    boxes = cute.group_modes(cute.flat_divide(tile, (TILE, BOX)), 0, 2)
    pages = cute.local_tile(copy.coordinates, (TILE, BOX), (None, None, None))
    into, source = cpasync.tma_partition(
        copy.atom, 0, cute.make_layout(1), boxes, cute.group_modes(pages, 0, 2)
    )
    for box in cutlass.range_constexpr(BOXES):
        cute.copy(copy.atom, source[None, 0, box, page], into[None, 0, box], tma_bar_ptr=barrier)


@cute.jit
def store_tile(tile: cute.Tensor, out: cute.Tensor, thread):
    """A tile from shared memory to `out` (64, 192), by 128 threads, 16 bytes at a time."""
    for i in cutlass.range_constexpr(TILE * WIDTH // VECTOR // WARP_GROUP):
        vector = i * WARP_GROUP + thread
        place = (vector // (WIDTH // VECTOR), vector % (WIDTH // VECTOR))
        source = cute.local_tile(tile, (1, VECTOR), place)
        cute.autovec_copy(source, cute.local_tile(out, (1, VECTOR), place))


def allocate_tile(element: Any, stages: int, barriers: int):
    """Shared memory of `stages` tiles and the barriers behind them."""
    alloc = cutlass.memory.SmemAllocator()
    layout = tile_layout(stages)
    tile = alloc.allocate_tensor(element, layout.outer, byte_alignment=1024, swizzle=layout.inner)
    return tile, alloc.allocate_array(Int64, barriers)


@cute.kernel
def gather_pages(copy: PageCopy, block_table: cute.Tensor, out: cute.Tensor):
    """CTA t: tile t of the request."""
    thread, t = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    tile, full = allocate_tile(out.element_type, 1, 1)
    if warp == 0:
        with cute.arch.elect_one():
            cute.arch.mbarrier_init(full, 1)
        cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    if warp == 0:
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(full, tile_bytes())
        load_page(copy, tile[None, None, 0], page_of(block_table, t), full)
    cute.arch.mbarrier_wait(full, 0)
    store_tile(tile[None, None, 0], cute.local_tile(out, (TILE, WIDTH), (t, 0)), thread)


@cute.jit
def launch(cache: cute.Tensor, block_table: cute.Tensor, out: cute.Tensor, stream):
    """cache: bf16 [pages, 64, 192]. block_table: int32 [tiles]. out: bf16 [64 tiles, 192]."""
    gather_pages(page_copy(cache), block_table, out).launch(
        grid=(block_table.shape[0], 1, 1), block=(WARP_GROUP, 1, 1), stream=stream
    )
