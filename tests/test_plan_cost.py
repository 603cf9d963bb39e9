"""The cost model, the search over cuts, the choice of kernel, and how long planning takes."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mla_lab.backends.cute.backend import common_reason
from mla_lab.bench.tune.calibrate import Launches, Measured
from mla_lab.call.form import Features
from mla_lab.core.errors import InvalidInput, Unsupported
from mla_lab.core.gpu import H100, H200, from_properties
from mla_lab.core.problem import Problem
from mla_lab.plan import (
    CostModel,
    Plan,
    choose,
    default_model,
    kernel_costs,
    make_plan,
    predicted_us,
)
from mla_lab.plan.__main__ import BUDGET_MS, planning_ms, ragged_problem
from mla_lab.plan.choose import invariant_kinds
from mla_lab.plan.cuts import Shape
from mla_lab.plan.formula import makespans, most_splits
from mla_lab.plan.kernel_costs import recorded_costs, recorded_of
from mla_lab.plan.launch_modes import KEEP_AB_PERSISTENT, SWAP_AB_CLUSTER, mode_of
from mla_lab.plan.schedule import POLICIES
from mla_lab.plan.search import even, even_candidates, try_cuts
from mla_lab.simulate import H200 as CONSTANTS
from mla_lab.simulate import simulate

from .plan_oracles import problems

KEEP_AB, SWAP_AB = recorded_of(KEEP_AB_PERSISTENT.key), recorded_of(SWAP_AB_CLUSTER.key)
PLAIN = CostModel(
    launch_ns=1000.0,
    tile_ns=100.0,
    block_ns=10.0,
    block_bytes=0,
    card_rate=1.0,
    partial_ns=7.0,
    copy_ns=20.0,
    exchange_ns=2.0,
    merge_ns=50.0,
    merge_partial_ns=3.0,
)


def priced_by_hand(plan: Plan, model: CostModel, step: float) -> float:
    """Microseconds of `plan`, worker by worker, where a step takes `step` ns whoever is busy."""
    at_once = min(plan.num_slots, plan.num_workers)
    leave = model.partial_ns + max(model.copy_ns, at_once * model.exchange_ns)
    clocks, owing = [0.0] * plan.num_workers, set()
    for w in range(plan.num_workers):
        for tile in plan.worker(w):
            steps = math.ceil((tile.block_end - tile.block_begin) / model.kv_ways)
            clocks[w] += model.tile_ns + steps * step
            if tile.num_splits > 1:
                clocks[w] += leave
                owing.add(w)
    last = max(clocks, default=0.0)
    if owing and model.fused_merge:
        merge = model.merge_ns + max(model.copy_ns, plan.num_slots * model.exchange_ns)
        last = max(last, max(clocks[w] for w in owing) + merge)
    elif owing:
        last += model.merge_ns + plan.num_slots * model.merge_partial_ns
    return (model.launch_ns + last) / 1e3


@settings(max_examples=30, deadline=None)
@given(problems(), st.sampled_from(sorted(POLICIES)), st.sampled_from((1, 7, 132)))
def test_prediction_is_the_sum_by_hand(problem, policy, workers):
    for ways, fused in ((1, True), (4, True), (1, False)):
        model = replace(PLAIN, kv_ways=ways, fused_merge=fused)
        plan = make_plan(problem, policy=policy, num_workers=workers, model=model)
        assert predicted_us(plan, model) == pytest.approx(priced_by_hand(plan, model, 10.0))


def test_chain_and_memory_share_a_launch():
    model = replace(PLAIN, block_bytes=1000, card_rate=100.0, memory_ns=500.0, sharpness=2.0)
    assert model.memory_time(25, 0) == 750.0
    assert replace(model, l2_rate=50.0).memory_time(25, 50) == pytest.approx(1250.0)
    assert model.both(np.array(1000.0), 750.0) == pytest.approx(1250.0)
    assert model.both(np.array(0.0), 750.0) == 750.0
    sharp = replace(model, sharpness=50.0)
    assert sharp.both(np.array(1000.0), 750.0) == pytest.approx(1000.0)
    # where reading takes longest, pieces only cost
    problem = Problem.uniform(1, 1, 64 * 64, heads=64)
    whole, cut = (make_plan(problem, policy="fixed", num_splits=n) for n in (1, 8))
    slow, fast = (replace(sharp, card_rate=rate, memory_ns=0.0) for rate in (1.0, 1e6))
    assert predicted_us(whole, slow) == pytest.approx(1.0 + 64, rel=0.01)
    assert predicted_us(whole, slow) < predicted_us(cut, slow)
    assert predicted_us(whole, fast) > predicted_us(cut, fast)


@settings(max_examples=40, deadline=None)
@given(problems(max_batch=12, max_kv=20000), st.sampled_from((16, 66, 132)))
def test_cost_policy_is_no_worse_than_whole_requests_or_uniform_splits(problem, workers):
    """Under its own model, up to the 1 % that a further trial must promise."""
    ours = predicted_us(make_plan(problem, num_workers=workers))
    for policy in ("none", "fixed", "cutlass"):
        plan = make_plan(problem, policy=policy, num_workers=workers)
        assert ours <= predicted_us(plan) * 1.05 + 0.1


@settings(max_examples=30, deadline=None)
@given(problems(max_batch=12, max_kv=20000), st.sampled_from((7, 66)), st.sampled_from((1, 4)))
def test_search_bounds_are_bounds(problem, workers, ways):
    for fused in (True, False):
        model = replace(PLAIN, kv_ways=ways, fused_merge=fused)
        shape = Shape.of(problem, 64, 64, workers)
        if not shape.batch:
            continue
        splits, bounds = even_candidates(shape, model)
        for row, bound in zip(splits, bounds, strict=True):
            # times of tiles are rounded to nanoseconds, the bound's are not
            price = try_cuts(shape, model, even(shape, model, row)).makespan_ns
            assert bound <= price + len(shape.blocks) + 1


def test_search_bound_is_exact_for_one_wave_of_equal_pieces():
    shape = Shape.of(Problem.uniform(4, 1, 64 * 32, heads=64), 64, 64, 64)
    splits, bounds = even_candidates(shape, PLAIN)
    (i,) = np.flatnonzero(splits[:, 0] == 16)
    assert bounds[i] == try_cuts(shape, PLAIN, even(shape, PLAIN, splits[i])).makespan_ns


def test_cost_policy_against_all_others_on_ragged_lengths():
    rng = np.random.default_rng(1)
    model = KEEP_AB.model(Problem.uniform(1, 1, 1, heads=128))
    gain = []
    for batch in (1, 4, 16, 32, 100, 200):
        lens = np.exp(rng.normal(7.5, 1.1, batch)).astype(int) + 1
        problem = Problem((1,) * batch, tuple(lens.tolist()), heads=128)
        took = {p: predicted_us(make_plan(problem, policy=p, model=model), model) for p in POLICIES}
        ours = took.pop("cost")
        gain.append(min(took.values()) / ours)
    assert min(gain) >= 0.98
    assert max(gain) > 1.01


def test_more_expensive_partials_make_fewer_splits():
    problem = Problem((1,), (65536,), heads=128)
    cheap = KEEP_AB.model(problem)
    dear = replace(cheap, exchange_ns=400 * cheap.exchange_ns)
    few = make_plan(problem, model=dear).splits()[0]
    assert 1 <= few < make_plan(problem, model=cheap).splits()[0]
    whole = replace(cheap, merge_ns=1e9)
    assert make_plan(problem, model=whole).splits()[0] == 1


@pytest.mark.parametrize(
    ("batch", "heads", "kv_len", "cluster", "splits", "measured"),
    [
        (1, 128, 8192, 2, 24, 17.2),
        (4, 128, 8192, 2, 12, 25.2),
        (16, 128, 4096, 2, 3, 41.2),
        (64, 128, 4096, 2, 1, 106.4),
        (64, 128, 4096, 1, 2, 115.7),
        (16, 16, 8192, 1, 6, 46.9),
        (128, 64, 8192, 1, 1, 289.2),
        (128, 64, 8192, 1, 2, 311.2),
    ],
)
def test_constants_tell_launches_with_merges(batch, heads, kv_len, cluster, splits, measured):
    """Query rows on M, one H200, 2026-11-20."""
    problem = Problem.uniform(batch, 1, kv_len, heads)
    rows = 64 * cluster
    plan = make_plan(
        problem, tile_rows=rows, num_workers=132 // cluster, policy="fixed", num_splits=splits
    )
    model = KEEP_AB.model(problem, rows, 64, cluster)
    assert predicted_us(plan, model) == pytest.approx(measured, rel=0.13)


@pytest.mark.parametrize(
    ("batch", "heads", "kv_len", "mode", "rows", "cluster", "splits", "measured"),
    [
        (1, 128, 1024, "swap_ab_cluster", 16, 8, 1, 6.5),
        (4, 16, 4096, "swap_ab_ll_m8", 8, 1, 16, 12.7),
        (1, 128, 8192, "swap_ab_ll_multicast", 16, 1, 16, 16.6),
        (1, 128, 8192, "swap_ab_ll", 32, 1, 32, 16.2),
        (4, 16, 4096, "swap_ab_ll", 16, 1, 33, 11.2),
        (16, 16, 8192, "swap_ab_ll", 16, 1, 8, 44.6),
        (16, 16, 8192, "swap_ab_ll", 16, 1, 4, 50.5),
    ],
)
def test_constants_tell_launches_by_formula(
    batch, heads, kv_len, mode, rows, cluster, splits, measured
):
    """KV on M, one H200, 2026-11-20."""
    problem = Problem.uniform(batch, 1, kv_len, heads)
    plan = make_plan(problem, tile_rows=rows, policy="fixed", schedule="grid", num_splits=splits)
    costs = recorded_of(("cute/swap_ab_sm90", mode))
    model = costs.model(problem, rows, 64, cluster)
    assert predicted_us(plan, model) == pytest.approx(measured, rel=0.13)


@settings(max_examples=15, deadline=None)
@given(problems(max_batch=12), st.sampled_from(((8, 8), (16, 1), (32, 4))))
def test_a_formula_is_priced_as_its_plan(problem, tile):
    rows, cluster = tile
    shape = Shape.of(problem, rows, 64, 132)
    model = SWAP_AB.model(problem, rows, 64, cluster)
    most = most_splits(shape, problem.batch, cluster)
    times = makespans(shape, model, most).tolist() if most else []
    for splits in {1, 2, 3, most} & set(range(1, most + 1)):
        plan = make_plan(
            problem, tile_rows=rows, policy="fixed", schedule="grid", num_splits=splits
        )
        assert predicted_us(plan, model) == pytest.approx(times[splits - 1] / 1e3)
        assert plan.num_workers <= 132


def test_a_formula_wants_all_workers_at_once_and_a_counter_for_each_group():
    def most(problem, rows=16, cluster=1):
        shape = Shape.of(problem, rows, 64, H200.workers(cluster))
        return most_splits(shape, problem.batch, cluster)

    assert most(Problem.uniform(4, 1, 8192, heads=16)) == 33
    assert most(Problem.uniform(4, 1, 300, heads=16)) == 5, "a piece has a block"
    assert most(Problem.uniform(1, 1, 8192, heads=128), 16, 8) == 1
    assert most(Problem.uniform(132, 1, 8192, heads=16)) == 1
    assert most(Problem.uniform(133, 1, 8192, heads=16)) == 0
    assert most(Problem((0,), (5,), heads=16)) == 0
    assert most(Problem((1, 0, 0), (9000,) * 3, heads=16)) == 44, "idle workers count"
    many = Shape.of(Problem.uniform(1025, 1, 64, heads=16), 16, 64, 10**6)
    assert (most_splits(many, 1025, 16), most_splits(many, 1025, 8)) == (0, 1)


@settings(max_examples=15, deadline=None)
@given(problems(max_batch=12, max_kv=20000), st.sampled_from(sorted(POLICIES)))
def test_cost_model_and_simulator_mean_the_same_merge(problem, policy):
    """What partials add to a launch of one wave, by either."""
    plan = make_plan(problem, policy=policy)
    assume(plan.num_tiles <= plan.num_workers)
    model = KEEP_AB.model(problem)
    free = replace(model, partial_ns=0.0, copy_ns=0.0, exchange_ns=0.0, merge_ns=0.0)
    ours = predicted_us(plan, model) - predicted_us(plan, free)
    never = replace(CONSTANTS, exchange_tbps=1e9, store_tbps=1e9, merge_tbps=1e9, merge_us=0.0)
    theirs = simulate(plan, CONSTANTS).makespan - simulate(plan, never).makespan
    assert abs(ours - theirs) < 3.0 + 0.3 * max(ours, theirs)


def test_cuts_fall_where_all_ctas_of_a_cluster_have_as_many_blocks():
    problem = Problem((1,), (64 * 100,), heads=16)
    model = SWAP_AB.model(problem, 16, 64, cluster=8)
    plan = make_plan(problem, tile_rows=16, num_workers=15, model=model)
    assert plan.splits()[0] > 1
    assert all(t.block_begin % 8 == 0 for t in plan)


@settings(max_examples=20, deadline=None)
@given(problems(max_batch=12, max_kv=20000), st.sampled_from(sorted(POLICIES)), st.booleans())
def test_launches_as_arrays_are_priced_as_one_by_one(problem, policy, fused):
    cases = []
    for costs, (rows, cluster) in ((KEEP_AB, (64, 1)), (KEEP_AB, (128, 2)), (SWAP_AB, (8, 8))):
        model = costs.model(problem, rows, 64, cluster, fused)
        workers = 132 // cluster
        plan = make_plan(problem, tile_rows=rows, num_workers=workers, policy=policy, model=model)
        cases.append((costs, Measured(plan, 1.0, cluster, fused), predicted_us(plan, model)))
    for costs, case, us in cases:
        assert Launches([case]).predict(costs)[0] == pytest.approx(us, rel=1e-3)
    both = [case for costs, case, _ in cases if costs is KEEP_AB]
    assert Launches(both).predict(KEEP_AB) == pytest.approx(
        [us for _, _, us in cases[:2]], rel=1e-3
    )


def test_constants_are_read_from_their_record(tmp_path, monkeypatch):
    monkeypatch.setattr(kernel_costs, "data_dir", lambda: tmp_path)
    recorded_costs.cache_clear()
    try:
        record = tmp_path / "runtime" / "kernel_costs.json"
        record.parent.mkdir()
        row = dict(vars(replace(SWAP_AB, tile_ns=1.0)))
        record.write_text(json.dumps({"costs": [row]}))
        assert recorded_costs() == (replace(SWAP_AB, tile_ns=1.0),)
        problem = Problem.uniform(1, 1, 100, heads=16)
        assert default_model(problem, 16).tile_ns == 1.0
        with pytest.raises(InvalidInput, match=r"kernel costs: got .*keep_ab_sm90"):
            default_model(problem, 64)
        del row["tile_ns"]
        record.write_text(json.dumps({"costs": [row]}))
        recorded_costs.cache_clear()
        with pytest.raises(InvalidInput, match=r"kernel_costs\.json: got"):
            recorded_costs()
    finally:
        recorded_costs.cache_clear()


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_model_refuses_nonsense(value):
    with pytest.raises(InvalidInput, match=r"CostModel\.tile_ns: got"):
        replace(PLAIN, tile_ns=value)
    with pytest.raises(InvalidInput, match="above 0"):
        replace(PLAIN, card_rate=0.0)
    with pytest.raises(InvalidInput, match="1 or more"):
        replace(PLAIN, sharpness=0.5)


@pytest.mark.parametrize(
    ("problem", "modes"),
    [
        (Problem.uniform(1, 1, 1024, heads=16), {"swap_ab_cluster"}),
        (Problem.uniform(1, 1, 1024, heads=128), {"swap_ab_cluster"}),
        (Problem.uniform(1, 1, 4096, heads=128), {"swap_ab_ll_multicast", "swap_ab_ll"}),
        (Problem.uniform(1, 1, 4096, heads=16), {"swap_ab_ll_m8"}),
        (Problem.uniform(1, 1, 8192, heads=16), {"swap_ab_ll", "swap_ab_ll_m8"}),
        (Problem((1,) * 128, tuple(range(64, 8193, 64)), heads=16), {"swap_ab_persistent"}),
        (Problem.uniform(16, 1, 1024, heads=128), {"keep_ab_persistent"}),
        (Problem.uniform(64, 1, 8192, heads=128), {"keep_ab_persistent"}),
        (Problem.uniform(128, 1, 8192, heads=64), {"keep_ab_persistent"}),
    ],
)
def test_choice_by_regime(problem, modes):
    """Where two are as good as one another, a new record may turn from one to the other."""
    choice = choose(problem)
    assert mode_of(choice.config) in modes
    assert 0 < choice.num_workers <= H200.workers(choice.config.cluster)
    assert "us predicted, least of" in choice.reason
    plan = choice.plan(problem)
    assert plan.num_workers == choice.num_workers
    config = choice.config
    assert predicted_us(plan, choice.model) == pytest.approx(choice.predicted_us)
    assert mode_of(config) in str(choice)


def test_choice_reads_the_problem_and_the_card():
    ragged = Problem((1, 3), (500, 900), heads=64, kv_format="e4m3", page_size=32)
    config = choose(ragged).config
    assert (config.mask, config.kv_format, config.page_size) == ("causal", "e4m3", 32)
    assert choose(Problem.uniform(64, 1, 8192, 64)).config.mask == "none"
    large = Problem.uniform(128, 1, 8192, heads=16)
    assert choose(large, H100).predicted_us > choose(large, H200).predicted_us
    only = choose(Problem.uniform(1, 1, 8192, heads=16), costs=(KEEP_AB,))
    assert only.config.kernel == "cute/keep_ab_sm90"


def test_choice_for_no_work_at_all():
    empty = Problem((0,), (100,), heads=16)
    assert choose(empty).plan(empty).num_tiles == 0


def invariant(problem, gpu=H200, ragged=False):
    return invariant_kinds(problem, gpu, recorded_costs(), ragged)


@settings(max_examples=30, deadline=None)
@given(problems(), problems(), st.booleans())
def test_an_invariant_choice_depends_on_heads_formats_and_own_rows_alone(one, other, ragged):
    mixed = replace(other, heads=one.heads, top_k=one.top_k)
    both = [invariant(one, ragged=ragged), invariant(mixed, H100)]
    rules = [{(k.least_rows, k.most_rows): k.choice for k in kinds} for kinds in both]
    for kind in set(rules[0]) & set(rules[1]):
        first, second = (rule[kind] for rule in rules)
        assert first.config == second.config
        assert (first.policy, first.knobs) == ("fixed_size", second.knobs)
        assert "batch invariant" in first.reason
    for problem, rule in ((one, rules[0]), (mixed, rules[1])):
        for rows in set(problem.rows.tolist()) - {0}:
            served = [least <= rows <= (most or rows) for least, most in rule]
            assert sum(served) == 1, "each request by one launch"


@pytest.mark.parametrize(
    ("heads", "q_len", "rows", "cluster"),
    [(1, 4, 16, 1), (16, 1, 16, 1), (16, 2, 64, 1), (64, 1, 64, 1), (65, 1, 64, 1)],
)
def test_invariant_tiles(heads, q_len, rows, cluster):
    config = choose(Problem.uniform(3, q_len, 900, heads), batch_invariant=True).config
    assert (config.tile_rows, config.cluster, config.mask) == (rows, cluster, "causal")
    alone = choose(Problem.uniform(3, q_len, 900, heads), batch_invariant=True, costs=(KEEP_AB,))
    assert alone.config.kernel == "cute/keep_ab_sm90"


def test_no_plan_holds_requests_of_both_kinds():
    mixed = Problem((1, 4), (900, 900), heads=16)
    assert [kind.choice.config.tile_rows for kind in invariant(mixed)] == [16, 64]
    bounds = Problem((4,), (9,), heads=16)
    assert [kind.least_rows for kind in invariant(bounds)] == [17]
    assert [kind.least_rows for kind in invariant(bounds, ragged=True)] == [1, 17]
    with pytest.raises(Unsupported, match="16 query rows and of more"):
        choose(mixed, batch_invariant=True)


@pytest.mark.serial
@pytest.mark.parametrize("policy", POLICIES)
def test_1024_requests_in_under_10_ms(policy):
    took = min(planning_ms(policy, ragged_problem()))
    print(f"{policy}: {took:.2f} ms, {took / BUDGET_MS:.2f} of the budget")
    assert took < BUDGET_MS


@pytest.mark.parametrize("batch", [1, 64, 300])
@pytest.mark.parametrize("heads", [16, 128])
def test_a_hopper_card_without_known_rates_has_a_kernel(batch: int, heads: int) -> None:
    reported = SimpleNamespace(
        name="NVIDIA H20", multi_processor_count=78, major=9, minor=0, total_memory=96 * 10**9
    )
    card, problem = from_properties(reported), Problem.uniform(batch, 1, 1000, heads)
    assert common_reason(Features(), problem, card) is None
    choice = choose(problem, gpu=card)
    assert choice.config is not None and choice.config.kernel.startswith("cute/")
    assert "no floor: the rates of NVIDIA H20 are unknown" in choice.reason
    assert choice.plan(problem).num_workers <= card.sms
