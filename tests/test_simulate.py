"""The simulator: pipelines obey their barriers, plans conserve work and respect every bound."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mla_lab.core.errors import InvalidInput
from mla_lab.core.problem import Problem
from mla_lab.plan.config import KernelConfig
from mla_lab.plan.tile import Plan
from mla_lab.simulate import (
    H200,
    SWAP_AB,
    Constants,
    Pipeline,
    Timeline,
    constants_for,
    launch,
    run_pipeline,
)

CLOCKS = st.floats(1, 3000)


def simulate(plan: Plan, constants: Constants = H200, **how: Any) -> Timeline:
    """With constants that no new record changes."""
    return launch.simulate(plan, constants, **how)


def bounds(plan: Plan, constants: Constants = H200, **how: Any) -> dict[str, float]:
    return launch.bounds(plan, constants, **how)


def plan_of(problem: Problem, splits: int, workers: int, tile_rows: int = 64) -> Plan:
    """Every row tile cut into about `splits` pieces, dealt out in runs; independent of policies."""
    tiles: list[tuple[int, ...]] = []
    slot = group = 0
    for request, (rows, kv_len) in enumerate(zip(problem.rows, problem.kv_lens, strict=True)):
        blocks = -(-kv_len // 64)
        cuts = np.unique(np.linspace(0, blocks, splits + 1).astype(int))
        pieces = max(1, len(cuts) - 1)
        for row_tile in range(-(-int(rows) // tile_rows)):
            for i in range(pieces):
                end = cuts[i + 1] if blocks else 0
                split = (slot, group) if pieces > 1 else (-1, -1)
                tiles.append((request, row_tile, cuts[i], end, i, pieces, *split))
                slot += pieces > 1
            group += pieces > 1
    begin = np.linspace(0, len(tiles), workers + 1).astype(np.int32)
    return Plan(problem, tile_rows, 64, "test", "grid", np.asarray(tiles, np.int32), begin)


def test_a_timeline_is_one_line_in_a_notebook() -> None:
    timeline = simulate(plan_of(Problem.uniform(2, 1, 300, 16), 2, 132))
    us = f"{timeline.makespan:.1f} us"
    assert repr(timeline) == f"<Timeline: {len(timeline)} events on {timeline.lanes} lanes, {us}>"


@given(CLOCKS, CLOCKS, CLOCKS, CLOCKS, st.integers(1, 6), st.integers(0, 3), st.integers(1, 40))
def test_a_pipeline_keeps_its_order_and_its_ring(
    load: float, qk: float, softmax: float, pv: float, stages: int, ahead: int, blocks: int
) -> None:
    ahead = min(ahead, stages - 1)
    pipeline = Pipeline(load, 500.0, qk, softmax, pv, 100.0, stages, ahead)
    spans = run_pipeline(pipeline, blocks)
    for before, after in (("load", "qk"), ("qk", "softmax"), ("softmax", "pv")):
        assert np.all(getattr(spans, after)[0] >= getattr(spans, before)[1])
    matrix = sorted([*zip(*spans.qk, strict=True), *zip(*spans.pv, strict=True)])
    assert all(a[1] <= b[0] + 1e-6 for a, b in itertools.pairwise(matrix))
    assert np.all(spans.load[0][stages:] >= spans.free[:-stages])


def test_the_steady_state_is_the_slowest_role() -> None:
    def steady(load: float) -> float:
        return run_pipeline(Pipeline(load, 100.0, 900, 600, 800, 0.0, 4, 1), 60).steady()

    assert steady(500) == pytest.approx(1700)
    assert steady(2500) == pytest.approx(2500)
    serial = run_pipeline(Pipeline(500, 100.0, 900, 600, 800, 0.0, 4, 0), 60)
    assert serial.steady() == pytest.approx(900 + 600 + 800)


def test_the_measured_loop_of_the_card_comes_out() -> None:
    # a 64 x 64 block takes 2419 clocks where the matrix unit alone needs 2176 (H200, 2026-11-20)
    pipeline = Pipeline.of(H200, 64, 64, 1152)
    assert H200.matrix_clocks(64, 64) == 2176
    assert run_pipeline(pipeline, 40).steady() == pytest.approx(2419, abs=1)


def test_a_lookahead_beyond_the_ring_is_a_deadlock_and_refused() -> None:
    with pytest.raises(InvalidInput, match="2 blocks ahead with 2 stages"):
        Pipeline(1, 1, 1, 1, 1, stages=2, lookahead=2)


@given(
    st.lists(st.integers(0, 5000), min_size=1, max_size=12),
    st.sampled_from([16, 64, 128]),
    st.integers(1, 9),
    st.integers(1, 200),
    st.booleans(),
)
def test_work_is_conserved_and_no_bound_is_beaten(
    kv_lens: list[int], heads: int, splits: int, workers: int, fused: bool
) -> None:
    problem = Problem((1,) * len(kv_lens), tuple(kv_lens), heads)
    plan = plan_of(problem, splits, workers)
    timeline = simulate(plan, fused_merge=fused)
    attended = timeline.tile[timeline.only("attend")]
    assert sorted(attended) == list(range(plan.num_tiles))
    if fused and workers <= timeline.lanes:
        split = np.flatnonzero(plan.tiles[:, 7] >= 0)
        assert sorted(timeline.tile[timeline.only("merge")]) == split.tolist()
    assert timeline.makespan >= max(bounds(plan).values()) - 1e-9
    for lane in range(timeline.lanes):
        mine = timeline.sm == lane
        order = np.lexsort((timeline.end[mine], timeline.start[mine]))
        starts, ends = timeline.start[mine][order], timeline.end[mine][order]
        assert np.all(starts[1:] >= ends[:-1] - 1e-9)


def test_a_tile_goes_on_while_other_workers_begin_and_end() -> None:
    """Each of their events divides its mainloop, and none takes from its progress."""

    def attended(*kv_lens: int) -> float:
        problem = Problem((1,) * len(kv_lens), kv_lens, 16)
        timeline = simulate(plan_of(problem, 1, len(kv_lens)))
        return next(e.end - e.start for e in timeline if e.role == "attend" and e.tile == 0)

    others = range(640, 12800, 640)
    assert attended(12800, *others) == pytest.approx(attended(12800), rel=0.01)


def test_a_merge_waits_for_its_last_partial() -> None:
    plan = plan_of(Problem.uniform(3, 1, 4096, 16), 5, 15)
    timeline = simulate(plan)
    written = {e.tile: e.end for e in timeline if e.role == "write"}
    for event in timeline:
        if event.role == "merge":
            group = plan.tiles[event.tile, 7]
            members = np.flatnonzero(plan.tiles[:, 7] == group)
            assert event.start >= max(written[t] for t in members.tolist())


def test_a_share_of_the_merge_comes_behind_its_worker_s_last_tile() -> None:
    plan = plan_of(Problem((1,) * 5, (9000, 300, 4000, 50, 2000), 64), 4, 7)
    timeline = simulate(plan)
    for worker in range(plan.num_workers):
        mine = [e for e in timeline if e.worker == worker]
        shares = [e for e in mine if e.role == "merge"]
        walk = range(*plan.worker_begin[worker : worker + 2].tolist())
        assert [e.tile for e in shares] == [t for t in walk if plan.tiles[t, 7] >= 0]
        last = max(e.end for e in mine if e.role == "write")
        assert all(e.start >= last for e in shares)


def test_all_who_split_a_row_tile_merge_it_at_the_card_s_rate() -> None:
    """132 CTAs leave 128 KB in 3.3 us and merge in 3.9, half of them in about half of it (H200)."""
    took = {}
    for parts in (66, 132):
        timeline = simulate(plan_of(Problem.uniform(1, 1, 64 * 132 * 4, 64), parts, parts))
        for role in ("write", "merge"):
            spans = [e.end - e.start for e in timeline if e.role == role]
            assert len(spans) == parts
            took[parts, role] = max(spans)
    assert took[132, "write"] == pytest.approx(3.3, rel=0.15)
    assert took[132, "merge"] == pytest.approx(3.9, rel=0.15)
    assert took[66, "merge"] < 0.7 * took[132, "merge"]


def test_a_second_launch_merges_where_workers_would_wait_for_others_that_have_not_begun() -> None:
    plan = plan_of(Problem.uniform(40, 1, 4096, 64), 4, 160)
    assert list(simulate(plan)) == list(simulate(plan, fused_merge=False))
    fits = plan_of(Problem.uniform(33, 1, 4096, 64), 4, 132)
    assert simulate(fits).makespan < simulate(fits, fused_merge=False).makespan


def test_large_memory_bound_steps_run_at_the_measured_bandwidth() -> None:
    problem = Problem.uniform(128, 1, 8192, 16)
    cool = replace(H200, clock_ghz=1.98)
    timeline = simulate(plan_of(problem, 1, 128), cool)
    floor = problem.total_kv * 1152 / H200.read_tbps / 1e6
    assert floor < timeline.makespan < 1.07 * floor


def test_few_streams_do_not_reach_the_card_s_bandwidth() -> None:
    def tbps(requests: int) -> float:
        problem = Problem.uniform(requests, 1, 8192, 16)
        return problem.bytes() / simulate(plan_of(problem, 1, requests)).makespan / 1e6

    assert tbps(8) < 0.09 * 8
    assert tbps(8) < 0.5 * tbps(32) < tbps(128) < H200.read_tbps


def test_query_and_result_take_their_share_of_the_memory() -> None:
    # the same keys: 64 rows bring 64 queries a request and leave 64 results (9.4 + 8.4 MB)
    few, many = (
        simulate(plan_of(Problem.uniform(128, 1, 1024, heads), 1, 128, tile_rows=heads), SWAP_AB)
        for heads in (16, 32)
    )
    assert many.makespan > few.makespan + 2.0


def test_streams_that_share_a_memory_fall_behind_until_a_bound() -> None:
    level, uneven = replace(H200, lag=0.0), replace(H200, lag=2.0)
    behind = {}
    for kv_len in (128, 1024, 8192):
        plan = plan_of(Problem.uniform(128, 1, kv_len, 64), 1, 128)
        behind[kv_len] = simulate(plan, uneven).makespan - simulate(plan, level).makespan
    step = 128 * 64 * 1152 / 1e6 / H200.read_tbps
    assert behind[128] == pytest.approx(2 * 2 / 8 * step)
    assert behind[1024] == pytest.approx(behind[8192]) == pytest.approx(2 * step)


def test_pairs_of_row_tiles_ask_l2_for_half() -> None:
    plan = plan_of(Problem.uniform(1, 1, 65536, 128), 64, 128)
    config = KernelConfig("cute/swap_ab_sm90", options=(("pair", 2),))
    tight = replace(H200, l2_tbps=2.0)
    assert simulate(replace(plan, config=config), tight).makespan < simulate(plan, tight).makespan


def test_mail_merges_without_a_counter_s_round_trip() -> None:
    plan = plan_of(Problem.uniform(1, 1, 4096, 64), 16, 16)
    ll = replace(plan, config=KernelConfig("cute/swap_ab_sm90", options=(("fused_merge", 3),)))
    saved = simulate(plan).makespan - simulate(ll).makespan
    assert saved == pytest.approx(H200.merge_us - H200.ll_merge_us)


def test_workers_beyond_the_lanes_come_in_waves() -> None:
    problem = Problem.uniform(133, 1, 1024, 64)
    alone = simulate(plan_of(Problem.uniform(132, 1, 1024, 64), 1, 132))
    waves = simulate(plan_of(problem, 1, 133))
    assert waves.makespan > 1.4 * alone.makespan
    assert waves.tail() > 10 * alone.tail()
    assert waves.utilisation() < alone.utilisation()


def test_clusters_hold_taller_tiles_in_the_same_time() -> None:
    problem = Problem.uniform(66, 1, 2048, 128)
    pairs = simulate(plan_of(problem, 1, 66, tile_rows=128), cluster=2)
    single = simulate(plan_of(problem, 1, 66, tile_rows=128))
    assert pairs.lanes == 66
    assert pairs.makespan < 0.6 * single.makespan


def test_the_critical_path_ends_with_the_call() -> None:
    timeline = simulate(plan_of(Problem.uniform(4, 1, 8192, 128), 7, 56))
    path = timeline.critical_path()
    assert path[-1].end == timeline.makespan
    assert path[0].role == "launch"
    assert [e.role for e in path[-2:]] == ["write", "merge"]
    assert all(a.end <= b.start + 1e-3 for a, b in itertools.pairwise(path))


def test_the_critical_path_goes_through_whoever_was_waited_for() -> None:
    # the second piece is far longer than the first, whose worker is lane 0
    tiles = np.array([(0, 0, 0, 2, 0, 2, 0, 0), (0, 0, 2, 90, 1, 2, 1, 0)], np.int32)
    begin = np.array([0, 1, 2], np.int32)
    plan = Plan(Problem.uniform(1, 1, 64 * 90, 64), 64, 64, "test", "grid", tiles, begin)
    path = simulate(plan).critical_path()
    assert [(e.role, e.sm) for e in path[1:-1]] == [("setup", 1), ("attend", 1), ("write", 1)]
    assert path[-1].role == "merge"


def test_more_bandwidth_and_clock_never_hurt() -> None:
    plan = plan_of(Problem.uniform(16, 1, 4096, 128), 4, 128)
    base = simulate(plan).makespan
    assert simulate(plan, replace(H200, read_tbps=8.0)).makespan <= base
    assert simulate(plan, replace(H200, clock_ghz=1.9)).makespan < base


def test_a_step_of_128_requests_is_simulated_in_under_a_second() -> None:
    rng = np.random.default_rng(0)
    lens = tuple(int(n) for n in rng.integers(500, 30_000, 128))
    plan = plan_of(Problem((1,) * 128, lens, 128), 4, 132)
    start = time.perf_counter()
    timeline = simulate(plan)
    assert time.perf_counter() - start < 1.0
    assert len(timeline) > plan.num_tiles


def test_without_constants_the_fitted_ones_of_the_family_count() -> None:
    for rows in (16, 64):
        plan = plan_of(Problem.uniform(4, 1, 2048, 16), 2, 8, tile_rows=rows)
        fitted = launch.simulate(plan, constants_for(rows))
        assert launch.simulate(plan).makespan == fitted.makespan
        assert launch.bounds(plan) == launch.bounds(plan, constants_for(rows))


def test_power_sets_the_clock_by_the_matrix_load() -> None:
    powered = replace(H200, burst_ghz=1.98)
    small = plan_of(Problem.uniform(1, 1, 4096, 128), 8, 16)
    large = plan_of(Problem.uniform(132, 1, 4096, 128), 1, 66, tile_rows=128)
    at_burst = replace(H200, clock_ghz=1.98)
    assert simulate(small, powered).makespan == simulate(small, at_burst).makespan
    hot, cool = (simulate(large, c, cluster=2).makespan for c in (powered, at_burst))
    assert hot > 1.1 * cool
    assert hot >= max(bounds(large, powered, cluster=2).values())


def test_few_rows_a_tile_cost_what_the_prototype_took() -> None:
    for rows, family in ((16, SWAP_AB), (32, SWAP_AB), (64, H200), (128, H200)):
        assert constants_for(rows).stages == family.stages
    steady = run_pipeline(Pipeline.of(SWAP_AB, 16, 64, 1152), 40).steady() / SWAP_AB.clock_ghz / 1e3
    assert steady == pytest.approx(1.2, abs=0.1)
