"""Tokens of 656 bytes, read as they are stored: a scale for every 128 columns, a bf16 rope.

    of a token           512 e4m3          4 fp32 scales       64 bf16    (`common.kv_656`)
    boxes of a tile      8 of 64 x 64 B    64 x 4              64 x 64, and P later
    swizzle              64 bytes          none                128 bytes

The scores are QK of the bf16 rope, and a part of its own for each group of 128 columns:

    S[r, t] = rope QK + sum over groups g of scale[t, g] * (hi + lo)[r, t, g]

V^T is converted to fp16 in registers (`v_fp8_to_fp16`) and multiplied there:

    O^T[column, r] += V^T[column, t] * (scale[t, g] / unit)  *  P[r, t] * unit

The unit is a power of two, 1/64 of the one above the greatest scale of the tile's tokens: no value
passes fp16, and one whose scale is 2^-20 of the greatest is as precise as that. The weights take it
in through their exponents: a row max is one of score + log2(unit), so that fp16 weights are precise
where they count for O, whatever the scales. Row sums are without the unit.

A warp beside the producer warp, the scale warp, reads a tile's scales when they land, computes the
unit and stores both forms of factors so that threads read 16 and 8 bytes at once. Scales of tokens
past kv_len count as 0.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import BFloat16, Float16, Float32, Int16, Int32, Int64
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

from ....core.dims import ROPE_DIM
from ...common.kv_656 import ROPE_STEPS, SCALE_GROUPS
from ...common.pipeline import PipelineState
from ...common.ptx_sm90 import EVICT_FIRST, bits_float, float_bits, fresh_thread, load4, pack2, ptx
from ...rows_on_m.mask import first_row
from ...rows_on_m.params import BLOCK, RECORDS, Cta
from ...rows_on_m.work_records import read_work
from ..params import BOX, Mmas
from .params import Q_ARRIVAL_BOXES, Q_STAGES, Fp8Shared

#: boxes of the query that the rope arrives in
ROPE_ARRIVALS = 2
#: log2 of how far the query's rope may exceed its other columns before these lose digits
ROPE_ABOVE = 70
#: bytes of V's factors of 16 tokens, and of 64 tokens in a group; of the scores' scales of those
STEP_FACTORS, GROUP_FACTORS, GROUP_SCALES = 32, 128, 256
#: log2 of the greatest factor over the unit; the least biased exponent of a unit
UNIT_LOG2, LEAST_UNIT = 6, 27


def rope_mma() -> cute.TiledMma:
    """QK of the rope."""
    major = OperandMajorMode.K
    return sm90.make_trivial_tiled_mma(
        BFloat16, BFloat16, major, major, Float32, (1, 1, 1), (BLOCK, BLOCK)
    )


def load_rope_and_scales(cta: Cta, row: Any, page: Any, part: Any, stage: Any) -> None:
    """Ropes and scales of one box of tokens; the full barrier counts their bytes."""
    cfg, s = cta.cfg, cta.s
    rows = cfg.box_rows
    tma_rope, ropes, tma_scale, scales = cta.g.tma_656
    multicast: dict[str, Any] = {"mcast_mask": Int16(3)} if cfg.cluster == 2 else {}
    for tma, view, to, width, size in (
        (tma_rope, ropes, s.kv_656.sK_rope.iterator, ROPE_DIM, 2),
        (tma_scale, scales, s.kv_656.scales, SCALE_GROUPS, 4),
    ):
        smem = cute.make_tensor(
            to,
            cute.make_layout(
                ((rows, width), BLOCK // rows, cfg.stages),
                stride=((width, 1), rows * width, cfg.stage_bytes // size),
            ),
        )
        gmem = cute.local_tile(view, (rows, width), (None, None, None))
        into, source = cpasync.tma_partition(
            tma, 0, cute.make_layout(1), smem, cute.group_modes(gmem, 0, 2)
        )
        cute.copy(
            tma,
            source[None, row, 0, page],
            into[None, part, stage],
            tma_bar_ptr=s.kv_pipe.full.at(stage),
            cache_policy=Int64(EVICT_FIRST),
            **multicast,
        )


def max_magnitude_bits(values: Any) -> Any:
    """Bits of the greatest magnitude among all fp32 `values` of a warp."""
    names = [f"{{$r{i}}}" for i in range(len(values))]
    found = " ".join(f"and.b32 b, {name}, 0x7FFFFFFF; max.s32 a, a, b;" for name in names)
    return ptx(
        "{ .reg .b32 a, b; mov.b32 a, 0; " + found + " redux.sync.max.s32 {$w0}, a, 0xFFFFFFFF; }",
        *values,
        out=Int32,
    )


def place_of_tokens(lane: Any) -> Any:
    """Where lane `lane` stores the factors of tokens 2 lane and 2 lane + 1: of each 16 tokens those
    that lane q of a quad reads lie side by side, in the order 2q, 2q + 1, 2q + 8, 2q + 9."""
    return (lane >> 3) * 16 + (lane & 3) * 4 + ((lane >> 2) & 1) * 2


@cute.jit
def prepare_tile(cta: Cta, stage: Int32, left: Int32, lane: Int32):
    """Factors of a tile with `left` tokens to the request's end; a lane has two neighbours. Returns
    the biased exponent of the unit."""
    cfg, more = cta.cfg, cta.s.kv_656
    at = more.scales + (stage * (cfg.stage_bytes // 4) + 2 * lane * SCALE_GROUPS)
    first, second = load4(at), load4(at + SCALE_GROUPS)
    for g in cutlass.range_constexpr(SCALE_GROUPS):
        first[g] = first[g] if 2 * lane < left else Float32(0.0)
        second[g] = second[g] if 2 * lane + 1 < left else Float32(0.0)
    both = [(first[g], second[g]) for g in range(SCALE_GROUPS)]
    top = max_magnitude_bits([x for pair in both for x in pair]) >> 23
    exponent = cutlass.max(top + (1 - UNIT_LOG2), Int32(LEAST_UNIT))
    inverse = bits_float((254 - exponent) << 23)
    place = place_of_tokens(lane)
    values = more.v_factors + (place + stage * (BLOCK * SCALE_GROUPS)) // 2
    scales = more.scales + (place + stage * (cfg.stage_bytes // 4))
    # all lanes have read
    cute.arch.sync_warp()
    for g in cutlass.range_constexpr(SCALE_GROUPS):
        a, b = both[g]
        pair = cute.make_rmem_tensor(2, Float32)
        pair[0], pair[1] = a, b
        to = (scales + g * BLOCK).align(8)
        cute.autovec_copy(pair, cute.make_tensor(to, cute.make_layout(2)))
        word = pack2(a * inverse, b * inverse, Float16)
        (values + g * BLOCK // 2).store(word)
    if lane == 0:
        (more.units + stage).store(bits_float(exponent << 23))
    # the next write there is a TMA copy
    cute.arch.fence_view_async_shared()
    return exponent


@cute.jit
def scale_warp(cta: Cta):
    """Factors of all tiles as they land, by one warp.

    It goes past the stages of the query in step with the QK-softmax warp group: both arrive twice
    at q_pipe.empty, that group first when the stages are full and then before it releases them.
    """
    cfg, s, plan = cta.cfg, cta.s, cta.plan
    lane = cute.arch.lane_idx()
    state = PipelineState.start()
    for index in cutlass.range(plan.first, plan.last, unroll=1):
        for _ in cutlass.range_constexpr(Q_STAGES):
            state = state.advance(cfg.stages)
        # the second phase of the work tile before
        s.q_pipe.empty.wait(0, 1)
        s.q_pipe.empty.arrive(0)
        s.q_pipe.empty.wait(0, 0)
        s.q_pipe.empty.arrive(0)
        work = read_work(cta.g, s, index)
        left = work.kv_len - work.begin * BLOCK
        exponent = Int32(LEAST_UNIT)
        for _tile in cutlass.range(work.begin, work.end, unroll=1):
            s.kv_pipe.consumer_wait(state)
            exponent = cutlass.max(exponent, prepare_tile(cta, state.index, left, lane))
            # read only behind the work tile's last tile
            if lane == 0:
                (s.kv_656.max_exponents + index % RECORDS).store(exponent)
            s.kv_656.ready.arrive(state.index)
            left = left - BLOCK
            state = state.advance(cfg.stages)


def load_words(address: Any, offset: int) -> Any:
    """Two words of shared memory."""
    return ptx(
        f"ld.shared.v2.b32 {{ {{$w0}}, {{$w1}} }}, [{{$r0}}+{offset}];", address, out=[Int32] * 2
    )


def scale_bf16x2(words: Any, factors: Any) -> Any:
    """Four bf16 numbers times the power of two in both halves of `factors`."""
    return ptx(
        "mul.rn.bf16x2 {$w0}, {$r0}, {$r2}; mul.rn.bf16x2 {$w1}, {$r1}, {$r2};",
        *words,
        factors,
        out=[Int32] * 2,
    )


def twice_bf16(x: Any) -> Any:
    """A number of bf16 that is held in fp32, in both halves of a word."""
    bits = float_bits(x)
    return bits | ((bits >> 16) & 0xFFFF)


def scale_q_rope(cta: Cta, stages: Any, up: Any) -> None:
    """The query's rope, scaled as its other columns are, to its own place."""
    cfg, s = cta.cfg, cta.s
    tid = fresh_thread()
    row, q = first_row(tid), tid & 3
    inner = (q & 1) << 3
    at = Int32(s.sKV.iterator.toint()) + row * 64 + (((q >> 1) ^ ((row >> 1) & 3)) << 4) + inner
    half = Q_ARRIVAL_BOXES // Q_STAGES
    at = at + stages[Q_STAGES - 1] * cfg.stage_bytes + (half - ROPE_ARRIVALS) * BOX
    to = (
        Int32(s.kv_656.sQ_rope.iterator.toint()) + row * 128 + (((q >> 1) ^ (row & 7)) << 4) + inner
    )
    for h in range(2):
        factors = twice_bf16(up[h])
        for arrival in range(ROPE_ARRIVALS):
            for far in range(2):
                words = load_words(at ^ (32 * far), arrival * BOX + 512 * h)
                ptx(
                    f"st.shared.v2.b32 [{{$r0}}+{1024 * h}], {{ {{$r1}}, {{$r2}} }};",
                    to ^ (64 * arrival + 32 * far),
                    *scale_bf16x2(words, factors),
                )


