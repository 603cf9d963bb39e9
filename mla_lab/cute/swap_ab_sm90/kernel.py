"""MLA decode with KV on the M side: S^T = K Q^T, O^T = V^T P^T (see the package's docstring)."""

from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

from ..common.feature_operands import mask_words
from . import kv_656 as scaled
from .mainloop import consume
from .params import BOX, BOXES, CONSUMER_WARPS, GROUPS, HEAD_DIM, TILE_KV, Shape
from .producer import barriers_init, produce, produce_one
from .producer_gather import SPARSE, gather
from .shared_storage import STAMPS, Global, Products, allocate, stamp
from .tile_scheduler import find_plan


def values_product(c: Shape, k_major: OperandMajorMode, mn_major: OperandMajorMode):
    """V^T P^T: e4m3 operands are K-major only, so that V^T goes through registers (see `fp8`)."""
    shape = (Float32, (1, 1, 1), (TILE_KV, c.width))
    if c.eight:
        source = warpgroup.OperandSource.RMEM
        return sm90.make_trivial_tiled_mma(
            c.dtype, c.dtype, k_major, k_major, *shape, a_source=source
        )
    return sm90.make_trivial_tiled_mma(c.dtype, c.dtype, mn_major, k_major, *shape)


@cute.kernel
def swap_ab_kernel(
    c: cutlass.Constexpr[Shape],
    g: Global,
    mma: Products,
    q_layout: cute.ComposedLayout,
    k_layout: cute.ComposedLayout,
    rope: Any,
):
    """One CTA: set up, then one producer warp and two consumer warpgroups."""
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    block, _, _ = cute.arch.block_idx()
    s = allocate(c, q_layout, k_layout, rope)
    stamp(c, s, 0)
    rank = Int32(0)
    if const_expr(c.cluster > 1):
        rank = cute.arch.make_warp_uniform(cute.arch.block_idx_in_cluster())
    if warp == CONSUMER_WARPS:
        if const_expr(c.boxed):
            cpasync.prefetch_descriptor(g.tma_k)
        cpasync.prefetch_descriptor(g.tma_q)
        with cute.arch.elect_one():
            barriers_init(c, s)
        cute.arch.mbarrier_init_fence()
    if const_expr(c.pdl):
        cute.arch.griddepcontrol_launch_dependents()
    if const_expr(c.cluster > 1 or c.pair > 1):
        cute.arch.cluster_arrive_relaxed()
    cute.arch.sync_threads()
    if const_expr(c.pair > 1):
        cute.arch.cluster_wait()
    if const_expr(c.pdl):
        cute.arch.griddepcontrol_wait()
    stamp(c, s, 1)
    found = Int32(0)
    if const_expr(not c.grid):
        if warp == CONSUMER_WARPS:
            found = find_plan(c, g, s, block // c.cluster)
    if warp >= CONSUMER_WARPS:
        if const_expr(c.wide):
            cute.arch.setmaxregister_decrease(c.registers[0])
        if const_expr(c.gather):
            gather(c, g, s)
        elif warp == CONSUMER_WARPS:
            if const_expr(c.grid):
                produce_one(c, g, s, rank)
            else:
                produce(c, g, s, found, rank)
        if const_expr(c.cluster > 1):
            cute.arch.cluster_wait()
    else:
        if const_expr(c.wide):
            cute.arch.setmaxregister_increase(c.registers[1])
        if const_expr(c.cluster > 1):
            cute.arch.cluster_wait()
        consume(c, g, s, mma, rank)
        if const_expr(c.pair > 1):
            # nobody leaves while a peer may still arrive here
            cute.arch.cluster_wait()
        if const_expr(c.stamps):
            stamp(c, s, 7)
            tid, _, _ = cute.arch.thread_idx()
            if tid == 0:
                y, z = cute.arch.block_idx()[1:]
                nx, ny, _ = cute.arch.grid_dim()
                row = block + nx * (y + ny * z)
                for i in cutlass.range_constexpr(STAMPS):
                    g.stamps[row, i] = cute.arch.load(s.stamps + i, cutlass.Int64)


class SwapAB:
    """Launch of one compiled shape that walks a plan. Grid: one cluster per worker."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        kv: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        partial_out: cute.Tensor,
        partial_lse: cute.Tensor,
        counters: cute.Tensor,
        block_table: cute.Tensor,
        seq_lens: cute.Tensor,
        q_begin: cute.Tensor,
        tiles: cute.Tensor,
        worker_begin: cute.Tensor,
        heads: Int32,
        scale_log2: Float32,
        out_scale: Float32,
        num_workers: Int32,
        q_len: Int32,
        costs: Int32,
        stream,
    ):
        operands = (
            out, lse, partial_out, partial_lse, counters, block_table, seq_lens, q_begin, tiles,
            worker_begin, None, heads, scale_log2, out_scale, None, None, q_len, num_workers,
            costs,
        )  # fmt: skip
        self.launch(q, kv, operands, stream)

    @cute.jit
    def launch(self, q: cute.Tensor, kv: cute.Tensor, operands: tuple, stream):
        """`operands`: the fields of `Global` after the TMA views. Query, out and lse as rows, or in
        the caller's shapes (option "shaped"): the rows lie in memory alike."""
        c = self.shape
        out, lse, *rest = operands
        lse = cute.make_tensor(lse.iterator, cute.make_layout(cute.size(lse.shape)))
        if const_expr(c.tree):
            rest[-1 - c.skip] = mask_words(rest[-1 - c.skip])
        operands = (out, lse, *rest)
        k_major, mn_major = OperandMajorMode.K, OperandMajorMode.MN
        kinds = warpgroup.SmemLayoutAtomKind
        atom = warpgroup.make_smem_layout_atom(
            kinds.K_SW64 if const_expr(c.box * c.bytes == 64) else kinds.K_SW128, c.dtype
        )
        q_layout = cute.tile_to_shape(atom, (c.width, c.columns), (0, 1))
        q_arrives = q_layout
        if const_expr(c.terms > 1):
            stored = warpgroup.make_smem_layout_atom(kinds.K_SW128, c.q_dtype)
            q_arrives = cute.tile_to_shape(stored, (c.rows, HEAD_DIM), (0, 1))
        k_layout = cute.tile_to_shape(atom, (TILE_KV, c.columns, c.stages), (0, 1, 2))
        box_layout = cute.tile_to_shape(atom, (c.box_rows, c.box * c.box_cols), (0, 1))
        mma = Products(
            sm90.make_trivial_tiled_mma(
                c.dtype, c.dtype, k_major, k_major, Float32, (1, 1, 1), (TILE_KV, c.width)
            ),
            values_product(c, k_major, mn_major),
            scaled.rope_product(c) if const_expr(c.scaled) else None,
        )
        rope = scaled.rope_layouts(c) if const_expr(c.scaled) else None
        columns = (BOX, BOXES)
        q_view = cute.make_tensor(
            q.iterator,
            cute.make_layout((cute.size(q.shape[:-1]), columns), stride=(HEAD_DIM, (1, BOX))),
        )
        copy = cpasync.CopyBulkTensorTileG2SOp()
        spread = cpasync.CopyBulkTensorTileG2SMulticastOp() if const_expr(c.pair > 1) else copy
        tma_k, gk, tokens = None, None, kv
        more = None
        if const_expr(c.boxed and c.scaled):
            tokens, more = None, scaled.make_views(c, kv)
            tma_k, gk = scaled.make_view(c, kv, c.dtype, 0, (c.box, GROUPS), box_layout)
        elif const_expr(c.boxed):
            tokens = None
            kv_view = cute.make_tensor(
                kv.iterator,
                cute.make_layout(
                    (c.page, columns, kv.shape[0]), stride=(HEAD_DIM, (1, BOX), kv.stride[0])
                ),
            )
            tma_k, gk = cpasync.make_tiled_tma_atom(
                spread, kv_view, box_layout, (c.box_rows, (BOX, c.box_cols))
            )
        tma_q, gq = cpasync.make_tiled_tma_atom(copy, q_view, q_arrives, (c.rows, columns))
        g = Global(tma_q, gq, tma_k, gk, *operands, kv=tokens, more=more)
        if const_expr(c.grid):
            row_tiles = (g.row_tiles + c.pair - 1) // c.pair * c.pair
            requests = g.seq_lens.shape[0]
            if const_expr(c.gather == SPARSE):
                requests = g.block_table.shape[0]
            grid = (g.num_splits * c.cluster, row_tiles, requests)
        else:
            grid = (g.num_workers * c.cluster, 1, 1)
        swap_ab_kernel(c, g, mma, q_layout, k_layout, rope).launch(
            grid=grid,
            block=(c.threads, 1, 1),
            cluster=(c.cluster, c.pair, 1) if const_expr(c.cluster * c.pair > 1) else None,
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=c.pdl,
            cooperative=c.cooperative,
        )


class StampedSwapAB(SwapAB):
    """The same launch with `stamps` int64 [CTAs, STAMPS] after worker_begin (option "stamps")."""

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        kv: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        partial_out: cute.Tensor,
        partial_lse: cute.Tensor,
        counters: cute.Tensor,
        block_table: cute.Tensor,
        seq_lens: cute.Tensor,
        q_begin: cute.Tensor,
        tiles: cute.Tensor,
        worker_begin: cute.Tensor,
        stamps: cute.Tensor,
        heads: Int32,
        scale_log2: Float32,
        out_scale: Float32,
        num_workers: Int32,
        q_len: Int32,
        costs: Int32,
        stream,
    ):
        operands = (
            out, lse, partial_out, partial_lse, counters, block_table, seq_lens, q_begin, tiles,
            worker_begin, stamps, heads, scale_log2, out_scale, None, None, q_len, num_workers,
            costs,
        )  # fmt: skip
        self.launch(q, kv, operands, stream)


