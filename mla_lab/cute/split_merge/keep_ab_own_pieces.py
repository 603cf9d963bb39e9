"""The sum of an item that a worker of a batch-invariant launch ran whole, piece by piece
(`plan.fixed_pieces`), behind its last piece.

A thread stored the strips of earlier pieces itself and reads the same ones again, and its rows are
the same in all of them: strips need no barrier, and the weights of the pieces are computed once.
Behind a worker's last work tile the ring is free: earlier pieces are copied there with all copies
in flight at once, and the last piece is stored behind them. Elsewhere all come from the slots.

Weights, order and rounding are those of `keep_ab_registers`, and so are the bits: that sum adds
zeros for pieces that are missing, which turn a sum of -0 into +0, and so this one adds a zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32

from ...plan.fixed_pieces import WHOLE_PIECES
from ..common.feature_operands import with_scales
from ..common.fixed_pieces import OWN_PIECES
from ..common.ptx_sm90 import discard_line, fresh_thread, pick, ptx
from ..rows_on_m.epilogue_store import store_rows
from ..rows_on_m.params import LATENT, PV_BARRIER, Cta, Work
from .keep_ab_cooperative import copy_piece
from .keep_ab_partials import REGION, ROW_WORDS, UNITS, UNITS_PER_STRIP, WARPS, OwnStrips, unpack
from .keep_ab_registers import row_factors, row_values

#: strips of a partial, those of a warp, and bytes of all
STRIPS = UNITS // UNITS_PER_STRIP
WARP_STRIPS = STRIPS // WARPS
PIECE_BYTES = STRIPS * 512
#: strips whose loads are in flight together
AT_ONCE = 4


def ends_own_item(work: Work, piece: Int32) -> Any:
    """Whether this is the last piece of an item that the worker runs whole."""
    return (work.group == OWN_PIECES) & (piece + 1 == work.num_splits)


def fits_free_ring(cta: Cta, work: Work, index: Int32) -> Any:
    """Whether all pieces of work tile `index` fit into the ring, which no further one needs."""
    fits = work.num_splits * PIECE_BYTES <= cta.cfg.ring_bytes
    return (index + 1 == cta.plan.last) & fits


@dataclass(frozen=True)
class OwnPieces:
    """Where a thread finds its words of a warp's first strip: of piece 0 in the slots, `far`, and
    in the ring, `near`, if that holds the pieces."""

    far: cute.Pointer
    near: Int32
    in_ring: Any


def own_pieces(cta: Cta, wg: Any, work: Work, index: Int32) -> OwnPieces:
    """Of work tile `index`, for the calling thread."""
    first = ((fresh_thread() >> 5 & 3) * 2 + wg) * WARP_STRIPS
    lane = cute.arch.lane_idx()
    far = cta.g.mO_partial.iterator + (work.slot * REGION + first * 128 + lane * 4)
    near = Int32(cta.s.sKV.iterator.toint()) + first * 512 + lane * 16
    return OwnPieces(far, near, fits_free_ring(cta, work, index))


@cute.jit
def strips_for_sum(cta: Cta, wg: Any, work: Work, index: Int32, piece: Int32) -> OwnStrips:
    """Where a piece is stored: the last one in the ring, if that is free, as all strips that the
    CTA keeps. Copies of the earlier ones are under way then, in front of it."""
    at, count = own_pieces(cta, wg, work, index), Int32(0)
    if ends_own_item(work, piece) & at.in_ring:
        PV_BARRIER.sync()  # both warp groups have read the ring
        for k in cutlass.range(piece, unroll=1):
            to, source = at.near + k * PIECE_BYTES, at.far + k * REGION
            for i in cutlass.range(WARP_STRIPS, unroll=4):
                copy_piece(to + i * 512, source + i * 128)
        cute.arch.cp_async_commit_group()
        count = Int32(STRIPS)
    ring = Int32(cta.s.sKV.iterator.toint())
    return OwnStrips(Int32(0), count, ring + piece * PIECE_BYTES)


@cute.jit
def add_own_pieces(cta: Cta, wg: Any, work: Work, index: Int32, scales: Any, lse: Any):
    """Results and lse of the item; `scales` and `lse` of the thread's rows are the last piece's."""
    g, lane, last = with_scales(cta.cfg, cta.g), cute.arch.lane_idx(), work.num_splits - 1
    w = cute.arch.make_warp_uniform(fresh_thread() >> 5 & 3)
    at = own_pieces(cta, wg, work, index)
    rows = g.mO_partial.iterator + (work.slot * REGION + REGION // 2 + ROW_WORDS * w)
    rows = rows + 2 * (lane // 4)
    values = []
    for k in cutlass.range_constexpr(WHOLE_PIECES):
        lses, factors = row_values(rows, rows + 16 * (1 + wg), last, k, 1)
        is_last = last == k
        lses = [pick(is_last, lse[h], lses[h]) for h in range(2)]
        values.append((lses, [pick(is_last, scales[h], factors[h]) for h in range(2)]))
    row = 16 * w + lane // 4
    factors = row_factors(cta, g, work, values, row, 32 * w + 16 * wg)
    cute.arch.cp_async_wait_group(0)
    for strip in cutlass.range(0, WARP_STRIPS, AT_ONCE, unroll=1):
        acc = cute.make_rmem_tensor(8 * AT_ONCE, Float32)
        acc.fill(0.0)
        add_pieces(acc, at, strip, work.num_splits, factors, (0, 1))
        if work.num_splits > 2:
            add_pieces(acc, at, strip, work.num_splits, factors, (2,))
        for e in cutlass.range_constexpr(cute.size(acc)):
            acc[e] = acc[e] + Float32(0.0)
        store_rows(cta, acc, work, row, wg * (LATENT // 2) + strip * 16, lane)
    # all lanes of the warp have read the lines, and nobody reads them again
    cute.arch.sync_warp()
    first = g.mO_partial.iterator + (work.slot * REGION + (w * 2 + wg) * WARP_STRIPS * 128)
    for k in cutlass.range(pick(at.in_ring, last, work.num_splits), unroll=1):
        for i in cutlass.range_constexpr(WARP_STRIPS // 8):
            discard_line(first + (k * REGION + (lane + 32 * i) * 32))
    # both warp groups have read the lse, which the first one stores again
    PV_BARRIER.sync()


@cute.jit
def add_pieces(
    acc: cute.Tensor, at: OwnPieces, strip: Int32, count: Int32, factors: list,
    pieces: cutlass.Constexpr[tuple],
):  # fmt: skip
    """`acc` plus AT_ONCE strips from `strip` on of some of an item's `count` pieces, times the
    factors of the thread's rows; nothing of those past the last."""
    near, far = at.near + strip * 512, at.far + strip * 128
    in_ring = pick(at.in_ring, Int32(1), Int32(0))
    parts = []
    for k in pieces:
        parts += [(k, i, load_strip(near, far, in_ring, count, k, i)) for i in range(AT_ONCE)]
    for k, i, words in parts:
        v = unpack(cute.recast_tensor(words, Float16))
        for e in cutlass.range_constexpr(8):
            acc[8 * i + e] = acc[8 * i + e] + factors[e // 2 % 2][k] * v[e]


def load_strip(near: Int32, far: Any, in_ring: Int32, pieces: Int32, k: int, i: int) -> Any:
    """Words of strip `i` of piece `k`."""
    inside, outside = k * PIECE_BYTES + 512 * i, 4 * k * REGION + 512 * i
    words = ", ".join(f"{{$w{e}}}" for e in range(4))
    zeros = "".join(f"mov.b32 {{$w{e}}}, 0;" for e in range(4))
    found = ptx(
        f"{{ .reg .pred n, f, r; setp.ne.s32 r, {{$r2}}, 0;"
        f"setp.gt.and.s32 n, {{$r3}}, {k}, r; setp.gt.and.s32 f, {{$r3}}, {k}, !r; {zeros}"
        f"@n ld.shared.v4.b32 {{ {words} }}, [{{$r0}} + {inside}];"
        f"@f ld.relaxed.gpu.global.v4.b32 {{ {words} }}, [{{$r1}} + {outside}]; }}",
        near,
        far,
        in_ring,
        pieces,
        out=[Int32] * 4,
    )
    result = cute.make_rmem_tensor(4, Int32)
    for e in range(4):
        result[e] = found[e]
    return result
