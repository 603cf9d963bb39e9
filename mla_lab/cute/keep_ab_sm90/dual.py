"""swap_ab inside a launch of keep_ab: the option `dual`, for one request.

With query rows on M a CTA has 64 of them, and loads and merges 64 rows for a few KV tiles; with KV
on M it has 16. Which is quicker depends on the length, which the host does not have. So the kernel
holds both mainloops, and the gate of the launch decides (`plan.gate`): the scheduler warp compares
the blocks of the request with it, and where it is closed to keep_ab, every CTA runs swap_ab: a grid
of row tiles of 16 rows and even splits, with the LL merge.

swap_ab has its shared memory on the KV ring of keep_ab, and its mbarriers are initialised once the
choice is made. What its work depends on is loaded before, by its producer warp.

The order of the code matters: the first 128 KiB of a kernel are fast, and what lies behind is
fetched anew in each launch (`jit.code_size`). keep_ab stands first and loses nothing; swap_ab took
0.2 us more than with its code first, when 80 KB of it lay behind (H200, 2026-11-24,
`data/notes/kernel_attempts.jsonl`)."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from ...plan.config import KernelConfig
from ...plan.gate import DUAL_ROWS
from ...plan.launch_modes import SWAP_AB_LL
from ..rows_on_m.params import Cta, Globals
from ..swap_ab_sm90.kernel import kv_tma, q_tma
from ..swap_ab_sm90.mainloop import consume, merge_slices
from ..swap_ab_sm90.mma import tiled_mmas
from ..swap_ab_sm90.params import CONSUMER_WARPS, LATENT_DIM, TILE_KV, Traits, traits_of
from ..swap_ab_sm90.producer import produce_grid
from ..swap_ab_sm90.shared_storage import Globals as SwapGlobals
from ..swap_ab_sm90.shared_storage import SmemOverlay, allocate, barriers_init
from ..swap_ab_sm90.tile_scheduler import GridLoads, issue_loads
from .params import Config

#: values of the option: one query token, or several with the causal rule
ONE_TOKEN, CAUSAL = 1, 2


@cache
def traits(cfg: Config) -> Traits:
    """What of swap_ab is compiled in."""
    config = KernelConfig(
        SWAP_AB_LL.kernel,
        q_dtype=cfg.dtype,
        kv_format=cfg.dtype,
        out_dtype=cfg.out_dtype,
        tile_rows=DUAL_ROWS,
        page_size=cfg.page_size,
        mask="causal" if cfg.dual == CAUSAL else "none",
        options=(*SWAP_AB_LL.options, ("pdl", cfg.pdl)),
    )
    return replace(traits_of(config), linear=True)


#: operands that both mainloops take as they are
SHARED = (
    *("mO", "mLSE", "counters", "block_table", "seq_lens", "q_begin", "heads", "scale_log2"),
    *("out_scale", "q_len", "cache"),
)


@cute.jit
def operands(cfg: cutlass.Constexpr[Config], g: Globals, q: cute.Tensor, ll_partials: cute.Tensor):
    """Operands, MMAs and layouts of swap_ab, from those of keep_ab and the workspace of the LL
    merge (fp32 [words], see `plan.formula.ll_words`)."""
    c = traits(cfg)
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, c.dtype)
    q_layout = cute.tile_to_shape(atom, (c.mma_n, c.columns), (0, 1))
    k_layout = cute.tile_to_shape(atom, (TILE_KV, c.columns, c.stages), (0, 1, 2))
    row_tiles = (g.q_len * g.heads + c.rows - 1) // c.rows
    num_splits = g.num_workers // row_tiles
    slots, row = row_tiles * num_splits, c.rows * LATENT_DIM
    partials = cute.make_layout((slots, c.rows, LATENT_DIM), stride=(row, LATENT_DIM, 1))
    stats = cute.make_layout((slots * (num_splits + c.row_pairs), 4), stride=(4, 1))
    swap = SwapGlobals(
        *q_tma(c, q, q_layout),
        *kv_tma(c, g.cache, atom),
        mO_partial=cute.make_tensor(ll_partials.iterator, partials),
        mLSE_partial=cute.make_tensor((ll_partials.iterator + slots * row).align(16), stats),
        num_splits=num_splits,
        row_tiles=row_tiles,
        **{name: getattr(g, name) for name in SHARED},
    )
    return swap, tiled_mmas(c), q_layout, k_layout


@cute.jit
def issue_ahead(cfg: cutlass.Constexpr[Config], swap: tuple, warp: Int32) -> GridLoads:
    """The loads of swap_ab's producer warp, while the scheduler warp looks for keep_ab's work."""
    loads = GridLoads.none()
    if warp == CONSUMER_WARPS:
        if const_expr(cfg.pdl):
            cute.arch.griddepcontrol_wait()
        loads = issue_loads(traits(cfg), swap[0])
    return loads


@cute.jit
def swap_ab_roles(cta: Cta, swap: tuple, ahead: GridLoads, warp: Int32):
    """The roles of swap_ab, by the first nine warps of the CTA; the others have none."""
    c = traits(cta.cfg)
    g, mma, q_layout, k_layout = swap
    own = allocate(c, q_layout, k_layout, None, SmemOverlay(cta.s.sKV.iterator))
    if warp == CONSUMER_WARPS:
        with cute.arch.elect_one():
            barriers_init(c, own)
        cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    if warp == CONSUMER_WARPS:
        produce_grid(c, g, own, ahead, Int32(0))
    elif warp < CONSUMER_WARPS:
        consume(c, g, own, mma, Int32(0))
    if warp <= CONSUMER_WARPS:
        merge_slices(c, g, own, Int32(0), True)
