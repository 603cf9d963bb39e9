"""The merge of a split row tile by all CTAs that split it, a slice of its fragments each.

Both protocols end here: cooperative (`swap_ab_cooperative`: partials complete behind a counter) and
LL (`swap_ab_ll`: words are polled until they arrive). The loads of the first partials are in flight
while the weights are computed.

Lines of partials are discarded behind the stores of results, as in `keep_ab_cooperative`; those of
the LL protocol are not, as their words are 0 between launches.

A slice is a multiple of 8 fragments. In the merge of many splits up to 256 fragments are in work at
once: `width` threads take neighbouring fragments, 256 / width of them the splits of one fragment in
turn, and are added up in a fixed order, so equal inputs give equal bits.

Of few splits a slice is long: a thread takes several of its fragments at once, all of their
partials in flight together. One after the other each would wait for L2: 3 us for two splits of 16
rows in place of 1 (H200, 2026-11-20, data/notes/kernel_attempts.jsonl).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, const_expr

from ..common.feature_operands import with_scales
from ..common.ptx_sm90 import (
    discard_line,
    fresh_thread,
    load2,
    load4,
    load4_where,
    pick,
    smem_f32,
    vec4,
    write4_lasting,
)
from . import SplitMerge
from . import swap_ab_cooperative as cooperative
from . import swap_ab_ll as ll
from .swap_ab_fragments import (
    CONSUMER_THREADS,
    CONSUMERS,
    MAX_SPLITS,
    CtaEvent,
    fragment_column,
    fragment_place,
    fragments_per_split,
    partial_words,
    profile_event,
    row_pair_of,
    store_fragment,
    weight_table,
)
from .swap_ab_weights import slice_weights

#: splits of a row tile at most for `merge_few`, and values of a thread at a time there
FEW, ROUND_VALUES = 4, 16
#: fragments of a 128-byte line, of which slices are multiples
LINE = 8


def rounds_of(c: Any) -> int:
    """Fragments that a thread takes at a time in `merge_few`."""
    return ROUND_VALUES // c.fragment_values


def pass_of(c: Any) -> int:
    """Fragments of a slice that all threads take at a time there."""
    return rounds_of(c) * CONSUMER_THREADS


@dataclass(frozen=True)
class Slice:
    """Fragments [begin, end) of a row tile's, `size` of a full slice; `merges` of this CTA went
    before. `live`: see `merge_slice`."""

    begin: Int32
    end: Int32
    size: Int32
    merges: Int32
    live: Any


@dataclass(frozen=True)
class ThreadSplits:
    """What a thread adds: splits first, first + step, ... below `splits` of one fragment, whose
    partials begin at `partial`."""

    fragment: Int32
    partial: Int32
    splits: Int32
    first: Int32
    step: Int32


@cute.jit
def merge_slice(c: cutlass.Constexpr, g: Any, s: Any, r: Any, merges: Int32, live: Any = True):
    """This CTA's slice of a row tile, out of all partials. The KV ring is idle: it holds tables.

    `live` is False in the producer warp, which runs this code only to bring it into the SM's
    instruction cache, ahead of the consumers (as in `keep_ab_cooperative`): it waits for nothing,
    and takes no partial and no row."""
    if const_expr(c.split_merge == SplitMerge.COOPERATIVE):
        if live:
            cooperative.wait_for_partials(c, g, r)
        profile_event(c, s, CtaEvent.PARTIALS_HERE)
    g = with_scales(c, g)
    num_splits = r.num_splits
    size = fragments_per_split(c.fragments, num_splits)
    begin = r.split * size
    end = cutlass.min(begin + size, Int32(c.fragments))
    if const_expr(live is not True):
        r = r.without_rows_unless(live)
    m = Slice(begin, end, size, merges, live)
    if (num_splits <= FEW) & (size > pass_of(c) // 2):
        merge_few(c, g, s, r, m)
    else:
        merge_many(c, g, s, r, m)
    if const_expr(c.split_merge == SplitMerge.COOPERATIVE):
        if (begin >= end) & live:
            sync_weights(s, merges)  # of no fragment: every merge completes the phase once


@cute.jit
def sync_weights(s: Any, merges: Int32):
    """Wait until all 256 consumer threads have stored their weights of the merge."""
    s.weights_full.arrive(0)
    s.weights_full.wait(0, merges & 1)


@cute.jit
def make_weights(c: cutlass.Constexpr, g: Any, s: Any, r: Any, m: Slice):
    """Compute the weights of all splits for the slice's row pairs, by all threads."""
    slice_weights(c, g, s, r, m)
    if m.live:
        sync_weights(s, m.merges)
    if const_expr(c.split_merge == SplitMerge.LL):
        profile_event(c, s, CtaEvent.PARTIALS_HERE)


