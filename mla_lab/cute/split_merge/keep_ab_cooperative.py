"""The merge of split row tiles: all CTAs that split one merge a share of it each.

A share is 1 / num_splits of the strips of a partial (see `partials`). What a CTA's last work tile
has of its own share stays in its shared memory; the others' is copied there whole (the ring is
free by then), all of it in flight at once; weights are made from the lse under that copy, and
added up in split order, fp32. The launch is cooperative: a CTA waits here for others, after its
last tile, so all of them must be running. Up to eight partials of 16 bits skip shared memory and
go to registers straight (see `few`).
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from ..common.feature_operands import with_scales, with_sink
from ..common.ptx_sm90 import add
from ..keep_ab_sm90.epilogue_store import store_row_lse
from ..keep_ab_sm90.mainloop_qk_softmax import select
from ..keep_ab_sm90.params import BLOCK, LN2, RECORDS, Config, Globals, Shared, Work
from ..keep_ab_sm90.tile_scheduler import Plan, read_work, record, stamp
from .keep_ab_combine import LOG2E, Share, combine_far, combine_pairs, combine_strips, smem
from .keep_ab_partials import (
    MERGE_BARRIER,
    REGION,
    THREADS,
    UNITS,
    Kept,
    row_words,
    units_per_strip,
)
from .keep_ab_registers import FEW_SPLITS, combine_few

#: up to `FEW_SPLITS` partials of 16 bits go to registers straight (see `few`); of 32 bits a warp
#: takes four units of them at a time, and 16-byte stores; up to so many splits one strip; beyond, a
#: thread takes two columns of a row, so that short shares still occupy all warps
SOME_SPLITS = 32


@cute.jit
def share_of(cfg: cutlass.Constexpr[Config], s: Shared, work: Work, rank):
    """The strips that this CTA merges: whole twos or fours where splits are few."""
    units = units_per_strip(cfg)
    grain = select(work.num_splits <= FEW_SPLITS, Int32(4 // units), Int32(1))
    if const_expr(cfg.partials == 16):
        grain = select(work.num_splits <= FEW_SPLITS // 2, Int32(4), grain)
    grains = UNITS // units // grain
    first = grains * work.split_idx // work.num_splits * grain
    last = grains * (work.split_idx + 1) // work.num_splits * grain
    group = first * units // 64
    groups = (last * units + 63) // 64 - group
    base = (work.slot - work.split_idx) * cfg.cluster + rank
    values = Int32(s.kv.iterator.toint())
    return Share(
        first,
        last - first,
        work.num_splits,
        group,
        groups,
        base * REGION,
        base * BLOCK,
        values,
        values + work.num_splits * (last - first) * 512,
        groups * (row_words(cfg) * 4) + 16,
    )


@cute.jit
def kept_strips(cfg: cutlass.Constexpr[Config], share: Share, work: Work, index, last):
    """Strips of its own partial that a CTA leaves in the ring, where the merge wants them: those of
    its own share, where the ring is free, as no work tile follows, and holds the share."""
    count = Int32(0)
    if (index + 1 == last) & in_ring(cfg, share):
        count = share.count
    return Kept(share.first, count, share.values + work.split_idx * (share.count * 512))


def in_ring(cfg, share: Share):
    """Whether the ring holds all partials of a share."""
    return share.splits * (share.count * 512 + share.pitch) <= cfg.ring_bytes


@dataclass(frozen=True)
class Walk:
    """A thread's way through `width` 16-byte pieces of each split: every 256th piece.

    `piece` within the split; offsets of the first one, and how both grow by a step and where the
    step passes the end of a split. Divisions are done here, before the wait for others.
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