def rope_operands(s: Fp8Shared, mma: Mmas) -> tuple[Any, Any]:
    """Descriptors of the ropes of Q and of K."""
    one = mma.rope.get_slice(0)
    return (
        mma.rope.make_fragment_A(one.partition_A(s.kv_656.sQ_rope)),
        mma.rope.make_fragment_B(one.partition_B(s.kv_656.sK_rope)),
    )


def issue_rope(mma: Mmas, ropes: Any, scores: cute.Tensor, stage: Any) -> None:
    """Scores += QK of the rope; committed with the MMAs that follow."""
    atom = cute.make_mma_atom(mma.rope.op)
    atom.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.fence()
    for k in range(ROPE_STEPS):
        cute.gemm(atom, scores, ropes[0][None, None, k], ropes[1][None, None, k, stage], scores)


def scaled_sum(x: Any, y: Any, z: Any) -> Any:
    """x y + z by an opaque instruction; without z the product."""
    if z is None:
        return ptx("mul.f32 {$w0}, {$r0}, {$r1};", x, y, out=Float32)
    return ptx("fma.rn.f32 {$w0}, {$r0}, {$r1}, {$r2};", x, y, z, out=Float32)


def load_scales(cta: Cta, group: int, stage: Any) -> list[Any]:
    """Scales of a group for a lane's tokens, four of each 16 tokens."""
    cfg, s = cta.cfg, cta.s
    at = Int32(s.kv_656.scales.toint()) + stage * cfg.stage_bytes
    at = at + ((fresh_thread() & 3) << 4)
    return [
        factor
        for i in range(4)
        for factor in ptx(
            "ld.shared.v4.f32 { {$w0}, {$w1}, {$w2}, {$w3} }, "
            f"[{{$r0}}+{group * GROUP_SCALES + 64 * i}];",
            at,
            out=[Float32] * 4,
        )
    ]


