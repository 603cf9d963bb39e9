"""swap_ab inside a launch of keep_ab, for batches of few blocks.

Rows on M need 64 of them, whatever a request has, and load and merge 64 rows for a few KV tiles; with
KV on M a CTA takes 16. Which is quicker depends on the lengths, which the host does not have. So the
kernel has both mainloops, and the gate of the launch decides: the scheduler warp compares the blocks
of the batch with it (`plan.gate`), and where it is closed to keep_ab, every CTA runs swap_ab, as a
grid of row tiles of 16 rows, LL merge, pairs of CTAs that share KV by multicast.

swap_ab has its shared memory on the KV ring of keep_ab, and its barriers are initialised when the
choice is made. The loads that its work depends on are issued before, by its producer warp.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from ...plan.config import KernelConfig
from ..swap_ab_sm90.kernel import kv_tma, q_tma
from ..swap_ab_sm90.mainloop import consume
from ..swap_ab_sm90.mma import tiled_mmas
from ..swap_ab_sm90.params import CONSUMER_WARPS, LATENT_DIM, TILE_KV, Traits, traits_of
from ..swap_ab_sm90.producer import produce_grid
from ..swap_ab_sm90.shared_storage import Globals as SwapGlobals
from ..swap_ab_sm90.shared_storage import SmemOverlay, allocate, barriers_init
from ..swap_ab_sm90.tile_scheduler import GridLoads, issue_loads
from .params import Config, Globals, Shared

#: query rows of a swap_ab CTA, and CTAs that share KV by multicast
ROWS, PAIR = 16, 2


@cache
def traits(cfg: Config) -> Traits:
    """What of swap_ab is compiled in."""
    from dataclasses import replace

    config = KernelConfig(
        "cute/swap_ab_sm90",
        q_dtype=cfg.dtype,
        kv_format=cfg.dtype,
        out_dtype=cfg.out_dtype,
        tile_rows=ROWS,
        page_size=cfg.page_size,
        mask="causal" if cfg.dual == 2 else "none",
        options=(("fused_merge", 3), ("grid", 1), ("pair", PAIR), ("pdl", cfg.pdl)),
    )
    return replace(traits_of(config), linear=True)


@cute.jit
def operands(cfg: cutlass.Constexpr[Config], g: Globals, q: cute.Tensor, ll: cute.Tensor):
    """Operands, MMAs and layouts of swap_ab, from those of keep_ab and the workspace of LL
    partials."""
    c = traits(cfg)
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, c.dtype)
    q_layout = cute.tile_to_shape(atom, (c.mma_n, c.columns), (0, 1))
    k_layout = cute.tile_to_shape(atom, (TILE_KV, c.columns, c.stages), (0, 1, 2))
    row_tiles = (g.q_len * g.heads + ROWS - 1) // ROWS
    batch = g.seq_lens.shape[0]
    num_splits = g.num_workers // ((row_tiles + PAIR - 1) // PAIR * PAIR * batch)
    slots = batch * row_tiles * num_splits
    words = slots * (ROWS * LATENT_DIM)
    partials = cute.make_tensor(
        ll.iterator,
        cute.make_layout((slots, ROWS, LATENT_DIM), stride=(ROWS * LATENT_DIM, LATENT_DIM, 1)),
    )
    stats = cute.make_tensor(
        (ll.iterator + words).align(16),
        cute.make_layout((slots * (num_splits + ROWS // 2), 4), stride=(4, 1)),
    )
    swap = SwapGlobals(
        *q_tma(c, q, q_layout),
        *kv_tma(c, g.cache, atom),
        mO=g.mO,
        mLSE=g.mLSE,
        mO_partial=partials,
        mLSE_partial=stats,
        counters=g.counters,
        block_table=g.block_table,
        seq_lens=g.seq_lens,
        q_begin=g.q_begin,
        heads=g.heads,
        scale_log2=g.scale_log2,
        out_scale=g.out_scale,
        num_splits=num_splits,
        row_tiles=row_tiles,
        q_len=g.q_len,
        costs=Int32(0),
        cache=g.cache,
    )
    return swap, tiled_mmas(c), q_layout, k_layout


@cute.jit
def issue_ahead(cfg: cutlass.Constexpr[Config], swap: tuple, warp: Int32):
    """What swap_ab's work depends on, by its producer warp, while another looks for keep_ab's."""
    g, c = swap[0], traits(cfg)
    loads = GridLoads.none()
    if warp == CONSUMER_WARPS:
        if const_expr(cfg.pdl):
            cute.arch.griddepcontrol_wait()
        loads = issue_loads(c, g)
    return loads


@cute.jit
def swap_ab(cfg: cutlass.Constexpr[Config], s: Shared, swap: tuple, ahead: GridLoads, warp: Int32):
    """The whole of swap_ab for this CTA, by its first nine warps."""
    c = traits(cfg)
    g, mma, q_layout, k_layout = swap
    own = allocate(c, q_layout, k_layout, None, SmemOverlay(s.sKV.iterator))
    if warp == CONSUMER_WARPS:
        with cute.arch.elect_one():
            barriers_init(c, own)
        cute.arch.mbarrier_init_fence()
    cute.arch.cluster_arrive_relaxed()
    cute.arch.sync_threads()
    cute.arch.cluster_wait()
    if warp == CONSUMER_WARPS:
        produce_grid(c, g, own, ahead, Int32(0))
    elif warp < CONSUMER_WARPS:
        consume(c, g, own, mma, Int32(0))
        # a CTA must not exit while a peer may still arrive at its barriers
        cute.arch.cluster_wait()
