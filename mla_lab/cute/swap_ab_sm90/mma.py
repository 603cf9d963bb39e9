"""Issue of the two matrix products. Trace-time code: the caller fences, commits are here."""

from typing import Any

import cutlass.cute as cute
from cutlass.cute.nvgpu import warpgroup

from .params import BOX, TILE_KV, Shape
from .shared_storage import Shared

#: one k-step of the matrix unit
K_BYTES = 32


def issue_scores(
    c: Shape, s: Shared, op: Any, acc: cute.Tensor, a: cute.Tensor, b: cute.Tensor,
    stage: Any, phase: Any,
) -> None:  # fmt: skip
    """S^T of one tile, following the column groups as they arrive; one commit group."""
    atom = cute.make_mma_atom(op)
    atom.set(warpgroup.Field.ACCUMULATE, False)
    steps = c.group * BOX * c.bytes // K_BYTES
    for n in range(c.groups):
        cute.arch.mbarrier_wait(s.full + stage * c.groups + n, phase)
        if c.gather:
            cute.arch.fence_view_async_shared()
        for k in range(n * steps, (n + 1) * steps):
            cute.gemm(atom, acc, a[None, None, k, stage], b[None, None, k], acc)
            atom.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()


def issue_values(op: Any, acc: cute.Tensor, a: cute.Tensor, b: cute.Tensor, stage: Any) -> None:
    """O^T += V^T P^T of one tile for this warpgroup's 256 columns; one commit group. (16 bits.)"""
    atom = cute.make_mma_atom(op)
    atom.set(warpgroup.Field.ACCUMULATE, True)
    for k in range(TILE_KV * 2 // K_BYTES):
        cute.gemm(atom, acc, a[None, None, k, stage], b[None, None, k, stage], acc)
    warpgroup.commit_group()
