"""656-byte tokens, read as they are stored: a scale for every 128 columns, a bf16 rope.

    bytes of a token     0 .. 511        512 .. 527          528 .. 655
                         512 e4m3        4 fp32 scales       64 bf16
    TMA boxes            4 of 64 x 128   64 x 4              64 x 64, and P later
    swizzle              128 bytes       none                128 bytes

A box of 128 columns has one scale, so that only sums are multiplied. With the query's hi and lo
(see `query_hi_lo`) each scale group's product has accumulators of its own, and the rope's MMA is
bf16:

    S[t, r] = rope product + sQ_scale[r] * sum over groups g: scale[t, g] * (hi + lo / 16)[t, r, g]

A thread has two tokens of a tile and reads their eight scales. V^T P^T sums over tokens, so there a
scale is a factor of the weight, and P is four matrices, one per scale group, of hi and lo each:

    P_g[r, t] = p[r, t] * scale[t, g] / u_g        O^T of group g += u_g * (hi + lo / 16)

u_g (`sP_scale`) is the power of two above the largest scale of the tile's tokens: no weight passes
256, and a weight 2^-14 of that still has two digits. It may differ by tile, since a tile's product
is added in fp32. Each P_g is a block of its own on the bytes of the rope:

    P[group][row, hi then lo][64 tokens] of 64 bytes, swizzled and in `fp8_operands`' token order

Scales of tokens past the end count as 0, whatever lies there. A tile with a scale of 2^126 or more
has an infinite u_g, since 1 / u_g would be no normal number: its columns of out are not finite.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync, warpgroup

from ...core.dims import LATENT_DIM, ROPE_DIM
from ..common.kv_656 import ROPE_STEPS, columns_of_tokens, rope_and_scale_tma
from ..common.pipeline import PipelineState
from ..common.ptx_sm90 import bits_float, float_bits, load4, pick
from ..common.tma import tma_views
from . import fp8_operands as fp8
from . import query_hi_lo as hi_lo
from .mma import WarpGroup, operands
from .params import SCALES, TILE_KV, Traits
from .shared_storage import Globals, Shared

#: biased fp32 exponent of the greatest u_g that has an inverse
MOST_EXPONENT = 253


def rope_layouts(c: Traits) -> tuple[cute.ComposedLayout, cute.ComposedLayout]:
    """Shared memory layouts of the query's rope and of the tiles'."""
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, c.q_dtype)
    width = c.rope_bytes // (2 * TILE_KV)
    return (
        cute.tile_to_shape(atom, (c.rows, ROPE_DIM), (0, 1)),
        cute.tile_to_shape(atom, (TILE_KV, width, c.stages), (0, 1, 2)),
    )


def latent_tma(c: Traits, kv: cute.Tensor, layout: Any) -> tuple[cute.CopyAtom, cute.Tensor]:
    """TMA atom and coordinates (tokens of a page, (columns of a box, boxes), pages) of the e4m3
    columns."""
    columns = columns_of_tokens(kv, c.page, c.dtype, 0, (c.box, LATENT_DIM // c.box))
    box = (c.box_rows, (c.box, c.boxes_per_copy))
    return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), columns, layout, box)


def rope_and_scale_maps(c: Traits, kv: cute.Tensor) -> tuple:
    """TMA atoms and coordinates of the ropes and of the scales."""
    return rope_and_scale_tma(cpasync.CopyBulkTensorTileG2SOp(), kv, c.page, c.box_rows)


def load_rope_and_scales(c: Traits, g: Globals, s: Shared, box: tuple, policy: Any) -> None:
    """Ropes and scales of one box of tokens, whose bytes the full barrier expects; `box`: its rows
    in the page, the page, its rows in the tile, the stage."""
    rows, slots = c.box_rows, TILE_KV // c.box_rows
    inside, page, slot, stage = box
    tma_rope, ropes, tma_scale, scales = g.tma_656
    for tma, view, to, width, stage_size in (
        (tma_rope, ropes, s.kv_656.sRope, ROPE_DIM, c.rope_bytes // 2),
        (tma_scale, scales, s.kv_656.sScale, SCALES, TILE_KV * SCALES),
    ):
        shape, stride = (rows, width, slots, c.stages), (width, 1, rows * width, stage_size)
        smem = cute.make_tensor(to.iterator, cute.make_layout(shape, stride=stride))
        gmem = cute.local_tile(view, (rows, width), (None, None, None))
        source, into = tma_views(tma, smem, gmem)
        cute.copy(
            tma,
            source[None, inside, 0, page],
            into[None, slot, stage],
            tma_bar_ptr=s.kv.full.at(stage),
            cache_policy=policy,
        )


def qk(
    c: Traits, s: Shared, wg: WarpGroup, state: PipelineState, left: Int32, token: Int32
) -> None:
    """Scores of a tile with `left` tokens of the request, on top of the rope's product. The caller
    fences."""
    s.kv.consumer_wait(state)
    if c.gathered:
        cute.arch.fence_view_async_shared()
    atom = cute.make_mma_atom(wg.mma.qk_rope.op)
    atom.set(warpgroup.Field.ACCUMULATE, False)
    sK = s.kv_656.sRope[None, None, state.index]
    tSrK, tSrQ = operands(wg.mma.qk_rope, sK, s.kv_656.sQ_rope, 128)
    for k in range(ROPE_STEPS):
        cute.gemm(atom, wg.scores, tSrK[None, None, k], tSrQ[None, None, k], wg.scores)
        atom.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()

    def factors() -> Any:
        load_scales(c, s, wg, state.index, left, token)
        return lambda x, part: wg.kv_scale[x % 4 // 2 * SCALES + part * SCALES // c.qk_parts]

    hi_lo.store_scores(c, s, wg, hi_lo.qk_sums(c, s, wg, state, factors))


@cute.jit
def load_scales(
    c: cutlass.Constexpr[Traits], s: Shared, wg: WarpGroup, stage: Int32, left: Int32, token: Int32
):  # fmt: skip
    """The eight scales of the thread's two tokens."""
    for h in cutlass.range_constexpr(2):
        four = load4(s.kv_656.sScale.iterator + (stage * TILE_KV + token + 8 * h) * SCALES)
        for n in cutlass.range_constexpr(SCALES):
            wg.kv_scale[h * SCALES + n] = four[n] if token + 8 * h < left else Float32(0.0)


