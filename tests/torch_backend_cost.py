"""The torch backend against torch itself, as ratios.

Time: batch 8, 16 heads, kv 4096, float32, two threads; beside it gathering the pages and calling
scaled_dot_product_attention with the heads as query rows of one KV head. Both take turns in one
process, medians of 9. At most 0.6 is allowed.

Memory: the most that torch's profiler saw allocated above the start of a call, less the plan's
workspace. At most 64 MB is allowed, whatever the cache holds.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from mla_lab.api.decode import decode
from mla_lab.core.problem import Problem
from mla_lab.plan import Plan, make_plan
from mla_lab.reference.inputs import DecodeInputs, make_inputs

SPEED_PROBLEM = Problem.uniform(8, 1, 4096, heads=16, q_dtype="fp32", kv_format="fp32")
SPEED_LIMIT = 0.6
MEMORY_LIMIT = 64 * 1024 * 1024


class Speed(NamedTuple):
    """Median seconds of one call."""

    decode: float
    sdpa: float

    @property
    def ratio(self) -> float:
        return self.decode / self.sdpa


class Memory(NamedTuple):
    """Bytes."""

    peak: int
    workspace: int

    @property
    def beyond(self) -> int:
        """What a call takes beside its workspace."""
        return self.peak - self.workspace


def speed(
    problem: Problem = SPEED_PROBLEM,
    threads: int = 2,
    repeats: int = 9,
    clock: Callable[[], float] = time.perf_counter,
) -> Speed:
    """Median time of both, in turn, with `threads` of torch's; the thread count is put back.

    clock: of one thread, time.process_time tells the same on a busy machine.
    """
    inputs = make_inputs(problem)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        calls = (lambda: call(inputs), lambda: gather_and_sdpa(inputs))
        for run in calls:
            run()
        times = [[_seconds(run, clock) for run in calls] for _ in range(repeats)]
    finally:
        torch.set_num_threads(before)
    return Speed(*map(statistics.median, zip(*times, strict=True)))


def memory(problem: Problem, policy: str | None = None) -> Memory:
    """Peak of one call that allocates its own workspace, under the plan of `policy`."""
    inputs = replace(make_inputs(problem), workspace_buffer=None)  # type: ignore[arg-type]
    plan = make_plan(problem, policy=policy or "cost")
    call(inputs, plan)
    return Memory(profiled_peak(lambda: call(inputs, plan)), plan.workspace.nbytes)


def call(inputs: DecodeInputs, plan: Plan | None = None) -> Tensor:
    """One call on the torch backend."""
    result = decode(**inputs.contract_args(), plan=plan, backend="torch")
    return result if isinstance(result, Tensor) else result[0]


def gather_and_sdpa(inputs: DecodeInputs) -> Tensor:
    """Pages gathered into one tensor, then one call for the batch; equal lengths only."""
    problem = inputs.problem
    kv_len = problem.kv_lens[0]
    pages = -(-kv_len // problem.page_size)
    gathered = inputs.kv_cache[inputs.block_tables[:, :pages].long()]
    keys = gathered.view(problem.batch, 1, -1, problem.head_dim)[:, :, :kv_len]
    return scaled_dot_product_attention(
        inputs.query.view(problem.batch, 1, problem.heads, problem.head_dim),
        keys,
        keys[..., : problem.latent_dim],
        scale=float(inputs.bmm1_scale),
    )


def profiled_peak(run: Callable[[], object]) -> int:
    """Most bytes allocated at one time during `run`, above its start, by torch's profiler."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        run()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    changes = [(e["ts"], e["args"]["Bytes"]) for e in events if e.get("name") == "[memory]"]
    held = peak = 0
    for _, change in sorted(changes, key=lambda pair: pair[0]):
        held += change
        peak = max(peak, held)
    return peak


def _seconds(run: Callable[[], object], clock: Callable[[], float]) -> float:
    start = clock()
    run()
    return clock() - start
