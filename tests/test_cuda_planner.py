"""The device planner's rules, run on the host, against the plans that Python makes."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from mla_lab.backends.cuda.ops import DevicePlanner
from mla_lab.core.errors import InvalidInput
from mla_lab.core.problem import Problem
from mla_lab.plan import Plan

from .needs import needs_cxx
from .planner_cases import host_plan, random_case
from .planner_host import HostPlan, build, plan_on_host

pytestmark = needs_cxx


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return build(tmp_path_factory.mktemp("planner"))


def check_equal(found: HostPlan, plan: Plan) -> None:
    assert found.counts.tolist() == [plan.num_tiles, plan.num_slots, plan.num_groups, 0]
    np.testing.assert_array_equal(found.worker_begin, plan.worker_begin)
    np.testing.assert_array_equal(found.tiles[: plan.num_tiles], plan.tiles)


@pytest.mark.parametrize("seed", range(10))
def test_equal_to_the_python_plan_on_random_batches(library: ctypes.CDLL, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(100):
        planner, problem = random_case(rng)
        check_equal(plan_on_host(library, planner, problem), host_plan(planner, problem))


@pytest.mark.parametrize(
    ("q_lens", "kv_lens", "heads"),
    [
        ((0, 0), (5, 9), 16),
        ((1,), (0,), 128),
        ((1, 0, 1), (0, 70_000, 64), 16),
        ((1,) * 4096, tuple(range(4096)), 16),
        ((40,), (131_072,), 128),
    ],
)
def test_equal_at_the_edges(
    library: ctypes.CDLL, q_lens: tuple[int, ...], kv_lens: tuple[int, ...], heads: int
) -> None:
    problem = Problem(q_lens, kv_lens, heads)
    planner = DevicePlanner(heads, len(q_lens), max(q_lens), max(kv_lens), num_workers=132)
    check_equal(plan_on_host(library, planner, problem), host_plan(planner, problem))


@pytest.mark.parametrize("short", [0, 1, 2])
def test_a_plan_that_does_not_fit_leaves_every_worker_idle(
    library: ctypes.CDLL, short: int
) -> None:
    problem = Problem((1, 1), (100_000, 3_000), 16)
    planner = DevicePlanner(16, 2, 1, 100_000)
    plan = host_plan(planner, problem)
    capacity = [plan.num_tiles, plan.num_slots, plan.num_groups]
    capacity[short] -= 1
    found = plan_on_host(library, planner, problem, (capacity[0], capacity[1], capacity[2]))
    assert found.counts.tolist() == [plan.num_tiles, plan.num_slots, plan.num_groups, 1]
    assert not found.worker_begin.any()


@pytest.mark.parametrize("batch", [5000, 0])
def test_bounds_are_checked_before_anything_runs(batch: int) -> None:
    with pytest.raises(InvalidInput, match="max_batch"):
        DevicePlanner(heads=16, max_batch=batch, max_q_len=1, max_kv_len=100)


@pytest.mark.parametrize(
    "name", ["heads", "tile_rows", "tile_kv", "num_workers", "split_blocks", "max_splits"]
)
def test_planner_refuses_what_it_divides_by(name: str) -> None:
    given = {"heads": 16, "max_batch": 1, "max_q_len": 1, "max_kv_len": 100, name: 0}
    with pytest.raises(InvalidInput, match=f"{name}: got 0; supported: 1 or more"):
        DevicePlanner(**given)
