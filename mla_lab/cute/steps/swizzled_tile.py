"""Step 62: a tile that is written by rows and read by columns, in a swizzled place.

The output is the transposed box. Rows go to shared memory vector by vector, at offsets that
`swizzled` computes; columns are read through CuTe's own swizzle of `swizzle_numbers`.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

from mla_lab.cute.steps.shape import BOX, BOXES, TILE, WARP_GROUP
from mla_lab.cute.steps.tile_copy import box_of

#: numbers in 16 bytes, what one vector access moves, and such vectors in a row of a box
VECTOR = 8
VECTORS = BOX // VECTOR


def swizzled(offset):
    """Where number `offset` = 64 row + column of a tile lies: vector v of row r goes to vector
    v xor (r mod 8) of its row."""
    return offset ^ ((offset >> 3) & 0x38)


def swizzle_numbers():
    """The same as CuTe's (bits, base, shift)."""
    return 3, 3, 3


@cute.jit
def store_rows(box: cute.Tensor, tile: cute.Tensor, thread):
    """Each thread takes every 128th vector of the tile."""
    for i in cutlass.range_constexpr(TILE * VECTORS // WARP_GROUP):
        vector = i * WARP_GROUP + thread
        row, column = vector // VECTORS, vector % VECTORS
        source = cute.local_tile(box, (1, VECTOR), (row, column))
        at = cute.assume(swizzled(vector * VECTOR), divby=VECTOR)
        target = cute.make_tensor(tile.iterator + at, cute.make_layout((1, VECTOR)))
        cute.autovec_copy(source, target)


@cute.jit
def store_transposed(tile: cute.Tensor, out: cute.Tensor, thread):
    """Neighbouring threads read neighbouring rows of a column of vectors, and write `out[c, r]`."""
    bits, base, shift = swizzle_numbers()
    plain = cute.make_layout((TILE, BOX), stride=(BOX, 1))
    layout = cute.make_composed_layout(cute.make_swizzle(bits, base, shift), 0, plain)
    numbers = cute.make_tensor(tile.iterator, layout)
    row = thread % TILE
    for i in cutlass.range_constexpr(VECTORS * TILE // WARP_GROUP):
        column = 2 * i + thread // TILE
        values = cute.make_rmem_tensor((1, VECTOR), tile.element_type)
        cute.autovec_copy(cute.local_tile(numbers, (1, VECTOR), (row, column)), values)
        for k in cutlass.range_constexpr(VECTOR):
            out[VECTOR * column + k, row] = values[k]


@cute.kernel
def transpose_boxes(cache: cute.Tensor, out: cute.Tensor):
    """CTA (page, box): rows in, columns out."""
    thread = cute.arch.thread_idx()[0]
    page, box, _ = cute.arch.block_idx()
    alloc = cutlass.memory.SmemAllocator()
    tile = alloc.allocate_tensor(
        cache.element_type, cute.make_layout(TILE * BOX), byte_alignment=1024
    )
    store_rows(box_of(cache, page, box), tile, thread)
    cute.arch.sync_threads()
    columns = cute.local_tile(out[page, None, None], (BOX, TILE), (box, 0))
    store_transposed(tile, columns, thread)


@cute.jit
def launch(cache: cute.Tensor, out: cute.Tensor, stream):
    """cache: bf16 [pages, 64, 192]. out: bf16 [pages, 192, 64], each page transposed."""
    transpose_boxes(cache, out).launch(
        grid=(cache.shape[0], BOXES, 1), block=(WARP_GROUP, 1, 1), stream=stream
    )
