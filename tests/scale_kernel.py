"""The smallest CuTe kernel, for tests of the emulator; its annotations are the DSL's, not text."""

# mypy: ignore-errors

import cutlass
from cutlass import cute


@cute.kernel
def scale(a: cute.Tensor, b: cute.Tensor, n: cutlass.Int32):
    i = cute.arch.block_idx()[0] * 64 + cute.arch.thread_idx()[0]
    if i < n:
        b[i] = a[i] * 2.0 + b[i]


@cute.jit
def launch(a: cute.Tensor, b: cute.Tensor, n: cutlass.Int32):
    """b += 2 a, for n elements."""
    scale(a, b, n).launch(grid=((n + 63) // 64, 1, 1), block=(64, 1, 1))
