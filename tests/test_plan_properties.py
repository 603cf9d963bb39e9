"""What every plan must be, whatever the policy: counted tile by tile on random ragged batches."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_lab.core.problem import Problem
from mla_lab.plan import POLICIES, SCHEDULES, Plan, WorkTile, make_plan
from mla_lab.plan.assign import balance, beside, in_turn
from mla_lab.plan.check import check_plan
from mla_lab.plan.greedy import OVERHEAD, greedy_payload

from .plan_oracles import assert_covers, problems

WORKERS = st.sampled_from((1, 2, 7, 66, 132))
FEW = settings(max_examples=40, deadline=None)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("policy", POLICIES)
@FEW
@given(
    problem=problems(),
    workers=WORKERS,
    rows=st.sampled_from((8, 16, 64, 128)),
    blocks=st.sampled_from((32, 64, 100)),
)
def test_each_block_of_each_row_tile_once(policy, schedule, problem, workers, rows, blocks):
    plan = make_plan(
        problem,
        tile_rows=rows,
        tile_kv=blocks,
        num_workers=workers,
        policy=policy,
        schedule=schedule,
    )
    assert_covers(plan)
    check_plan(plan)
    assert plan.num_workers == (workers if schedule == "persistent" else plan.num_tiles)


@pytest.mark.parametrize("policy", POLICIES)
def test_each_block_of_long_requests_once(policy):
    problem = Problem((1, 4, 1), (131_072, 64 * 1500 + 1, 20), heads=64)
    for plan in (make_plan(problem, policy=policy), make_plan(problem, policy=policy, tile_kv=32)):
        assert_covers(plan)


@FEW
@given(problems(), st.sampled_from(sorted(POLICIES)), WORKERS)
def test_both_schedules_walk_the_same_tiles(problem, policy, workers):
    persistent, grid = (
        make_plan(problem, policy=policy, num_workers=workers, schedule=schedule)
        for schedule in SCHEDULES
    )
    assert sorted(persistent) == sorted(grid)
    sizes = [tile.block_end - tile.block_begin for tile in grid]
    assert sizes == sorted(sizes, reverse=True)


def shapes(problem: Problem, rows: int) -> tuple[list[int], int]:
    """Blocks of requests that have query rows, and the most row tiles of one."""
    tiles = [
        q * -(-problem.heads // rows) if problem.top_k else -(-q * problem.heads // rows)
        for q in problem.q_lens
    ]
    kv = [problem.top_k or n for n in problem.kv_lens]
    return [max(1, -(-n // 64)) for n, t in zip(kv, tiles, strict=True) if t], max(tiles)


@FEW
@given(problems(max_batch=10), WORKERS, st.sampled_from((64, 128)))
def test_greedy_keeps_its_bounds(problem, workers, rows):
    plan = make_plan(problem, tile_rows=rows, num_workers=workers, policy="greedy")
    blocks, most = shapes(problem, rows)
    if not blocks:
        assert plan.num_tiles == 0
        return
    parts = max(1, workers // most)
    assert plan.splits().sum() <= len(blocks) + parts - 1
    payload = greedy_payload(np.array(blocks), parts, OVERHEAD)
    for w in range(plan.num_workers):
        by_row: dict[int, int] = {}
        for tile in plan.worker(w):
            load = max(1, tile.block_end - tile.block_begin) + OVERHEAD
            by_row[tile.row_tile] = by_row.get(tile.row_tile, 0) + load
        # more row tiles than workers: a worker walks several lanes of the only part
        assert len(by_row) <= -(-most // workers)
        assert all(load <= payload for load in by_row.values())


@FEW
@given(problems(max_batch=10), WORKERS)
def test_greedy_worker_is_part_and_row_tile(problem, workers):
    plan = make_plan(problem, num_workers=workers, policy="greedy")
    _, most = shapes(problem, 64)
    order = []
    for w in range(plan.num_workers):
        for tile in plan.worker(w):
            if most <= workers:
                assert tile.row_tile == w % most
            else:
                assert tile.row_tile % workers == w
        keys = [(t.request, t.row_tile, t.split_idx) for t in plan.worker(w)]
        assert keys == sorted(keys)
        order += keys
    assert len(set(order)) == plan.num_tiles


@FEW
@given(problems(), problems(), st.integers(0, 10), WORKERS, WORKERS)
def test_fixed_size_cuts_depend_on_the_request_alone(one, others, place, here, there):
    """Alone or among others, on any card: the same pieces in the same order."""
    q_len, kv_len, heads = one.q_lens[0], one.kv_lens[0], one.heads
    at = place % (others.batch + 1)
    q_lens, kv_lens = list(others.q_lens), list(others.kv_lens)
    q_lens.insert(at, q_len)
    kv_lens.insert(at, kv_len)
    alone = make_plan(Problem((q_len,), (kv_len,), heads), policy="fixed_size", num_workers=here)
    among = make_plan(
        Problem(tuple(q_lens), tuple(kv_lens), heads), policy="fixed_size", num_workers=there
    )

    def pieces(plan: Plan, request: int) -> set[tuple[int, ...]]:
        return {tuple(t)[1:6] for t in plan if t.request == request}

    assert pieces(alone, 0) == pieces(among, at)


def test_the_default_does_depend_on_the_neighbours():
    """The negative control of batch invariance."""
    alone = make_plan(Problem((1,), (8192,), 128))
    among = make_plan(Problem((1,) * 64, (8192,) * 64, 128))
    assert alone.splits()[0] != among.splits()[0]


@FEW
@given(problems(max_batch=10), WORKERS)
def test_fixed_size_deals_longest_first(problem, workers):
    plan = make_plan(problem, num_workers=workers, policy="fixed_size")
    grid = make_plan(problem, num_workers=workers, policy="fixed_size", schedule="grid")
    dealt: dict[int, WorkTile] = {}
    for w in range(workers):
        for i, tile in enumerate(plan.worker(w)):
            dealt[(workers - 1 - w if i % 2 else w) + i * workers] = tile
    assert [dealt[i] for i in range(plan.num_tiles)] == list(grid)
    sizes = [t.block_end - t.block_begin for t in grid]
    assert sizes == sorted(sizes, reverse=True)


@FEW
@given(st.lists(st.integers(1, 1000), min_size=1, max_size=200), st.integers(1, 40))
def test_longest_first_is_within_grahams_bound(times, workers):
    order, begins = balance(np.array(times), workers)
    assert sorted(order) == list(range(len(times)))
    loads = [sum(times[i] for i in order[a:b]) for a, b in pairwise(begins)]
    longest_first = sorted(times, reverse=True)
    two = longest_first[workers - 1] + longest_first[workers] if len(times) > workers else 0
    bound = max(sum(times) / workers, max(times), two)
    assert bound <= max(loads) or max(loads) == pytest.approx(bound)
    # Graham: the last tile to end began no later than the mean of the rest
    assert max(loads) <= sum(times) / workers + max(times) * (1 - 1 / workers) + 1e-9


@FEW
@given(st.lists(st.integers(1, 9), min_size=1, max_size=400), st.integers(1, 40))
def test_longest_first_takes_the_least_loaded_worker(times, workers):
    """Rounds and heap, whichever hands out a tile, give what one tile at a time gives."""
    order, begins = balance(np.array(times), workers)
    loads = [0] * workers
    lists: list[list[int]] = [[] for _ in range(workers)]
    for i in sorted(range(len(times)), key=lambda i: -times[i]):
        w = loads.index(min(loads))
        loads[w] += times[i]
        lists[w].append(i)
    assert [order[a:b].tolist() for a, b in pairwise(begins)] == lists


def test_many_tiles_beside_giants_take_the_least_loaded_worker():
    """One free worker among busy ones: the heap's part of the balance."""
    times = np.array([10**6] * 40 + [7] * 3000)
    order, begins = balance(times, 41)
    loads = [int(times[order[a:b]].sum()) for a, b in pairwise(begins)]
    assert loads == [10**6] * 40 + [21000]


