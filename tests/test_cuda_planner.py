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
from .planner_host import HostPlan, build, plan_of, plan_on_host

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


@pytest.mark.parametrize("longest", [200, 4000, 100_000])
@pytest.mark.parametrize("length", [4001, 10**6, 2**31 - 64, 2**31 - 1, -1, -(2**31)])
def test_a_length_out_of_bounds_leaves_the_other_requests_their_tiles(
    library: ctypes.CDLL, longest: int, length: int
) -> None:
    """One that is too long has a tile for each piece up to its end, in as many as any request."""
    honest = (longest, max(0, length) and longest, longest // 3)
    planner = DevicePlanner(16, 3, 2, longest, total_q=6)
    expected = host_plan(planner, Problem((2, 2, 2), honest, 16))
    found = plan_of(library, planner, (longest, length, longest // 3), (0, 2, 4, 6))
    assert found.counts[3] == 0 and found.counts[0] == found.worker_begin[-1]
    tiles = found.tiles[: found.counts[0]]

    def of_others(rows: np.ndarray) -> np.ndarray:
        rows = rows[rows[:, 0] != 1, :6]
        return rows[np.lexsort(rows.T[::-1])]

    np.testing.assert_array_equal(of_others(tiles), of_others(expected.tiles))
    of_it = tiles[tiles[:, 0] == 1]
    of_it = of_it[np.lexsort((of_it[:, 4], of_it[:, 1]))]
    whole = max(longest, length) if length > longest else max(0, min(length, longest))
    assert of_it[0, 2] == 0 and of_it[-1, 3] == -(-whole // 64)
    assert (of_it[1:, 2] == of_it[:-1, 3])[of_it[1:, 1] == of_it[:-1, 1]].all()


@pytest.mark.parametrize(
    ("sums", "row_tiles"),
    [
        ((0, 2, 4, 9), (1, 1, 1)),
        ((0, 2, 4, 2**31 - 1), (1, 1, 1)),
        ((-(2**31), 2, 4, 6), (1, 1, 1)),
        ((0, 2, 9, -(2**31)), (1, 2, 0)),
        ((3, 2, 4, 6), (0, 1, 1)),
        ((0, 2**31 - 1, -(2**31), 2**31 - 1), None),
        ((0, 6, 0, 6), None),
    ],
)
def test_offsets_out_of_bounds_are_cut_to_the_call_s_query_tokens(
    library: ctypes.CDLL, sums: tuple[int, ...], row_tiles: tuple[int, ...] | None
) -> None:
    """Where requests share so many tokens that the plan does not fit, every worker idles."""
    planner = DevicePlanner(32, 3, 6, 640, tile_rows=64, total_q=6)
    found = plan_of(library, planner, (640, 0, 70), sums, (4, 0, 0))
    if row_tiles is None:
        assert found.counts[3] == 1 and not found.worker_begin.any()
        return
    assert found.counts.tolist() == [sum(row_tiles), 0, 0, 0]
    requests = found.tiles[: found.counts[0], 0]
    assert tuple(int((requests == i).sum()) for i in range(3)) == row_tiles


def test_counts_stop_at_the_greatest_int32(library: ctypes.CDLL) -> None:
    """They would pass for few after an overflow."""
    batch, tokens = 4096, 1 << 22
    planner = DevicePlanner(128, batch, tokens, 10**9, tile_rows=8, split_blocks=1, total_q=tokens)
    sums = [tokens * (i % 2) for i in range(batch + 1)]
    found = plan_of(library, planner, [2**31 - 1] * batch, sums, (1000, 1000, 1000))
    assert found.counts.tolist() == [2**31 - 1, 2**31 - 1, 2**31 - 1, 1]
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
