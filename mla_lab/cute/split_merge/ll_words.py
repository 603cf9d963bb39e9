"""Words that are their own flags, and the notes (m, l) of `mail` made of them."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from ..common.feature_operands import sink_of
from ..common.ptx_sm90 import LN2, NO_SCORE, add, read4_relaxed, vec2, write4_relaxed
from ..swap_ab_sm90.epilogue_store import (
    NUM_SPLITS,
    OUT_ROW,
    ROW,
    ROWS,
    SLOT,
    SPLIT,
    unit_place,
    wants_lse,
)
from ..swap_ab_sm90.params import CONSUMERS, MAX_SPLITS, Shape, share_units
from ..swap_ab_sm90.shared_storage import Global, Shared
from .swap_ab_cooperative import table_of

#: the word that stands for +0.0
MINUS_ZERO = -(1 << 31)
#: four words that are not here
NOTHING = (0, 0, 0, 0)
WARPS = CONSUMERS // 32


@cute.jit
def seen_word(value: Float32):
    """The bits of `value`, never 0."""
    bits = value.bitcast(Int32)
    return bits if bits != 0 else Int32(MINUS_ZERO)


def lacks(part: cute.Tensor, k: int):
    """Whether a word of the k-th partial is not here yet."""
    return (part[0, k] == 0) | (part[1, k] == 0) | (part[2, k] == 0) | (part[3, k] == 0)


def note_at(c: Shape, g: Global, slot: Int32, place: Int32) -> cute.Pointer:
    """Note `place` = share + row pair of a slot."""
    return g.partial_lse.iterator + (slot * (g.num_splits + c.pairs) + place) * 4


@cute.jit
def send_notes(
    c: cutlass.Constexpr[Shape], g: Global, values: cute.Tensor, pair: Int32, more: cute.Tensor,
    lane: Int32,
):  # fmt: skip
    """(m, l, m, l) of a row pair, to every share that touches it; by one warp."""
    words = cute.make_rmem_tensor(4, Int32)
    for e in cutlass.range_constexpr(4):
        words[e] = seen_word(values[e])
    share = share_units(c.units, more[NUM_SPLITS])
    for start in cutlass.range(0, more[NUM_SPLITS], 32, unroll=1):
        to = start + lane
        begin = to * share
        end = cutlass.min(begin + share, Int32(c.units))
        if (to < more[NUM_SPLITS]) & (begin < (pair + 1) * 256) & (end > pair * 256):
            write4_relaxed(note_at(c, g, more[SLOT], to + pair), words)


@cute.jit
def weigh_notes(
    c: cutlass.Constexpr[Shape], g: Global, s: Shared, values: cute.Tensor, tail: cute.Tensor,
    more: cute.Tensor, begin: Int32, p: Int32, lane: Int32,
):  # fmt: skip
    """The p-th row pair's notes, all here, become the weights of all splits; by one warp."""
    pair = begin // 256 + p
    first, _ = unit_place(c, pair * 256, Int32(0))
    sinks = [sink_of(c, g, tail[ROW] + first + e) for e in range(2)]
    lse = weigh_pair(c, values, more[NUM_SPLITS], table_of(s, p), sinks, lane)
    if const_expr(c.lse):
        row, _ = unit_place(c, pair * 256, Int32(0))
        for e in cutlass.range_constexpr(2):
            own = (pair * 256 >= begin) & (lane == 0) & (row + e < tail[ROWS])
            if own & wants_lse(g):
                g.lse[tail[OUT_ROW] + row + e] = lse[e]


@cute.jit
def take_notes(
    c: cutlass.Constexpr[Shape], g: Global, values: cute.Tensor, more: cute.Tensor, pair: Int32,
    lane: Int32,
):  # fmt: skip
    """A row pair's note of every split (nothing past the last), and zeros left in its place."""
    slot = more[SLOT] - more[SPLIT]
    place = more[SPLIT] + pair
    words = cute.recast_tensor(values, Int32)
    words.fill(0)
    missing = Int32(1)
    while missing != 0:
        missing = Int32(0)
        for k in cutlass.range_constexpr(MAX_SPLITS // 32):
            split = 32 * k + lane
            if (split < more[NUM_SPLITS]) & lacks(words, k):
                got = read4_relaxed(note_at(c, g, slot + split, place))
                for e in cutlass.range_constexpr(4):
                    words[e, k] = got[e]
        for k in cutlass.range_constexpr(MAX_SPLITS // 32):
            lacking = (32 * k + lane < more[NUM_SPLITS]) & lacks(words, k)
            missing = Int32(1) if lacking else missing
    cute.arch.sync_warp()
    for k in cutlass.range_constexpr(MAX_SPLITS // 32):
        split = 32 * k + lane
        if split < more[NUM_SPLITS]:
            write4_relaxed(note_at(c, g, slot + split, place), NOTHING)
        else:
            for e in cutlass.range_constexpr(2):
                values[2 * e, k] = Float32(NO_SCORE)
                values[2 * e + 1, k] = Float32(0.0)


def reduce_two(op, pair: list) -> list:
    """Two values over a warp, side by side; every lane gets the results."""
    for offset in (16, 8, 4, 2, 1):
        pair = [op(v, cute.arch.shuffle_sync_bfly(v, offset=offset)) for v in pair]
    return pair


@cute.jit
def weigh_pair(
    c: cutlass.Constexpr[Shape], values: cute.Tensor, splits: Int32, table: cute.Pointer,
    sinks: list, lane: Int32,
):  # fmt: skip
    """From (m, l) of two rows to their weights in `table`; the rows' natural lse."""
    tops, sums = [], []
    for e in cutlass.range_constexpr(2):
        top = values[2 * e, 0]
        for k in cutlass.range_constexpr(1, MAX_SPLITS // 32):
            top = cute.arch.fmax(top, values[2 * e, k])
        tops.append(top)
    tops = reduce_two(cute.arch.fmax, tops)
    for e in cutlass.range_constexpr(2):
        total = Float32(0.0)
        for k in cutlass.range_constexpr(MAX_SPLITS // 32):
            values[2 * e, k] = cute.math.exp2(values[2 * e, k] - tops[e], fastmath=True)
            total = total + values[2 * e, k] * values[2 * e + 1, k]
        sums.append(total)
    sums = reduce_two(add, sums)
    for k in cutlass.range_constexpr(MAX_SPLITS // 32):
        two = cute.make_rmem_tensor(2, Float32)
        for e in cutlass.range_constexpr(2):
            whole = sums[e]
            if const_expr(c.features):
                whole = whole + cute.math.exp2(sinks[e] - tops[e], fastmath=True)
            inverse = cute.arch.rcp_approx(whole) if sums[e] > 0.0 else Float32(0.0)
            two[e] = values[2 * e, k] * inverse
        if 32 * k + lane < splits:
            cute.autovec_copy(two, vec2(table + (32 * k + lane) * 2))
    lse = cute.make_rmem_tensor(2, Float32)
    for e in cutlass.range_constexpr(2):
        value = (tops[e] + cute.math.log2(sums[e], fastmath=True)) * Float32(LN2)
        lse[e] = value if sums[e] > 0.0 else -Float32.inf
    return lse