@given(st.lists(st.integers(0, 50), min_size=1, max_size=100), st.integers(1, 20))
def test_in_turn_keeps_loads_within_one_piece(blocks, workers):
    order, begins = in_turn(np.array(blocks), workers)
    loads = [sum(blocks[i] for i in order[a:b]) for a, b in pairwise(begins)]
    assert max(loads) - min(loads) <= max(blocks)


@given(problems(), WORKERS)
@FEW
def test_tiles_of_the_same_keys_lie_beside_each_other(problem, workers):
    tiles = make_plan(problem, policy="fixed", num_splits=3, num_workers=workers).tiles
    times = (1 + tiles[:, 3] - tiles[:, 2]).astype(np.int64)
    order, begins = beside(tiles, times, len(tiles))
    assert begins.tolist() == list(range(len(tiles) + 1))
    keys = [tuple(words) for words in tiles[order][:, [0, 4, 1]].tolist()]
    assert keys == sorted(keys)
    order, begins = beside(tiles, times, workers)
    loads = [int(times[order[a:b]].sum()) for a, b in pairwise(begins)]
    assert sum(loads) == times.sum() and len(loads) == workers
    assert max(loads) <= times.sum() / workers + times.max(initial=0)


@given(problems(), st.sampled_from(sorted(POLICIES)), WORKERS)
@FEW
def test_planning_is_deterministic_and_survives_json(problem, policy, workers):
    plan = make_plan(problem, policy=policy, num_workers=workers)
    assert make_plan(problem, policy=policy, num_workers=workers) == plan
    assert Plan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan
