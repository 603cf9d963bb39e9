"""Step 65: a ring of stages. The producer runs ahead of the consumers by as many tiles.

full[stage]   1 arrival and the bytes of a tile: the tile is here
empty[stage]  an arrival of each consumer warp: the tile has been read
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute

from mla_lab.cute.steps.empty_kernel import consumer_registers, producer_registers
from mla_lab.cute.steps.one_barrier import THREADS, announce, full_arrivals
from mla_lab.cute.steps.page_load import (
    PageCopy,
    allocate_tile,
    load_page,
    page_copy,
    page_of,
    store_tile,
)
from mla_lab.cute.steps.shape import TILE, WARP_GROUP, WIDTH

STAGES = 2


@dataclass(frozen=True)
class Ring:
    """Stages in shared memory (64, 192, stage), and two mbarriers for each."""

    tiles: cute.Tensor
    full: cute.Pointer
    empty: cute.Pointer


def stage_of(t):
    """The stage that tile `t` goes through."""
    return t % STAGES


def full_parity(t):
    """Parity of the phase of `full[stage_of(t)]` that ends when tile `t` is here."""
    return t // STAGES % 2


def empty_parity(t):
    """Parity of the phase of `empty[stage_of(t)]` behind which there is room for tile `t`. A fresh
    barrier passes a wait for parity 1 at once."""
    return (t // STAGES + 1) % 2


def empty_arrivals():
    """Arrivals that complete a phase of `empty`: one of each consumer warp."""
    return 4


def make_ring(element) -> Ring:
    """Shared memory of the stages and barriers; `init_ring` comes next."""
    tiles, barriers = allocate_tile(element, STAGES, 2 * STAGES)
    return Ring(tiles, barriers, barriers + STAGES)


@cute.jit
def init_ring(ring: Ring, warp):
    """Set the arrivals of all barriers, by one thread; all others wait for it."""
    if warp == 0:
        with cute.arch.elect_one():
            for stage in cutlass.range_constexpr(STAGES):
                cute.arch.mbarrier_init(ring.full + stage, full_arrivals())
                cute.arch.mbarrier_init(ring.empty + stage, empty_arrivals())
        cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()


@cute.jit
def fill_stage(copy: PageCopy, ring: Ring, t, page):
    """Producer: wait for room, announce, copy tile `t`."""
    stage = stage_of(t)
    cute.arch.mbarrier_wait(ring.empty + stage, empty_parity(t))
    with cute.arch.elect_one():
        announce(ring.full + stage)
    load_page(copy, ring.tiles[None, None, stage], page, ring.full + stage)


@cute.jit
def release_stage(ring: Ring, t):
    """Consumer: one arrival a warp, once all its threads have read tile `t`."""
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(ring.empty + stage_of(t))


@cute.kernel
def gather_through_ring(copy: PageCopy, block_table: cute.Tensor, out: cute.Tensor):
    """One CTA: warp 0 loads, warps 4 to 7 store."""
    thread = cute.arch.thread_idx()[0]
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    ring = make_ring(out.element_type)
    init_ring(ring, warp)
    if warp < 4:
        cute.arch.setmaxregister_decrease(producer_registers())
        if warp == 0:
            for t in cutlass.range(block_table.shape[0], unroll=1):
                fill_stage(copy, ring, t, page_of(block_table, t))
    else:
        cute.arch.setmaxregister_increase(consumer_registers())
        for t in cutlass.range(block_table.shape[0], unroll=1):
            cute.arch.mbarrier_wait(ring.full + stage_of(t), full_parity(t))
            rows = cute.local_tile(out, (TILE, WIDTH), (t, 0))
            store_tile(ring.tiles[None, None, stage_of(t)], rows, thread - WARP_GROUP)
            release_stage(ring, t)


@cute.jit
def launch(cache: cute.Tensor, block_table: cute.Tensor, out: cute.Tensor, stream):
    """cache: bf16 [pages, 64, 192]. block_table: int32 [tiles]. out: bf16 [64 tiles, 192]."""
    gather_through_ring(page_copy(cache), block_table, out).launch(
        grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream, min_blocks_per_mp=1
    )
