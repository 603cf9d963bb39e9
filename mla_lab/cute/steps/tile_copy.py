"""Step 61: a box of 64 tokens x 64 numbers to shared memory and back, as layouts say."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

from mla_lab.cute.steps.shape import BOX, BOXES, TILE, WARP_GROUP


def threads_over_tile():
    """The 128 threads over rows of a tile: neighbours lie along a row."""
    return cute.make_layout((16, 8), stride=(8, 1))


def numbers_of_thread():
    """What a thread copies at once: the widest vector of a row."""
    return cute.make_layout((1, 8))


def box_of(tensor, page, box):
    """Column box `box` of a page of `tensor` [pages, 64 tokens, 192]: a tile of 64 x 64."""
    return cute.local_tile(tensor[page, None, None], (TILE, BOX), (0, box))


@cute.jit
def copy_tile(source: cute.Tensor, target: cute.Tensor, thread):
    """Copy a tile by all threads; each takes the vectors that the two layouts give it."""
    atom = cute.make_copy_atom(cute.nvgpu.CopyUniversalOp(), source.element_type)
    tiled = cute.make_tiled_copy_tv(atom, threads_over_tile(), numbers_of_thread())
    mine = tiled.get_slice(thread)
    values = cute.make_fragment_like(mine.partition_S(source))
    cute.autovec_copy(mine.partition_S(source), values)
    cute.autovec_copy(values, mine.partition_D(target))


@cute.kernel
def copy_boxes(cache: cute.Tensor, out: cute.Tensor):
    """CTA (page, box): cache to shared memory, shared memory to out."""
    thread = cute.arch.thread_idx()[0]
    page, box, _ = cute.arch.block_idx()
    alloc = cutlass.memory.SmemAllocator()
    tile = alloc.allocate_tensor(
        cache.element_type, cute.make_layout((TILE, BOX), stride=(BOX, 1)), byte_alignment=128
    )
    copy_tile(box_of(cache, page, box), tile, thread)
    cute.arch.sync_threads()
    copy_tile(tile, box_of(out, page, box), thread)


@cute.jit
def launch(cache: cute.Tensor, out: cute.Tensor, stream):
    """cache, out: bf16 [pages, 64, 192]."""
    copy_boxes(cache, out).launch(
        grid=(cache.shape[0], BOXES, 1), block=(WARP_GROUP, 1, 1), stream=stream
    )
