"""The kernel, and its launch: layouts, tensor maps, grid (see the package's docstring)."""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync, warpgroup

from ..common.launch_arguments import operand_fields
from ..common.worker_plan import likely_words
from ..split_merge.swap_ab_fragments import CtaEvent, profile_event
from . import kv_656
from .mainloop import consume, merge_slices
from .mma import tiled_mmas
from .params import BOX, BOXES, CONSUMER_WARPS, HEAD_DIM, TILE_KV, KvLoad, Traits
from .producer import produce_grid, produce_plan
from .producer_gather import produce_gathered
from .shared_storage import Globals, Shared, TiledMmas, allocate, barriers_init
from .tile_scheduler import WorkLoads, find_plan, issue_loads, prefetch


@cute.kernel
def swap_ab_kernel(
    c: cutlass.Constexpr[Traits],
    g: Globals,
    mma: TiledMmas,
    q_layout: cute.ComposedLayout,
    k_layout: cute.ComposedLayout,
    rope: Any,
):
    """One CTA: shared memory and barriers, then the producer and two consumer warp groups."""
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    block, _, _ = cute.arch.block_idx()
    s = allocate(c, q_layout, k_layout, rope)
    profile_event(c, s, CtaEvent.START)
    rank = Int32(0)
    if const_expr(c.cluster > 1):
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
    if warp == CONSUMER_WARPS:
        if const_expr(not c.gathered):
            cpasync.prefetch_descriptor(g.tma_kv)
        cpasync.prefetch_descriptor(g.tma_q)
        with cute.arch.elect_one():
            barriers_init(c, s)
        cute.arch.mbarrier_init_fence()
    if const_expr(c.pdl):
        cute.arch.griddepcontrol_launch_dependents()
    if const_expr(c.cluster > 1 or c.multicast > 1):
        cute.arch.cluster_arrive_relaxed()
    cute.arch.sync_threads()
    if const_expr(c.multicast > 1):
        cute.arch.cluster_wait()
    words, loads = Int32(0), WorkLoads.none()
    if const_expr(not c.grid):
        if warp == CONSUMER_WARPS:
            words = likely_words(g.tiles, g.schedule, block)
    if const_expr(c.pdl):
        if const_expr(not c.gathered):
            if warp == 0:
                prefetch(c, g, rank)
        cute.arch.griddepcontrol_wait()
    profile_event(c, s, CtaEvent.SETUP_DONE)
    if const_expr(not c.grid):
        if warp == CONSUMER_WARPS:
            words, loads = find_plan(c, g, s, words, block)
    if warp >= CONSUMER_WARPS:
        producer(c, g, s, warp, words, loads, rank)
    else:
        if const_expr(c.producer_group):
            cute.arch.setmaxregister_increase(c.registers[1])
        if const_expr(c.cluster > 1):
            cute.arch.cluster_wait()
        consume(c, g, s, mma, rank)
        if const_expr(not c.warms_code):
            merge_slices(c, g, s, rank, False)
    if const_expr(c.warms_code):
        merge_slices(c, g, s, rank, True)
    if warp < CONSUMER_WARPS:
        if const_expr(c.multicast > 1):
            # a CTA must not exit while a peer may still arrive at its barriers
            cute.arch.cluster_wait()
        if const_expr(c.profile):
            profile_event(c, s, CtaEvent.EXIT)
            tid, _, _ = cute.arch.thread_idx()
            if tid == 0:
                row = profile_row(block)
                for i in cutlass.range_constexpr(len(CtaEvent)):
                    g.profile[row, i] = cute.arch.load(s.profile + i, Int64)


@cute.jit
def producer(
    c: cutlass.Constexpr[Traits], g: Globals, s: Shared, warp: Int32, found: Int32,
    loads: WorkLoads, rank: Int32,
):  # fmt: skip
    """The producer warp, or warp group; `found` and `loads` as `find_plan` gives them."""
    if const_expr(c.producer_group):
        cute.arch.setmaxregister_decrease(c.registers[0])
    if const_expr(c.gathered):
        produce_gathered(c, g, s)
    elif warp == CONSUMER_WARPS:
        if const_expr(c.grid):
            produce_grid(c, g, s, issue_loads(c, g), rank)
        else:
            produce_plan(c, g, s, found, loads, rank)
    if const_expr(c.cluster > 1):
        cute.arch.cluster_wait()


