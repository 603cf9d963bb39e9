"""The merge of ranks by one kernel (`cute.rank_merge`): where it runs, and its launch."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ... import jit
from ...plan.config import KernelConfig
from ..base import current, refuse_capture
from .catalogue import no_compiler

#: what `cute.rank_merge` is written for: dtypes of outs and their names, the latent, and most ranks
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
LATENT, MOST_RANKS = 512, 32
ARCH, CAPABILITY = "sm_90a", (9, 0)
#: natural logarithms to log2 units, and back
NATURAL, BASE_2 = (1 / math.log(2), math.log(2)), (1.0, 1.0)


def takes(outs: Tensor, lses: Tensor) -> bool:
    """Whether the kernel merges outs [ranks, rows, heads, latent] by lses [ranks, rows, heads]."""
    if torch.compiler.is_compiling() or not outs.is_cuda or outs.requires_grad:
        return False
    if outs.dtype not in NAMES or lses.dtype is not torch.float32 or lses.requires_grad:
        return False
    fits = outs.shape[-1] == LATENT and len(outs) <= MOST_RANKS
    packed = outs.is_contiguous() and lses.is_contiguous() and outs.data_ptr() % 16 == 0
    return fits and packed and outs.numel() > 0 and _is_here(outs.dtype, outs.device)


def merged(
    outs: Tensor, lses: Tensor, sinks: Tensor | None, *, base2: bool = False
) -> tuple[Tensor, Tensor]:
    """out [rows, heads, latent] and lse [rows, heads] of what `takes` takes, in one launch.

    sinks: fp32 [heads], in natural units; lses are in log2 units if `base2`. Raises InvalidInput
    for the first use of the kernel in a CUDA graph's capture.
    """
    ranks, rows, heads, latent = outs.shape
    out, lse = torch.empty_like(outs[0]), torch.empty_like(lses[0])
    with current(outs.device):
        _kernel(outs.dtype, outs.device)(
            outs.view(ranks, rows * heads, latent),
            lses.view(ranks, rows * heads),
            lses.view(-1) if sinks is None else sinks.contiguous(),
            out.view(rows * heads, latent),
            lse.view(-1),
            0 if sinks is None else heads,
            *(BASE_2 if base2 else NATURAL),
        )
    return out, lse


def _config(dtype: torch.dtype) -> KernelConfig:
    return KernelConfig("cute/rank_merge", out_dtype=NAMES[dtype])


@cache
def _is_here(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the device is one that the kernel is written for, and its build can be had."""
    if torch.cuda.get_device_capability(device) != CAPABILITY:
        return False
    config = _config(dtype)
    return jit.find(config, ARCH) is not None or no_compiler(config) is None


@cache
def _kernel(dtype: torch.dtype, device: torch.device) -> Callable[..., Any]:
    """The tvm-ffi function on a device, compiled at its first use."""
    config = _config(dtype)
    refuse_capture("merge", f"the first use of {config.name()}", device)
    return jit.kernel(config, ARCH).launch
