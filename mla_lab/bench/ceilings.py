"""Ceilings of the card, measured in the run itself: bf16 GEMM and read, before and after cases."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch

GEMM_SIZE = 8192
READ_BYTES = 4_000_000_000
REPEATS = 10


def ceilings(device: torch.device | str) -> dict[str, Any] | None:
    """TFLOP/s of bf16 GEMMs of 8192^3 and TB/s of reading 4 GB, None without a GPU.

    Random inputs: with zeros a GEMM is 13 % faster, as it draws less power.
    """
    if torch.device(device).type != "cuda":
        return None
    gemm = _gemm_rates(device)
    reader, read = _read_rates(device)
    return {
        "gemm_tflops": max(gemm),
        "gemm_rounds_tflops": gemm,
        "read_tbps": max(read),
        "read_rounds_tbps": read,
        "read_by": reader,
    }


def _gemm_rates(device: torch.device | str) -> list[float]:
    size = GEMM_SIZE
    a = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    b = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    out = torch.empty_like(a)
    return [2 * size**3 / ms / 1e9 for ms in _times(lambda: torch.mm(a, b, out=out))]


def _read_rates(device: torch.device | str) -> tuple[str, list[float]]:
    """Method of the read, and its TB/s in each round."""
    data = torch.randint(-128, 127, (READ_BYTES // 4,), dtype=torch.int32, device=device)
    reader, call = "torch.sum", lambda: data.sum(dtype=torch.int64)
    try:
        from .peers import triton_read
    except ImportError:
        pass
    else:
        reader, call = "triton", lambda: triton_read.read(data)
    return reader, [READ_BYTES / ms / 1e9 for ms in _times(call)]


def _times(call: Callable[[], Any]) -> list[float]:
    """Milliseconds of `REPEATS` calls after two to warm up."""
    for _ in range(2):
        call()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(REPEATS + 1)]
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in pairwise(marks)]
