"""Weights of fp16, made of a query's scores in two terms, and their way to shared memory.

A thread's pairs of neighbouring tokens are what stmatrix stores: tokens keep their order. Weights
of a CTA by itself go to the rope of their tile's stage and a place of its own, those of a pair to
its slots (see `pair`), and then are made before it is known whether a maximum moves: none may be 2,
so that of all their bits one says so, and no tile's greatest scores are looked for.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, const_expr

from ...common.ptx_sm90 import fresh_thread, pack2
from ..mainloop_qk_softmax import publish_pair, row_top
from ..mask import own_row
from . import kv_656 as groups
from .mainloop_qk_softmax import nothing, raise_maxima, row_address
from .p_exchange_2cta import own_p, own_rows
from .params import BOX, ROPE_BOX, SLOT, WEIGHT_LOG2, Transposed, TransposedShared

#: what a weight of 2 or more has, or one that is no number, of two
TWO = 0x40004000


def store_four(address, offset, words):
    """Four 8 x 8 matrices of 16 bits, each lane at its own row."""
    cute.arch.inline_ptx(
        f"stmatrix.sync.aligned.m8n8.x4.shared.b16 [{{$r0}}+{offset}], "
        "{ {$r1}, {$r2}, {$r3}, {$r4} };",
        read_only_args=[address, *words],
    )


def make_step(acc, scale, below, step, between, add):
    """Weights of 16 tokens: four words, by 8 tokens, then half; `add` is called with the half and
    the sum of each."""
    words = []
    for i in range(2 * step, 2 * step + 2):
        for h in range(2):
            x = 4 * i + 2 * h
            a, b = (
                cute.math.exp2(acc[at] * scale[h] - below[h], fastmath=True) for at in (x, x + 1)
            )
            add(h, a + b)
            words.append(pack2(a, b, Float16))
            between(2 * i + h)
    return words


@cute.jit
def weigh(
    cfg: cutlass.Constexpr[Transposed], s: TransposedShared, acc, scale, row_max, row_sum, stage,
    between: cutlass.Constexpr,
):  # fmt: skip
    """Weights of fp16 against a maximum that moves rarely, to shared memory. `between` is called
    with the number of each word that is done."""
    lift, inverse = (
        groups.unit_of(s, stage) if const_expr(cfg.scaled) else (Float32(0.0), Float32(1.0))
    )
    below = [row_max[h] - lift for h in range(2)] if const_expr(cfg.scaled) else row_max
    over = cute.arch.fmax(
        row_top(acc, 0) * scale[0] - below[0], row_top(acc, 1) * scale[1] - below[1]
    )
    tid = fresh_thread()
    lane, row = tid & 31, own_row(tid)
    factor = s.factor[None, stage]
    if cute.arch.vote_any_sync(over > Float32(WEIGHT_LOG2 + cfg.lazy_log2)):
        raise_maxima(cfg, scale, acc, row_max, row_sum, factor, row, lane, lift)
    else:
        publish_pair(factor, row, lane, Float16(1.0), Float16(1.0))
    first_at = row_address(Int32(s.kv.iterator.toint()) + ROPE_BOX * BOX, 3, 4)
    first_at = first_at + stage * cfg.stage_bytes
    if const_expr(cfg.scaled):
        rest_at = first_at + BOX
        below = [row_max[h] - lift for h in range(2)]
    else:
        rest_at = row_address(Int32(s.p_second.iterator.toint()), 3, 4) + stage * BOX
        below = row_max
    for step in cutlass.range_constexpr(4):
        sums: list[Any] = []

        def keep(h, x, sums=sums):  # type: ignore[no-untyped-def]
            sums.append(x)

        words = make_step(acc, scale, below, step, between, keep)
        for h in cutlass.range_constexpr(2):
            total = sums[h] + sums[2 + h]
            row_sum[h] = row_sum[h] + (total * inverse if const_expr(cfg.scaled) else total)
        at = first_at if const_expr(step < 2) else rest_at
        store_four(at ^ (32 * (step % 2)), 0, words)


def make_all(s: TransposedShared, acc, scale, row_max, sums, slot, between):
    """All weights of a tile to its slot; sums <- theirs. Returns their bits, put together."""
    at = row_address(own_p(s), 3, 4) + slot * SLOT
    bits = Int32(0)
    sums.fill(0.0)

    def add(h, x):  # type: ignore[no-untyped-def]
        sums[h] = sums[h] + x

    for step in range(4):
        words = make_step(acc, scale, row_max, step, between, add)
        for word in words:
            bits = bits | word
        store_four((at + step // 2 * (SLOT // 2)) ^ (32 * (step % 2)), 0, words)
    return bits


@cute.jit
def weigh_at_once(
    cfg: cutlass.Constexpr[Transposed], s: TransposedShared, acc, scale, row_max, row_sum, slot,
    between: cutlass.Constexpr,
):  # fmt: skip
    """The same for a pair."""
    sums = cute.make_rmem_tensor(2, Float32)
    bits = make_all(s, acc, scale, row_max, sums, slot, between)
    tid = fresh_thread()
    lane, row = tid & 31, own_row(tid)
    factor = own_rows(s).factor[None, slot]
    if cute.arch.vote_any_sync((bits & Int32(TWO)) != 0):
        raise_maxima(cfg, scale, acc, row_max, row_sum, factor, row, lane)
        make_all(s, acc, scale, row_max, sums, slot, nothing)
    else:
        publish_pair(factor, row, lane, Float16(1.0), Float16(1.0))
    for h in cutlass.range_constexpr(2):
        row_sum[h] = row_sum[h] + sums[h]
