"""The planner on a GPU equals the Python plan, tile for tile, without a copy to the host."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from mla_lab.backends.cuda.ops import DevicePlan, DevicePlanner
from mla_lab.core.problem import Problem
from mla_lab.workload import load_trace, sample, shipped_trace

from ..planner_cases import host_plan, random_case
from .calls import no_synchronisation

pytestmark = pytest.mark.gpu


def lengths(problem: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    seq_lens = torch.tensor(problem.kv_lens, dtype=torch.int32, device="cuda")
    q_begin = torch.tensor(np.cumsum([0, *problem.q_lens]), dtype=torch.int32, device="cuda")
    return seq_lens, q_begin


def check(planner: DevicePlanner, problem: Problem, found: DevicePlan) -> None:
    plan = host_plan(planner, problem)
    counts = [plan.num_tiles, plan.num_slots, plan.num_groups, 0]
    assert found.counts.tolist() == counts
    np.testing.assert_array_equal(found.worker_begin.cpu().numpy(), plan.worker_begin)
    np.testing.assert_array_equal(found.tiles[: counts[0]].cpu().numpy(), plan.tiles)


def plan_on_device(planner: DevicePlanner, problem: Problem) -> DevicePlan:
    plan = DevicePlan.empty(planner)
    planner(*lengths(problem), plan)
    return plan


@pytest.mark.parametrize("seed", range(10))
def test_random_batches(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(100):
        planner, problem = random_case(rng)
        check(planner, problem, plan_on_device(planner, problem))


@pytest.mark.parametrize("batch", [1, 31, 1023, 1025, 4096])
def test_sizes_around_the_blocks_own(batch: int) -> None:
    rng = np.random.default_rng(batch)
    kv_lens = rng.integers(0, 40_000, batch)
    problem = Problem((1,) * batch, tuple(kv_lens.tolist()), 128)
    planner = DevicePlanner(128, batch, 1, 40_000)
    check(planner, problem, plan_on_device(planner, problem))


def trace_files() -> list[Path]:
    """Traces of one's own: the files in the folder $MLA_LAB_TRACES."""
    folder = os.environ.get("MLA_LAB_TRACES")
    return sorted(Path(folder).iterdir()) if folder else []


def test_batches_of_traces() -> None:
    for trace in [shipped_trace(), *map(load_trace, trace_files())]:
        for seed, batch in enumerate((1, 8, 64, 256)):
            kv_lens = sample(trace, batch, seed).kv_lens
            problem = Problem((1,) * len(kv_lens), kv_lens, 128)
            planner = DevicePlanner(128, len(kv_lens), 1, max(kv_lens))
            check(planner, problem, plan_on_device(planner, problem))


def test_a_captured_planner_follows_new_lengths() -> None:
    rng = np.random.default_rng(0)
    planner = DevicePlanner(128, 64, 2, 100_000)
    plan = DevicePlan.empty(planner)
    problems = [
        Problem(
            tuple(rng.integers(0, 3, 64).tolist()),
            tuple(rng.integers(0, 100_000, 64).tolist()),
            128,
        )
        for _ in range(5)
    ]
    seq_lens, q_begin = lengths(problems[0])
    planner(seq_lens, q_begin, plan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        planner(seq_lens, q_begin, plan)
    for problem in problems:
        for held, new in zip((seq_lens, q_begin), lengths(problem), strict=True):
            held.copy_(new)
        graph.replay()
        check(planner, problem, plan)


def test_nothing_synchronises() -> None:
    planner = DevicePlanner(128, 64, 1, 8192)
    plan = DevicePlan.empty(planner)
    seq_lens, q_begin = lengths(Problem.uniform(64, 1, 8192, 128))
    planner(seq_lens, q_begin, plan)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    with no_synchronisation():
        planner(seq_lens, q_begin, plan)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_too_small_a_plan_is_said_and_idle() -> None:
    problem = Problem((1,) * 8, (50_000,) * 8, 128)
    planner = DevicePlanner(128, 8, 1, 50_000)
    plan = plan_on_device(planner, problem)
    small = replace(plan, tiles=plan.tiles[:4])
    planner(*lengths(problem), small)
    assert plan.counts.tolist()[3] == 1
    assert not plan.worker_begin.any()


@pytest.mark.parametrize("batch", [5000])
def test_too_many_requests_are_refused(batch: int) -> None:
    planner = DevicePlanner(16, 4096, 1, 64)
    plan = DevicePlan.empty(planner)
    with pytest.raises(ValueError, match="5000 requests"):
        planner(*lengths(Problem.uniform(batch, 1, 64, 16)), plan)
