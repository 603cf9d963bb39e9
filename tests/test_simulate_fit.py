"""Fitting the simulator: planted constants come back, held-out regimes are judged, files keep."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mla_lab.bench.cases import uniform_case
from mla_lab.bench.records import describe_case
from mla_lab.errors import InvalidInput
from mla_lab.simulate import Constants, simulate
from mla_lab.simulate import fit as fitting

SHAPES = [
    (batch, heads, kv_len)
    for batch in (1, 16, 128)
    for heads in (16, 128)
    for kv_len in (1024, 8192)
]


def record(truth: dict[str, Constants]) -> list[dict[str, Any]]:
    """Result rows as a benchmark writes them, timed by a simulator with planted constants."""
    rows = []
    for batch, heads, kv_len in SHAPES:
        case = uniform_case(batch, 1, heads, kv_len)
        row = {"kind": "result", **describe_case(case), "peer": "mla-lab", "part": 0}
        rows.append({**row, "status": "ok", "us": 1.0})
    for row, launch in zip(rows, fitting.launches(rows), strict=True):
        timeline = simulate(launch.plan, truth[launch.kernel], cluster=launch.cluster)
        row["us"] = timeline.makespan
    return rows


@pytest.fixture(scope="module")
def planted() -> dict[str, Constants]:
    return {
        kernel: replace(
            start, read_tbps=3.9, first_byte_us=1.6, merge_us=2.0, clock_ghz=start.clock_ghz * 0.9
        )
        for kernel, start in fitting.STARTS.items()
    }


@pytest.fixture(scope="module")
def cases(planted: dict[str, Constants]) -> list[fitting.Launch]:
    return fitting.launches(record(planted))


def test_planted_constants_are_found(
    cases: list[fitting.Launch], planted: dict[str, Constants]
) -> None:
    us = np.array([c.us for c in cases])
    before = np.abs(fitting.predict(fitting.STARTS, cases) / us - 1)
    found = fitting.fit(cases, rounds=4)
    after = np.abs(fitting.predict(found, cases) / us - 1)
    assert np.median(before) > 0.05
    assert np.median(after) < 0.01
    assert {c.kernel for c in cases} == set(planted)


def test_a_held_out_regime_is_judged_beside_two_numbers(cases: list[fitting.Launch]) -> None:
    out = np.array([fitting.regime(c.problem) == "memory" for c in cases])
    verdict = fitting._judge("memory", cases, out)
    assert verdict.rows == out.sum()
    assert verdict.median < verdict.baseline_median
    assert verdict.worst >= verdict.median
    assert "| memory |" in fitting.error_table([verdict])


def test_regimes_follow_the_roofline() -> None:
    names = {fitting.regime(uniform_case(b, 1, h, n).problem) for b, h, n in SHAPES}
    assert names == {"latency", "memory", "compute"}


def test_constants_survive_their_file(tmp_path: Path, planted: dict[str, Constants]) -> None:
    path = tmp_path / "simulator.json"
    fitting.write(planted, path, "a test")
    assert fitting.load(path) == planted
    assert fitting.load(tmp_path / "none.json") == fitting.STARTS


def test_records_without_a_launch_of_ours_are_refused() -> None:
    rows = [{**row, "peer": "flashmla"} for row in record(fitting.STARTS)]
    assert fitting.launches(rows) == []
    with pytest.raises(InvalidInput, match="no timed launch of ours"):
        fitting.fit([])
