"""Mainloop of a PV warp group: O = P V for one half of the latent; then the epilogue."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from ..common.feature_operands import with_scales
from ..common.fixed_pieces import OWN_PIECES
from ..common.pipeline import StagePhases
from ..common.ptx_sm90 import LN2, fresh_thread, pick
from ..rows_on_m.epilogue_store import inverse_sum, store_lse, store_rows
from ..rows_on_m.mask import rows_of
from ..rows_on_m.params import BLOCK, LATENT, PV_BARRIER, Cta
from ..rows_on_m.profile import profile_event, profile_tile
from ..rows_on_m.work_records import piece_begin, read_work, record
from ..split_merge.keep_ab_cooperative import count_partial, merge_share, own_strips
from ..split_merge.keep_ab_own_pieces import add_own_pieces, ends_own_item, strips_for_sum
from ..split_merge.keep_ab_partials import fp16_scales, store_fragment
from ..split_merge.keep_ab_pieces import merge_piece, store_piece
from .mainloop_qk_softmax import two_to_minus
from .params import SKIPPED
from .producer import ProducerState, fill_next_stage, start_producer
from .release import release_stage

HALF = LATENT // 2


@dataclass(frozen=True)
class Fragments:
    """Descriptors of P and of this group's half of V, and the accumulator."""

    tOrP: cute.Tensor
    tOrV: cute.Tensor
    tOrO: cute.Tensor


