"""Views of a TMA copy's two sides."""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync


def tma_views(tma: Any, smem: cute.Tensor, gmem: cute.Tensor) -> tuple[cute.Tensor, cute.Tensor]:
    """Source and destination of copies by the atom `tma`, whose box is the first two modes of both
    tensors; the other modes stay and choose a box."""
    one_cta = cute.make_layout(1)
    sides = cute.group_modes(smem, 0, 2), cute.group_modes(gmem, 0, 2)
    into, source = cpasync.tma_partition(tma, 0, one_cta, *sides)
    return source, into
