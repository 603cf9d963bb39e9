"""The factor beside the cost model: its features, what it does to a choice, and who taught it."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from mla_lab.bench.cases import uniform_case
from mla_lab.bench.peers.variant import Variant
from mla_lab.core.errors import InvalidInput
from mla_lab.core.gpu import H200
from mla_lab.core.problem import Problem
from mla_lab.plan import Plan, choose, kernel_costs, make_plan
from mla_lab.plan.correction import FEATURES, MOST, PLACE, SPREADS, WIDTH, Call, Correction, of_plan
from mla_lab.plan.cuts import Shape
from mla_lab.plan.kernel_costs import KV_M, MEASURED, Q_M, recorded_costs
from mla_lab.plan.pricing import price, price_others
from mla_lab.plan.ways import way_of
from mla_lab.tune import fitting
from mla_lab.tune.calibrate import Measured
from mla_lab.tune.fitting import Launch, quality
from mla_lab.tune.learning import learn
from mla_lab.tune.sweep import variants

RAGGED = Problem((1,) * 6, (100, 4000, 900, 64, 2000, 0), heads=64)


def named(row):
    """Features by name; what is told twice, here and as a place, as the former."""
    names = (*FEATURES, *(f"at {name}" for name in PLACE))
    return dict(zip(names, row.tolist(), strict=True))


def a_constant(log):
    return Correction((log, *(0.0,) * (len(FEATURES) - 1)))


def test_features_are_those_of_a_plan_by_hand():
    # 16 blocks in 4 pieces for each of 2 requests of one row tile, on a card of 16 workers
    plan = make_plan(
        Problem.uniform(2, 1, 1024, heads=64), num_workers=16, policy="fixed", num_splits=4
    )
    found = named(of_plan(plan, 16))
    assert found["constant"] == 1 and found["busy"] == 0.5 and found["walked"] == 0
    assert found["longest"] == pytest.approx(2 / 3) and found["pieces"] == pytest.approx(2 / 3)
    assert found["uneven"] == 0 and found["binary"] == 1
    logs = (1, 4, 6, 2)  # of 2 row tiles, 16 blocks, 64 rows, 4 pieces
    for name, log, spread in zip(PLACE, logs, SPREADS, strict=False):
        assert found[f"at {name}"] == pytest.approx(log / spread)
    thirds = make_plan(
        Problem.uniform(2, 1, 1024, heads=64), num_workers=4, policy="fixed", num_splits=3
    )
    found = named(of_plan(thirds, 4))
    assert found["busy"] == 1 and found["walked"] == 1 and found["binary"] == 0
    # pieces of 6, 6, 5, 5, 5, 5 blocks on four workers: 6, 6, 10, 10
    assert found["uneven"] == pytest.approx(10 / 8 - 1)


@pytest.mark.parametrize("rows", [16, 32])
@pytest.mark.parametrize("problem", [RAGGED, Problem.uniform(4, 2, 5000, heads=32)])
def test_a_formula_has_the_features_of_its_plans(problem, rows):
    counts = np.array([1, 2, 5, 7, 16])
    shape = Shape.of(problem, rows, 64, 132)
    found = Call.of(problem, shape, 132).of_formula(counts)
    for splits, row in zip(counts.tolist(), found, strict=True):
        plan = make_plan(
            problem, tile_rows=rows, policy="fixed", num_splits=splits, schedule="grid"
        )
        assert row == pytest.approx(of_plan(plan, 132))


def test_no_work_has_no_measures_and_a_factor_has_limits():
    empty = make_plan(Problem((0,), (64,), heads=16))
    assert not of_plan(empty, 132).any()
    found = of_plan(make_plan(RAGGED), 132)
    assert KV_M.factor(16, 1, found) == 1.0, "nothing learnt"
    assert Correction((5.0,) * len(FEATURES)).factor(found) == pytest.approx(np.exp(MOST))
    assert a_constant(-0.1).factor(found) == pytest.approx(np.exp(-0.1))


def test_a_bump_is_felt_near_its_place():
    found = of_plan(make_plan(RAGGED), 132)
    place = found[len(FEATURES) :]
    there = Correction((0.0,) * len(FEATURES), ((*place.tolist(), 0.1),))
    assert there.factor(found) == pytest.approx(np.exp(0.1))
    aside = place.copy()
    aside[0] += WIDTH
    moved = Correction((0.0,) * len(FEATURES), ((*aside.tolist(), 0.1),))
    assert moved.factor(found) == pytest.approx(np.exp(0.1 * np.exp(-0.5)))
    both = Correction(there.weights, there.bumps + moved.bumps)
    assert both.factor(found) == pytest.approx(there.factor(found) * moved.factor(found))


def test_a_choice_follows_what_was_learnt():
    problem = Problem.uniform(16, 1, 4096, heads=16)
    family = replace(KV_M, way="walk")
    slow = a_constant(0.2)
    plain = price(problem, H200, family, 16, 1)
    taught = price(problem, H200, replace(family, corrections=((16, 1, slow),)), 16, 1)
    assert taught.predicted_us == pytest.approx(np.exp(0.2) * plain.predicted_us)
    other = price(problem, H200, replace(family, corrections=((32, 1, slow),)), 16, 1)
    assert other == plain, "weights are those of a tile"
    # walks cut by the model or by FlashMLA's rule cost the same until pieces of a power of two do
    binary = Correction((*(0.0,) * (len(FEATURES) - 1), -0.2))
    costs = (replace(Q_M, corrections=((64, 1, binary), (128, 2, binary))),)
    splits = choose(problem, costs=costs).plan(problem).splits().max()
    assert np.log2(splits) % 1 == 0


def test_other_cuts_are_plans_of_their_policies():
    found = price_others(RAGGED, H200, Q_M, 64, 1)
    assert [c.policy for c in found].count("greedy") == 1
    assert {c.policy for c in found} <= {"greedy", "none", "fixed"} and len(found) == 4
    for choice in found:
        plan = choice.plan(RAGGED)
        assert plan.policy == choice.policy and choice.predicted_us > 0
    assert price_others(Problem((0,), (64,), heads=16), H200, Q_M, 64, 1) == []


def taught_by(card, cases):
    """Launches that take what `card` says, corrections included."""
    found = []
    for case in cases:
        for variant in variants(case.problem):
            plan: Plan = variant.plan(case.problem)
            config = variant.config
            measured = Measured(plan, 1.0, config.cluster, variant.fused)
            found.append(Launch(case.name, (config.kernel, way_of(config)), measured))
    times = fitting.Timed(found).predict({family.key: family for family in card})
    return [
        replace(x, measured=replace(x.measured, us=float(us)))
        for x, us in zip(found, times, strict=True)
    ]


def test_weights_are_found_again_and_stored(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    start = fitting.bare(recorded_costs())
    weights = Correction(tuple((rng.normal(size=len(FEATURES)) * 0.05).tolist()))
    card = [
        replace(c, corrections=((64, 1, weights), (128, 2, weights))) if c.way == "rows" else c
        for c in start
    ]
    cases = [uniform_case(b, 1, h, kv) for b in (2, 12, 40) for h in (16, 64) for kv in (900, 5000)]
    found = [
        launch for launch in taught_by(card, cases) if launch.key == ("cute/keep_ab_sm90", "rows")
    ]
    learnt = learn(start, found)
    before, after = quality(start, found), quality(learnt, found)
    assert after.error < 0.3 * before.error
    assert after.mean_regret <= before.mean_regret
    assert after.close == 1.0
    (tmp_path / "runtime").mkdir()
    fitting.write(tmp_path / kernel_costs.RECORD, learnt, "a card", [start[0].key])
    monkeypatch.setattr(kernel_costs, "data_dir", lambda: tmp_path)
    kernel_costs.recorded_costs.cache_clear()
    try:
        stored = kernel_costs.recorded_costs()
        rows = json.loads((tmp_path / kernel_costs.RECORD).read_text())
        rows["costs"][-1]["corrections"] = {"64x1": {"weights": {"constant": 1.0}}}
        (tmp_path / kernel_costs.RECORD).write_text(json.dumps(rows))
        kernel_costs.recorded_costs.cache_clear()
        with pytest.raises(InvalidInput, match="corrections of 64x1"):
            kernel_costs.recorded_costs()
    finally:
        monkeypatch.undo()
        kernel_costs.recorded_costs.cache_clear()
    assert [c.corrections for c in stored] == [c.corrections for c in learnt]
    assert learn(start, found) == learnt, "the same record teaches the same"


def test_cuts_do_not_depend_on_what_was_learnt():
    problem = Problem.uniform(3, 1, 5000, heads=64)
    variant = Variant(choose(problem, costs=MEASURED[-1:]).config, 132, "cost", (), MEASURED[-1])
    taught = replace(MEASURED[-1], corrections=((64, 1, a_constant(0.1)),))
    same = replace(variant, costs=taught)
    assert same.notes(same.plan(problem)) == variant.notes(variant.plan(problem))
