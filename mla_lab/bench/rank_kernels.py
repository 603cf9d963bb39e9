"""What decode context parallel adds to a call, on one device: our kernels beside PyTorch's.

The merge: the results of all ranks lie in memory as a gather leaves them, and both merges are
compared with the one in float64. The mask, which calls of several query tokens have: both must be
the same. Our kernel and PyTorch's take turns in every round; a row says whether ours ran, or
PyTorch's in both turns.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import chain, product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..api.context_parallel import Done, Gathering, merged_by_torch, shard_of
from ..backends.rank_kernels import can_mask, can_merge
from ..backends.rank_mask import RankMask
from ..call.decode_args import DecodeArgs, native_args
from ..core.dims import LATENT_DIM
from ..core.errors import invalid
from ..core.problem import Problem
from ..reference.inputs import make_inputs
from ..reference.mla import merge_partials
from ..reference.tolerance import lse_error, rel_error
from .environment import environment
from .rank_steps import LSE_LIMIT, OUT_LIMIT, Clock, check_record

#: query tokens of a request with a mask
DRAFTS = 4
#: of the results that are merged: 8 GiB in bf16
MOST_VALUES = 2**32


def measure(
    out: Path, ranks: tuple[int, ...], batches: tuple[int, ...], heads: int, rounds: int
) -> Iterator[dict[str, Any]]:
    """Yield a row as it is appended to `out`: of the merge for each number of ranks and batch size,
    one query token a request, then of the mask for each batch size. Times are of CUDA graphs; on a
    CPU, of calls.
    """
    sizes = {"heads": (heads,), "rounds": (rounds,), "ranks": ranks, "batch": batches}
    for name, values in sizes.items():
        if min(values) < 1:
            raise invalid(name, min(values), "1 or more")
        if len(set(values)) < len(values):
            raise invalid(name, values, "each number once")
    largest = max(ranks) * max(batches) * heads * LATENT_DIM
    if largest > MOST_VALUES:
        raise invalid("ranks x batch x heads x 512", largest, f"up to {MOST_VALUES}")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    clock, where = Clock(device, rounds, graph=device.type == "cuda"), environment(device)
    check_record(out, "rank_merge", "rank_mask")
    with out.open("a") as file:
        for row in chain(
            _merges(ranks, batches, heads, clock), (_mask(batch, clock) for batch in batches)
        ):
            file.write(json.dumps(row | {"environment": where}) + "\n")
            file.flush()
            yield row


def _merges(
    ranks: tuple[int, ...], batches: tuple[int, ...], heads: int, clock: Clock
) -> Iterator[dict[str, Any]]:
    for count, batch in product(ranks, batches):
        row = {"kind": "rank_merge", "ranks": count, "batch": batch, "heads": heads}
        yield row | _merge(_gathered(count, batch, heads, clock.device), clock)


def _mask(batch: int, clock: Clock) -> dict[str, Any]:
    """Of one of two ranks; `DRAFTS` query tokens a request."""
    whole = make_inputs(
        Problem.uniform(batch, DRAFTS, 2 * DRAFTS, 1), 0, workspace_bytes=0, device=clock.device
    )
    args = native_args(**shard_of(whole, 2, 1).contract_args())
    of = RankMask(DRAFTS, DRAFTS * batch, DRAFTS)

    def tensors(made: DecodeArgs) -> tuple[Tensor, Any]:
        return made.seq_lens, made.mask

    steps: dict[str, Callable[[int], tuple[Tensor, Any]]] = {
        "us": lambda _: tensors(of(args)),
        "torch_us": lambda _: tensors(of.by_torch(args)),
    }
    times, results = clock.medians_us(steps)
    pairs = zip(*results.values(), strict=True)
    ok = all(torch.equal(*(t.view(torch.uint8) for t in pair)) for pair in pairs)
    row = {"kind": "rank_mask", "batch": batch, "q_len": DRAFTS, "kernel": can_mask(args)}
    return {**row, **times, "ok": ok}


def _gathered(ranks: int, batch: int, heads: int, device: torch.device) -> Gathering:
    """Random results in bf16; a tenth of the rows of each rank have no key."""
    made = torch.Generator().manual_seed(0)
    lses = 4 * torch.randn(ranks, batch, heads, generator=made)
    outs = torch.randn(ranks, batch, heads, LATENT_DIM, generator=made)
    lses[torch.rand(lses.shape, generator=made) < 0.1] = -torch.inf
    shapes = (outs.shape[1:], lses.shape[1:])
    outs = outs.to(device, torch.bfloat16)
    return Gathering(lses.to(device), outs, (Done(), Done()), shapes)


def _merge(gathered: Gathering, clock: Clock) -> dict[str, Any]:
    steps: dict[str, Callable[[int], tuple[Tensor, Tensor]]] = {
        "us": lambda _: gathered.merged(),
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
    return {"kernel": can_merge(gathered.outs, gathered.lses), **row, **errors, "ok": ok}