def profile_row(block: Int32) -> Int32:
    """This CTA's row of the record of timestamps."""
    y, z = cute.arch.block_idx()[1:]
    nx, ny, _ = cute.arch.grid_dim()
    return block + nx * (y + ny * z)


class SwapAB:
    """Host entry of one compiled kernel. Grid: one cluster per worker, or in grid mode (row tiles x
    cluster, splits, requests)."""

    def __init__(self, traits: Traits) -> None:
        self.traits = traits

    @cute.jit
    def launch(self, q: cute.Tensor, kv: cute.Tensor, stream: Any, args: dict):
        """Query, out and lse may have any shape whose rows lie in memory in order."""
        c = self.traits
        kinds = warpgroup.SmemLayoutAtomKind
        narrow = kinds.K_SW64 if const_expr(c.box * c.bytes == 64) else kinds.K_SW128
        atom = warpgroup.make_smem_layout_atom(narrow, c.dtype)
        q_layout = cute.tile_to_shape(atom, (c.mma_n, c.columns), (0, 1))
        k_layout = cute.tile_to_shape(atom, (TILE_KV, c.columns, c.stages), (0, 1, 2))
        g = Globals(
            *q_tma(c, q, q_layout),
            *kv_tma(c, kv, atom),
            **operand_fields(args, tree=c.tree, skip=c.skip),
            cache=kv,
            tma_656=kv_656.rope_and_scale_maps(c, kv) if c.kv_656 and not c.gathered else None,
        )
        rope = kv_656.rope_layouts(c) if const_expr(c.kv_656) else None
        swap_ab_kernel(c, g, tiled_mmas(c), q_layout, k_layout, rope).launch(
            grid=grid_of(c, g),
            block=(c.threads, 1, 1),
            cluster=(c.cluster * c.multicast, 1, 1) if c.cluster * c.multicast > 1 else None,
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=c.pdl,
            cooperative=c.cooperative_launch,
        )


def grid_of(c: Traits, g: Globals) -> tuple:
    """CTAs of a launch. In grid mode neighbours are row tiles of one split, so that the second one
    to read a KV tile finds it in L2."""
    if not c.grid:
        return (g.num_workers * c.cluster, 1, 1)
    row_tiles = (g.row_tiles + c.multicast - 1) // c.multicast * c.multicast
    requests = (g.block_table if c.kv_load == KvLoad.GATHER_SPARSE else g.seq_lens).shape[0]
    return (row_tiles * c.cluster, g.num_splits, requests)


def q_tma(c: Traits, q: cute.Tensor, q_layout: cute.ComposedLayout) -> tuple:
    """TMA atom and coordinates (rows, (64, 9)) of the query, which is stored before it is split
    into hi and lo."""
    if c.hi_lo:
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, c.q_dtype)
        q_layout = cute.tile_to_shape(atom, (c.rows, HEAD_DIM), (0, 1))
    columns = (BOX, BOXES)
    shape = (cute.size(q.shape[:-1]), columns)
    rows = cute.make_tensor(q.iterator, cute.make_layout(shape, stride=(HEAD_DIM, (1, BOX))))
    copy = cpasync.CopyBulkTensorTileG2SOp()
    return cpasync.make_tiled_tma_atom(copy, rows, q_layout, (c.rows, columns))


def kv_tma(c: Traits, kv: cute.Tensor, atom: Any) -> tuple:
    """TMA atom and coordinates (page rows, (64, 9), pages) of the cache, without the rope of
    656-byte tokens; None where tokens are gathered."""
    if c.gathered:
        return None, None
    box = cute.tile_to_shape(atom, (c.box_rows, c.box * c.boxes_per_copy), (0, 1))
    if c.kv_656:
        return kv_656.latent_tma(c, kv, box)
    shape = (c.page, (BOX, BOXES), kv.shape[0])
    stride = (HEAD_DIM, (1, BOX), kv.stride[0])
    pages = cute.make_tensor(kv.iterator, cute.make_layout(shape, stride=stride))
    copy = cpasync.CopyBulkTensorTileG2SOp()
    if c.multicast > 1:
        copy = cpasync.CopyBulkTensorTileG2SMulticastOp()
    return cpasync.make_tiled_tma_atom(copy, pages, box, (c.box_rows, (BOX, c.boxes_per_copy)))
