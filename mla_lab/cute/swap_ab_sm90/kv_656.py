"""Tokens of 656 bytes, read as they are stored: a scale for every 128 columns, a bf16 rope.

    bytes of a token     0 .. 511        512 .. 527          528 .. 655
                         512 e4m3        4 fp32 scales       64 bf16
    TMA boxes            4 of 64 x 128   64 x 4              64 x 64, and P later
    swizzle              128 bytes       none                128 bytes

A box of 128 columns is a scale group, so that nothing is multiplied but sums. With the query's two
terms (see `split`) a group's product has accumulators of its own, and the rope's is one of bf16:

    S[t, r] = rope product + unit[r] * sum over groups g of scale[t, g] * (hi + lo / 16)[t, r, g]

A thread has two tokens of a tile, whose eight scales it reads for itself. V^T P^T sums over tokens,
so there a scale is a factor of the weight, and P is four, one a group, each of two terms:

    P_g[r, t] = p[r, t] * scale[t, g] / u_g        O^T of group g += u_g * (hi + lo / 16)

u_g is the power of two above the greatest scale of the tile's tokens: no weight passes 256, and a
weight 2^-14 of that still has two digits. It is the tile's own, since a tile's product is added in
fp32. Each P_g is a block of its own on the place of the rope:

    P[group][row and term][64 tokens] of 64 bytes, swizzled and in the order of tokens of `fp8`

Scales of tokens past the end count as 0, whatever lies there.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

from ...core.problem import FP8_656_BYTES, LATENT_DIM, ROPE_DIM
from ..common.ptx_sm90 import load4
from . import fp8_operands as fp8
from . import query_hi_lo as split
from .params import GROUPS, TILE_KV, Shape
from .shared_storage import Global, Products, Shared, statistics

#: bytes of a token that precede its scales, and its rope
SCALES_BEGIN, ROPE_BEGIN = LATENT_DIM, LATENT_DIM + 4 * GROUPS
#: k-steps of the rope's product
ROPE_STEPS = ROPE_DIM // 16


def rope_product(c: Shape) -> cute.TiledMma:
    """Scores' part of the rope: 64 tokens x rows."""
    major = OperandMajorMode.K
    return sm90.make_trivial_tiled_mma(
        c.q_dtype, c.q_dtype, major, major, Float32, (1, 1, 1), (TILE_KV, c.rows)
    )


def rope_layouts(c: Shape) -> tuple[cute.ComposedLayout, cute.ComposedLayout]:
    """Of the query's rope and of the tiles', in shared memory."""
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, c.q_dtype)
    width = c.rope_bytes // (2 * TILE_KV)
    return (
        cute.tile_to_shape(atom, (c.rows, ROPE_DIM), (0, 1)),
        cute.tile_to_shape(atom, (TILE_KV, width, c.stages), (0, 1, 2)),
    )


def make_view(c: Shape, kv: cute.Tensor, dtype: Any, begin: int, columns: Any, layout: Any) -> Any:
    """TMA atom and view (tokens of a page, columns, pages) of what begins at byte `begin`."""
    size = dtype.width // 8
    pages = cute.assume(kv.stride[0] // size, divby=16 // size)
    tensor = cute.make_tensor(
        cute.recast_ptr((kv.iterator + begin).align(16), dtype=dtype),
        cute.make_layout(
            (c.page, columns, kv.shape[0]),
            stride=(
                FP8_656_BYTES // size,
                (1, columns[0]) if isinstance(columns, tuple) else 1,
                pages,
            ),
        ),
    )
    box = (c.box_rows, (columns[0], c.box_cols) if isinstance(columns, tuple) else columns)
    return cpasync.make_tiled_tma_atom(cpasync.CopyBulkTensorTileG2SOp(), tensor, layout, box)


def make_views(c: Shape, kv: cute.Tensor) -> tuple:
    """Those of ropes and of scales."""
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, c.q_dtype)
    ropes = cute.tile_to_shape(atom, (c.box_rows, ROPE_DIM), (0, 1))
    scales = cute.make_layout((c.box_rows, GROUPS), stride=(GROUPS, 1))
    return (
        *make_view(c, kv, c.q_dtype, ROPE_BEGIN, ROPE_DIM, ropes),
        *make_view(c, kv, Float32, SCALES_BEGIN, GROUPS, scales),
    )


