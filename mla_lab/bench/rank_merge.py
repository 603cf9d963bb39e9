"""The merge of decode context parallel alone: ours beside PyTorch's, on one device.

The results of all ranks lie in its memory as a gather leaves them. The two take turns in every
round, and each is compared with the merge in float64.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..api.context_parallel import Gathering, merged_by_torch
from ..core.errors import invalid
from ..core.problem import LATENT_DIM
from ..reference.mla import merge_partials
from ..reference.tolerance import lse_error, rel_error
from .environment import environment
from .rank_steps import LSE_LIMIT, OUT_LIMIT, Clock, Done, check_record


def measure(
    out: Path, ranks: tuple[int, ...], batches: tuple[int, ...], heads: int, rounds: int
) -> Iterator[dict[str, Any]]:
    """Yield a row for each number of ranks and batch size, one query token a request, as it is
    appended to `out`. Times are of CUDA graphs; on a CPU, of calls.
    """
    for name, value in (("heads", heads), ("rounds", rounds)):
        if value < 1:
            raise invalid(name, value, "1 or more")
    for name, values in (("ranks", ranks), ("batch", batches)):
        if min(values) < 1:
            raise invalid(name, min(values), "1 or more")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    clock, where = Clock(device, rounds, graph=device.type == "cuda"), environment(device)
    check_record(out)
    with out.open("a") as file:
        for count, batch in product(ranks, batches):
            row = {"kind": "rank_merge", "ranks": count, "batch": batch, "heads": heads}
            row |= _measured(_gathered(count, batch, heads, device), clock)
            file.write(json.dumps(row | {"environment": where}) + "\n")
            file.flush()
            yield row


def _gathered(ranks: int, batch: int, heads: int, device: torch.device) -> Gathering:
    """Random results in bf16; a tenth of the rows of each rank have no key."""
    made = torch.Generator().manual_seed(0)
    lses = 4 * torch.randn(ranks, batch, heads, generator=made)
    outs = torch.randn(ranks, batch, heads, LATENT_DIM, generator=made)
    lses[torch.rand(lses.shape, generator=made) < 0.1] = -torch.inf
    shapes = (outs.shape[1:], lses.shape[1:])
    outs = outs.to(device, torch.bfloat16)
    return Gathering(lses.to(device), outs, (Done(), Done()), shapes)


def _measured(gathered: Gathering, clock: Clock) -> dict[str, Any]:
    steps: dict[str, Callable[[int], tuple[Tensor, Tensor]]] = {
        "merge_us": lambda _: gathered.merged(),
        "torch_us": lambda _: merged_by_torch(gathered.outs, gathered.lses),
    }
    row, results = clock.medians_us(steps)
    expected = merge_partials(gathered.outs.double(), gathered.lses.double())
    found = list(results.values())
    errors = {
        "out_error": max(rel_error(out, expected.out) for out, _ in found),
        "lse_error": max(lse_error(lse, expected.lse) for _, lse in found),
    }
    ok = errors["out_error"] < OUT_LIMIT and errors["lse_error"] < LSE_LIMIT
    return {**row, **errors, "ok": ok}
