"""One launch of keep_ab: what both designs share. The roles, barriers and timelines are theirs.

    straight     O[rows, columns] += P V          elements of 16 bits
    transposed   O^T[columns, rows] += V^T P^T    a cache of 8 bits, whose V reaches the matrix unit
                                                  by way of registers

In both S[rows, tokens] = Q K^T with Q in registers, a group of warps attends, two accumulate, KV
tiles of 64 tokens pass through a ring, and plans, work tiles, partials and merges are the same.
Rows are packed (token * heads + head); causal is bottom-right. Partials of a split row tile are
merged in split order, fp32, by all who split it, a share each (see `merge`).
"""

from __future__ import annotations

from types import ModuleType

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import cpasync

from ..common.feature_operands import mask_words
from . import fp8 as transposed
from . import kernel_bf16 as straight
from .params import Config, Globals, Mmas
from .tile_scheduler import find_plan, load_plan, stamp


def design(cfg: Config) -> ModuleType:
    """What allocates, has the roles and makes the operands of a configuration."""
    return transposed if cfg.transposed else straight


@cute.kernel
def decode_kernel(cfg: cutlass.Constexpr[Config], g: Globals, mma: Mmas, layouts: tuple):
    """One CTA: storage, barriers, then its roles."""
    warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    cta, _, _ = cute.arch.block_idx()
    worker = cta // cfg.cluster
    rank = cta % cfg.cluster
    stamp(cfg, g, 0)
    s = design(cfg).allocate(cfg, *layouts)
    if warp_idx == 0:
        cpasync.prefetch_descriptor(g.tma_q)
        cpasync.prefetch_descriptor(g.tma_kv)
        design(cfg).init_barriers(cfg, s)
    if warp_idx == 1:
        if const_expr(cfg.pdl):
            cute.arch.griddepcontrol_wait()
        find_plan(cfg, g, s, worker)
    if const_expr(cfg.cluster == 2):
        cute.arch.cluster_arrive_relaxed()
        cute.arch.cluster_wait()
    cute.arch.sync_threads()
    if const_expr(cfg.pdl):
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
    plan = load_plan(cfg, s)
    stamp(cfg, g, 1)
    design(cfg).roles(cfg, g, s, mma, plan, rank, warp_idx)
    if const_expr(cfg.cluster == 2):
        # a CTA must not leave while the other multicasts into it or arrives on its barriers
        cute.arch.cluster_arrive_relaxed()
        cute.arch.cluster_wait()


class KeepAB:
    """Host entry: layouts, tensor maps and the launch. `compile` it with fake tensors."""

    def __init__(self, cfg: Config):
        self.cfg = cfg

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
        """As in the package's docstring; `stream` is torch's current one."""
        tensors = (
            q, kv, out, lse, partial_out, partial_lse, counters,
            block_table, seq_lens, q_begin, tiles, worker_begin, worker_begin,
        )  # fmt: skip
        self.launch(tensors, (heads, scale_log2, out_scale, num_workers, q_len, costs), stream)

    @cute.jit
    def launch(self, tensors, numbers, stream):
        """Layouts, tensor maps and the launch itself."""
        q, kv, out, lse, *others = tensors
        (*plan, stamps), extras = others[:9], others[9:]
        cfg = self.cfg
        skip = extras.pop() if const_expr(cfg.skip) else None
        if const_expr(cfg.tree):
            extras[-1] = mask_words(extras[-1])
        else:
            extras += [None] * (4 - len(extras))
        lse = cute.make_tensor(lse.iterator, cute.make_layout(cute.size(lse.shape)))
        mma, maps, layouts = design(cfg).operands(cfg, q, kv)
        g = Globals(
            *maps[:4], out, lse, *plan, *numbers, stamps, *extras, skip,
            maps[4:],
        )  # fmt: skip
        decode_kernel(cfg, g, mma, layouts).launch(
            grid=(g.num_workers * cfg.cluster, 1, 1),
            block=(design(cfg).THREADS, 1, 1),
            cluster=(2, 1, 1) if const_expr(cfg.cluster == 2) else None,
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=bool(cfg.pdl),
            cooperative=bool(cfg.fused_merge),
        )


class StampedKeepAB(KeepAB):
    """The same launch with `stamps` int64 [CTAs, 8] after worker_begin (option "stamps"; with 2
    there are `work.ROUNDS` rows more, see there)."""

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
        """`KeepAB`'s arguments and `stamps`."""
        tensors = (
            q, kv, out, lse, partial_out, partial_lse, counters,
            block_table, seq_lens, q_begin, tiles, worker_begin, stamps,
        )  # fmt: skip
        self.launch(tensors, (heads, scale_log2, out_scale, num_workers, q_len, costs), stream)


class FeatureKeepAB(KeepAB):
    """The same launch with a tuple of what `extras` lists at the end."""

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
        """`KeepAB`'s arguments and `extras`."""
        tensors = (
            q, kv, out, lse, partial_out, partial_lse, counters,
            block_table, seq_lens, q_begin, tiles, worker_begin, worker_begin, *extras,
        )  # fmt: skip
        self.launch(tensors, (heads, scale_log2, out_scale, num_workers, q_len, costs), stream)
