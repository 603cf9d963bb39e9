"""The merge of split row tiles: all CTAs that split one merge a share of it each.

A partial lies in its slot as the accumulators hold it, so that every access is 512 B in a row of
a warp, a *strip*. A thread holds two columns of rows `r` and `r + 8` of each *unit*, 16 rows by 8
columns; 256 units are the 64 rows of a CTA, [warp][group][col8 of 32].

    partials  strip                             row values of 16 rows, beside them
    32        fp32 [lane][4], a unit            lse, in `partial_lse`
    16        fp16 [lane][2 units][4]           lse, two scales: after the strips, in `partial_out`

Row values stand in the order r, r + 8 of a thread. A 16-bit value times its scale, a power of two
for each row and half of the columns, is the normalised output: 11 bits of it, whatever V's range.

A share is 1 / num_splits of the strips. It is copied to shared memory whole (the ring is free by
then), all of it in flight at once; weights are made from the lse under that copy, and added up in
split order, fp32. The launch is cooperative: a CTA waits here for others, after its last tile, so
all of them must be running.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, const_expr

from ..extras import with_scales, with_sink
from ..hopper import load2, load4, pack2
from .attend import add, quad, select
from .output import store_pair, store_row_lse, store_rows
from .storage import BLOCK, LATENT, LN2, RECORDS, STAGE, STAGES, Config, Globals, Shared, Work
from .work import Plan, plan_words, read_work, record, stamp

MERGE_BARRIER = 2
THREADS = 256
WARPS = 8
UNITS = 256
#: up to so many splits a warp takes four units at a time, and 16-byte stores; up to so many one
#: strip; beyond, a thread takes two columns of a row, so that short shares still occupy all warps
FEW_SPLITS, SOME_SPLITS = 8, 32
RING_BYTES = STAGES * STAGE * 2
#: fp32 words of 64 rows of a partial
REGION = BLOCK * LATENT
#: biased exponents: the least of a row's bound, and what 2**15 has
LEAST, HIGHEST = 31, 142
LOG2E = 1.4426950408889634


@dataclass(frozen=True)
class Share:
    """Strips [first, first + count) of a CTA's 64 rows, and where their partials lie."""

    first: Int32
    count: Int32
    splits: Int32
    group: Int32  # of 16 rows: that of the first strip
    groups: Int32
    region: Int32  # fp32 words of partial_out before split 0
    rows: Int32  # its first row in partial_lse
    values: Int32  # shared memory address of strips [split][strip]
    weights: Int32  # and of row values [split][16-row group], one more 16 B a split
    pitch: Int32  # bytes of a split there


def units_per_strip(cfg):
    """8-column units that 512 B of a partial hold."""
    return 2 if cfg.partials == 16 else 1


def row_words(cfg):
    """Words beside the strips of 16 rows: the lse; with 16 bits, a scale for each half too."""
    return 48 if cfg.partials == 16 else 16


def words_at(pointer, count):
    """`count` fp32 words of global memory at an aligned place."""
    return cute.make_tensor(pointer.align(4 * count), cute.make_layout(count))


def smem(address, dtype, count):
    """Pointer to shared memory at an aligned address."""
    return cute.make_ptr(dtype, address, cute.AddressSpace.smem, assumed_align=4 * count)


def power(exponent):
    """fp32 of a biased exponent."""
    bits = cute.make_rmem_tensor(1, Int32)
    bits[0] = exponent << 23
    return cute.recast_tensor(bits, Float32)[0]