def load_more(
    c: Shape, g: Global, s: Shared, inside: Any, page: Any, slot: int, stage: Any,
    policy: Any,
) -> None:  # fmt: skip
    """Ropes and scales of one box of tokens; their bytes are the full barrier's."""
    rows, slots = c.box_rows, TILE_KV // c.box_rows
    tma_rope, ropes, tma_scale, scales = g.more
    for tma, view, to, width, next_stage in (
        (tma_rope, ropes, s.scaled.rope, ROPE_DIM, c.rope_bytes // 2),
        (tma_scale, scales, s.scaled.scales, GROUPS, TILE_KV * GROUPS),
    ):
        smem = cute.make_tensor(
            to.iterator,
            cute.make_layout(
                (rows, width, slots, c.stages), stride=(width, 1, rows * width, next_stage)
            ),
        )
        gmem = cute.local_tile(view, (rows, width), (None, None, None))
        into, source = cpasync.tma_partition(
            tma,
            0,
            cute.make_layout(1),
            cute.group_modes(smem, 0, 2),
            cute.group_modes(gmem, 0, 2),
        )
        cute.copy(
            tma,
            source[None, inside, 0, page],
            into[None, slot, stage],
            tma_bar_ptr=s.full + stage,
            cache_policy=policy,
        )


def scores(
    c: Shape, s: Shared, mma: Products, f: Any, stage: Any, phase: Any, left: Int32,
    token: Int32, lane: Int32,
) -> None:  # fmt: skip
    """Scores of a tile with `left` tokens of the request, in the place of the rope's."""
    cute.arch.mbarrier_wait(s.full + stage, phase)
    if c.gather:
        cute.arch.fence_view_async_shared()
    atom = cute.make_mma_atom(mma.rope.op)
    atom.set(warpgroup.Field.ACCUMULATE, False)
    for k in range(ROPE_STEPS):
        cute.gemm(atom, f.rest, f.k_rope[None, None, k, stage], f.q_rope[None, None, k], f.rest)
        atom.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()

    def factors() -> Any:
        read_scales(c, s, f, stage, left, token)
        return lambda x, part: f.scales[x % 4 // 2 * GROUPS + part * GROUPS // c.score_parts]

    sums = split.add_parts(c, s, mma, f, stage, phase, factors)
    split.put_scores(c, s, f, sums, lane, rope=True)


@cute.jit
def read_scales(
    c: cutlass.Constexpr[Shape], s: Shared, f: Any, stage: Int32, left: Int32, token: Int32
):  # fmt: skip
    """A thread's eight: of its token, and of the one eight further."""
    for h in cutlass.range_constexpr(2):
        four = load4(s.scaled.scales.iterator + (stage * TILE_KV + token + 8 * h) * GROUPS)
        for g in cutlass.range_constexpr(GROUPS):
            f.scales[h * GROUPS + g] = four[g] if token + 8 * h < left else Float32(0.0)


@cute.jit
def leave_tops(
    c: cutlass.Constexpr[Shape], wg: cutlass.Constexpr[int], s: Shared, f: Any, warp: Int32,
    lane: Int32,
):  # fmt: skip
    """The greatest scales of a warp's tokens."""
    for g in cutlass.range_constexpr(GROUPS):
        top = cute.arch.inline_ptx(
            "{ .reg .b32 a, b; and.b32 a, {$r0}, 0x7FFFFFFF; and.b32 b, {$r1}, 0x7FFFFFFF;"
            " max.s32 a, a, b; redux.sync.max.s32 {$w0}, a, 0xFFFFFFFF; }",
            write_only_types=[Float32],
            read_only_args=[f.scales[g], f.scales[GROUPS + g]],
        )
        if lane == g:
            s.scaled.tops[wg, warp, g] = top


@cute.jit
def group_statistics(
    c: cutlass.Constexpr[Shape], wg: cutlass.Constexpr[int], s: Shared, at: Int32, g: Int32
):  # fmt: skip
    """One thread a group: what one of the weights of tile `at` counts for."""
    top = Int32(0)
    for warp in cutlass.range_constexpr(4):
        top = cutlass.max(top, as_bits(s.scaled.tops[wg, warp, g]))
    exponent = cutlass.min(cutlass.max((top >> 23) + 1, Int32(1)), Int32(split.INFINITE))
    s.scaled.units[statistics(c, wg, at), g] = split.as_float(exponent << 23)


def as_bits(value: Float32) -> Int32:
    """The same 32 bits."""
    return cute.arch.inline_ptx(
        "mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[value]
    )


def publish(
    c: Shape, wg: int, s: Shared, f: Any, weights: cute.Tensor, stage: Any, at: Int32,
    warp: Int32, lane: Int32,
) -> None:  # fmt: skip
    """P of all groups."""
    units = load4(s.scaled.units.iterator + statistics(c, wg, at) * GROUPS)
    base = Int32(s.scaled.rope.iterator.toint()) + stage * c.rope_bytes
    for g in range(GROUPS):
        inverse = split.as_float(Int32(254 << 23) - as_bits(units[g]))
        scales = (f.scales[g] * inverse, f.scales[GROUPS + g] * inverse)
        fp8.put_terms(c, base + g * (c.width * TILE_KV), weights, scales, warp, lane)
