"""Variants of a case, a sweep over them, and the cost model fitted to it."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import replace

import pytest
import torch

from mla_lab.bench.cases import anchor_cases, uniform_case
from mla_lab.bench.peers.variant import Variant
from mla_lab.bench.records import Record, describe_case, read, results
from mla_lab.bench.tune import fitting
from mla_lab.bench.tune.calibrate import Launches, Measured
from mla_lab.bench.tune.fitting import Launch, fit_all, held_out, launches, quality
from mla_lab.bench.tune.sweep import METHOD, PER_TILE, Sweep, fitting_tiles, variants
from mla_lab.cli import main
from mla_lab.core.errors import InvalidInput
from mla_lab.core.gpu import H200
from mla_lab.plan import kernel_costs
from mla_lab.plan.check import check_plan
from mla_lab.plan.kernel_costs import recorded_costs
from mla_lab.plan.launch_modes import (
    KEEP_AB_PERSISTENT,
    LAUNCH_MODES,
    SWAP_AB_CLUSTER,
    SWAP_AB_LL,
    SWAP_AB_LL_MULTICAST,
    keep_ab_tiles,
    mode_of,
)

ANCHORS = [case for case in anchor_cases() if case.problem.batch in (1, 16)]
SMALL = [uniform_case(batch, 1, 64, 300) for batch in (1, 2)]


def launch_of(variant, case, us=1.0):
    plan = variant.plan(case.problem)
    measured = Measured(plan, us, variant.config.cluster, variant.fused)
    key = variant.config.kernel, mode_of(variant.config)
    return Launch(case.name, key, measured)


def timed_by(costs, cases):
    """What a card with these constants would measure."""
    by_key = {family.key: family for family in costs}
    found = [launch_of(v, case) for case in cases for v in variants(case.problem)]
    for launch in found:
        (us,) = Launches([launch.measured]).predict(by_key[launch.key])
        yield replace(launch, measured=replace(launch.measured, us=float(us)))


@pytest.mark.parametrize("case", ANCHORS[::4], ids=lambda case: case.name)
def test_variants_are_few_and_different_and_their_plans_hold(case):
    found = variants(case.problem)
    assert len({v.name for v in found}) == len(found) >= 2
    tiles = {(mode_of(v.config), v.config.tile_rows, v.config.cluster) for v in found}
    assert len(found) <= PER_TILE * len(tiles)
    plans = [v.plan(case.problem) for v in found]
    for variant, plan in zip(found, plans, strict=True):
        check_plan(plan)
        assert plan.config == variant.config
        pair = variant.config.option("pair", 1)
        workers = H200.workers(variant.config.cluster * pair) * pair
        by_formula = variant.config.option("grid")
        assert plan.num_workers <= workers if by_formula else plan.num_workers == workers
    work = {
        (str(v.config), p.tiles.tobytes(), p.worker_begin.tobytes())
        for v, p in zip(found, plans, strict=True)
    }
    assert len(work) == len(found)


def test_tiles_that_a_request_would_leave_empty_are_left_out():
    few, many = uniform_case(1, 1, 16, 64).problem, uniform_case(1, 1, 128, 64).problem
    assert fitting_tiles(few, KEEP_AB_PERSISTENT) == [(64, 1)]
    assert fitting_tiles(many, KEEP_AB_PERSISTENT) == [(64, 1), (128, 2)]
    assert (32, 1) not in fitting_tiles(few, SWAP_AB_LL)
    assert fitting_tiles(many, SWAP_AB_CLUSTER) == list(SWAP_AB_CLUSTER.tiles)
    assert fitting_tiles(few, SWAP_AB_LL_MULTICAST) == [], "one row tile has no neighbour"
    assert fitting_tiles(many, SWAP_AB_LL_MULTICAST) == list(SWAP_AB_LL_MULTICAST.tiles)


@pytest.mark.parametrize(
    ("query", "cache"), [("bf16", "e4m3"), ("bf16", "fp8_656"), ("e4m3", "e4m3")]
)
@pytest.mark.parametrize("page_size", [32, 64])
def test_variants_of_eight_bits_are_of_builds_for_those_formats(query, cache, page_size):
    formats = {"q_dtype": query, "kv_format": cache, "page_size": page_size}
    problem = uniform_case(4, 1, 128, 1024, **formats).problem
    found = variants(problem)
    tiles = {
        mode.name: keep_ab_tiles(query, cache, page_size)
        if mode is KEEP_AB_PERSISTENT
        else mode.tiles_for(query, cache)
        for mode in LAUNCH_MODES
    }
    assert found
    for variant in found:
        config = variant.config
        assert (config.tile_rows, config.cluster) in tiles[mode_of(config)]
        assert variant.costs == variant.costs.of(problem)


def test_a_formula_is_swept_over_its_counts_of_pieces():
    found = variants(uniform_case(1, 1, 16, 8192).problem, per_tile=99)
    counts = [dict(v.knobs)["num_splits"] for v in found if v.name.startswith("swap_ab-16x1-ll-")]
    assert {24, 64, 128} <= set(counts), "those within twice the best"
    assert all(v.policy == "fixed" for v in found if v.config.option("grid"))
    crowd = variants(uniform_case(133, 1, 16, 8192).problem, per_tile=99)
    assert not any(v.config.option("grid") for v in crowd), "more than run at once"


def test_a_variant_survives_its_notes():
    for variant in variants(ANCHORS[0].problem):
        plan = variant.plan(ANCHORS[0].problem)
        again = Variant.from_notes(json.loads(json.dumps(variant.notes(plan))))
        assert again == variant
        assert again.plan(ANCHORS[0].problem) == plan


def test_a_variant_runs_its_own_plan_and_says_where_it_cannot():
    assert variants(SMALL[0].problem)[0].available(torch.device("cpu")) is None
    nobody = replace(variants(SMALL[0].problem)[0], backend="nobody")
    assert "nobody" in str(nobody.available(torch.device("cpu")))


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """Rows of a sweep, which no test changes."""

    class Here(Sweep):
        backend = "torch"
        per_tile = 2

    method = replace(METHOD, rounds=1, rotation_bytes=1, workspace_bytes=1 << 24)
    record = Record(tmp_path_factory.mktemp("sweep") / "sweep.jsonl")
    Here(record, [], "cpu", method).run(SMALL)
    return tuple(record.rows)


def test_a_sweep_measures_each_case_s_own_variants(swept):
    rows = results(swept)
    assert {row["status"] for row in rows} == {"ok"}
    for case in SMALL:
        wanted = {v.name for v in variants(case.problem, per_tile=2)}
        assert {row["peer"] for row in rows if row["case"] == case.name} == wanted
    found = launches(swept)
    assert sorted(launch.measured.us for launch in found) == sorted(row["us"] for row in rows)
    assert found[0].measured.plan.problem == SMALL[0].problem


def test_cuts_of_another_cost_model_are_refused():
    (variant, *_) = (v for v in variants(ANCHORS[0].problem) if v.policy == "cost")
    notes = variant.notes(variant.plan(ANCHORS[0].problem))
    with pytest.raises(InvalidInput, match="another cost model"):
        Variant.from_notes({**notes, "costs": {**notes["costs"], "hot_factor": 1.0}})


def test_times_of_other_plans_are_refused(swept):
    rows = deepcopy(swept)
    results(rows)[0]["notes"]["tiles"] += 1
    with pytest.raises(InvalidInput, match="plans as now"):
        launches(rows)
    with pytest.raises(InvalidInput, match="bench sweep"):
        launches(
            [{"kind": "result", **describe_case(SMALL[0]), "peer": "x", "part": 0, "status": "ok"}]
        )


def test_a_fit_finds_the_card_that_was_measured():
    start = recorded_costs()
    card = [
        replace(
            c, tile_ns=c.tile_ns * 1.8, block_row_ns=c.block_row_ns * 0.6, merge_ns=c.merge_ns * 2
        )
        for c in start
    ]
    found = list(timed_by(card, ANCHORS[::5]))
    before, after = quality(start, found), quality(fit_all(found, start), found)
    assert before.error > 0.1
    assert after.error < 0.05
    assert after.close == 1.0
    assert after.worst_regret <= before.worst_regret
    assert quality(card, found).mean_regret == 1.0
    assert "choice within 3% of the best in 100%" in str(after)


def test_parts_are_judged_with_each_other_s_constants():
    start = recorded_costs()
    cases = [uniform_case(batch, 1, 64, 300) for batch in (1, 2, 3, 5, 8, 40)]
    found = list(timed_by(start, cases))
    judged = held_out(found, start)
    assert judged is not None and judged.cases == 6
    assert judged.error < 0.01
    few = [launch for launch in found if launch.case != cases[0].name]
    assert held_out(few, start) is None, "as many cases as parts"


def test_written_constants_are_read_back(tmp_path, monkeypatch):
    start = recorded_costs()
    fitted = [replace(c, tile_ns=1234.56789) for c in start]
    (tmp_path / "runtime").mkdir()
    fitting.write(tmp_path / kernel_costs.RECORD, fitted, "a card", [start[0].key])
    monkeypatch.setattr(kernel_costs, "data_dir", lambda: tmp_path)
    kernel_costs.recorded_costs.cache_clear()
    try:
        read_back = kernel_costs.recorded_costs()
    finally:
        monkeypatch.undo()
        kernel_costs.recorded_costs.cache_clear()
    assert [c.tile_ns for c in read_back] == [1235.0] * len(start)
    assert [c.source for c in read_back] == ["a card", *(c.source for c in start[1:])]


def test_the_commands_sweep_and_fit(tmp_path, capsys):
    record, out = str(tmp_path / "r.jsonl"), tmp_path / "costs.json"
    sweep = ["--batch", "1,2", "--heads", "16", "--kv-len", "200", "--device", "cpu"]
    more = ["--backend", "torch", "--per-tile", "1", "--rounds", "1", "--rotation-mb", "0.01"]
    assert main(["bench", "sweep", record, *sweep, *more]) == 0
    tiles = {v.name for v in variants(uniform_case(1, 1, 16, 200).problem, per_tile=1)}
    assert len(results(read(tmp_path / "r.jsonl"), "ok")) == 2 * len(tiles)
    assert main(["bench", "fit", record, "--judge", record, "--parts", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "fitted   on others" in said and "held out in parts" in said
    assert "wrote" not in said
    assert main(["bench", "fit", record, "--out", str(out)]) == 0
    assert "2 cases" in json.loads(out.read_text(encoding="utf-8"))["costs"][-1]["source"]
