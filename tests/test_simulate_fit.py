"""Fitting the simulator: planted constants come back, held-out regimes are judged, files keep."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mla_lab.bench import records
from mla_lab.bench.cases import uniform_case
from mla_lab.bench.peers.ours import describe_choice, describe_plan
from mla_lab.bench.records import describe_case
from mla_lab.core.errors import InvalidInput
from mla_lab.core.gpu import H200 as CARD
from mla_lab.core.problem import Problem
from mla_lab.core.resources import data_dir
from mla_lab.plan.choose import choose
from mla_lab.plan.config import KernelConfig
from mla_lab.simulate import Constants, simulate
from mla_lab.simulate import fit as fitting
from mla_lab.simulate.launches import config_of, launches, remade
from mla_lab.simulate.recorded import STARTS, Fitted, Judgement, error_table, read, write

from .needs import needs_time

SHAPES = [
    (batch, heads, kv_len)
    for batch in (1, 16, 128)
    for heads in (16, 128)
    for kv_len in (1024, 8192)
]
CEILINGS = {"kind": "run", "ceilings": {"read_tbps": 4.4, "gemm_tflops": 790.0}}
ANCHORS = data_dir() / "records/h200_anchor.jsonl"


def record(truth: dict[str, Constants]) -> list[dict[str, Any]]:
    """Result rows as a benchmark writes them, timed by a simulator with planted constants."""
    rows = []
    for batch, heads, kv_len in SHAPES:
        case = uniform_case(batch, 1, heads, kv_len)
        row = {"kind": "result", **describe_case(case), "peer": "mla-lab", "part": 0}
        rows.append({**row, "status": "ok", "us": 1.0})
    for row, launch in zip(rows, launches(rows), strict=True):
        timeline = simulate(launch.plan, truth[launch.kernel], cluster=launch.cluster)
        row["us"] = timeline.makespan
    return rows


@pytest.fixture(scope="module")
def planted() -> dict[str, Constants]:
    return {
        kernel: replace(
            start, lag=1.9, first_byte_us=1.6, merge_us=2.0, clock_ghz=start.clock_ghz * 0.9
        )
        for kernel, start in STARTS.items()
    }


@pytest.fixture(scope="module")
def rows(planted: dict[str, Constants]) -> list[dict[str, Any]]:
    return record(planted)


def test_planted_constants_are_found(
    rows: list[dict[str, Any]], planted: dict[str, Constants]
) -> None:
    cases = launches(rows)
    us = np.array([c.us for c in cases])
    before = np.abs(fitting.predict(STARTS, cases) / us - 1)
    found = fitting.fit(cases, STARTS, rounds=4)
    after = np.abs(fitting.predict(found, cases) / us - 1)
    assert np.median(before) > 0.05
    assert np.median(after) < 0.01
    assert {c.kernel for c in cases} == set(planted)


def test_what_the_card_s_ceilings_say_is_not_fitted() -> None:
    found = fitting.starts([CEILINGS, {**CEILINGS, "kind": "end"}, {"kind": "result"}])
    assert {c.read_tbps for c in found.values()} == {4.4}
    assert found["cute/keep_ab_sm90"].clock_ghz == pytest.approx(790e3 / 4096 / 132)
    assert found["cute/swap_ab_sm90"].clock_ghz == STARTS["cute/swap_ab_sm90"].clock_ghz
    assert "read_tbps" not in (*fitting.SHARED, *fitting.OWN)
    assert fitting.starts([]) == STARTS


def test_a_held_out_regime_is_judged_beside_two_numbers(rows: list[dict[str, Any]]) -> None:
    cases = launches(rows)
    out = fitting.splits(cases)["memory"]
    known, unseen = fitting.parts(cases, out)
    assert {fitting.regime(c.problem) for c in unseen} == {"memory"}
    assert "memory" not in {fitting.regime(c.problem) for c in known}
    verdict = fitting.judge("memory", cases, fitting.fit(known, STARTS, rounds=2))
    assert verdict.cases == out.sum()
    assert verdict.median < verdict.baseline_median
    assert verdict.worst >= verdict.median
    assert "| memory |" in error_table([verdict])


def test_regimes_follow_the_roofline() -> None:
    names = {fitting.regime(uniform_case(b, 1, h, n).problem) for b, h, n in SHAPES}
    assert names == {"latency", "memory", "compute"}


def test_constants_survive_their_file(tmp_path: Path, planted: dict[str, Constants]) -> None:
    path = tmp_path / "simulator.json"
    held = {k: replace(c, merge_us=3.0) for k, c in planted.items()}
    judgement = Judgement("memory", 3, 0.02, 0.1, "b1", 0.3)
    fitted = Fitted("a test", planted, {"memory": held}, (judgement,))
    write(fitted, path)
    assert read(path) == fitted
    assert read(tmp_path / "none.json").constants == STARTS


def test_records_without_a_launch_of_ours_are_refused() -> None:
    rows = [{**row, "peer": "flashmla"} for row in record(STARTS)]
    assert launches(rows) == []
    with pytest.raises(InvalidInput, match="no timed launch of ours"):
        fitting.fit([], STARTS)


@pytest.mark.parametrize(
    "lengths", [(1024,), (8192,), (4096,) * 16, (4096,) * 64, (300, 9000, 2000, 50)]
)
@pytest.mark.parametrize("heads", [16, 128])
def test_a_plan_is_made_again_from_what_a_record_notes(
    lengths: tuple[int, ...], heads: int
) -> None:
    problem = Problem((1,) * len(lengths), lengths, heads)
    choice = choose(problem, CARD)
    plan = choice.plan(problem)
    notes = {**describe_plan(plan), **describe_choice(choice)}
    again = remade(problem, notes)
    assert again == plan
    assert again.config is not None and plan.config is not None
    assert config_of(plan.config.name()).options == plan.config.options
    assert again.config.cluster == plan.config.cluster
    assert remade(problem, {**notes, "tiles": plan.num_tiles + 1}) is None, "of another plan"


def test_a_configuration_is_read_out_of_its_name() -> None:
    for options in ((), (("grid", 1), ("pair", 2)), (("few", 1), ("fused_merge", 3), ("lse", 0))):
        for config in (
            KernelConfig(
                "cute/swap_ab_sm90", tile_rows=16, cluster=8, mask="causal", options=options
            ),
            KernelConfig("cute/keep_ab_sm90", q_dtype="fp16", page_size=32, options=options),
        ):
            found = config_of(config.name())
            for field in ("kernel", "tile_rows", "cluster", "options"):
                assert getattr(found, field) == getattr(config, field), config.name()


def test_notes_of_no_or_another_cost_model_tell_no_plan() -> None:
    problem = Problem.uniform(16, 1, 4096, 128)
    notes = describe_plan(choose(problem, CARD).plan(problem))
    assert remade(problem, notes) is None
    assert remade(problem, {**notes, "model": {"a_constant_of_old": 1.0}, "knobs": {}}) is None


@pytest.fixture(scope="module")
def recorded_rows() -> list[dict[str, Any]]:
    return list(records.read(ANCHORS))


def test_the_error_table_is_what_the_stored_constants_predict(
    recorded_rows: list[dict[str, Any]],
) -> None:
    """Every judgement of data/runtime/simulator.json, made again from the record and the
    constants."""
    fitted, cases = read(), launches(recorded_rows)
    assert fitted.origin == f"{len(cases)} cases of {ANCHORS.name}", (
        f"fix: python -m mla_lab.simulate.fit data/{ANCHORS.name}, then make format"
    )
    assert [j.held_out for j in fitted.judgements] == list(fitting.splits(cases))
    for judgement in fitted.judgements:
        name = judgement.held_out
        again = fitting.judge(name, cases, fitted.held_out[name])
        assert (again.cases, again.worst_case) == (judgement.cases, judgement.worst_case)
        for figure in ("median", "worst", "baseline_median"):
            assert getattr(again, figure) == pytest.approx(getattr(judgement, figure), abs=2e-4)


@needs_time
def test_stored_constants_are_what_the_command_fits(recorded_rows: list[dict[str, Any]]) -> None:
    """The quickest of the fits, whole: without the regime that has most cases."""
    fitted, cases = read(), launches(recorded_rows)
    masks = fitting.splits(cases)
    name = max(masks, key=lambda name: masks[name].sum())
    known, _ = fitting.parts(cases, masks[name])
    again = fitting.fit(known, fitting.starts(recorded_rows))
    for kernel, constants in again.items():
        for constant in (*fitting.SHARED, *fitting.OWN, fitting.CLOCK):
            value = getattr(fitted.held_out[name][kernel], constant)
            assert getattr(constants, constant) == pytest.approx(value, rel=1e-6), constant


def test_memories_are_the_card_s_whatever_the_kernel() -> None:
    keep_ab, swap_ab = read().constants.values()
    for constant in (*fitting.SHARED, "read_tbps"):
        assert getattr(keep_ab, constant) == getattr(swap_ab, constant)
    assert keep_ab.gap_clocks != swap_ab.gap_clocks


def test_every_regime_is_predicted_within_ten_per_cent() -> None:
    """Two more per cent are left to a new record; the table tells what it is."""
    for judgement in read().judgements:
        assert judgement.median <= 0.12, judgement
        assert judgement.median < judgement.baseline_median, judgement


def test_the_command_says_in_one_line_what_it_cannot_fit(tmp_path: Path, capsys: Any) -> None:
    empty, broken = tmp_path / "empty.jsonl", tmp_path / "broken.jsonl"
    empty.touch()
    broken.write_text("{\n[]\n")
    for words, says in (
        ([str(empty)], "records: got no timed launch of ours"),
        ([str(broken)], "broken.jsonl:1: got broken JSON"),
        ([str(empty), "--out", str(tmp_path / "none/x.json")], "--out: got"),
    ):
        with pytest.raises(SystemExit):
            fitting.main(words)
        assert says in capsys.readouterr().err
