"""What a launch takes beyond a plain call (option features): sinks, scales in memory, a mask.

A sink is one more term exp(sink) in a row's denominator. It enters once, where the row's result is
divided: in `finish` and `exchange` where the row tile is whole, else in the merge. No lse knows it.
"""

from dataclasses import replace

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr

from ..hopper import LOG2E
from .config import Shape
from .storage import Global


def mask_words(mask: cute.Tensor) -> cute.Tensor:
    """Packed uint16 [..., words] as uint32 [tokens, words / 2]."""
    words = mask.shape[-1] // 2
    pointer = cute.recast_ptr(mask.iterator.align(4), dtype=Uint32)
    rows = cute.size(mask.shape[:-1])
    return cute.make_tensor(pointer, cute.make_layout((rows, words), stride=(words, 1)))


@cute.jit
def read_scales(c: cutlass.Constexpr[Shape], g: Global):
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


def with_scales(c: Shape, g: Global) -> Global:
    """`g` with the scales that this launch uses."""
    if const_expr(not c.features):
        return g
    scale, out_scale = read_scales(c, g)
    return replace(g, scale_log2=scale, out_scale=out_scale)


@cute.jit
def sink_of(c: cutlass.Constexpr[Shape], g: Global, row: Int32):
    """The sink of a row (of the request) in log2 units; -inf where there is none."""
    sink = -Float32.inf
    if const_expr(c.features):
        if cute.size(g.sinks) > 0:
            sink = g.sinks[row % g.heads] * Float32(LOG2E)
    return sink


def with_sink(c: Shape, g: Global, total: Float32, top: Float32, row: Int32) -> Float32:
    """A row's sum of exponentials relative to `top` (log2 units), and the sink's term."""
    if const_expr(not c.features):
        return total
    return total + cute.math.exp2(sink_of(c, g, row) - top, fastmath=True)
