"""The rest of a decode step: what runs between the calls of two layers.

A replay of calls alone finds each kernel's machine code in the instruction caches of the SMs, where
the launch before has left it. In a step a layer's other kernels run between two calls: they take
the place of the code in those caches, and what they read takes its place in L2, so that each launch
fetches its code from memory. The rest of a layer is one GEMM here, of as many rows as the call has
query tokens, over weights of more than twice an H200's L2.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

#: bf16 weights [in, out] of the GEMM: 132 MB, 35 to 39 us with up to 64 rows (H200, 2026-11-26, by
#: hand)
WEIGHTS = (7168, 9216)
#: layers of a timed step
LAYERS = 16


class StepRest:
    """A launch of the GEMM for `tokens` query tokens."""

    def __init__(self, tokens: int, device: torch.device) -> None:
        self._weights = _weights(device)
        rows = max(tokens, 1)
        self._x = torch.randn(rows, WEIGHTS[0], device=device, dtype=torch.bfloat16)
        self._y = torch.empty(rows, WEIGHTS[1], device=device, dtype=torch.bfloat16)

    def __call__(self) -> Tensor:
        """Enqueue it."""
        return torch.mm(self._x, self._weights, out=self._y)


@lru_cache(maxsize=1)
def _weights(device: torch.device) -> Tensor:
    return torch.randn(WEIGHTS, device=device, dtype=torch.bfloat16)
