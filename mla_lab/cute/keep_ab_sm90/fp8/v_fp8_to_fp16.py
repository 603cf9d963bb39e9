"""V^T of sixteen bits: e4m3 widened on its way through registers, for weights of fp16.

The columns of V come out of `ldmatrix.trans` two by two (see swap_ab's `fp8`); what operand A of a
16-bit product wants is two tokens of one column:

    a word of ldmatrix, lane 4g + q   columns 2g 2g+1 of token 2q, then of token 2q + 1
    prmt                              tokens 2q 2q+1 of column 2g, then of column 2g + 1
    cvt, each half                    two fp16: row g, and row g + 8 of V^T

So tokens keep their order, and columns lie in the accumulators as those of e4m3 do. Every e4m3
number is one of fp16. Products of 16 bits take twice the time of those of e4m3, as long as two
terms of weights would; but the matrix unit adds them in fp32, so that none is added apart, and a
weight has 11 bits.

    P[row][64 tokens]   two boxes of 32 tokens, 64 bytes wide and swizzled: on the rope of its
                        tile's stage, and on a place of its own
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float16, Int32
from cutlass.cute.nvgpu import warpgroup

from ..params import Mmas
from . import kv_656 as groups
from .params import BOX, ROPE_BOX, Transposed, TransposedShared

#: tokens of one k-step of a 16-bit product, and k-steps of a box of P
STEP_TOKENS, BOX_STEPS = 16, 2
#: boxes of P
P_BOXES = 2
#: places of boxes in shared memory, at most
PLACES = 224
#: boxes may begin at multiples of so many bytes
PLACE = 1024


def weights_of(cfg: Transposed, s: TransposedShared, mma: Mmas):
    """Operand B of a box of P: (.., .., k-step, place), by the places of boxes in shared memory;
    crossed: (.., .., k-step, slot)."""
    if cfg.crossed:
        return mma.pv.make_fragment_B(mma.pv.get_slice(0).partition_B(s.p))
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW64, Float16)
    box = cute.tile_to_shape(atom, (64, 32), (0, 1))
    layout = cute.append(box.outer, cute.make_layout(PLACES, stride=PLACE // 2))
    view = cute.make_tensor(cute.recast_ptr(s.kv.iterator, box.inner, Float16), layout)
    return mma.pv.make_fragment_B(mma.pv.get_slice(0).partition_B(view))


def operands_a(cfg: Transposed, mma: Mmas):
    """Registers for operand A of as many steps as are held."""
    shape = mma.pv.partition_shape_A((64, STEP_TOKENS))
    return [cute.make_rmem_tensor(shape, Float16) for _ in range(cfg.held)]


def load_words(base: Int32, offset: int):
    """V of 64 columns and 16 tokens as it lies."""
    return cute.arch.inline_ptx(
        "ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 { {$w0}, {$w1} }, "
        f"[{{$r0}}+{offset}];",
        write_only_types=[Int32] * 2,
        read_only_args=[base],
    )


def widen(word: Int32):
    """Row g, and row g + 8 of V^T: two tokens of fp16 each."""
    return cute.arch.inline_ptx(
        "{ .reg .b32 x; .reg .b16 a, b; prmt.b32 x, {$r0}, 0, 0x3120; mov.b32 {a, b}, x; "
        "cvt.rn.f16x2.e4m3x2 {$w0}, a; cvt.rn.f16x2.e4m3x2 {$w1}, b; }",
        write_only_types=[Int32, Int32],
        read_only_args=[word],
    )


def add_wide(
    cfg: Transposed, s: TransposedShared, mma: Mmas, acc: cute.Tensor, v, r_p, base: Int32,
    stage: Int32, slot: Int32,
):  # fmt: skip
    """O^T += V^T P^T of one tile, whose V begins for this lane at `base`; by steps of 64 columns
    and 16 tokens, of which operand A of `cfg.held` is held.

    The words of the next step are on their way while the products of this one are: where shared
    memory is busy they take longer than those.
    """
    shape = cute.make_layout(mma.pv.partition_shape_C((64, cfg.width)))
    atom = cute.make_mma_atom(mma.pv.op)
    atom.set(warpgroup.Field.ACCUMULATE, True)
    first = ROPE_BOX * (BOX // PLACE) + stage * (cfg.stage_bytes // PLACE)
    scales = None
    if cfg.crossed:
        first = rest = slot
    elif cfg.scaled:
        rest, scales = first + BOX // PLACE, groups.lane_factors(s, stage)
    else:
        rest = (Int32(s.p_second.iterator.toint()) - Int32(s.kv.iterator.toint())) // PLACE
        rest = rest + stage * (BOX // PLACE)
    # two slices have the same scales
    pairs, halves = (cfg.slices // 2, 2) if cfg.scaled else (cfg.slices, 1)
    steps = [
        (box, n * halves + half, k)
        for box in range(P_BOXES)
        for n in range(pairs)
        for k in range(BOX_STEPS)
        for half in range(halves)
    ]

    def fetch(i):  # type: ignore[no-untyped-def]
        box, m, k = steps[i]
        words = load_words(base, box * (BOX // 2) + m * BOX + k * (STEP_TOKENS * 64))
        if cfg.scaled and m % 2 == 0:
            return words, groups.two_factors(scales, m // 2, BOX_STEPS * box + k)
        return words, None

    words, factors = fetch(0)
    for i, (box, m, k) in enumerate(steps):
        a = v[i % cfg.held]
        if i >= cfg.held:
            warpgroup.wait_group(cfg.held - 1)
        to = cute.recast_tensor(a, Int32)
        for n in range(2):
            to[2 * n], to[2 * n + 1] = (
                groups.widen(words[n], factors[n]) if cfg.scaled else widen(words[n])
            )
        if i + 1 < len(steps):
            words, more = fetch(i + 1)
            factors = more or factors
        product = cute.make_tensor(acc.iterator + cfg.width // 2 * m, shape)
        warpgroup.fence()
        step = BOX_STEPS * box + k if cfg.crossed else k
        weights = r_p[None, None, step, rest if box else first]
        cute.gemm(atom, product, a[None, None, 0], weights, product)
        warpgroup.commit_group()
