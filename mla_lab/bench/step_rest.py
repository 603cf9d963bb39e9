"""The rest of a decode step: what runs between the calls of two layers.

A replay of calls alone finds each kernel's machine code in the instruction caches of the SMs, where
the launch before has left it. In a step a layer's other kernels run between two calls: their code
takes the place of the call's in those caches, and what they read takes its place in L2. Here they
are five of a layer's kernels, of as many rows as the call has query tokens: a norm, a GEMM over
weights of more than twice an H200's L2, an activation, the softmax of router scores, and a sum over
experts. A GEMM alone leaves part of the code where it is: behind it 4 requests of 4,096 tokens and
128 heads took 22 us, behind five such kernels 29 us, behind their own replay 17 us (H100,
2026-11-27, commit 87206eb, by hand).
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import rms_norm, silu

#: bf16 weights [in, out] of the GEMM: 132 MB, 35 to 39 us with up to 64 rows (H200, 2026-11-26, by
#: hand)
WEIGHTS = (7168, 9216)
#: weights of different layers, in turns: none finds its own in L2
COPIES = 2
#: router scores of a token, and experts that it takes
EXPERTS, TAKEN = 256, 8
#: layers of a timed step
LAYERS = 16
#: what a record says of the kernels between two calls
KERNELS = "a norm, a GEMM over 132 MB of weights, an activation, a softmax and a sum"


class StepRest:
    """A launch of the five kernels for `tokens` query tokens."""

    def __init__(self, tokens: int, device: torch.device) -> None:
        rows = max(tokens, 1)

        def made(*shape: int) -> Tensor:
            return torch.randn(shape, device=device, dtype=torch.bfloat16)

        self._weights = _weights(device)
        self._turn = 0
        self._x, self._y = made(rows, WEIGHTS[0]), made(rows, WEIGHTS[1])
        self._gain = made(WEIGHTS[0])
        self._scores, self._experts = made(rows, EXPERTS), made(TAKEN, rows, WEIGHTS[0])

    def __call__(self) -> Tensor:
        """Enqueue them."""
        self._turn = (self._turn + 1) % COPIES
        normed = rms_norm(self._x, (WEIGHTS[0],), self._gain)
        silu(torch.mm(normed, self._weights[self._turn], out=self._y))
        torch.softmax(self._scores, dim=-1)
        return self._experts.sum(dim=0)


@lru_cache(maxsize=1)
def _weights(device: torch.device) -> tuple[Tensor, ...]:
    return tuple(torch.randn(WEIGHTS, device=device, dtype=torch.bfloat16) for _ in range(COPIES))
