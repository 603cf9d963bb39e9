"""Small CuTe kernels, for tests of the emulator; their annotations are the DSL's, not text."""

# mypy: ignore-errors

import cutlass
from cutlass import cute

from mla_lab.cute.common.ptx_sm90 import small_quotient


@cute.kernel
def scale(a: cute.Tensor, b: cute.Tensor, n: cutlass.Int32):
    i = cute.arch.block_idx()[0] * 64 + cute.arch.thread_idx()[0]
    if i < n:
        b[i] = a[i] * 2.0 + b[i]


@cute.jit
def launch(a: cute.Tensor, b: cute.Tensor, n: cutlass.Int32):
    """b += 2 a, for n elements."""
    scale(a, b, n).launch(grid=((n + 63) // 64, 1, 1), block=(64, 1, 1))


@cute.kernel
def divide(a: cute.Tensor, b: cute.Tensor, n: cutlass.Int32):
    i = cute.arch.block_idx()[0] * 64 + cute.arch.thread_idx()[0]
    if i < n:
        a[i] = small_quotient(a[i], b[i])


@cute.jit
def launch_divide(a: cute.Tensor, b: cute.Tensor, n: cutlass.Int32):
    """a //= b by `small_quotient`, for n elements."""
    divide(a, b, n).launch(grid=((n + 63) // 64, 1, 1), block=(64, 1, 1))
