"""The merge of a split row tile by all who split it: each a share of the units (fused_merge 2).

The counter of (group, rank) counts the arrivals 1 .. s, then, from s on, those who have seen all
arrivals; the 2 s-th step takes it back to 0. A waiter leaves at s or more, and it cannot miss
that, since its own step is one of the 2 s. Nobody waits before its own last arrival, and the
launch is cooperative, so that all of them run.

A share is a multiple of 8 units of 16 bytes (2 columns x 2 rows). Up to 256 units of it are in
work at once: `width` threads stand side by side, 256 / width of them take the splits in turn and
are added up in a fixed order, so equal inputs give equal bits.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from ..common.feature_operands import sink_of, with_scales
from ..common.ptx_sm90 import (
    LN2,
    LOG2E,
    add,
    count_up,
    fresh_thread,
    load2,
    load4,
    smem_f32,
    vec2,
    vec4,
)
from ..swap_ab_sm90.epilogue_store import (
    GROUP,
    NUM_SPLITS,
    OUT_ROW,
    ROW,
    ROWS,
    SLOT,
    SPLIT,
    column,
    store_unit,
    unit_place,
    unit_words,
    wants_lse,
)
from ..swap_ab_sm90.params import CONSUMERS, MAX_SPLITS, Shape, share_units
from ..swap_ab_sm90.shared_storage import Global, Shared, stamp
from .swap_ab_registers import FEW, PASS, ROUNDS, load_few, store_few

ALL = 1
#: partials of a unit that a thread has in flight
BATCH = 12


def counter_of(c: Shape, g: Global, more: cute.Tensor, rank: Int32) -> cute.Pointer:
    """The counter of this rank's part of a row tile."""
    return g.counters.iterator + (more[GROUP] * c.cluster + rank)


@cute.jit
def arrive(c: cutlass.Constexpr[Shape], g: Global, more: cute.Tensor, rank: Int32):
    """After a barrier of all consumers: release the partial that they have written."""
    if fresh_thread() == 0:
        count_up(counter_of(c, g, more, rank), 2 * more[NUM_SPLITS] - 1, "release")


@cute.jit
def await_all(c: cutlass.Constexpr[Shape], g: Global, more: cute.Tensor, rank: Int32):
    """Until all splits have arrived; then say that this one has seen it."""
    if fresh_thread() == 0:
        counter = counter_of(c, g, more, rank)
        seen = Int32(0)
        while seen < more[NUM_SPLITS]:
            seen = cute.arch.load(counter, Int32, sem="acquire", scope="gpu")
        count_up(counter, 2 * more[NUM_SPLITS] - 1, "relaxed")
    cute.arch.barrier(barrier_id=ALL, number_of_threads=CONSUMERS)


@cute.jit
def await_weights(s: Shared, merges: Int32):
    """Until all threads have left the weights that are theirs to make; `merges` went before."""
    cute.arch.mbarrier_arrive(s.weighed)
    cute.arch.mbarrier_wait(s.weighed, merges & 1)


@cute.jit
def warp_reduce(op: cutlass.Constexpr, value: Float32):
    """Reduce over a warp; every lane gets the result."""
    for offset in (16, 8, 4, 2, 1):
        value = op(value, cute.arch.shuffle_sync_bfly(value, offset=offset))
    return value