def scale_rows(acc, factors):
    """Multiply the thread's two rows."""
    rows = rows_of(acc)
    for c in range(cute.size(acc) // 2):
        for h in range(2):
            rows[h, c] = rows[h, c] * factors[h]


@cute.jit
def epilogue(cta: Cta, acc: cute.Tensor, index, piece: Any = None):
    """Divide by the row sums; write the result x out_scale, or the partial (the merge scales).
    Returns the slot of the partial, -1 without one. `piece`: of a batch-invariant call, which piece
    of its work tile this is."""
    cfg, g, s = cta.cfg, cta.g, cta.s
    tid = fresh_thread()  # held through the loop, it and what follows would take registers
    lane = tid % 32
    wg = cute.arch.make_warp_uniform(tid // 128)
    row = 16 * cute.arch.make_warp_uniform((tid % 128) // 32) + lane // 4
    column = wg * HALF
    work = read_work(g, s, index)
    sums = [s.sRowSum[row + 8 * h] for h in range(2)]
    lse = [s.sRowMax[row + 8 * h] for h in range(2)]
    s.stats_read.arrive(0)
    if const_expr(not cfg.features):  # otherwise sRowMax holds the lse
        lse = [(lse[h] + cute.math.log2(sums[h], fastmath=True)) * Float32(LN2) for h in range(2)]
    inverse = [inverse_sum(x) for x in sums]
    if work.slot >= 0:
        if const_expr(cfg.pieces):
            strips = strips_for_sum(cta, wg, work, index, piece)
            scales = fp16_scales(acc, inverse)
            store_piece(cta, wg, acc, work, (index, piece), scales, lse, strips)
            if ends_own_item(work, piece):
                add_own_pieces(cta, wg, work, index, scales, lse)
        else:
            own = own_strips(cfg, merge_share(cta, work), work, index, cta.plan.last)
            store_fragment(cta, wg, acc, work, inverse, lse, own)
            count_partial(cta, work)
    else:
        out_scale = with_scales(cfg, g).out_scale
        scale_rows(acc, [inverse[h] * out_scale for h in range(2)])
        store_rows(cta, acc, work, row, column, lane)
        if wg == 0:
            store_lse(cta, work, row, lane, lse)
    slot = work.slot
    if const_expr(cfg.pieces):  # of an item that this CTA runs whole nothing is left to merge
        slot = pick(work.group == OWN_PIECES, Int32(-1), slot)
    return slot


@cute.jit
def gemm_pv(cta: Cta, f: Fragments, stage, exponents, later):
    """O <- O * 2**-exponents + P V of the tile in `stage`; of a work tile's first one, which is not
    `later`, O <- P V, unless O starts from zeros."""
    adds = True if const_expr(cta.cfg.from_zeros) else later
    if adds & cute.arch.vote_any_sync((exponents[0] | exponents[1]) != 0):
        scale_rows(f.tOrO, [two_to_minus(x) for x in exponents])
    atom = cute.make_mma_atom(cta.mma.pv.op)
    atom.set(warpgroup.Field.ACCUMULATE, adds)
    warpgroup.fence()
    for k in cutlass.range_constexpr(4):
        cute.gemm(atom, f.tOrO, f.tOrP[None, None, k, stage], f.tOrV[None, None, k, stage], f.tOrO)
        atom.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()
    warpgroup.wait_group(0)


@cute.jit
def pv_tile(cta: Cta, f: Fragments, row, stage, index, block, count):
    """PV of the tile in `stage`, whose P is full: tile `block` of `count` of work tile `index`."""
    cfg, g, s = cta.cfg, cta.g, cta.s
    if const_expr(cfg.profile):
        if (block == 0) & (index == cta.plan.first):
            profile_event(cfg, g, "first P")
        profile_tile(cfg, g, count - block, "PV begun")
    exponents = [Int32(s.sRescale[row + 8 * h, stage]) for h in range(2)]
    s.p_pipe.consumer_release(stage)
    if const_expr(cfg.skip):
        if cute.arch.vote_any_sync(exponents[0] != SKIPPED):
            gemm_pv(cta, f, stage, exponents, block > 0)
    else:
        gemm_pv(cta, f, stage, exponents, block > 0)
    profile_tile(cfg, g, count - block, "PV done")
    profile_tile(cfg, g, count - block, "PV done, ns")


def is_producer(cta: Cta):
    """True in a warp that fills the ring: warp 0, or all where tokens are fetched one by one."""
    warp = cute.arch.make_warp_uniform(cute.arch.thread_idx()[0] // 32)
    return warp < 8 if cta.cfg.gather else warp == 0


@cute.jit
def produce_ahead(cta: Cta, load: ProducerState, index, lane) -> ProducerState:
    """The record of the next work tile, and the stage that Q has released; before the first work
    tile, whose record `find_plan` has left, all stages."""
    cfg, plan = cta.cfg, cta.plan
    for step in cutlass.range(pick(index == plan.first, Int32(0), Int32(1)), 2, unroll=1):
        if (step == 1) & (index + 1 < plan.last):
            if const_expr(cfg.gather):
                if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
                    record(cfg, cta.g, cta.s, plan, index + 1, cta.rank)
                PV_BARRIER.sync()  # all warps read it
            else:
                record(cfg, cta.g, cta.s, plan, index + 1, cta.rank)
        for _ in cutlass.range(pick(step == 0, Int32(cfg.stages), Int32(1)), unroll=1):
            load = fill_next_stage(cta, load, lane)
    return load


def make_fragments(cta: Cta, wg) -> Fragments:
    """Descriptors once for all tiles, and the accumulator."""
    pv = cta.mma.pv
    sP = cute.local_tile(cta.s.sKV, (64, 64), (0, 8, None))
    tOrP = pv.make_fragment_A(pv.get_slice(0).partition_A(sP))
    sVt = cute.local_tile(cta.s.sVt, (HALF, BLOCK), (wg, 0, None))
    tOrV = pv.make_fragment_B(pv.get_slice(0).partition_B(sVt))
    return Fragments(tOrP, tOrV, cute.make_rmem_tensor(pv.partition_shape_C((64, HALF)), Float32))


@cute.jit
def attend(
    cta: Cta, f: Fragments, load: ProducerState, phases: StagePhases, row, index, stage,
    piece: Any = None,
):  # fmt: skip
    """PV of the tiles of work tile `index` from `stage` on, or, of a batch-invariant call, of its
    piece `piece`. Returns the producer's state, the phases, the next stage."""
    cfg, g, s = cta.cfg, cta.g, cta.s
    lane = cute.arch.lane_idx()
    produces = is_producer(cta)
    block, count = Int32(0), Int32(1)
    while block < count:
        stage = cute.arch.make_warp_uniform(stage)
        s.p_pipe.consumer_wait(phases.state(stage))
        if const_expr(cfg.gather):  # for V, as the QK-softmax warp group does for K
            cute.arch.fence_view_async_shared()
        phases = phases.flip(stage)
        if block == 0:  # read before the loop, the count would cost the softmax registers
            work = read_work(g, s, index)
            count = cute.arch.make_warp_uniform(work.end - work.begin)
            if const_expr(cfg.pieces):
                count = piece_begin(work, piece + 1) - piece_begin(work, piece)
                count = cute.arch.make_warp_uniform(count)
        pv_tile(cta, f, row, stage, index, block, count)
        release_stage(cta, stage, lane)
        if produces:
            load = fill_next_stage(cta, load, lane, True)
        block = block + 1
        stage = stage + 1
        if stage == cfg.stages:
            stage = Int32(0)
    return load, phases, stage


@cute.jit
def pass_over(cta: Cta, load: ProducerState, stage, lane) -> ProducerState:
    """The stages that the ring passes over behind a work tile, so that the next Q enters stage 0.
    Returns the producer's state."""
    produces = is_producer(cta)
    if produces & (stage > 0):
        for _ in cutlass.range(cta.cfg.stages - stage, unroll=1):
            load = fill_next_stage(cta, load, lane)
    return load


@cute.jit
def attend_pieces(cta: Cta, f: Fragments, load: ProducerState, phases: StagePhases, row, index):
    """A work tile of a batch-invariant call: a piece, or a whole item piece by piece. Returns the
    producer's state, the phases, the slot of the piece, -1 without one."""
    stage, piece, left, slot = Int32(1), Int32(0), Int32(1), Int32(-1)
    while left > 0:
        f.tOrO.fill(0.0)
        load, phases, stage = attend(cta, f, load, phases, row, index, stage, piece)
        work = read_work(cta.g, cta.s, index)
        piece, left = piece + 1, work.end - work.begin - piece_begin(work, piece + 1)
        if left == 0:
            load = pass_over(cta, load, stage, cute.arch.lane_idx())
        profile_event(cta.cfg, cta.g, "last PV")
        slot = epilogue(cta, f.tOrO, index, piece - 1)
        profile_event(cta.cfg, cta.g, "partial written")
    return load, phases, slot


@cute.jit
def mainloop_pieces(
    cta: Cta, f: Fragments, load: ProducerState, phases: StagePhases, row, produces
):
    """`mainloop_pv` of a batch-invariant call. A piece whose item others share is merged behind the
    work tile that follows it: one turn more than there are work tiles, for one copy of the
    merge."""
    last, before = cta.plan.last, Int32(-1)
    for index in cutlass.range(cta.plan.first, last + 1, unroll=1):
        slot = Int32(-1)
        if index < last:
            if produces:
                load = produce_ahead(cta, load, index, cute.arch.lane_idx())
            load, phases, slot = attend_pieces(cta, f, load, phases, row, index)
        if before >= 0:
            merge_piece(cta, index - 1)
        before = slot
    profile_event(cta.cfg, cta.g, "end")


@cute.jit
def mainloop_pv(cta: Cta):
    """Per work tile: PV tile by tile as P is committed; warp 0 refills the ring behind it."""
    cfg, g, s = cta.cfg, cta.g, cta.s
    tid, _, _ = cute.arch.thread_idx()
    lane = cute.arch.lane_idx()
    wg = cute.arch.make_warp_uniform(tid // 128)
    row = 16 * cute.arch.make_warp_uniform((tid % 128) // 32) + lane // 4
    f = make_fragments(cta, wg)
    phases = StagePhases(Int32(0))
    first, last = cta.plan.first, cta.plan.last
    produces = is_producer(cta)
    load = start_producer(cfg.stages, first)
    s.stats_read.arrive(0)
    if const_expr(cfg.pieces):
        mainloop_pieces(cta, f, load, phases, row, produces)
    else:
        for index in cutlass.range(first, last, unroll=1):
            if produces:
                load = produce_ahead(cta, load, index, lane)
            stage = Int32(1)
            if const_expr(cfg.from_zeros):
                f.tOrO.fill(0.0)
            load, phases, stage = attend(cta, f, load, phases, row, index, stage)
            load = pass_over(cta, load, stage, lane)
            profile_event(cfg, g, "last PV")
            epilogue(cta, f.tOrO, index)
            profile_event(cfg, g, "partial written")
