"""What a launch takes beyond a plain call, in the order of its tuple: the host's one list.

A build with the option features, scales or skip, or with the mask "tree", takes one more argument,
a tuple. On the kernels' side `entry` of a package in `mla_lab/cute` declares the same tuple, and
`__call__` of its kernel takes it apart.

    sinks           fp32 [heads], or no element
    bmm1, bmm2      a scale in memory, fp32 [1], or no element
    mask            with the mask "tree": uint16 [batch, q_len, words], or no element
    skip            with the option skip: skip-softmax's factor, a number
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..plan.config import KernelConfig
from .decode_args import DecodeArgs

#: kernels take scores, and give lse, in log2 units
LOG2_E = math.log2(math.e)

#: options of a build with the tuple
OPTIONS = ("features", "scales", "skip")


class Empty(NamedTuple):
    """What stands for an operand that the call does not have."""

    numbers: Tensor
    mask: Tensor

    @staticmethod
    def on(device: torch.device) -> Empty:
        """fp32 [0] and uint16 [0, 0, 0]."""
        mask = torch.empty(0, 0, 0, dtype=torch.uint16, device=device)
        return Empty(torch.empty(0, dtype=torch.float32, device=device), mask)


#: takes an operand from a call
Take = Callable[[DecodeArgs, Empty], Any]


def sinks(given: DecodeArgs, empty: Empty) -> Tensor:
    """fp32 [heads], or no element."""
    sink = given.sink
    return empty.numbers if sink is None else sink


def bmm1(given: DecodeArgs, empty: Empty) -> Tensor:
    """bmm1_scale in memory, fp32 [1], or no element."""
    return _cell(given.bmm1_scale, empty)


def bmm2(given: DecodeArgs, empty: Empty) -> Tensor:
    """bmm2_scale in memory, fp32 [1], or no element."""
    return _cell(given.bmm2_scale, empty)


def mask(given: DecodeArgs, empty: Empty) -> Tensor:
    """uint16 [batch, q_len, words], of a ragged call [1, total_q, words], or no element."""
    if given.mask is None:
        return empty.mask
    return given.mask.unsqueeze(0) if given.mask.dim() == 2 else given.mask


def skip(given: DecodeArgs, empty: Empty) -> float:
    """Skip-softmax's factor; 0 skips nothing."""
    return float(given.skip_softmax_threshold_scale_factor or 0.0)


def feature_operands(config: KernelConfig) -> tuple[Take, ...]:
    """The operands of a build's tuple, in order; none for a plain build."""
    tree = config.mask == "tree"
    if not (tree or any(map(config.option, OPTIONS))):
        return ()
    found: tuple[Take, ...] = (sinks, bmm1, bmm2)
    if tree:
        found += (mask,)
    if config.option("skip"):
        found += (skip,)
    return found


def _cell(scale: float | Tensor, empty: Empty) -> Tensor:
    return scale.view(1) if isinstance(scale, Tensor) else empty.numbers
