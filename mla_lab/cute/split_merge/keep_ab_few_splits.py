"""The sum of up to eight partials, by whichever of two ways a build has the registers for.

`keep_ab_registers` takes eight strips of two splits at once, by four addresses. Where 656-byte
tokens are gathered a PV thread has 128 registers: there a warp takes four strips of up to four
splits, or two of eight, by two addresses. With eight strips those builds spill 8 bytes, for every
order of loads and discards that was tried (2026-11-30, `data/notes/kernel_attempts.jsonl`).
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from ..common.feature_operands import with_scales
from ..common.ptx_sm90 import pick
from ..rows_on_m.params import Cta, Work
from .keep_ab_combine import MergeShare
from .keep_ab_partials import REGION, WARPS, OwnStrips, discard_strip
from .keep_ab_registers import (
    FEW_SPLITS,
    PAIR,
    Strips,
    add_strips,
    factors_of,
    load_two,
    pieces_of,
    store_strips,
    sum_in_registers,
    warp_strips,
    weigh_strip,
)

HALF = FEW_SPLITS // 2


@cute.jit
def sum_few_splits(cta: Cta, work: Work, share: MergeShare, own: OwnStrips):
    """This CTA's share, of up to `FEW_SPLITS` partials, in split order."""
    if const_expr(cta.cfg.fp8 and cta.cfg.kv_656 and cta.cfg.gather):
        sum_four_strips(cta, work, share, own)
    else:
        sum_in_registers(cta, work, share, own)


def load_four_strips(cta: Cta, share, own, split_idx, strip, wide):
    """Two strips of each of eight splits, zeros past the last one, or (where `wide`) of four, and
    then the two strips behind these; the `own` strips, of split `split_idx`, from shared memory."""
    lane = cute.arch.lane_idx()
    stride = REGION * cta.cfg.cluster
    first = Strips(
        cta.g.mO_partial.iterator + (share.region + 128 * strip + 4 * lane),
        own.address + (strip - share.first) * 512 + lane * 16,
        share.splits,
        pick(own.count > 0, split_idx, Int32(-1)),
    )
    # of those from the fourth on split 0 is the fourth, or the first again
    second = Strips(
        first.far + pick(wide, Int32(128 * PAIR), Int32(HALF * stride)),
        first.near + pick(wide, Int32(512 * PAIR), Int32(0)),
        pick(wide, first.splits, first.splits - HALF),
        pick(wide | (first.own < 0), first.own, first.own - HALF),
    )
    return [load_two(at, i, stride) for at in (first, second) for i in range(HALF)]


@cute.jit
def sum_four_strips(cta: Cta, work: Work, share: MergeShare, own: OwnStrips):
    """As `keep_ab_registers.sum_in_registers`, with half as many addresses."""
    g = with_scales(cta.cfg, cta.g)
    wide = share.splits <= HALF
    width = pick(wide, Int32(2 * PAIR), Int32(PAIR))
    first, end = warp_strips(cta, share, width)
    for strip in cutlass.range(first, end, WARPS * width, unroll=1):
        strip = cute.arch.make_warp_uniform(strip)
        parts = load_four_strips(cta, share, own, work.split_idx, strip, wide)
        row, column, factors = weigh_strip(cta, g, work, share, strip)
        now, later = pieces_of(parts[:HALF]), pieces_of(parts[HALF:])
        weights, others = factors_of(factors, 0, HALF), factors_of(factors, HALF, HALF)
        acc = cute.make_rmem_tensor(8 * PAIR, Float32)
        acc.fill(0.0)
        for turn in cutlass.range(2, unroll=1):
            add_strips(acc, weights, now)
            if turn == 1:  # all partials are in registers, of every lane
                cute.arch.sync_warp()
                for merged in cutlass.range(strip, strip + width, unroll=1):
                    discard_strip(cta, share.region + 128 * merged, share.splits)
            if wide | (turn == 1):
                store_strips(cta, acc, work, row, column)
                acc.fill(0.0)
                column = column + 16 * PAIR
            # with up to four splits, sums of their other strips; else of the other splits
            now.store(later.load())
            if not wide:
                weights.store(others.load())
