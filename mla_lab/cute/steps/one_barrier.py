"""Step 64: a producer and four consumer warps, one tile of shared memory, one mbarrier.

The tile is filled again and again, so that the barrier passes from phase to phase. `sync_threads`
still keeps the producer from filling a tile that is being read; step 65 has a barrier for that.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute

from mla_lab.cute.steps.empty_kernel import consumer_registers, producer_registers
from mla_lab.cute.steps.page_load import (
    PageCopy,
    allocate_tile,
    load_page,
    page_copy,
    page_of,
    store_tile,
    tile_bytes,
)
from mla_lab.cute.steps.shape import TILE, WARP_GROUP, WIDTH

THREADS = 2 * WARP_GROUP


def full_arrivals():
    """Arrivals that complete a phase of `full`, beside the bytes."""
    return 1


def full_parity(t):
    """Parity of the phase in which tile `t` arrives."""
    return t % 2


def announce(full):
    """The producer's arrival, by one thread, ahead of the copies of a tile: their bytes too."""
    cute.arch.mbarrier_arrive_and_expect_tx(full, tile_bytes())


@cute.kernel
def gather_in_turn(copy: PageCopy, block_table: cute.Tensor, out: cute.Tensor):
    """One CTA: warp 0 loads, warps 4 to 7 store."""
    thread = cute.arch.thread_idx()[0]
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    tile, full = allocate_tile(out.element_type, 1, 1)
    if warp == 0:
        with cute.arch.elect_one():
            cute.arch.mbarrier_init(full, full_arrivals())
        cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    if warp < 4:
        cute.arch.setmaxregister_decrease(producer_registers())
        for t in cutlass.range(block_table.shape[0], unroll=1):
            if warp == 0:
                with cute.arch.elect_one():
                    announce(full)
                load_page(copy, tile[None, None, 0], page_of(block_table, t), full)
            cute.arch.sync_threads()
    else:
        cute.arch.setmaxregister_increase(consumer_registers())
        for t in cutlass.range(block_table.shape[0], unroll=1):
            cute.arch.mbarrier_wait(full, full_parity(t))
            rows = cute.local_tile(out, (TILE, WIDTH), (t, 0))
            store_tile(tile[None, None, 0], rows, thread - WARP_GROUP)
            cute.arch.sync_threads()


@cute.jit
def launch(cache: cute.Tensor, block_table: cute.Tensor, out: cute.Tensor, stream):
    """cache: bf16 [pages, 64, 192]. block_table: int32 [tiles]. out: bf16 [64 tiles, 192]."""
    gather_in_turn(page_copy(cache), block_table, out).launch(
        grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream, min_blocks_per_mp=1
    )