@cute.jit
def store_max_scale(c: cutlass.Constexpr[Traits], s: Shared, wg: WarpGroup):
    """The largest scales of a warp's tokens."""
    for n in cutlass.range_constexpr(SCALES):
        top = cute.arch.inline_ptx(
            "{ .reg .b32 a, b; and.b32 a, {$r0}, 0x7FFFFFFF; and.b32 b, {$r1}, 0x7FFFFFFF;"
            " max.s32 a, a, b; redux.sync.max.s32 {$w0}, a, 0xFFFFFFFF; }",
            write_only_types=[Float32],
            read_only_args=[wg.kv_scale[n], wg.kv_scale[SCALES + n]],
        )
        if wg.lane == n:
            s.kv_656.sMaxScale[wg.idx, wg.warp, n] = top


@cute.jit
def p_scale(c: cutlass.Constexpr[Traits], s: Shared, wg: WarpGroup, stage: Int32, n: Int32):
    """One thread per scale group n: u_n of the KV tile in `stage`. The last readers of the stage's
    former u_n have released the stage."""
    top = Int32(0)
    for warp in cutlass.range_constexpr(4):
        top = cutlass.max(top, float_bits(s.kv_656.sMaxScale[wg.idx, warp, n]))
    exponent = (top >> 23) + 1
    exponent = pick(exponent > MOST_EXPONENT, Int32(hi_lo.INFINITE), exponent)
    s.kv_656.sP_scale[stage, n] = bits_float(exponent << 23)


def store_p(c: Traits, s: Shared, wg: WarpGroup, weights: cute.Tensor, stage: Any) -> None:
    """P of all scale groups."""
    units = load4(s.kv_656.sP_scale.iterator + stage * SCALES)
    base = Int32(s.kv_656.sRope.iterator.toint()) + stage * c.rope_bytes
    for n in range(SCALES):
        inverse = bits_float(Int32(254 << 23) - float_bits(units[n]))
        scales = (wg.kv_scale[n] * inverse, wg.kv_scale[SCALES + n] * inverse)
        fp8.store_p_hi_lo(c, wg, base + n * (c.mma_n * TILE_KV), weights, scales)