class GridSwapAB(SwapAB):
    """Grid mode: the plan is a formula of `num_splits`; `q_len` 0: they differ, see `q_begin`.

    The upper half of `row_tiles` is a gate."""

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        kv: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        partial_out: cute.Tensor,
        partial_lse: cute.Tensor,
        counters: cute.Tensor,
        block_table: cute.Tensor,
        seq_lens: cute.Tensor,
        q_begin: cute.Tensor,
        heads: Int32,
        scale_log2: Float32,
        out_scale: Float32,
        num_splits: Int32,
        row_tiles: Int32,
        q_len: Int32,
        stream,
    ):
        operands = (
            out, lse, partial_out, partial_lse, counters, block_table, seq_lens, q_begin, None,
            None, None, heads, scale_log2, out_scale, num_splits, row_tiles & 0xFFFF, q_len, None,
            row_tiles >> 16,
        )  # fmt: skip
        self.launch(q, kv, operands, stream)


class StampedGridSwapAB(SwapAB):
    """GridSwapAB with `stamps` int64 [CTAs, STAMPS] after q_begin."""

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        kv: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        partial_out: cute.Tensor,
        partial_lse: cute.Tensor,
        counters: cute.Tensor,
        block_table: cute.Tensor,
        seq_lens: cute.Tensor,
        q_begin: cute.Tensor,
        stamps: cute.Tensor,
        heads: Int32,
        scale_log2: Float32,
        out_scale: Float32,
        num_splits: Int32,
        row_tiles: Int32,
        q_len: Int32,
        stream,
    ):
        operands = (
            out, lse, partial_out, partial_lse, counters, block_table, seq_lens, q_begin, None,
            None, stamps, heads, scale_log2, out_scale, num_splits, row_tiles & 0xFFFF, q_len, None,
            row_tiles >> 16,
        )  # fmt: skip
        self.launch(q, kv, operands, stream)


