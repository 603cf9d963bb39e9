"""A pair that halves the columns of O^T, and what its CTAs send each other.

Each CTA has the scores of its own 64 rows, and O^T of all 128 rows for 256 columns. A step of
V^T P^T is 64 columns by 128 rows: V^T passes through registers once for twice as many rows, and who
issues waits half as often. P, factors, and at a work tile's end sums and maxima lie at the same
places of both CTAs; a warp beside the loader copies this CTA's rows of them to the other.

    P[row][64 tokens]   two slots of two boxes of 32 tokens, 128 rows of 64 bytes, swizzled
        box                | rows 0 .. 63, of CTA 0 | rows 64 .. 127, of CTA 1 |     4,096 B each

    barriers        arrivals                             says
    p_own[slot]     128 attend threads                   this CTA's rows are written
    p_full[slot]    1 + bytes                            the other's have come
    seen[slot]      256 threads, 8 warps of the other    P and factors have been read in both CTAs
    free            the same                             so have sums and maxima

Slots go by a CTA's tiles one after the other, whatever work tile they belong to.
"""

from __future__ import annotations

from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from ...common.ptx_sm90 import fresh_block
from ...common.self_schedule import tile_words
from ..params import BLOCK, Globals
from ..tile_scheduler import Plan, batch_of, span_of
from .params import P_SLOTS, SLOT, Transposed, TransposedShared

#: bytes of a CTA's rows: of a box, its whole box of both, factors, and sums or maxima
ROWS_OF_BOX, WHOLE_BOX, FACTORS, SUMS = BLOCK * 64, SLOT // 2, BLOCK * 2, BLOCK * 4


def slot_of(tile):
    """Where P of a CTA's tile number `tile` lies, and the parity of its barriers then."""
    return tile & (P_SLOTS - 1), (tile // P_SLOTS) & 1


def own_rows(s: TransposedShared) -> TransposedShared:
    """Views of row values from this CTA's first row on."""
    first = (fresh_block() & 1) * BLOCK

    def view(t):  # type: ignore[no-untyped-def]
        return cute.make_tensor(t.iterator + first, t.layout)

    return replace(s, row_sum=view(s.row_sum), row_max=view(s.row_max), factor=view(s.factor))


def own_p(s: TransposedShared):
    """Where this CTA's rows of P begin in slot 0."""
    return Int32(s.p.iterator.toint()) + (fresh_block() & 1) * ROWS_OF_BOX


def place_free(s: TransposedShared, tile):
    """Whether P of two tiles before has been read in both CTAs, asked early."""
    slot, turn = slot_of(tile)
    return cute.arch.mbarrier_test_wait(s.seen + slot, turn ^ 1)


@cute.jit
def await_place(s: TransposedShared, tile):
    """Until it has."""
    slot, turn = slot_of(tile)
    cute.arch.mbarrier_wait(s.seen + slot, turn ^ 1)


def copy_over(address, count, barrier, peer):
    """Bytes to the same place of the other CTA, counted there."""
    cute.arch.inline_ptx(
        "{ .reg .b32 to, bar; mapa.shared::cluster.u32 to, {$r0}, {$r2}; "
        "mapa.shared::cluster.u32 bar, {$r1}, {$r2}; "
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes "
        f"[to], [{{$r0}}], {count}, [bar]; }}",
        read_only_args=[address, barrier, peer],
    )


@cute.jit
def send(s: TransposedShared, slot, last: cutlass.Constexpr[bool]):
    """This CTA's rows of a tile to the other; what comes from there is expected."""
    count = 2 * ROWS_OF_BOX + FACTORS + (2 * SUMS if last else 0)
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(s.p_full + slot, count)
        rank = fresh_block() & 1
        peer, row = 1 - rank, rank * BLOCK
        bar = Int32((s.p_full + slot).toint())
        at = own_p(s) + slot * SLOT
        for box in cutlass.range_constexpr(2):
            copy_over(at + box * WHOLE_BOX, ROWS_OF_BOX, bar, peer)
        factors = Int32(s.factor.iterator.toint()) + (slot * (2 * BLOCK) + row) * 2
        copy_over(factors, FACTORS, bar, peer)
        if const_expr(last):
            for values in (s.row_sum, s.row_max):
                copy_over(Int32(values.iterator.toint()) + row * 4, SUMS, bar, peer)


@cute.jit
def carry(cfg: cutlass.Constexpr[Transposed], g: Globals, s: TransposedShared, plan: Plan):
    """By one warp, for all tiles as they are written."""
    tile, request, row_tile = Int32(0), Int32(0), Int32(0)
    for index in cutlass.range(plan.first, plan.last, unroll=1):
        # not from the record, which may be gone before this warp reads it
        words = tile_words(batch_of(cfg, g), g.tiles, plan, index, request, row_tile)
        request, row_tile = cute.arch.shuffle_sync(words, 0), cute.arch.shuffle_sync(words, 1)
        begin, end = span_of(words, g.seq_lens[request])
        left = cute.arch.make_warp_uniform(end - begin)
        slot, turn = slot_of(tile)
        cute.arch.mbarrier_wait(s.p_own + slot, turn)
        while left > 1:
            send(s, slot, False)
            tile = tile + 1
            left = left - 1
            slot, turn = slot_of(tile)
            cute.arch.mbarrier_wait(s.p_own + slot, turn)
        send(s, slot, True)
        tile = tile + 1
