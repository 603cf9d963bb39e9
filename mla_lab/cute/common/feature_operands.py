"""Operands of the option `features`: attention sinks, scales in device memory, a packed mask.

    sinks fp32 [heads], bmm1 fp32 [1], bmm2 fp32 [1]   0 elements: not given
    mask uint16 [..., words]                           in kernels with mask "tree"; in swap_ab
                                                       0 elements select the causal rule

A scale of the scores may be 0 or negative. Scores are masked with -inf before they are scaled, and
a row max is the greatest score times the scale. So 0 counts as `LEAST_SCALE`, under which a row's
weights are equal. A negative scale counts as its magnitude: scores change their sign instead, or,
where the query passes through registers, the query does, once per work tile.

A sink adds exp(sink) to a row's softmax denominator. It is added once, where the output is divided
by the row sum: in the epilogue of an unsplit row tile, otherwise in the merge. The lse excludes it.

`c` is a family's static configuration, `g` its operands; both families use these field names.
"""

from dataclasses import replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr

from .ptx_sm90 import LOG2E, pick, ptx

#: least normal fp32 number: times it, -inf stays -inf
LEAST_SCALE = 2.0**-126
#: sign bits of two 16-bit numbers
SIGNS = 0x80008000


def mask_words(mask: cute.Tensor) -> cute.Tensor:
    """Packed uint16 [..., words] as uint32 [tokens, words / 2]."""
    words = mask.shape[-1] // 2
    pointer = cute.recast_ptr(mask.iterator.align(4), dtype=Uint32)
    rows = cute.size(mask.shape[:-1])
    return cute.make_tensor(pointer, cute.make_layout((rows, words), stride=(words, 1)))


@cute.jit
def read_scales(c: cutlass.Constexpr, g: Any):
    """(scale_log2, out_scale): from bmm1 and bmm2 where they have an element, else the numbers.

    bmm1 holds the plain scale, without log2 e.
    """
    scale = g.scale_log2
    out_scale = g.out_scale
    if cute.size(g.bmm1) > 0:
        scale = not_zero(g.bmm1[0] * Float32(LOG2E))
    if cute.size(g.bmm2) > 0:
        out_scale = g.bmm2[0]
    return scale, out_scale


@cute.jit
def scale_now(c: cutlass.Constexpr, g: Any):
    """The scale of the scores times log2 e. A scale in memory is read again at each call (an L1
    hit), for loops that have no register to hold it."""
    scale = g.scale_log2
    if const_expr(c.scales):
        if cute.size(g.bmm1) > 0:
            plain = ptx("ld.global.f32 {$w0}, [{$r0}];", g.bmm1.iterator, out=Float32)
            scale = not_zero(plain * Float32(LOG2E))
    return scale


def not_zero(scale: Float32) -> Float32:
    """`LEAST_SCALE` for a scale of less magnitude."""
    least = Float32(LEAST_SCALE)
    return pick((scale < least) & (scale > -least), least, scale)


def with_sign(number: Float32, scale: Float32) -> Float32:
    """A number above 0 with the sign of a scale."""
    return pick(scale < Float32(0.0), -number, number)


def magnitude(scale: Float32) -> Float32:
    """The magnitude of a scale; NaN of NaN."""
    return cute.arch.fmax(scale, -scale)


@cute.jit
def orient_query(
    c: cutlass.Constexpr, g: Any, fragment: cute.Tensor, count: cutlass.Constexpr[int]
):
    """The first `count` 16-bit elements of the query change their sign under a negative scale."""
    if const_expr(c.scales):
        if scale_now(c, g) < Float32(0.0):
            words = cute.recast_tensor(fragment, Int32)
            for i in cutlass.range_constexpr(count // 2):
                words[i] = words[i] ^ Int32(SIGNS - 2**32)


@cute.jit
def orient_scores(c: cutlass.Constexpr, scores: cute.Tensor, scale: Float32):
    """The magnitude of a scale. Under a negative one the scores change their sign, but for masked
    ones."""
    if const_expr(c.scales):
        if scale < Float32(0.0):
            for x in cutlass.range_constexpr(cute.size(scores)):
                scores[x] = pick(scores[x] == -Float32.inf, scores[x], -scores[x])
            scale = -scale
    return scale


def with_scales(c: Any, g: Any) -> Any:
    """`g` with scale_log2 and out_scale as `read_scales` gives them."""
    if const_expr(not c.scales):
        return g
    scale, out_scale = read_scales(c, g)
    return replace(g, scale_log2=scale, out_scale=out_scale)


@cute.jit
def sink_of(c: cutlass.Constexpr, g: Any, row: Int32):
    """The sink of a packed row of the request, times log2 e; -inf without sinks."""
    sink = -Float32.inf
    if const_expr(c.features):
        if cute.size(g.sinks) > 0:
            sink = g.sinks[row % g.heads] * Float32(LOG2E)
    return sink


def with_sink(c: Any, g: Any, total: Float32, top: Float32, row: Int32) -> Float32:
    """Row sum `total`, relative to the row max `top` (log2 units), plus the sink's term."""
    if const_expr(not c.features):
        return total
    return total + cute.math.exp2(sink_of(c, g, row) - top, fastmath=True)