class FeatureSwapAB(SwapAB):
    """SwapAB with `extras` at the end: sinks, bmm1 and bmm2 in memory, then what is compiled in of
    the mask (option features, mask "tree")."""

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        kv: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        partial_out: cute.Tensor,
        partial_lse: cute.Tensor,
        counters: cute.Tensor,
        block_table: cute.Tensor,
        seq_lens: cute.Tensor,
        q_begin: cute.Tensor,
        tiles: cute.Tensor,
        worker_begin: cute.Tensor,
        heads: Int32,
        scale_log2: Float32,
        out_scale: Float32,
        num_workers: Int32,
        q_len: Int32,
        costs: Int32,
        extras: tuple,
        stream,
    ):
        operands = (
            out, lse, partial_out, partial_lse, counters, block_table, seq_lens, q_begin, tiles,
            worker_begin, None, heads, scale_log2, out_scale, None, None, q_len, num_workers,
            costs, *extras,
        )  # fmt: skip
        self.launch(q, kv, operands, stream)


class FeatureGridSwapAB(SwapAB):
    """GridSwapAB with `extras` at the end, as in FeatureSwapAB."""

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        kv: cute.Tensor,
        out: cute.Tensor,
        lse: cute.Tensor,
        partial_out: cute.Tensor,
        partial_lse: cute.Tensor,
        counters: cute.Tensor,
        block_table: cute.Tensor,
        seq_lens: cute.Tensor,
        q_begin: cute.Tensor,
        heads: Int32,
        scale_log2: Float32,
        out_scale: Float32,
        num_splits: Int32,
        row_tiles: Int32,
        q_len: Int32,
        extras: tuple,
        stream,
    ):
        operands = (
            out, lse, partial_out, partial_lse, counters, block_table, seq_lens, q_begin, None,
            None, None, heads, scale_log2, out_scale, num_splits, row_tiles & 0xFFFF, q_len, None,
            row_tiles >> 16, *extras,
        )  # fmt: skip
        self.launch(q, kv, operands, stream)
