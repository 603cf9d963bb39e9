"""Decode context parallel by torch.distributed: correctness against one device, and times.

Each rank holds the tokens rank, rank + world, ... of each request. A step is our call with lse on
them, one all-gather of outs and lses, and `context_parallel.merge` in rank order, so that all ranks
have the same bits. NCCL with a GPU a rank, gloo on a CPU.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from ..api import contract
from ..api.context_parallel import gather_and_merge, shard_of
from ..core.errors import invalid
from ..core.problem import Problem
from ..reference.inputs import DecodeInputs, make_inputs
from ..reference.tolerance import lse_error, rel_error
from .environment import environment

#: relative to one device's result: bf16 outs of the ranks, and fp32 lses
OUT_LIMIT, LSE_LIMIT = 1e-2, 1e-4
WARMUPS, ROUNDS = 3, 21


@dataclass(frozen=True)
class RankCases:
    """What to run: every batch size with every length."""

    world: int
    device: str
    batches: tuple[int, ...]
    kv_lens: tuple[int, ...]
    heads: int = 128
    rounds: int = ROUNDS

    def problems(self) -> list[Problem]:
        """The cases in order: by length, then by batch size."""
        return [
            Problem((1,) * batch, (kv_len,) * batch, self.heads, page_size=64)
            for kv_len in self.kv_lens
            for batch in self.batches
        ]


def measure(cases: RankCases, out: Path) -> list[dict[str, Any]]:
    """Run all cases in `world` processes; rank 0 appends a row each to `out`. Returns the rows.

    Raises InvalidInput where there are fewer GPUs than ranks.
    """
    if cases.world < 2:
        raise invalid("world", cases.world, "2 or more ranks")
    if cases.device == "cuda" and torch.cuda.device_count() < cases.world:
        raise invalid("world", cases.world, f"up to {torch.cuda.device_count()} GPUs")
    known = len(out.read_text().splitlines()) if out.exists() else 0
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, (cases, f"file://{folder}/ranks", str(out)), cases.world)
    return [json.loads(line) for line in out.read_text().splitlines()[known:]]


def _rank(rank: int, cases: RankCases, where: str, out: str) -> None:
    on_gpu = cases.device == "cuda"
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    torch.set_num_threads(1 if not on_gpu else torch.get_num_threads())
    backend = "nccl" if on_gpu else "gloo"
    dist.init_process_group(backend, init_method=where, rank=rank, world_size=cases.world)
    try:
        for problem in cases.problems():
            row = _case(problem, cases, rank, device)
            if rank == 0:
                with Path(out).open("a") as file:
                    file.write(json.dumps(row) + "\n")
    finally:
        dist.destroy_process_group()


def _case(problem: Problem, cases: RankCases, rank: int, device: torch.device) -> dict[str, Any]:
    """One case: rank 0's whole call, then the step of all ranks, compared and timed."""
    part, whole, alone_us = _prepare(problem, cases, rank, device)
    dist.barrier()
    out, lse = _step(part)
    times = {
        "step_us": _median_us(lambda: _step(part), cases.rounds, device),
        "own_call_us": _median_us(lambda: _call(part), cases.rounds, device),
    }
    result = _call(part)
    times["merge_us"] = _median_us(lambda: gather_and_merge(*result), cases.rounds, device)
    row: dict[str, Any] = {"kind": "ranks", "world": cases.world, "batch": len(problem.kv_lens)}
    row |= {"kv_len": problem.kv_lens[0], "heads": problem.heads, "alone_us": alone_us, **times}
    row["environment"] = environment(device)
    if whole is not None:
        row["out_error"] = rel_error(out.float(), whole[0].double())
        row["lse_error"] = lse_error(lse, whole[1].double())
        row["ok"] = row["out_error"] < OUT_LIMIT and row["lse_error"] < LSE_LIMIT
    return row


def _prepare(
    problem: Problem, cases: RankCases, rank: int, device: torch.device
) -> tuple[DecodeInputs, tuple[Tensor, Tensor] | None, float]:
    """The rank's part; on rank 0 also the whole call's result and time, us."""
    inputs = make_inputs(problem, 0, ["lse"], device=device, workspace_bytes=128 << 20)
    whole, alone_us = None, 0.0
    if rank == 0:
        whole = _call(inputs)
        alone_us = _median_us(lambda: _call(inputs), cases.rounds, device)
    return shard_of(inputs, cases.world, rank), whole, alone_us


def _call(inputs: DecodeInputs) -> tuple[Tensor, Tensor]:
    result: Any = contract.trtllm_batch_decode_with_kv_cache_mla(**inputs.contract_args())
    return result


def _step(part: DecodeInputs) -> tuple[Tensor, Tensor]:
    return gather_and_merge(*_call(part))


def _median_us(call: Callable[[], Any], rounds: int, device: torch.device) -> float:
    """Median time of a call, us, by events on a GPU; each rank runs as many rounds."""
    for _ in range(WARMUPS if device.type == "cuda" else 0):
        call()
    times = []
    for _ in range(rounds):
        if device.type != "cuda":
            begin = time.perf_counter()
            call()
            times.append(1e6 * (time.perf_counter() - begin))
            continue
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end))
    return round(statistics.median(times), 2)
