"""What a launch takes beyond a plain call (option features): sinks, scales in memory, a mask.

    sinks fp32 [heads], bmm1 fp32 [1], bmm2 fp32 [1]   each may have no element: then there is none
    mask uint16 [..., words]                           only in a kernel with the mask "tree"; for
                                                       swap_ab without an element: the causal rule

A sink is one more term exp(sink) in a row's denominator. It enters once, where the row's result is
divided: in the epilogue where the row tile is whole, else in the merge. No lse knows it.

`c` and `g` are a family's static facts and its operands; both families name these fields alike.
"""

from dataclasses import replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr

from .ptx_sm90 import LOG2E


def mask_words(mask: cute.Tensor) -> cute.Tensor:
    """Packed uint16 [..., words] as uint32 [tokens, words / 2]."""
    words = mask.shape[-1] // 2
    pointer = cute.recast_ptr(mask.iterator.align(4), dtype=Uint32)
    rows = cute.size(mask.shape[:-1])
    return cute.make_tensor(pointer, cute.make_layout((rows, words), stride=(words, 1)))


@cute.jit
def read_scales(c: cutlass.Constexpr, g: Any):
    """Both scales: from memory where a tensor was given (it has an element), else the numbers.

    bmm1_scale is plain there, not times log2 e. One that is not above 0 makes every score NaN,
    since scores are masked before they are scaled.
    """
    scale = g.scale_log2
    out_scale = g.out_scale
    if cute.size(g.bmm1) > 0:
        scale = g.bmm1[0] * Float32(LOG2E)
        scale = scale if scale > 0.0 else Float32(float("nan"))
    if cute.size(g.bmm2) > 0:
        out_scale = g.bmm2[0]
    return scale, out_scale


@cute.jit
def scale_now(c: cutlass.Constexpr, g: Any):
    """The scale of the scores in log2 units, asked for here and held no longer than needed: for
    loops without a register to spare. A tensor is read again each time, out of the L1."""
    scale = g.scale_log2
    if const_expr(c.scales):
        if cute.size(g.bmm1) > 0:
            plain = cute.arch.inline_ptx(
                "ld.global.f32 {$w0}, [{$r0}];",
                write_only_types=[Float32],
                read_only_args=[g.bmm1.iterator],
            )
            scale = plain * Float32(LOG2E)
            scale = scale if scale > 0.0 else Float32(float("nan"))
    return scale


def with_scales(c: Any, g: Any) -> Any:
    """`g` with the scales that this launch uses."""
    if const_expr(not c.scales):
        return g
    scale, out_scale = read_scales(c, g)
    return replace(g, scale_log2=scale, out_scale=out_scale)


@cute.jit
def sink_of(c: cutlass.Constexpr, g: Any, row: Int32):
    """The sink of a row (of the request) in log2 units; -inf where there is none."""
    sink = -Float32.inf
    if const_expr(c.features):
        if cute.size(g.sinks) > 0:
            sink = g.sinks[row % g.heads] * Float32(LOG2E)
    return sink


def with_sink(c: Any, g: Any, total: Float32, top: Float32, row: Int32) -> Float32:
    """A row's sum of exponentials relative to `top` (log2 units), and the sink's term."""
    if const_expr(not c.features):
        return total
    return total + cute.math.exp2(sink_of(c, g, row) - top, fastmath=True)
