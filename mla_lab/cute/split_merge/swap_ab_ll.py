"""The merge of a split row tile without counters: every word of a partial says that it is there.

Option fused_merge 3 (grid mode, one CTA a worker). partial_out and partial_lse are zero between
launches, as counters are elsewhere. A sender never writes the word 0: it writes -0.0 for +0.0. A
reader asks for its words until none of them is 0, and leaves zeros behind; each word has one
reader. So a partial is on its way once, with neither fence nor flag: words are read one by one
as relaxed, and none says anything about another.

Units and shares are those of `share`, but before the division by the row's sum, so that they leave
as soon as the last product is there. (m, l) of a row pair, the maximum in log2 units and the sum,
go as one note of 16 bytes to each CTA whose share touches the pair. Share d touches pair p in a
staircase, so d + p names a note: note (slot, d + p) is row slot * (num_splits + pairs) + d + p of
partial_lse.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from ..common.feature_operands import with_scales
from ..common.ptx_sm90 import fresh_thread, load4, read4_relaxed, vec4, write4_relaxed
from ..swap_ab_sm90.epilogue_store import (
    NUM_SPLITS,
    OUT_ROW,
    ROWS,
    SLOT,
    SPLIT,
    column,
    store_unit,
    unit_place,
    unit_words,
)
from ..swap_ab_sm90.params import CONSUMERS, MAX_SPLITS, Shape, share_units
from ..swap_ab_sm90.shared_storage import Global, Shared, stamp
from .ll_words import NOTHING, WARPS, lacks, seen_word, take_notes, weigh_notes
from .swap_ab_cooperative import ALL, BATCH, add_parts, await_weights, columns_of, table_of
from .swap_ab_registers import FEW, PASS, ROUNDS, ask_few, clear_few, lack_few, store_few


@cute.jit
def send_units(
    c: cutlass.Constexpr[Shape], wg: Int32, g: Global, acc: cute.Tensor,
    slot: Int32, warp: Int32, lane: Int32,
):  # fmt: skip
    """The fragments as they are, 16 bytes each, in the order of the units."""
    for j in cutlass.range_constexpr(c.rows // 8):
        for sl in cutlass.range_constexpr(4):
            unit = (4 * j + lane % 4) * 256 + wg * 128 + sl * 32 + warp * 8 + lane // 4
            words = cute.make_rmem_tensor(4, Int32)
            for e in cutlass.range_constexpr(4):
                words[e] = seen_word(acc[sl * (c.rows // 2) + 4 * j + e])
            write4_relaxed(unit_words(c, g, slot, Int32(0), unit).iterator, words)


@cute.jit
def merge_mail(
    c: cutlass.Constexpr[Shape], g: Global, s: Shared, tail: cute.Tensor, more: cute.Tensor
):
    """This CTA's share of a row tile, out of all partials. The KV ring is idle: it holds tables."""
    g = with_scales(c, g)
    splits = more[NUM_SPLITS]
    share = share_units(c.units, splits)
    begin = more[SPLIT] * share
    end = cutlass.min(begin + share, Int32(c.units))
    if (splits <= FEW) & (share > PASS // 2):
        mail_few(c, g, s, tail, more, begin, end)
    else:
        mail_many(c, g, s, tail, more, begin, end, share)


@cute.jit
def mail_few(
    c: cutlass.Constexpr[Shape], g: Global, s: Shared, tail: cute.Tensor, more: cute.Tensor,
    begin: Int32, end: Int32,
):  # fmt: skip
    """Units [begin, end) of few partials."""
    for base in cutlass.range(begin, end, PASS, unroll=1):
        part = cute.make_rmem_tensor((4, FEW * ROUNDS), Int32)
        part.fill(0)
        ask_few(c, g, part, more, base, end)
        if base == begin:
            # while the first partials are on the way
            weigh_all(c, g, s, tail, more, begin, end)
            await_weights(s, Int32(0))
            stamp(c, s, 9)
        while lack_few(part, more, base, end) != 0:
            ask_few(c, g, part, more, base, end)
        clear_few(c, g, more, base, end)
        values, tables = cute.recast_tensor(part, Float32), table_of(s, Int32(0))
        rank = Int32(0)
        store_few(c, g, values, tables, 2 * MAX_SPLITS, tail, more, rank, begin, base, end)


@cute.jit
def mail_many(
    c: cutlass.Constexpr[Shape], g: Global, s: Shared, tail: cute.Tensor, more: cute.Tensor,
    begin: Int32, end: Int32, share: Int32,
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
        # nobody but the unit's own threads may take it
        mine = splits if inside else Int32(0)
        part = cute.make_rmem_tensor((4, BATCH), Int32)
        part.fill(0)
        ask_parts(c, g, part, slot, mine, at, first, step)
        if r == 0:
            # while the first partials are on the way
            weigh_all(c, g, s, tail, more, begin, end)
            await_weights(s, Int32(0))
            stamp(c, s, 9)
        take_parts(c, g, part, slot, mine, at, first, step)
        acc = cute.make_rmem_tensor(4, Float32)
        acc.fill(0.0)
        weights = table_of(s, at // 256 - begin // 256)
        add_parts(acc, cute.recast_tensor(part, Float32), weights, mine, first, step)
        clear_parts(c, g, slot, mine, at, first, step)
        for k in cutlass.range(first + BATCH * step, mine, BATCH * step, unroll=1):
            part.fill(0)
            take_parts(c, g, part, slot, mine, at, k, step)
            add_parts(acc, cute.recast_tensor(part, Float32), weights, mine, k, step)
            clear_parts(c, g, slot, mine, at, k, step)
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
            row, place = unit_place(c, at, Int32(0))
            rows = tail[ROWS] if inside & (tid < width) else Int32(0)
            store_unit(c, g, acc, tail[OUT_ROW], rows, row, column(c, place), tid % 32)


@cute.jit
def weigh_all(
    c: cutlass.Constexpr[Shape], g: Global, s: Shared, tail: cute.Tensor, more: cute.Tensor,
    begin: Int32, end: Int32,
):  # fmt: skip
    """Notes of units [begin, end), a row pair a warp at a time, and the weights of all splits.

    (To ask for partials again meanwhile was slower: whoever asks, others wait for L2.)
    """
    tid = fresh_thread()
    lane = tid % 32
    warp = cute.arch.make_warp_uniform(tid // 32)
    pairs = (end - 1) // 256 - begin // 256 + 1
    for p in cutlass.range(warp, pairs, WARPS, unroll=1):
        notes = cute.make_rmem_tensor((4, MAX_SPLITS // 32), Float32)
        take_notes(c, g, notes, more, begin // 256 + p, lane)
        weigh_notes(c, g, s, notes, tail, more, begin, p, lane)


@cute.jit
def ask_parts(
    c: cutlass.Constexpr[Shape], g: Global, part: cute.Tensor, slot: Int32, splits: Int32,
    unit: Int32, first: Int32, step: Int32,
):  # fmt: skip
    """Ask for the unit's words of splits first, first + step, ... that are not here yet."""
    for k in cutlass.range_constexpr(BATCH):
        split = first + k * step
        if (split < splits) & lacks(part, k):
            words = read4_relaxed(unit_words(c, g, slot + split, Int32(0), unit).iterator)
            for e in cutlass.range_constexpr(4):
                part[e, k] = words[e]


@cute.jit
def take_parts(
    c: cutlass.Constexpr[Shape], g: Global, part: cute.Tensor, slot: Int32, splits: Int32,
    unit: Int32, first: Int32, step: Int32,
):  # fmt: skip
    """Ask until all are here."""
    missing = Int32(1)
    while missing != 0:
        ask_parts(c, g, part, slot, splits, unit, first, step)
        missing = Int32(0)
        for k in cutlass.range_constexpr(BATCH):
            missing = Int32(1) if (first + k * step < splits) & lacks(part, k) else missing


@cute.jit
def clear_parts(
    c: cutlass.Constexpr[Shape], g: Global, slot: Int32, splits: Int32, unit: Int32,
    first: Int32, step: Int32,
):  # fmt: skip
    """Leave zeros for the next launch in what `take_parts` has taken."""
    for k in cutlass.range_constexpr(BATCH):
        split = first + k * step
        if split < splits:
            write4_relaxed(unit_words(c, g, slot + split, Int32(0), unit).iterator, NOTHING)