def add_scaled(scores: cute.Tensor, part: cute.Tensor, factors: list[Any], group: int) -> None:
    """Scores += a group's part times its scales, of 16 tokens each; the first group overwrites."""
    for n in range(4):
        for x in range(8 * n, 8 * n + 8):
            factor = factors[4 * n + 2 * (x // 4 % 2) + x % 2]
            scores[x] = scaled_sum(part[x], factor, scores[x] if group else None)


def partial_scales(s: Fp8Shared, index: Any, log2: int) -> tuple[Any, Any]:
    """The power of two that takes results of the work tile to at most 448 * 2**log2, and its
    inverse."""
    exponent = (s.kv_656.max_exponents + index % RECORDS).load() + UNIT_LOG2
    return bits_float((254 + log2 - exponent) << 23), bits_float((exponent - log2) << 23)


def load_unit(s: Fp8Shared, stage: Any, exists: Any = 1) -> Any:
    """Bits of the unit of the tile in a stage, if it `exists`, else 0; loaded where this stands."""
    return ptx(
        "{ .reg .pred p; setp.ne.s32 p, {$r1}, 0; mov.b32 {$w0}, 0; "
        "@p ld.shared.b32 {$w0}, [{$r0}]; }",
        Int32(s.kv_656.units.toint()) + 4 * stage,
        Int32(exists),
        out=Int32,
    )


def unit_of(bits: Any) -> tuple[Any, Any]:
    """log2 of a unit with these bits, and 1 / unit."""
    return ((bits >> 23) - 127).to(Float32), bits_float(Int32(254 << 23) - bits)


def lane_factors(s: Fp8Shared, stage: Any) -> Any:
    """Address of the factors of a lane's tokens for its warp group's first 128 columns."""
    tid = fresh_thread()
    at = Int32(s.kv_656.v_factors.toint()) + stage * (SCALE_GROUPS * GROUP_FACTORS)
    return at + (tid >> 7) * (2 * GROUP_FACTORS) + ((tid & 3) << 3)


def two_factors(at: Any, group: int, step: int) -> Any:
    """Two fp16 factors for each word of a step."""
    return load_words(at, group * GROUP_FACTORS + step * STEP_FACTORS)


def to_fp16(word: Int32, factors: Int32):
    """Four e4m3 to two words of two fp16 each, every word times `factors`, one for each token."""
    return ptx(
        "{ .reg .b32 x, y; .reg .b16 a, b; prmt.b32 x, {$r0}, 0, 0x3120; mov.b32 {a, b}, x; "
        "cvt.rn.f16x2.e4m3x2 x, a; cvt.rn.f16x2.e4m3x2 y, b; "
        "mul.rn.f16x2 {$w0}, x, {$r1}; mul.rn.f16x2 {$w1}, y, {$r1}; }",
        word,
        factors,
        out=[Int32] * 2,
    )
