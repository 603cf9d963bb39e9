"""One launch of keep_ab: what the bf16 and the fp8 kernel share.

    kernel_bf16   O[rows, columns] += P V          16-bit elements
    fp8           O^T[columns, rows] += V^T P^T    an 8-bit cache; V^T goes through registers

In both, S[rows, tokens] = Q K^T with Q in registers: one QK-softmax warp group, two PV warp groups,
KV tiles of 64 tokens in a ring of stages; plans, work tiles, partials and merges are the same.
Rows are packed (token * heads + head); the causal rule is bottom-right. Partials of a split row
tile are merged in split order, in fp32, by all CTAs that split it, a share each
(`split_merge.keep_ab_cooperative`).
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import const_expr
from cutlass.cute.nvgpu import cpasync

from ..common.kv_prefetch import LEAST_REQUESTS, KvCache
from ..common.launch_arguments import operand_fields
from ..common.worker_plan import gate_closed, prefetch_ahead
from ..rows_on_m.params import Cta, Globals
from ..rows_on_m.profile import profile_event
from . import dual, fp8, kernel_bf16
from .params import Config, Mmas
from .tile_scheduler import find_plan, load_plan


def variant(cfg: Config) -> ModuleType:
    """The module with `allocate`, `init_barriers`, `roles`, `operands` and THREADS."""
    return fp8 if cfg.fp8 else kernel_bf16


@cute.kernel
def decode_kernel(
    cfg: cutlass.Constexpr[Config], g: Globals, mma: Mmas, layouts: tuple, swap: tuple
):
    """One CTA: shared memory, barriers, then its roles, or those of swap_ab (`dual`)."""
    warp_idx = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    cta_idx, _, _ = cute.arch.block_idx()
    rank = cta_idx % cfg.cluster
    profile_event(cfg, g, "start")
    s = variant(cfg).allocate(cfg, *layouts)
    if warp_idx == 0:
        cpasync.prefetch_descriptor(g.tma_q)
        if const_expr(not cfg.fetches_tokens):
            cpasync.prefetch_descriptor(g.tma_kv)
        variant(cfg).init_barriers(cfg, s)
    if warp_idx == 1:
        find_plan(cfg, g, s, cta_idx, rank)
    if const_expr(cfg.pdl and not cfg.fetches_tokens):
        many = g.seq_lens.shape[0] >= LEAST_REQUESTS
        if (warp_idx == 2) & many:
            kv = KvCache(g.cache, g.block_table, rank)
            prefetch_ahead(kv, g.tiles, g.schedule, cta_idx)
    ahead = dual.issue_ahead(cfg, swap, warp_idx) if const_expr(cfg.dual) else None
    if const_expr(cfg.cluster == 2):
        cute.arch.cluster_arrive_relaxed()
        cute.arch.cluster_wait()
    cute.arch.sync_threads()
    if const_expr(cfg.pdl):
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
    plan = load_plan(cfg, s)
    profile_event(cfg, g, "set up")
    cta = Cta(cfg, g, s, mma, plan, rank)
    if const_expr(cfg.dual):
        if not gate_closed(plan):
            variant(cfg).roles(cta, warp_idx)
        else:
            dual.swap_ab_roles(cta, swap, ahead, warp_idx)
    else:
        variant(cfg).roles(cta, warp_idx)
    if const_expr(cfg.cluster == 2):
        # a CTA must not exit while the other multicasts into it or arrives on its barriers
        cute.arch.cluster_arrive_relaxed()
        cute.arch.cluster_wait()


class KeepAB:
    """Host entry: layouts, tensor maps and the launch. `compile` it with fake tensors."""

    def __init__(self, cfg: Config):
        self.cfg = cfg

    @cute.jit
    def launch(self, q: cute.Tensor, kv: cute.Tensor, stream: Any, args: dict):
        """Query, out and lse may have any shape whose rows lie in memory in order."""
        cfg = self.cfg
        ll = args.pop("ll_partials") if const_expr(cfg.dual) else None
        args.setdefault("profile", args["schedule"])
        mma, maps, layouts = variant(cfg).operands(cfg, q, kv)
        fields = operand_fields(args, tree=cfg.tree, skip=cfg.skip)
        g = Globals(*maps[:4], **fields, tma_656=maps[4:], cache=kv)
        swap = dual.operands(cfg, g, q, ll) if const_expr(cfg.dual) else ()
        decode_kernel(cfg, g, mma, layouts, swap).launch(
            grid=(g.num_workers * cfg.cluster, 1, 1),
            block=(variant(cfg).THREADS, 1, 1),
            cluster=(2, 1, 1) if const_expr(cfg.cluster == 2) else None,
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=bool(cfg.pdl),
            cooperative=True,
        )
