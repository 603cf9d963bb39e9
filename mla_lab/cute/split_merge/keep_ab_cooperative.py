"""Cooperative merge of split row tiles: all CTAs that split one merge a share of it each.

A share is 1 / num_splits of the strips of a partial (`keep_ab_partials`). What a CTA's last work
tile contributes to its own share stays in its shared memory; the strips of the others are copied
there whole, into the free ring, with all copies in flight at once. Weights are computed from the
lse under those copies; partials are added in split order, in fp32. The launch is cooperative: after
its last tile a CTA waits here for others, so all of them must be resident. Up to eight partials are
summed without shared memory (`keep_ab_few_splits`).

The strips that a merge has read are discarded (`discard_strip`): 64 KB a CTA, up to 8.6 MB a
launch, which the next kernels would have to write to memory before their own data fit into L2. In a
step that takes 1 to 3 us off (H200, 2026-11-27, `data/notes/kernel_attempts.jsonl`). Results are
stored first: a discard ahead of them delays them by up to 0.5 us (H200, 2026-11-30, there).

The merge's 6 KB of code run once in a launch. In a decode step other kernels run between two
launches, and the code is no longer in the SM's instruction cache. So a warp group that has finished
runs it once ahead of those that merge, without partials and rows (`merge`, not `live`): with 128
heads this takes 2 to 3 us off a launch (H100, 2026-11-27, `data/notes/kernel_attempts.jsonl`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from ..common.feature_operands import with_scales, with_sink
from ..common.ptx_sm90 import (
    LN2,
    LOG2E,
    add,
    butterfly,
    count_up,
    fresh_thread,
    pick,
    ptx,
    small_quotient,
)
from ..common.worker_plan import may_be_split
from ..rows_on_m.epilogue_store import store_row_lse
from ..rows_on_m.params import PV_BARRIER, RECORDS, Config, Cta, Work
from ..rows_on_m.profile import profile_event
from ..rows_on_m.work_records import read_work, record
from .keep_ab_combine import MergeShare, smem, sum_from_global, sum_pairs, sum_strips
from .keep_ab_few_splits import sum_few_splits
from .keep_ab_partials import (
    REGION,
    ROW_WORDS,
    THREADS,
    UNITS,
    UNITS_PER_STRIP,
    WARPS,
    OwnStrips,
    discard_strip,
    merging_warp,
)
from .keep_ab_registers import FEW_SPLITS

#: up to so many splits a warp takes whole strips; beyond, a thread takes two columns of a row, so
#: that short shares still occupy all warps
SOME_SPLITS = 32
#: lane offsets of the 16 lanes that share a row of weights
SIXTEEN = (1, 2, 4, 8)


@cute.jit
def merge_share(cta: Cta, work: Work):
    """The strips that this CTA merges: whole twos or fours where splits are few."""
    grain = pick(work.num_splits <= FEW_SPLITS, Int32(4 // UNITS_PER_STRIP), Int32(1))
    grain = pick(work.num_splits <= FEW_SPLITS // 2, Int32(4), grain)
    few = pick(work.num_splits <= FEW_SPLITS, Int32(UNITS // 4), Int32(UNITS // UNITS_PER_STRIP))
    grains = pick(work.num_splits <= FEW_SPLITS // 2, Int32(UNITS // UNITS_PER_STRIP // 4), few)
    first = small_quotient(grains * work.split_idx, work.num_splits) * grain
    last = small_quotient(grains * (work.split_idx + 1), work.num_splits) * grain
    group = first >> 5  # 32 strips
    groups = ((last + 31) >> 5) - group
    base = (work.slot - work.split_idx) * cta.cfg.cluster + cta.rank
    values = Int32(cta.s.sKV.iterator.toint())
    return MergeShare(
        first,
        last - first,
        work.num_splits,
        group,
        groups,
        base * REGION,
        values,
        values + work.num_splits * (last - first) * 512,
        groups * (ROW_WORDS * 4) + 16,
    )


@cute.jit
def own_strips(cfg: cutlass.Constexpr[Config], share: MergeShare, work: Work, index, last):
    """Strips of its own partial that a CTA keeps in the ring, where the merge reads them: those of
    its own share, if the ring is free, as no work tile follows, and large enough."""
    count = Int32(0)
    if (index + 1 == last) & fits_ring(cfg, share):
        count = share.count
    return OwnStrips(share.first, count, share.values + work.split_idx * (share.count * 512))


def fits_ring(cfg: Config, share: MergeShare):
    """The ring holds all partials of the share."""
    return share.splits * (share.count * 512 + share.pitch) <= cfg.ring_bytes


@dataclass(frozen=True)
class CopyPath:
    """A thread's way through `width` 16-byte pieces of each split: every 256th piece.

    The piece within the split; source and destination of the first one, and how much both grow by a
    step and where a step passes the end of a split. Divisions are done before the wait for others.
    """

    pieces: Int32
    width: Int32
    piece: Int32
    rest: Int32
    source: Int32  # fp32 words
    source_step: Int32
    source_wrap: Int32
    to: Int32  # bytes
    to_step: Int32
    to_wrap: Int32


def copy_path(width, splits, stride, pitch):
    """From splits `stride` fp32 words apart to splits `pitch` bytes apart."""
    tid, _, _ = cute.arch.thread_idx()
    split = small_quotient(tid, width)
    piece = tid - split * width
    step = small_quotient(Int32(THREADS), width)
    rest = THREADS - step * width
    return CopyPath(
        width * splits,
        width,
        piece,
        rest,
        split * stride + piece * 4,
        step * stride + rest * 4,
        stride - width * 4,
        split * pitch + piece * 16,
        step * pitch + rest * 16,
        pitch - width * 16,
    )


@cute.jit
def copy_pieces(source: cute.Pointer, to, path: CopyPath, own: OwnStrips | None = None):
    """Pieces into shared memory, by all threads, asynchronously, except the `own` ones."""
    tid, _, _ = cute.arch.thread_idx()
    piece = path.piece
    offset = path.source
    to = to + path.to
    for _ in cutlass.range(tid, path.pieces, THREADS, unroll=1):
        if const_expr(own is None):
            copy_piece(to, source + offset)
        else:
            if (to < own.address) | (to >= own.address + own.count * 512):
                copy_piece(to, source + offset)
        piece = piece + path.rest
        offset = offset + path.source_step
        to = to + path.to_step
        if piece >= path.width:
            piece = piece - path.width
            offset = offset + path.source_wrap
            to = to + path.to_wrap
    cute.arch.cp_async_commit_group()


@cute.jit
def copy_piece(to, source: cute.Pointer):
    """16 bytes into shared memory, past the L1."""
    ptx("cp.async.cg.shared.global [{$r0}], [{$r1}], 16;", to, source)


@cute.jit
def merge_weights(cta: Cta, work: Work, share: MergeShare, group):
    """Turn the row values of a 16-row group into the factors of its partials; write the lse, once.
    16 threads per row, every sixteenth split each."""
    cfg, (tid, _, _) = cta.cfg, cute.arch.thread_idx()
    place = tid // 16
    first = tid % 16
    at = share.weights + (group * ROW_WORDS + place) * 4
    top = Float32(-Float32.inf)
    for i in cutlass.range(first, share.splits, 16, unroll=2):
        top = cute.arch.fmax(top, smem(at + i * share.pitch, Float32, 1).load())
    top = butterfly(cute.arch.fmax, top, SIXTEEN)
    top = pick(top == -Float32.inf, Float32(0.0), top)
    total = Float32(0)
    for i in cutlass.range(first, share.splits, 16, unroll=2):
        p = smem(at + i * share.pitch, Float32, 1)
        weight = cute.math.exp2((p.load() - top) * Float32(LOG2E), fastmath=True)
        p.store(weight)
        total = total + weight
    total = butterfly(add, total, SIXTEEN)
    row = 16 * (share.group + group) + place // 2 + 8 * (place % 2)
    g = with_scales(cfg, cta.g)
    whole = with_sink(cfg, g, total, top * Float32(LOG2E), work.first_row + row)
    inverse = pick(total > 0.0, cute.arch.rcp_approx(whole), Float32(0.0)) * g.out_scale
    for i in cutlass.range(first, share.splits, 16, unroll=2):
        p = smem(at + i * share.pitch, Float32, 1)
        weight = p.load() * inverse
        for half in cutlass.range_constexpr(2):
            scale = p + 16 * (1 + half)
            scale.store(scale.load() * weight)
    strip = (share.group + group) * (64 // UNITS_PER_STRIP)
    if (first == 0) & (strip >= share.first) & (strip < share.first + share.count):
        lse = top + cute.math.log2(total, fastmath=True) * Float32(LN2)
        store_row_lse(cta, work, row, lse)


@cute.jit
def merge_in_ring(cta: Cta, work: Work, share: MergeShare, rows_path, strips_path, own, live):
    """Copy row values, then strips, as two groups of copies; compute weights, sum."""
    partials = cta.g.mO_partial.iterator
    rows = partials + (share.region + REGION // 2 + ROW_WORDS * share.group)
    copy_pieces(rows, share.weights, rows_path)
    strips = partials + (share.region + 128 * share.first)
    copy_pieces(strips, share.values, strips_path, own)
    cute.arch.cp_async_wait_group(1)
    if live:
        PV_BARRIER.sync()
    for group in cutlass.range(share.groups, unroll=1):
        merge_weights(cta, work, share, group)
    cute.arch.cp_async_wait_group(0)
    if live:
        PV_BARRIER.sync()
    profile_event(cta.cfg, cta.g, "merge weights")
    if share.splits <= SOME_SPLITS:
        sum_strips(cta, work, share)
    else:
        sum_pairs(cta, work, share)
    tid, _, _ = cute.arch.thread_idx()
    for strip in cutlass.range(merging_warp(cta.cfg, tid), share.count, WARPS, unroll=1):
        discard_strip(cta, share.region + 128 * (share.first + strip), share.splits)


def counter_of(cta: Cta, work, rank):
    """Counter of a row tile. Neighbouring counters lie 128 B apart, so that row tiles do not queue
    for one line of L2."""
    index = work.group * cta.cfg.cluster + rank
    return cta.g.counters.iterator + (((index & 511) << 5) | (index >> 9))


def writers(cfg: Config) -> int:
    """Number of CTAs that write one 64-row partial."""
    return 2 if cfg.p_exchange else 1


def add_to_counter(cta: Cta, work, rank, order: str):
    """Add one to a row tile's counter: each writer once per partial, then, when all writers have,
    each merging CTA once. The last addition wraps the counter to 0, ready for the next launch."""
    counter = counter_of(cta, work, rank)
    count_up(counter, (writers(cta.cfg) + 1) * work.num_splits - 1, order)


@cute.jit
def count_partial(cta: Cta, work: Work):
    """Count this CTA's partial as written; the release follows the barrier of all its threads. With
    16 bits by the second PV warp group, as the first has the producer warp."""
    tid, _, _ = cute.arch.thread_idx()
    PV_BARRIER.sync()
    if tid == (0 if const_expr(cta.cfg.fp8) else THREADS // 2):
        for other in cutlass.range_constexpr(writers(cta.cfg)):
            rank = other if const_expr(cta.cfg.p_exchange) else cta.rank
            add_to_counter(cta, work, rank, "release")


@cute.jit
def merge(cta: Cta, index, keeps: cutlass.Constexpr[bool] = False, live: Any = True):
    """Wait for the partials of a split row tile, and merge a share of it.

    Runs after the worker's last tile, so that no CTA waits while others wait for its partials.
    `keeps`: the ring holds the `own_strips`. `live` is False in a warp that runs this code only to
    bring it into the SM's instruction cache: it waits for nothing, and takes no partial and no row.
    """
    cfg, s, plan = cta.cfg, cta.s, cta.plan
    tid, _, _ = cute.arch.thread_idx()
    if live & (plan.last - plan.first > RECORDS):  # records of early work tiles are overwritten
        PV_BARRIER.sync()
        if cute.arch.make_warp_uniform(tid // 32) == 0:
            record(cfg, cta.g, s, cta.plan, index, cta.rank)
        PV_BARRIER.sync()
    work = read_work(cta.g, s, index)
    if work.slot >= 0:
        share = merge_share(cta, work)
        last = plan.last if const_expr(keeps) else -1
        if const_expr(live is not True):
            last = pick(live, last, Int32(-1))
        own = own_strips(cfg, share, work, index, last)
        few = share.splits <= FEW_SPLITS
        if const_expr(live is not True):
            work = replace(work, num_rows=pick(live, work.num_rows, Int32(0)))
            share = replace(share, splits=pick(live, share.splits, Int32(0)))
        stride = REGION * cfg.cluster
        rows_path = copy_path(share.groups * (ROW_WORDS // 4), share.splits, stride, share.pitch)
        strips_path = copy_path(share.count * 32, share.splits, stride, share.count * 512)
        if tid == 0:
            counter = counter_of(cta, work, cta.rank)
            arrived = Int32(0)
            while arrived < writers(cfg) * work.num_splits:
                arrived = cute.arch.load(counter, Int32, sem="acquire", scope="gpu")
            add_to_counter(cta, work, cta.rank, "relaxed")
        if live:
            PV_BARRIER.sync()
        profile_event(cfg, cta.g, "partials there")
        if const_expr(cfg.dual):  # whose launches have one split row tile a CTA: it fits
            merge_in_ring(cta, work, share, rows_path, strips_path, own, live)
        elif few:
            sum_few_splits(cta, work, share, own)
        elif fits_ring(cfg, share):
            merge_in_ring(cta, work, share, rows_path, strips_path, own, live)
        else:
            sum_from_global(cta, work, share)


def in_pv_warp() -> Any:
    """True in a PV warp; computed anew, as it is held nowhere."""
    return fresh_thread() < THREADS


@cute.jit
def merge_all(cta: Cta):
    """The merges of a worker's split row tiles, the last work tile first: with 16 bits its own
    strips are in the ring. With `Config.warms_code` the QK-softmax warps come here too, and run the
    code of that one alone, if its record is not overwritten."""
    plan, warms_code = cta.plan, cta.cfg.warms_code
    end = plan.last + 1
    if const_expr(warms_code):
        number = plan.last - plan.first
        warm_ups = pick(number <= RECORDS, cutlass.min(number, 1), Int32(0))
        end = plan.first + 1 + pick(in_pv_warp(), number, warm_ups)
    for back in cutlass.range(plan.first + 1, end, unroll=1):
        index = plan.first + plan.last - back
        if may_be_split(plan, index):
            merge(cta, index, not cta.cfg.fp8, in_pv_warp() if warms_code else True)
    profile_event(cta.cfg, cta.g, "end")
