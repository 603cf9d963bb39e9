"""P exchange in a cluster of two, whose CTAs halve the columns of O^T instead of its rows.

Each CTA computes the scores of its own 64 rows, and O^T of all 128 rows for 256 columns. A step of
V^T P^T is 64 columns by 128 rows, so that V^T passes through registers once for twice as many rows.
P and rescale factors, and at the end of a work tile row sums and maxes, lie at the same places of
both CTAs; the exchange warp copies this CTA's rows of them to the other.

    P[row][64 tokens]   two stages of two boxes of 32 tokens, 128 rows of 64 bytes, swizzled
        box                | rows 0 .. 63, of CTA 0 | rows 64 .. 127, of CTA 1 |     4,096 B each

    mbarriers              arrivals per phase            completes when
    p_written[stage]       128 QK-softmax threads        this CTA's rows are stored
    p_pipe.full[stage]     1 + bytes                     the other's rows have arrived
    p_pipe.empty[stage]    256 threads, 8 warps of the   P and factors have been read in both CTAs
                           other CTA
    stats_read             the same                      row sums and maxes have been read, too

P stages alternate over all tiles of a CTA, across work tiles.
"""

from __future__ import annotations

from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from ...common.fixed_pieces import Before
from ...common.pipeline import PipelineState
from ...common.ptx_sm90 import fresh_block, ptx
from ...common.worker_plan import tile_words
from ...rows_on_m.params import BLOCK, Cta
from ...rows_on_m.work_records import batch_of, span_of
from .params import P_STAGE, P_STAGES, Fp8Shared

#: bytes of a CTA's rows: of one box, of both CTAs' box, of factors, of row sums or maxes
ROWS_OF_BOX, WHOLE_BOX, FACTORS, SUMS = BLOCK * 64, P_STAGE // 2, BLOCK * 2, BLOCK * 4


def p_state(tile) -> PipelineState:
    """Consumer state of P of a CTA's tile number `tile`."""
    return PipelineState(tile & (P_STAGES - 1), (tile // P_STAGES) & 1)


def own_rows(s: Fp8Shared) -> Fp8Shared:
    """Views of row values from this CTA's first row on."""
    first = (fresh_block() & 1) * BLOCK

    def view(t):
        return cute.make_tensor(t.iterator + first, t.layout)

    return replace(s, sRowSum=view(s.sRowSum), sRowMax=view(s.sRowMax), sRescale=view(s.sRescale))


def own_p(s: Fp8Shared):
    """Shared-memory address of this CTA's rows of P in stage 0."""
    return Int32(s.sP.iterator.toint()) + (fresh_block() & 1) * ROWS_OF_BOX


def copy_to_peer(address, num_bytes, barrier, peer):
    """Bytes to the same place of the other CTA, counted on its barrier."""
    ptx(
        "{ .reg .b32 to, bar; mapa.shared::cluster.u32 to, {$r0}, {$r2}; "
        "mapa.shared::cluster.u32 bar, {$r1}, {$r2}; "
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes "
        f"[to], [{{$r0}}], {num_bytes}, [bar]; }}",
        address,
        barrier,
        peer,
    )


@cute.jit
def send_tile(s: Fp8Shared, stage, last: cutlass.Constexpr[bool]):
    """This CTA's rows of a tile to the other, with the row statistics of a work tile's `last`; as
    many bytes are expected from there."""
    num_bytes = 2 * ROWS_OF_BOX + FACTORS + (2 * SUMS if last else 0)
    with cute.arch.elect_one():
        s.p_pipe.producer_expect_tx(stage, num_bytes)
        rank = fresh_block() & 1
        peer, row = 1 - rank, rank * BLOCK
        bar = Int32(s.p_pipe.full.at(stage).toint())
        at = own_p(s) + stage * P_STAGE
        for box in cutlass.range_constexpr(2):
            copy_to_peer(at + box * WHOLE_BOX, ROWS_OF_BOX, bar, peer)
        factors = Int32(s.sRescale.iterator.toint()) + (stage * (2 * BLOCK) + row) * 2
        copy_to_peer(factors, FACTORS, bar, peer)
        if const_expr(last):
            for values in (s.sRowSum, s.sRowMax):
                copy_to_peer(Int32(values.iterator.toint()) + row * 4, SUMS, bar, peer)


@cute.jit
def exchange_warp(cta: Cta):
    """Send all tiles as they are stored; by one warp."""
    g, s, plan = cta.g, cta.s, cta.plan
    tile, before = Int32(0), Before.none()
    for index in cutlass.range(plan.first, plan.last, unroll=1):
        # not from the record, which may be overwritten before this warp reads it
        words = tile_words(batch_of(cta.cfg, g), g.tiles, plan, index, before)
        request, row_tile = cute.arch.shuffle_sync(words, 0), cute.arch.shuffle_sync(words, 1)
        before = replace(before, request=request, row_tile=row_tile)
        begin, end = span_of(words, g.seq_lens[request])
        left = cute.arch.make_warp_uniform(end - begin)
        state = p_state(tile)
        s.p_written.wait(state.index, state.phase)
        while left > 1:
            send_tile(s, state.index, False)
            tile = tile + 1
            left = left - 1
            state = p_state(tile)
            s.p_written.wait(state.index, state.phase)
        send_tile(s, state.index, True)
        tile = tile + 1