def row_scale(acc, half, inverse):
    """Powers of two that take a thread's row into the range of fp16, and back.

    The sum of magnitudes bounds the greatest of them, at the full rate of fp32 additions.
    """
    even, odd = Float32(0), Float32(0)
    for j in range(cute.size(acc) // 4):
        even = even + cute.math.absf(acc[4 * j + 2 * half])
        odd = odd + cute.math.absf(acc[4 * j + 2 * half + 1])
    bound = cute.make_rmem_tensor(1, Float32)
    bound[0] = quad(add, even + odd) * inverse
    exponent = cutlass.max((cute.recast_tensor(bound, Int32)[0] >> 23) & 255, LEAST)
    return power(127 + HIGHEST - 1 - exponent), power(127 - HIGHEST + 1 + exponent)


@cute.jit
def store_fragment(
    cfg: cutlass.Constexpr[Config],
    wg,
    g: Globals,
    acc: cute.Tensor,
    work: Work,
    rank,
    inverse,
    lse,
):
    """A thread's 32 units, times `inverse` of their row, into its slot, with the row values."""
    tid, _, _ = cute.arch.thread_idx()
    lane = cute.arch.lane_idx()
    w = cute.arch.make_warp_uniform((tid % 128) // 32)
    slot = work.slot * cfg.cluster + rank
    region = g.partial_out.iterator + slot * REGION
    if const_expr(cfg.partials == 16):
        rows = region + (REGION // 2 + 48 * w + 2 * (lane // 4))
        down0, up0 = row_scale(acc, 0, inverse[0])
        down1, up1 = row_scale(acc, 1, inverse[1])
        f = (inverse[0] * down0, inverse[1] * down1)
        if lane % 4 == 0:
            v = cute.make_rmem_tensor(2, Float32)
            v[0], v[1] = up0, up1
            cute.autovec_copy(v, words_at(rows + 16 * (1 + wg), 2))
    else:
        rows = g.partial_lse.iterator + (slot * BLOCK + 16 * w + 2 * (lane // 4))
        f = inverse
    if (wg == 0) & (lane % 4 == 0):
        v = cute.make_rmem_tensor(2, Float32)
        v[0], v[1] = lse[0], lse[1]
        cute.autovec_copy(v, words_at(rows, 2))
    units = units_per_strip(cfg)
    count = cute.size(acc) // (4 * units)
    dst = region + ((w * 2 + wg) * count * 128 + lane * 4)
    for i in cutlass.range_constexpr(count):
        a = [acc[4 * units * i + e] * f[e // 2 % 2] for e in range(4 * units)]
        v = cute.make_rmem_tensor(4, Int32 if const_expr(cfg.partials == 16) else Float32)
        for e in cutlass.range_constexpr(4):
            v[e] = pack2(a[2 * e], a[2 * e + 1], Float16) if const_expr(units == 2) else a[e]
        cute.autovec_copy(cute.recast_tensor(v, Float32), words_at(dst + 128 * i, 4))


@cute.jit
def share_of(cfg: cutlass.Constexpr[Config], s: Shared, work: Work, rank):
    """The strips that this CTA merges: whole fours of units where splits are few."""
    units = units_per_strip(cfg)
    grain = select(work.num_splits <= FEW_SPLITS, Int32(4 // units), Int32(1))
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
def fetch(source: cute.Pointer, to, way: Walk):
    """Pieces into shared memory, by all threads, asynchronously."""
    tid, _, _ = cute.arch.thread_idx()
    piece = way.piece
    offset = way.source
    to = to + way.to
    for _ in cutlass.range(tid, way.pieces, THREADS, unroll=1):
        cute.arch.inline_ptx(
            "cp.async.cg.shared.global [{$r0}], [{$r1}], 16;",
            read_only_args=[to, source + offset],
        )
        piece = piece + way.rest
        offset = offset + way.source_step
        to = to + way.to_step
        if piece >= way.width:
            piece = piece - way.width
            offset = offset + way.source_wrap
            to = to + way.to_wrap
    cute.arch.cp_async_commit_group()


@cute.jit
def fetch_share(
    cfg: cutlass.Constexpr[Config], g: Globals, share: Share, rows_way: Walk, strips_way: Walk
):
    """Row values, then strips: two groups of copies."""
    if const_expr(cfg.partials == 16):
        rows = g.partial_out.iterator + (share.region + REGION // 2 + 48 * share.group)
    else:
        rows = g.partial_lse.iterator + (share.rows + 16 * share.group)
    fetch(rows, share.weights, rows_way)
    fetch(g.partial_out.iterator + (share.region + 128 * share.first), share.values, strips_way)


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
    for i in cutlass.range(first, share.splits, 16, unroll=1):
        top = cute.arch.fmax(top, smem(at + i * share.pitch, Float32, 1).load())
    top = sixteen(cute.arch.fmax, top)
    top = select(top == -Float32.inf, Float32(0.0), top)
    total = Float32(0)
    for i in cutlass.range(first, share.splits, 16, unroll=1):
        p = smem(at + i * share.pitch, Float32, 1)
        weight = cute.math.exp2((p.load() - top) * Float32(LOG2E), fastmath=True)
        p.store(weight)
        total = total + weight
    total = sixteen(add, total)
    row = 16 * (share.group + group) + place // 2 + 8 * (place % 2)
    g = with_scales(cfg, g)
    whole = with_sink(cfg, g, total, top * Float32(LOG2E), work.first_row + row)
    inverse = select(total > 0.0, cute.arch.rcp_approx(whole), Float32(0.0)) * g.out_scale
    for i in cutlass.range(first, share.splits, 16, unroll=1):
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


def factors_at(cfg, share, unit):
    """Address of a unit's 16 factors of split 0."""
    words = (unit // 64 - share.group) * row_words(cfg)
    if const_expr(cfg.partials == 16):
        words = words + 16 * (1 + unit // 32 % 2)
    return share.weights + words * 4


def unpack(v):
    """fp32 of a tensor of fp16, or fp32 as they are."""
    wide = cute.make_rmem_tensor(cute.size(v), Float32)
    wide.store(v.load().to(Float32))
    return wide


@cute.jit
def combine_strips(
    cfg: cutlass.Constexpr[Config],
    count: cutlass.Constexpr[int],
    g: Globals,
    work: Work,
    share: Share,
):
    """`count` strips of 16 rows by a warp at a time, partials in split order."""
    tid, _, _ = cute.arch.thread_idx()
    w = cute.arch.make_warp_uniform(tid // 32)
    lane = cute.arch.lane_idx()
    units = units_per_strip(cfg)
    for strip in cutlass.range(count * w, share.count, count * WARPS, unroll=1):
        unit = (share.first + strip) * units
        factors = factors_at(cfg, share, unit) + (lane // 4) * 8
        values = share.values + strip * 512 + lane * 16
        acc = cute.make_rmem_tensor(4 * units * count, Float32)
        acc.fill(0.0)
        for i in cutlass.range(0, share.splits, unroll=2):
            f = load2(smem(factors + i * share.pitch, Float32, 2))
            for c in cutlass.range_constexpr(count):
                at = values + (i * share.count + c) * 512
                words = load4(smem(at, Float32, 4))
                if const_expr(cfg.partials == 16):
                    v = unpack(cute.recast_tensor(words, Float16))
                else:
                    v = words
                for e in cutlass.range_constexpr(4 * units):
                    x = 4 * units * c + e
                    acc[x] = acc[x] + f[e // 2 % 2] * v[e]
        row = 16 * (unit // 64) + lane // 4
        column = unit % 64 * 8
        if const_expr(units * count == 4):
            store_rows(cfg, g, acc, work, row, column, lane)
        else:
            for u in cutlass.range_constexpr(units):
                for h in cutlass.range_constexpr(2):
                    store_pair(
                        cfg, g, work, row + 8 * h, column + 8 * u + 2 * (lane % 4),
                        acc[4 * u + 2 * h], acc[4 * u + 2 * h + 1],
                    )  # fmt: skip


def pair_place(cfg, pair):
    """Unit (in the share), place among 16 row values and first column (of 8) of a pair."""
    if const_expr(cfg.partials == 16):
        lane, unit, half = pair // 4 % 32, pair // 128 * 2 + pair // 2 % 2, pair % 2
    else:
        lane, unit, half = pair // 2 % 32, pair // 64, pair % 2
    return unit, 2 * (lane // 4) + half, 2 * (lane % 4)


@cute.jit
def combine_pairs(cfg: cutlass.Constexpr[Config], g: Globals, work: Work, share: Share):
    """Two columns of a row by a thread at a time, partials in split order."""
    tid, _, _ = cute.arch.thread_idx()
    units = units_per_strip(cfg)
    for pair in cutlass.range(tid, share.count * (64 * units), THREADS, unroll=1):
        unit, place, column = pair_place(cfg, pair)
        unit = unit + share.first * units
        factors = factors_at(cfg, share, unit) + place * 4
        values = share.values + pair * (8 // units)
        a, b = Float32(0), Float32(0)
        for i in cutlass.range(0, share.splits, unroll=4):
            f = smem(factors + i * share.pitch, Float32, 1).load()
            v = read_pair(cfg, smem(values + i * share.count * 512, Float32, 2 // units))
            a = a + f * v[0]
            b = b + f * v[1]
        row = 16 * (unit // 64) + place // 2 + 8 * (place % 2)
        store_pair(cfg, g, work, row, unit % 64 * 8 + column, a, b)


def read_pair(cfg, pointer):
    """Two neighbouring values of a partial as fp32, from shared or global memory."""
    if const_expr(cfg.partials == 16):
        words = cute.make_rmem_tensor(2, Float32)  # a tensor of one has no stride to recast
        words.fill(0.0)
        words[0] = pointer.load()
        return unpack(cute.recast_tensor(words, Float16))
    return load2(pointer)


def far_load(pointer):
    """An fp32 of global memory, past the L1: another SM wrote it."""
    return cute.arch.load(pointer, Float32, cop="cg")


@cute.jit
def combine_far(cfg: cutlass.Constexpr[Config], g: Globals, work: Work, share: Share):
    """As `combine_pairs`, from global memory: for shares that shared memory does not hold."""
    g = with_scales(cfg, g)
    tid, _, _ = cute.arch.thread_idx()
    units = units_per_strip(cfg)
    stride = REGION * cfg.cluster
    for pair in cutlass.range(tid, share.count * (64 * units), THREADS, unroll=1):
        unit, place, column = pair_place(cfg, pair)
        unit = unit + share.first * units
        values = g.partial_out.iterator + (share.region + 128 * share.first + pair * (2 // units))
        if const_expr(cfg.partials == 16):
            rows = g.partial_out.iterator + (share.region + REGION // 2 + unit // 64 * 48 + place)
            scales = rows + 16 * (1 + unit // 32 % 2)
            rows_stride = stride
        else:
            rows = g.partial_lse.iterator + (share.rows + unit // 64 * 16 + place)
            rows_stride = BLOCK * cfg.cluster
        top = Float32(-Float32.inf)
        for i in cutlass.range(0, share.splits, unroll=4):
            top = cute.arch.fmax(top, far_load(rows + i * rows_stride))
        top = select(top == -Float32.inf, Float32(0.0), top)
        total, a, b = Float32(0), Float32(0), Float32(0)
        for i in cutlass.range(0, share.splits, unroll=4):
            lse = far_load(rows + i * rows_stride)
            f = cute.math.exp2((lse - top) * Float32(LOG2E), fastmath=True)
            total = total + f
            if const_expr(cfg.partials == 16):
                f = f * far_load(scales + i * stride)
            v = read_pair(cfg, values + i * stride)
            a = a + f * v[0]
            b = b + f * v[1]
        row = 16 * (unit // 64) + place // 2 + 8 * (place % 2)
        whole = with_sink(cfg, g, total, top * Float32(LOG2E), work.first_row + row)
        inverse = select(total > 0.0, cute.arch.rcp_approx(whole), Float32(0.0)) * g.out_scale
        store_pair(cfg, g, work, row, unit % 64 * 8 + column, a * inverse, b * inverse)
        if (unit % 64 == 0) & (column == 0):
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
    if share.splits <= FEW_SPLITS:
        combine_strips(cfg, 4 // units_per_strip(cfg), g, work, share)
    elif share.splits <= SOME_SPLITS:
        combine_strips(cfg, 1, g, work, share)
    else:
        combine_pairs(cfg, g, work, share)


def counter_of(cfg, g, work, rank):
    """Neighbouring counters lie 128 B apart, so that groups do not queue for one line of L2."""
    index = work.group * cfg.cluster + rank
    return g.counters.iterator + (((index & 511) << 5) | (index >> 9))


def count_up(cfg, g, work, rank, order):
    """Add one to the group's counter, and go from 2 num_splits - 1 to zero.

    Arrivals take it to num_splits, those who saw that on to zero again, as the next launch needs
    it.
    """
    cute.arch.inline_ptx(
        f"red.{order}.gpu.global.inc.u32 [{{$r0}}], {{$r1}};",
        read_only_args=[counter_of(cfg, g, work, rank), 2 * work.num_splits - 1],
    )


@cute.jit
def arrive(cfg: cutlass.Constexpr[Config], g: Globals, work: Work, rank):
    """This CTA's partial is in its slot; the count releases what the barrier has gathered."""
    tid, _, _ = cute.arch.thread_idx()
    cute.arch.barrier(barrier_id=MERGE_BARRIER, number_of_threads=THREADS)
    if tid == 0:
        count_up(cfg, g, work, rank, "release")


@cute.jit
def merge(cfg: cutlass.Constexpr[Config], g: Globals, s: Shared, index, plan: Plan, rank):
    """Wait for the partials of a split row tile, and merge a share of it.

    Runs after the worker's last tile, so that nobody whom others wait for waits.
    """
    tid, _, _ = cute.arch.thread_idx()
    if plan.last - plan.first > RECORDS:  # the records of early work tiles are gone
        cute.arch.barrier(barrier_id=MERGE_BARRIER, number_of_threads=THREADS)
        if cute.arch.make_warp_uniform(tid // 32) == 0:
            record(cfg, g, s, plan_words(g, index), index, rank)
        cute.arch.barrier(barrier_id=MERGE_BARRIER, number_of_threads=THREADS)
    work = read_work(g, s, index)
    if work.slot >= 0:
        share = share_of(cfg, s, work, rank)
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
            while seen < work.num_splits:
                seen = cute.arch.load(counter, Int32, sem="acquire", scope="gpu")
            count_up(cfg, g, work, rank, "relaxed")
        cute.arch.barrier(barrier_id=MERGE_BARRIER, number_of_threads=THREADS)
        stamp(cfg, g, 5)
        if share.splits * (share.count * 512 + share.pitch) > RING_BYTES:
            combine_far(cfg, g, work, share)
        else:
            fetch_share(cfg, g, share, rows_way, strips_way)
            merge_share(cfg, g, work, share)