def walk(width, splits, stride, pitch):
    """From splits `stride` fp32 words apart to splits `pitch` bytes apart."""
    tid, _, _ = cute.arch.thread_idx()
    split = tid // width
    piece = tid - split * width
    step = THREADS // width
    rest = THREADS - step * width
    return Walk(
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
def fetch(source: cute.Pointer, to, way: Walk, kept: Kept | None = None):
    """Pieces into shared memory, by all threads, asynchronously, but for those `kept` there."""
    tid, _, _ = cute.arch.thread_idx()
    piece = way.piece
    offset = way.source
    to = to + way.to
    for _ in cutlass.range(tid, way.pieces, THREADS, unroll=1):
        if const_expr(kept is None):
            copy_piece(to, source + offset)
        else:
            if (to < kept.address) | (to >= kept.address + kept.count * 512):
                copy_piece(to, source + offset)
        piece = piece + way.rest
        offset = offset + way.source_step
        to = to + way.to_step
        if piece >= way.width:
            piece = piece - way.width
            offset = offset + way.source_wrap
            to = to + way.to_wrap
    cute.arch.cp_async_commit_group()


@cute.jit
def copy_piece(to, source: cute.Pointer):
    """16 bytes into shared memory, past the L1."""
    cute.arch.inline_ptx(
        "cp.async.cg.shared.global [{$r0}], [{$r1}], 16;", read_only_args=[to, source]
    )


@cute.jit
def fetch_share(
    cfg: cutlass.Constexpr[Config],
    g: Globals,
    share: Share,
    rows_way: Walk,
    strips_way: Walk,
    kept: Kept,
):
    """Row values, then strips: two groups of copies."""
    if const_expr(cfg.partials == 16):
        rows = g.partial_out.iterator + (share.region + REGION // 2 + 48 * share.group)
    else:
        rows = g.partial_lse.iterator + (share.rows + 16 * share.group)
    fetch(rows, share.weights, rows_way)
    strips = g.partial_out.iterator + (share.region + 128 * share.first)
    fetch(strips, share.values, strips_way, kept)


def sixteen(op, value):
    """Reduce over the 16 lanes that share a row."""
    for offset in (1, 2, 4, 8):
        value = op(value, cute.arch.shuffle_sync_bfly(value, offset=offset))
    return value


@cute.jit
def weigh(cfg: cutlass.Constexpr[Config], g: Globals, work: Work, share: Share, group):
    """A group's row values become the factors of its partials; its lse is written, once.

    16 threads a row, every sixteenth split each.
    """
    tid, _, _ = cute.arch.thread_idx()
    place = tid // 16
    first = tid % 16
    at = share.weights + (group * row_words(cfg) + place) * 4
    top = Float32(-Float32.inf)
    for i in cutlass.range(first, share.splits, 16, unroll=4):
        top = cute.arch.fmax(top, smem(at + i * share.pitch, Float32, 1).load())
    top = sixteen(cute.arch.fmax, top)
    top = select(top == -Float32.inf, Float32(0.0), top)
    total = Float32(0)
    for i in cutlass.range(first, share.splits, 16, unroll=4):
        p = smem(at + i * share.pitch, Float32, 1)
        weight = cute.math.exp2((p.load() - top) * Float32(LOG2E), fastmath=True)
        p.store(weight)
        total = total + weight
    total = sixteen(add, total)
    row = 16 * (share.group + group) + place // 2 + 8 * (place % 2)
    g = with_scales(cfg, g)
    whole = with_sink(cfg, g, total, top * Float32(LOG2E), work.first_row + row)
    inverse = select(total > 0.0, cute.arch.rcp_approx(whole), Float32(0.0)) * g.out_scale
    for i in cutlass.range(first, share.splits, 16, unroll=4):
        p = smem(at + i * share.pitch, Float32, 1)
        weight = p.load() * inverse
        if const_expr(cfg.partials == 16):
            for half in cutlass.range_constexpr(2):
                scale = p + 16 * (1 + half)
                scale.store(scale.load() * weight)
        else:
            p.store(weight)
    strip = (share.group + group) * (64 // units_per_strip(cfg))
    if (first == 0) & (strip >= share.first) & (strip < share.first + share.count):
        lse = top + cute.math.log2(total, fastmath=True) * Float32(LN2)
        store_row_lse(cfg, g, work, row, lse)


@cute.jit
def merge_share(cfg: cutlass.Constexpr[Config], g: Globals, work: Work, share: Share):
    """Weigh, add up."""
    cute.arch.cp_async_wait_group(1)
    cute.arch.barrier(barrier_id=MERGE_BARRIER, number_of_threads=THREADS)
    for group in cutlass.range(share.groups, unroll=1):
        weigh(cfg, g, work, share, group)
    cute.arch.cp_async_wait_group(0)
    cute.arch.barrier(barrier_id=MERGE_BARRIER, number_of_threads=THREADS)
    stamp(cfg, g, 7)
    if share.splits <= SOME_SPLITS:
        if const_expr(cfg.partials == 16):
            combine_strips(cfg, 1, g, work, share)
        elif share.splits <= FEW_SPLITS:
            combine_strips(cfg, 4, g, work, share)
        else:
            combine_strips(cfg, 1, g, work, share)
    else:
        combine_pairs(cfg, g, work, share)


def counter_of(cfg, g, work, rank):
    """Neighbouring counters lie 128 B apart, so that groups do not queue for one line of L2."""
    index = work.group * cfg.cluster + rank
    return g.counters.iterator + (((index & 511) << 5) | (index >> 9))


def writers(cfg):
    """CTAs that a partial of 64 rows is by."""
    return 2 if cfg.crossed else 1


def count_up(cfg, g, work, rank, order):
    """Add one to the group's counter, which goes to zero again where its last user leaves it.

    Arrivals take it to num_splits, or twice that, those who saw that on to zero, as the next
    launch needs it.
    """
    cute.arch.inline_ptx(
        f"red.{order}.gpu.global.inc.u32 [{{$r0}}], {{$r1}};",
        read_only_args=[counter_of(cfg, g, work, rank), (writers(cfg) + 1) * work.num_splits - 1],
    )


@cute.jit
def arrive(cfg: cutlass.Constexpr[Config], g: Globals, work: Work, rank):
    """This CTA's partial is in its slot; the count releases what the barrier has gathered."""
    tid, _, _ = cute.arch.thread_idx()
    cute.arch.barrier(barrier_id=MERGE_BARRIER, number_of_threads=THREADS)
    if tid == 0:
        for other in cutlass.range_constexpr(writers(cfg)):
            count_up(cfg, g, work, other if const_expr(cfg.crossed) else rank, "release")


@cute.jit
def merge(
    cfg: cutlass.Constexpr[Config],
    g: Globals,
    s: Shared,
    index,
    plan: Plan,
    rank,
    keeps: cutlass.Constexpr[bool] = False,
):
    """Wait for the partials of a split row tile, and merge a share of it.

    Runs after the worker's last tile, so that nobody whom others wait for waits. `keeps`: the ring
    holds what `kept_strips` says.
    """
    tid, _, _ = cute.arch.thread_idx()
    if plan.last - plan.first > RECORDS:  # the records of early work tiles are gone
        cute.arch.barrier(barrier_id=MERGE_BARRIER, number_of_threads=THREADS)
        if cute.arch.make_warp_uniform(tid // 32) == 0:
            record(cfg, g, s, plan, index, rank)
        cute.arch.barrier(barrier_id=MERGE_BARRIER, number_of_threads=THREADS)
    work = read_work(g, s, index)
    if work.slot >= 0:
        share = share_of(cfg, s, work, rank)
        kept = kept_strips(cfg, share, work, index, plan.last if const_expr(keeps) else -1)
        apart = REGION * cfg.cluster
        rows_way = walk(
            share.groups * (row_words(cfg) // 4),
            share.splits,
            apart if const_expr(cfg.partials == 16) else BLOCK * cfg.cluster,
            share.pitch,
        )
        strips_way = walk(share.count * 32, share.splits, apart, share.count * 512)
        if tid == 0:
            counter = counter_of(cfg, g, work, rank)
            seen = Int32(0)
            while seen < writers(cfg) * work.num_splits:
                seen = cute.arch.load(counter, Int32, sem="acquire", scope="gpu")
            count_up(cfg, g, work, rank, "relaxed")
        cute.arch.barrier(barrier_id=MERGE_BARRIER, number_of_threads=THREADS)
        stamp(cfg, g, 5)
        if share.splits <= (FEW_SPLITS if const_expr(cfg.partials == 16) else 0):
            if share.splits <= FEW_SPLITS // 2:
                combine_few(cfg, FEW_SPLITS // 2, g, work, share, kept)
            else:
                combine_few(cfg, FEW_SPLITS, g, work, share, kept)
        elif in_ring(cfg, share):
            fetch_share(cfg, g, share, rows_way, strips_way, kept)
            merge_share(cfg, g, work, share)
        else:
            combine_far(cfg, g, work, share)