@cute.jit
def merge_shares(
    c: cutlass.Constexpr[Shape], g: Global, s: Shared, tail: cute.Tensor, more: cute.Tensor,
    rank: Int32, merges: Int32,
):  # fmt: skip
    """This CTA's share of a row tile, out of all partials; `merges` of others went before. The KV
    ring is idle: it holds tables."""
    await_all(c, g, more, rank)
    stamp(c, s, 9)
    g = with_scales(c, g)
    splits = more[NUM_SPLITS]
    share = share_units(c.units, splits)
    begin = more[SPLIT] * share
    end = cutlass.min(begin + share, Int32(c.units))
    if (splits <= FEW) & (share > PASS // 2):
        share_few(c, g, s, tail, more, rank, begin, end, merges)
    else:
        share_many(c, g, s, tail, more, rank, begin, end, share, merges)
    if begin >= end:
        await_weights(s, merges)  # of nothing: every merge turns the barrier once


@cute.jit
def share_few(
    c: cutlass.Constexpr[Shape], g: Global, s: Shared, tail: cute.Tensor, more: cute.Tensor,
    rank: Int32, begin: Int32, end: Int32, merges: Int32,
):  # fmt: skip
    """Units [begin, end) of few partials."""
    for base in cutlass.range(begin, end, PASS, unroll=1):
        part = cute.make_rmem_tensor((4, FEW * ROUNDS), Float32)
        load_few(c, g, part, more, rank, base, end)
        if base == begin:
            # while the first partials are on the way
            slot = more[SLOT] - more[SPLIT]
            weigh(c, g, s, tail, slot, more[NUM_SPLITS], begin, end, rank)
            await_weights(s, merges)
        tables = table_of(s, Int32(0))
        store_few(c, g, part, tables, 2 * MAX_SPLITS, tail, more, rank, begin, base, end)


@cute.jit
def share_many(
    c: cutlass.Constexpr[Shape], g: Global, s: Shared, tail: cute.Tensor, more: cute.Tensor,
    rank: Int32, begin: Int32, end: Int32, share: Int32, merges: Int32,
):  # fmt: skip
    """Units [begin, end) of many partials: threads behind each other take them in turn."""
    tid = fresh_thread()
    splits = more[NUM_SPLITS]
    shift = Int32(3)
    for bit in cutlass.range_constexpr(3, 8):
        shift = Int32(bit + 1) if share > (1 << bit) else shift
    width = 1 << shift
    step = CONSUMERS >> shift
    first = tid >> shift
    slot = more[SLOT] - more[SPLIT]
    for r in cutlass.range((end - begin + width - 1) >> shift, unroll=1):
        unit = begin + (r << shift) + tid % width
        inside = unit < end
        at = cutlass.min(unit, end - 1)
        part = cute.make_rmem_tensor((4, BATCH), Float32)
        load_parts(c, g, part, slot, splits, rank, at, first, step)
        if r == 0:
            # while the first partials are on the way
            weigh(c, g, s, tail, slot, splits, begin, end, rank)
            await_weights(s, merges)
        acc = cute.make_rmem_tensor(4, Float32)
        acc.fill(0.0)
        weights = table_of(s, at // 256 - begin // 256)
        add_parts(acc, part, weights, splits, first, step)
        for k in cutlass.range(first + BATCH * step, splits, BATCH * step, unroll=1):
            load_parts(c, g, part, slot, splits, rank, at, k, step)
            add_parts(acc, part, weights, splits, k, step)
        if step > 1:
            cute.autovec_copy(acc, vec4(columns_of(c, s) + tid * 4))
            cute.arch.barrier(barrier_id=ALL, number_of_threads=CONSUMERS)
        if tid - tid % 32 < width:
            if step > 1:
                acc.fill(0.0)
                for k in cutlass.range(step, unroll=4):
                    other = load4(columns_of(c, s) + ((k << shift) + tid % width) * 4)
                    for e in cutlass.range_constexpr(4):
                        acc[e] = acc[e] + other[e]
            row, place = unit_place(c, at, rank)
            rows = tail[ROWS] if inside & (tid < width) else Int32(0)
            store_unit(c, g, acc, tail[OUT_ROW], rows, row, column(c, place), tid % 32)


def table_of(s: Shared, pair: Int32) -> cute.Pointer:
    """Weights of a row pair's splits: fp32 [MAX_SPLITS][2] a pair, on the KV ring."""
    return smem_f32(s.k.iterator) + pair * (2 * MAX_SPLITS)


def columns_of(c: Shape, s: Shared) -> cute.Pointer:
    """Sums of the threads that stand behind each other: fp32 [256][4], behind the tables."""
    return smem_f32(s.k.iterator) + (c.pairs + 1) * (2 * MAX_SPLITS)


@cute.jit
def load_parts(
    c: cutlass.Constexpr[Shape], g: Global, part: cute.Tensor, slot: Int32, splits: Int32,
    rank: Int32, unit: Int32, first: Int32, step: Int32,
):  # fmt: skip
    """A unit of splits first, first + step, ...: up to BATCH loads in flight."""
    for k in cutlass.range_constexpr(BATCH):
        split = first + k * step
        if split < splits:
            cute.autovec_copy(unit_words(c, g, slot + split, rank, unit), part[None, k])


@cute.jit
def add_parts(
    acc: cute.Tensor, part: cute.Tensor, weights: cute.Pointer, splits: Int32,
    first: Int32, step: Int32,
):  # fmt: skip
    """acc += weight x partial, for the splits that `load_parts` has asked for."""
    for k in cutlass.range_constexpr(BATCH):
        split = first + k * step
        if split < splits:
            w = load2(weights + split * 2)
            for e in cutlass.range_constexpr(4):
                acc[e] = acc[e] + w[e % 2] * part[e, k]


@cute.jit
def weigh(
    c: cutlass.Constexpr[Shape], g: Global, s: Shared, tail: cute.Tensor, slot: Int32,
    splits: Int32, begin: Int32, end: Int32, rank: Int32,
):  # fmt: skip
    """Weights of all splits for the row pairs of units [begin, end), a pair a warp at a time."""
    tid = fresh_thread()
    lane = tid % 32
    warp = cute.arch.make_warp_uniform(tid // 32)
    pairs = (end - 1) // 256 - begin // 256 + 1
    for p in cutlass.range(warp, pairs, CONSUMERS // 32, unroll=1):
        unit = (begin // 256 + p) * 256
        row, _ = unit_place(c, unit, rank)
        values = cute.make_rmem_tensor((2, MAX_SPLITS // 32), Float32)
        values.fill(-Float32.inf)
        for k in cutlass.range_constexpr(MAX_SPLITS // 32):
            if 32 * k + lane < splits:
                at = (slot + 32 * k + lane) * c.rows + row
                cute.autovec_copy(vec2(g.partial_lse.iterator + at), values[None, k])
        first_column = unit >= begin
        if const_expr(c.parts > 1):
            first_column = first_column & (rank % c.parts == 0)
        for e in cutlass.range_constexpr(2):
            sink = sink_of(c, g, tail[ROW] + row + e)
            lse = weigh_row(c, values[e, None], splits, table_of(s, p) + e, sink, lane)
            if const_expr(c.lse):
                if first_column & (lane == 0) & (row + e < tail[ROWS]) & wants_lse(g):
                    g.lse[tail[OUT_ROW] + row + e] = lse


@cute.jit
def weigh_row(
    c: cutlass.Constexpr[Shape], values: cute.Tensor, splits: Int32, table: cute.Pointer,
    sink: Float32, lane: Int32,
):  # fmt: skip
    """From natural lse to weights in `table` (every second word); the row's natural lse."""
    top = Float32(-Float32.inf)
    for k in cutlass.range_constexpr(MAX_SPLITS // 32):
        top = cute.arch.fmax(top, values[k])
    top = warp_reduce(cute.arch.fmax, top)
    shift = Float32(0.0) if top == -Float32.inf else top
    total = Float32(0.0)
    for k in cutlass.range_constexpr(MAX_SPLITS // 32):
        values[k] = cute.math.exp2((values[k] - shift) * Float32(LOG2E), fastmath=True)
        total = total + values[k]
    total = warp_reduce(add, total)
    whole = total
    if const_expr(c.features):
        whole = total + cute.math.exp2(sink - shift * Float32(LOG2E), fastmath=True)
    inverse = cute.arch.rcp_approx(whole) if total > 0.0 else Float32(0.0)
    for k in cutlass.range_constexpr(MAX_SPLITS // 32):
        if 32 * k + lane < splits:
            cute.arch.store(table + (32 * k + lane) * 2, values[k] * inverse)
    return shift + cute.math.log2(total, fastmath=True) * Float32(LN2)