def partial_registers(c: Any, number: int) -> cute.Tensor:
    """Registers for `number` fragments; LL: nothing has arrived in them."""
    part = cute.make_rmem_tensor((4, number), Int32 if c.split_merge == SplitMerge.LL else Float32)
    if c.split_merge == SplitMerge.LL:
        part.fill(0)
    return part


def fragment_of(c: Any, part: cute.Tensor, k: int) -> cute.Tensor:
    """The values, fp32, of the k-th fragment in `partial_registers`."""
    if c.fragment_values == 4:
        return part[None, k]
    wide = cute.make_rmem_tensor(c.fragment_values, Float32)
    wide.store(cute.recast_tensor(part[None, k], Float16).load().to(Float32))
    return wide


def sum_registers(c: Any) -> cute.Tensor:
    """Zeros for the sums of a fragment, four of 64 columns together."""
    acc = cute.make_rmem_tensor((4, c.fragment_values // 4), Float32)
    acc.fill(0.0)
    return acc


def add_fragment(c: Any, acc: cute.Tensor, weights: Any, values: cute.Tensor) -> None:
    """`acc` plus a fragment times the weights of its two rows."""
    for e in range(c.fragment_values):
        acc[e] = acc[e] + weights[e % 2] * values[e]


@cute.jit
def merge_few(c: cutlass.Constexpr, g: Any, s: Any, r: Any, m: Slice):
    """The slice out of at most FEW partials."""
    for base in cutlass.range(m.begin, m.end, pass_of(c), unroll=1):
        part = partial_registers(c, FEW * rounds_of(c))
        without_weights = base == m.begin
        waiting = Int32(1)
        while waiting != 0:
            load_few(c, g, part, r, m, base)
            if without_weights:
                make_weights(c, g, s, r, m)
            without_weights = False
            waiting = missing_few(c, part, r, m, base)
        if const_expr(c.split_merge == SplitMerge.LL):
            clear_few(c, g, r, m, base)
        tables = weight_table(s, Int32(0))
        for i in cutlass.range_constexpr(rounds_of(c)):
            fragment = base + i * CONSUMER_THREADS + fresh_thread()
            at = cutlass.min(fragment, m.end - 1)
            pair = row_pair_of(c, at) - row_pair_of(c, m.begin)
            weights = tables + pair * (2 * MAX_SPLITS)
            acc = sum_registers(c)
            for k in cutlass.range_constexpr(FEW):
                if k < r.num_splits:
                    weight = load2(weights + k * 2)
                    add_fragment(c, acc, weight, fragment_of(c, part, FEW * i + k))
            row, place = fragment_place(c, at, r.rank)
            rows = r.rows if fragment < m.end else Int32(0)
            lane, column = fresh_thread() % 32, fragment_column(c, place)
            for h in cutlass.range_constexpr(c.fragment_values // 4):
                at_column = column + 64 * h
                store_fragment(c, g, r.out_row, acc[None, h], rows, row, at_column, lane)
        if const_expr(c.split_merge != SplitMerge.LL):
            discard_few(c, g, r, m, base)


@cute.jit
def load_few(c: cutlass.Constexpr, g: Any, part: cute.Tensor, r: Any, m: Slice, base: Int32):
    """Partials of this thread's fragments of [base, m.end): split k of its i-th at FEW i + k. LL:
    those that have not arrived. A fragment of another thread is not loaded: its line may have been
    discarded."""
    partial = r.partial - r.split
    loaded = cute.recast_tensor(part, Int32)
    for i in cutlass.range_constexpr(rounds_of(c)):
        at = base + i * CONSUMER_THREADS + fresh_thread()
        left = pick(at < m.end, r.num_splits, Int32(0))
        for k in cutlass.range_constexpr(FEW):
            if const_expr(c.split_merge == SplitMerge.LL):
                if (at < m.end) & (k < r.num_splits) & ll.missing(part, FEW * i + k):
                    words = partial_words(c, g, partial + k, Int32(0), at)
                    ll.poll(part, FEW * i + k, words.iterator)
            else:
                words = partial_words(c, g, partial + k, r.rank, at)
                load4_where(left, Int32(k), words.iterator, loaded[None, FEW * i + k])


@cute.jit
def missing_few(c: cutlass.Constexpr, part: cute.Tensor, r: Any, m: Slice, base: Int32):
    """LL: 1 while one of the thread's partials has not arrived."""
    waiting = Int32(0)
    if const_expr(c.split_merge == SplitMerge.LL):
        for i in cutlass.range_constexpr(rounds_of(c)):
            inside = base + i * CONSUMER_THREADS + fresh_thread() < m.end
            for k in cutlass.range_constexpr(FEW):
                lacking = inside & (k < r.num_splits) & ll.missing(part, FEW * i + k)
                waiting = Int32(1) if lacking else waiting
    return waiting


@cute.jit
def clear_few(c: cutlass.Constexpr, g: Any, r: Any, m: Slice, base: Int32):
    """LL: leave zeros for the next launch in what `load_few` has taken."""
    partial = r.partial - r.split
    for i in cutlass.range_constexpr(rounds_of(c)):
        fragment = base + i * CONSUMER_THREADS + fresh_thread()
        for k in cutlass.range_constexpr(FEW):
            if (fragment < m.end) & (k < r.num_splits):
                words = partial_words(c, g, partial + k, Int32(0), fragment)
                write4_lasting(words.iterator, ll.EMPTY)


@cute.jit
def discard_few(c: cutlass.Constexpr, g: Any, r: Any, m: Slice, base: Int32):
    """Cooperative: discard the lines that the lanes of this warp have loaded by `load_few`."""
    cute.arch.sync_warp()
    lane = fresh_thread() % 32
    first = base + fresh_thread() - lane + lane % 4 * LINE
    for turn in cutlass.range_constexpr(FEW * rounds_of(c) * 4 // 32):
        k = lane // 4 % FEW
        fragment = first + (8 // FEW * turn + lane // (4 * FEW)) * CONSUMER_THREADS
        if (fragment < m.end) & (k < r.num_splits) & m.live:
            words = partial_words(c, g, r.partial - r.split + k, r.rank, fragment)
            discard_line(words.iterator)


def thread_sums(c: Any, s: Any) -> cute.Pointer:
    """Sums of the threads that share a fragment, fp32 [`fragment_values` / 4][256][4], behind the
    weight tables."""
    return smem_f32(s.sKV.iterator) + (c.row_pairs + 1) * (2 * MAX_SPLITS)


@cute.jit
def merge_many(c: cutlass.Constexpr, g: Any, s: Any, r: Any, m: Slice):
    """The slice out of many partials."""
    tid = fresh_thread() % CONSUMER_THREADS
    num_splits = r.num_splits
    shift = Int32(3)
    for bit in cutlass.range_constexpr(3, 8):
        shift = Int32(bit + 1) if m.size > (1 << bit) else shift
    width = 1 << shift
    step = CONSUMER_THREADS >> shift
    first = tid >> shift
    partial = r.partial - r.split
    for i in cutlass.range((m.end - m.begin + width - 1) >> shift, unroll=1):
        fragment = m.begin + (i << shift) + tid % width
        inside = fragment < m.end
        at = cutlass.min(fragment, m.end - 1)
        # LL: each word has one reader; cooperative: another warp may have discarded the line
        splits = num_splits if inside else Int32(0)
        part = partial_registers(c, c.merge_batch)
        acc = sum_registers(c)
        weights = weight_table(s, row_pair_of(c, at) - row_pair_of(c, m.begin))
        # at least once, whatever the thread's splits: all threads compute the weights
        for k in cutlass.range(
            first, cutlass.max(splits, first + 1), c.merge_batch * step, unroll=1
        ):
            t = ThreadSplits(at, partial, splits, k, step)
            if const_expr(c.split_merge == SplitMerge.LL):
                part.fill(0)
            without_weights = (i == 0) & (k == first)
            waiting = Int32(1)
            while waiting != 0:
                load_batch(c, g, part, r, t)
                if without_weights:
                    make_weights(c, g, s, r, m)
                without_weights = False
                waiting = missing_batch(c, part, t)
            add_batch(c, g, acc, part, t, weights)
        t = ThreadSplits(at, partial, num_splits, first, step)
        store_merged(c, g, s, r, m, acc, t, shift, r.rows if inside else Int32(0))
        discard_many(c, g, r, t, inside & m.live)


@cute.jit
def store_merged(
    c: cutlass.Constexpr, g: Any, s: Any, r: Any, m: Slice, acc: cute.Tensor, t: ThreadSplits,
    shift: Int32, rows: Int32,
):  # fmt: skip
    """Store a merged fragment, none of it where `rows` is 0. Where `t.step` threads have added its
    splits, a part each, 2**`shift` threads first add up their sums."""
    tid, width = fresh_thread() % CONSUMER_THREADS, 1 << shift
    halves = c.fragment_values // 4
    if (t.step > 1) & m.live:
        for h in cutlass.range_constexpr(halves):
            cute.autovec_copy(acc[None, h], vec4(thread_sums(c, s) + (256 * h + tid) * 4))
        CONSUMERS.sync()
    if tid - tid % 32 < width:
        if t.step > 1:
            acc.fill(0.0)
            sums = t.step if const_expr(m.live is True) else pick(m.live, t.step, Int32(0))
            for k in cutlass.range(sums, unroll=4):
                for h in cutlass.range_constexpr(halves):
                    at = 256 * h + (k << shift) + tid % width
                    other = load4(thread_sums(c, s) + at * 4)
                    for e in cutlass.range_constexpr(4):
                        acc[e, h] = acc[e, h] + other[e]
        row, place = fragment_place(c, t.fragment, r.rank)
        rows = rows if tid < width else Int32(0)
        column = fragment_column(c, place)
        for h in cutlass.range_constexpr(halves):
            store_fragment(c, g, r.out_row, acc[None, h], rows, row, column + 64 * h, tid % 32)


def batch_place(c: Any, g: Any, rank: Int32, t: ThreadSplits) -> tuple[cute.Pointer, Int32]:
    """Words of the thread's first partial, and how many words its next one lies behind."""
    first = (t.partial + t.first) * c.cluster + rank
    start = g.mO_partial.iterator + (first * c.fragments + t.fragment) * 4
    return start, t.step * (c.cluster * c.fragments * 4)


@cute.jit
def load_batch(c: cutlass.Constexpr, g: Any, part: cute.Tensor, r: Any, t: ThreadSplits):
    """Up to `merge_batch` partials of the thread's fragment. LL: those that have not arrived."""
    by_ll = c.split_merge == SplitMerge.LL
    start, stride = batch_place(c, g, Int32(0) if const_expr(by_ll) else r.rank, t)
    left = t.splits - t.first
    words = cute.recast_tensor(part, Int32)
    load = ll.poll_where if const_expr(by_ll) else load4_where
    for k in cutlass.range_constexpr(c.merge_batch):
        load(left, k * t.step, start + k * stride, words[None, k])


@cute.jit
def missing_batch(c: cutlass.Constexpr, part: cute.Tensor, t: ThreadSplits):
    """LL: 1 while one of the thread's partials has not arrived."""
    waiting = Int32(0)
    if const_expr(c.split_merge == SplitMerge.LL):
        for k in cutlass.range_constexpr(c.merge_batch):
            lacking = (t.first + k * t.step < t.splits) & ll.missing(part, k)
            waiting = Int32(1) if lacking else waiting
    return waiting


@cute.jit
def discard_many(c: cutlass.Constexpr, g: Any, r: Any, t: ThreadSplits, inside: Any):
    """Cooperative: discard the lines that a thread and its neighbours have added, if `inside` the
    slice. The fragments of LINE lanes are a line of each split; each lane takes another split."""
    if const_expr(c.split_merge == SplitMerge.COOPERATIVE):
        cute.arch.sync_warp()
        lane = fresh_thread() % LINE
        splits = pick(inside, t.splits, Int32(0))
        for k in cutlass.range(t.first + lane * t.step, splits, LINE * t.step, unroll=1):
            words = partial_words(c, g, t.partial + k, r.rank, t.fragment - lane)
            discard_line(words.iterator)


@cute.jit
def add_batch(
    c: cutlass.Constexpr, g: Any, acc: cute.Tensor, part: cute.Tensor, t: ThreadSplits,
    weights: cute.Pointer,
):  # fmt: skip
    """acc += weight x partial. LL: leave zeros for the next launch."""
    for k in cutlass.range_constexpr(c.merge_batch):
        split = t.first + k * t.step
        if split < t.splits:
            add_fragment(c, acc, load2(weights + split * 2), fragment_of(c, part, k))
    if const_expr(c.split_merge == SplitMerge.LL):
        start, stride = batch_place(c, g, Int32(0), t)
        for k in cutlass.range_constexpr(c.merge_batch):
            ll.clear_where(t.splits - t.first, k * t.step, start + k * stride)
