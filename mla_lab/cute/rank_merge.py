"""The merge of decode context parallel: results of several ranks, weighted by their lse.

A warp merges one row of one head. Lane r holds the lse of rank r; the weights are relative to the
greatest one. The ranks' outs are added in rank order, 16 columns a lane, in fp32; those of the
first ranks are loaded before the weights are computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Int64
from cutlass.cute.runtime import make_fake_stream

from ..core.dims import LATENT_DIM
from ..plan.config import KernelConfig
from .common.launch_arguments import tensor
from .common.ptx_sm90 import LOG2E, UPWARD, add, butterfly, pick
from .registry import CuteEntry

#: columns of a row, and warps of a CTA
COLUMNS, WARPS = LATENT_DIM, 4
#: columns of one 16-byte access, and accesses of a lane
VECTOR = 8
VECTORS = COLUMNS // (32 * VECTOR)
#: ranks whose outs are loaded at once
BATCH = 4
#: of a rank with keys; finite in log2 units too
LEAST_LSE = -1.0e38
ELEMENTS = {"bf16": BFloat16, "fp16": Float16}


def source_of(outs: cute.Tensor, row: Int64, rank: Any) -> Int64:
    """The row of one rank in outs [ranks * rows, 512]; past the last rank that of the last one."""
    return Int64(cutlass.min(rank, outs.shape[0] - 1)) * Int64(outs.shape[1]) + row


def vector_of(tensor: cute.Tensor, row, lane, i: int) -> cute.Tensor:
    """Access `i` of a lane to a row."""
    at = row * COLUMNS + Int64((i * 32 + lane) * VECTOR)
    return cute.make_tensor((tensor.iterator + at).align(16), cute.make_layout(VECTOR))


@cute.jit
def weight_of(own: Float32, sink: Float32, to_log2: Float32, from_log2: Float32):
    """The lane's weight, and the lse of all lanes; `own` in the caller's units, `sink` in log2
    units. The lse of a rank that alone has keys stays as it is."""
    # a row that no rank has a key for: weights exp2(-inf - finite) are 0
    top = cute.arch.fmax(butterfly(cute.arch.fmax, own, UPWARD), Float32(LEAST_LSE))
    part = cute.math.exp2((own - top) * to_log2, fastmath=True)
    total = butterfly(add, part, UPWARD)
    whole = total + cute.math.exp2(sink - top * to_log2, fastmath=True)
    inverse = pick(whole == 0.0, Float32(0.0), cute.arch.rcp_approx(whole))
    lse = top + cute.math.log2(total, fastmath=True) * from_log2
    return part * inverse, lse


@cute.jit
def load_parts(outs: cute.Tensor, parts: cute.Tensor, row: Int64, rank: Int32):
    """The lane's columns of a row from `BATCH` ranks, `rank` the first; past the last rank those of
    the last rank again, whose weight is 0 there."""
    lane = cute.arch.lane_idx()
    for k in cutlass.range_constexpr(BATCH):
        source = source_of(outs, row, rank + k)
        for i in cutlass.range_constexpr(VECTORS):
            cute.autovec_copy(vector_of(outs, source, lane, i), parts[None, i, k])


@cute.jit
def add_parts(acc: cute.Tensor, parts: cute.Tensor, weight: Float32, rank: Int32):
    """acc += each part times its rank's weight; a part of weight 0 may hold anything."""
    for k in cutlass.range_constexpr(BATCH):
        one = cute.arch.shuffle_sync(weight, rank + k)
        for i in cutlass.range_constexpr(VECTORS):
            for e in cutlass.range_constexpr(VECTOR):
                value = one * parts[e, i, k].to(Float32)
                acc[e, i] = acc[e, i] + pick(one == 0.0, Float32(0.0), value)


@dataclass(frozen=True)
class Merge:
    """What `merge_row` takes beside the row: outs [ranks, rows, 512], and `entry`'s others."""

    outs: cute.Tensor
    sinks: cute.Tensor
    out: cute.Tensor
    lse: cute.Tensor
    heads: Int32
    to_log2: Float32
    from_log2: Float32


@cute.jit
def merge_row(
    m: Merge, row: Int32, own: Float32, parts: cute.Tensor, load: cutlass.Constexpr[Callable]
):
    """out and lse of a row, by one warp. `own`: of lane r the lse of rank r, -inf past the last;
    `parts`: what `load`, of `load_parts`'s arguments, leaves of the first ranks."""
    lane, sink = cute.arch.lane_idx(), -Float32.inf
    if m.heads > 0:
        sink = m.sinks[row % m.heads] * Float32(LOG2E)
    weight, merged = weight_of(own, sink, m.to_log2, m.from_log2)
    if lane == 0:
        m.lse[row] = merged
    acc = cute.make_rmem_tensor((VECTOR, VECTORS), Float32)
    acc.fill(0.0)
    ranks = m.outs.shape[0]
    for rank in cutlass.range(0, ranks, BATCH, unroll=1):
        add_parts(acc, parts, weight, rank)
        if rank + BATCH < ranks:
            load(m.outs, parts, Int64(row), rank + BATCH)
    for i in cutlass.range_constexpr(VECTORS):
        result = cute.make_rmem_tensor(VECTOR, m.out.element_type)
        for e in cutlass.range_constexpr(VECTOR):
            result[e] = acc[e, i].to(m.out.element_type)
        cute.autovec_copy(result, vector_of(m.out, Int64(row), lane, i))


def parts_of(outs: cute.Tensor) -> cute.Tensor:
    """Registers for `load_parts`."""
    return cute.make_rmem_tensor((VECTOR, VECTORS, BATCH), outs.element_type)


@cute.kernel
def _merge(m: Merge, lses: cute.Tensor):
    lane, warp = cute.arch.lane_idx(), cute.arch.make_warp_uniform(cute.arch.warp_idx())
    row, (ranks, rows) = cute.arch.block_idx()[0] * WARPS + warp, lses.shape
    if row < rows:
        parts = parts_of(m.outs)
        load_parts(m.outs, parts, Int64(row), Int32(0))
        own = -Float32.inf
        if lane < ranks:
            own = lses[lane, row]
        merge_row(m, row, own, parts, load_parts)


@cute.jit
def _launch(*operands) -> None:
    """Operands in the order of `entry`, the stream last."""
    outs, lses, *others, stream = operands
    _merge(Merge(outs, *others), lses).launch(
        grid=((lses.shape[1] + WARPS - 1) // WARPS, 1, 1), block=(32 * WARPS, 1, 1), stream=stream
    )


def entry(config: KernelConfig) -> CuteEntry:
    """Arguments: outs [ranks, rows, 512] and out [rows, 512] in `out_dtype`, rows of all heads in
    turn; lses [ranks, rows], sinks [heads] and lse [rows] in fp32; heads (0: no sinks, and `sinks`
    is not read); the factors of an lse to log2 units and back."""
    element, ranks, rows = ELEMENTS[config.out_dtype], cute.sym_int(), cute.sym_int()
    outs, out = tensor(element, 16, ranks, rows, COLUMNS), tensor(element, 16, rows, COLUMNS)
    lses, lse = tensor(Float32, 4, ranks, rows), tensor(Float32, 4, rows)
    sinks = tensor(Float32, 4, None)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    numbers = (Int32(0), Float32(1.0), Float32(1.0))
    return CuteEntry(_launch, (outs, lses, sinks, out, lse, *numbers, stream), "rank_merge")
