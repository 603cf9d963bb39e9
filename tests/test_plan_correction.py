"""The factor beside the cost model: its features, what it does to a choice, and who taught it."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from mla_lab.bench import fitting
from mla_lab.bench.cases import uniform_case
from mla_lab.bench.fitting import Launch, quality
from mla_lab.bench.learning import learn
from mla_lab.bench.peers.variant import Variant
from mla_lab.bench.sweep import variants
from mla_lab.errors import InvalidInput
from mla_lab.gpu import H200
from mla_lab.plan import Plan, choose, kernel_costs, make_plan
from mla_lab.plan.calibrate import Measured
from mla_lab.plan.correction import FEATURES, MOST, factor, of_formula, of_plan
from mla_lab.plan.cuts import Shape
from mla_lab.plan.kernel_costs import KV_M, MEASURED, Q_M, recorded_costs
from mla_lab.plan.pricing import price, price_others
from mla_lab.plan.ways import way_of
from mla_lab.problem import Problem

RAGGED = Problem((1,) * 6, (100, 4000, 900, 64, 2000, 0), heads=64)


def named(row):
    return dict(zip(FEATURES, row.tolist(), strict=True))


def test_features_are_those_of_a_plan_by_hand():
    # 16 blocks in 4 pieces for each of 2 requests of one row tile, on a card of 16 workers
    plan = make_plan(
        Problem.uniform(2, 1, 1024, heads=64), num_workers=16, policy="fixed", num_splits=4
    )
    found = named(of_plan(plan, 16))
    assert found["constant"] == 1 and found["busy"] == 0.5 and found["walked"] == 0
    assert found["longest"] == pytest.approx(2 / 3) and found["pieces"] == pytest.approx(2 / 3)
    assert found["uneven"] == 0 and found["binary"] == 1
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
    found = of_formula(shape, counts, 132)
    for splits, row in zip(counts.tolist(), found, strict=True):
        plan = make_plan(
            problem, tile_rows=rows, policy="fixed", num_splits=splits, schedule="grid"
        )
        assert row == pytest.approx(of_plan(plan, 132))


def test_no_work_has_no_features_and_no_weights_change_nothing():
    empty = make_plan(Problem((0,), (64,), heads=16))
    assert not of_plan(empty, 132).any()
    found = of_plan(make_plan(RAGGED), 132)
    assert factor((), found) == 1.0
    assert factor((5.0,) * len(FEATURES), found) == pytest.approx(np.exp(MOST)), "it has a limit"


def test_a_choice_follows_what_was_learnt():
    problem = Problem.uniform(16, 1, 4096, heads=16)
    family = replace(KV_M, way="walk")
    slow = (0.2, *(0.0,) * (len(FEATURES) - 1))
    plain = price(problem, H200, family, 16, 1)
    taught = price(problem, H200, replace(family, corrections=((16, 1, slow),)), 16, 1)
    assert taught.predicted_us == pytest.approx(np.exp(0.2) * plain.predicted_us)
    other = price(problem, H200, replace(family, corrections=((32, 1, slow),)), 16, 1)
    assert other == plain, "weights are those of a tile"
    # walks cut by the model or by FlashMLA's rule cost the same until pieces of a power of two do
    binary = (*(0.0,) * (len(FEATURES) - 1), -0.2)
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
    weights = tuple((rng.normal(size=len(FEATURES)) * 0.05).tolist())
    card = [
        replace(c, corrections=((64, 1, weights), (128, 2, weights))) if c.way == "rows" else c
        for c in start
    ]
    cases = [uniform_case(b, 1, h, kv) for b in (2, 12, 40) for h in (16, 64) for kv in (900, 5000)]
    found = [launch for launch in taught_by(card, cases) if launch.key == ("cute/q_m", "rows")]
    learnt = learn(start, found)
    before, after = quality(start, found), quality(learnt, found)
    assert after.error < 0.3 * before.error
    assert after.mean_regret <= before.mean_regret
    assert after.close == 1.0
    fitting.write(tmp_path / kernel_costs.RECORD, learnt, "a card", [start[0].key])
    monkeypatch.setattr(kernel_costs, "data_dir", lambda: tmp_path)
    kernel_costs.recorded_costs.cache_clear()
    try:
        stored = kernel_costs.recorded_costs()
        rows = json.loads((tmp_path / kernel_costs.RECORD).read_text())
        rows["costs"][-1]["corrections"] = {"64x1": {"constant": 1.0}}
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
    taught = replace(MEASURED[-1], corrections=((64, 1, (0.1,) * len(FEATURES)),))
    same = replace(variant, costs=taught)
    assert same.notes(same.plan(problem)) == variant.notes(variant.plan(problem))
