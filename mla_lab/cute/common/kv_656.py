"""Where the parts of a 656-byte token lie, and TMA maps of them.

bytes of a token     0 .. 511          512 .. 527          528 .. 655
                     512 e4m3          4 fp32 scales       64 bf16, the rope
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import BFloat16, Float32
from cutlass.cute.nvgpu import cpasync, warpgroup

from ...core.dims import FP8_656_BYTES, LATENT_DIM, ROPE_DIM

#: scales of a token, one for 128 columns
SCALE_GROUPS = 4
#: bytes of a token before its scales, and before its rope
SCALES_BEGIN, ROPE_BEGIN = LATENT_DIM, LATENT_DIM + 4 * SCALE_GROUPS
#: k-steps of the rope's QK
ROPE_STEPS = ROPE_DIM // 16


def columns_of_tokens(
    kv: cute.Tensor, page_size: int, dtype: Any, begin: int, columns: Any
) -> cute.Tensor:
    """View (tokens of a page, columns, pages) of the `dtype` elements that begin at byte `begin` of
    a token; `columns` is their number, or (columns of a box, boxes)."""
    size = dtype.width // 8
    stride = (1, columns[0]) if isinstance(columns, tuple) else 1
    pages = cute.assume(kv.stride[0] // size, divby=16 // size)
    return cute.make_tensor(
        cute.recast_ptr((kv.iterator + begin).align(16), dtype=dtype),
        cute.make_layout(
            (page_size, columns, kv.shape[0]), stride=(FP8_656_BYTES // size, stride, pages)
        ),
    )


def rope_and_scale_tma(load: Any, kv: cute.Tensor, page_size: int, rows: int) -> tuple[Any, ...]:
    """TMA atoms and coordinates (tokens of a page, columns, pages) of the ropes and of the scales,
    in boxes of `rows` tokens; a rope has a 128-byte swizzle."""
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, BFloat16)
    ropes = cute.tile_to_shape(atom, (rows, ROPE_DIM), (0, 1))
    scales = cute.make_layout((rows, SCALE_GROUPS), stride=(SCALE_GROUPS, 1))
    maps: tuple[Any, ...] = ()
    for dtype, begin, columns, box in (
        (BFloat16, ROPE_BEGIN, ROPE_DIM, ropes),
        (Float32, SCALES_BEGIN, SCALE_GROUPS, scales),
    ):
        view = columns_of_tokens(kv, page_size, dtype, begin, columns)
        maps = (*maps, *cpasync.make_tiled_tma_atom(load, view, box, (rows, columns)))
    return maps
