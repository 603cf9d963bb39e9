"""Pictures of records show the numbers of their rows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mla_lab.bench.records import problem_of, results
from mla_lab.lab import bench_plots as plots
from mla_lab.lab import measuring
from mla_lab.lab.explorers import calls
from mla_lab.lab.explorers import record as record_explorer
from mla_lab.lab.explorers.record import RecordExplorer
from mla_lab.lab.measuring import headline_rows, measured_card, recorded_us
from mla_lab.lab.tables import lines

from .test_bench_records import CASES, row

RUN = {
    "kind": "run",
    "time": "2026-11-20T12:00:00+00:00",
    "environment": {"card": {"name": "NVIDIA H200"}},
    "ceilings": {"gemm_tflops": 700.0, "read_tbps": 4.0},
}
SOURCE = "recorded, NVIDIA H200, 2026-11-20"
ROWS = [
    RUN,
    *(row(case, 10.0, noise=0.0) for case in CASES),
    *(row(case, 12.0, "flashmla", noise=0.0) for case in CASES[:-1]),
    row(CASES[-1], 8.0, "fa3-qv", noise=0.0),
]


def test_speedups():
    figure = plots.speedup_bars(ROWS)
    (bars,) = figure.data
    assert list(bars.y) == [case.name for case in CASES]
    assert list(bars.x) == [1.2] * (len(CASES) - 1) + [0.8]
    assert figure.layout.title.text == "Ours is over 3% faster in 5 of 6 cases, within 3% in 0"
    assert figure.layout.xaxis.title.text.endswith(SOURCE)
    near = [
        RUN,
        *(row(c, 10.0, noise=0.0) for c in CASES),
        *(row(c, 10.2 + 0.2 * i, "flashmla", noise=0.0) for i, c in enumerate(CASES)),
    ]
    title = plots.speedup_bars(near).layout.title.text
    assert title == "Ours is over 3% faster in 5 of 6 cases, within 3% in 1"
    assert len(set(bars.marker.color)) == 2
    assert not plots.speedup_bars(ROWS, "trace").data[0].x


def made(file: str, name: str) -> list[list[str]]:
    """Cells of a table that code wrote into a page."""
    text = (Path(__file__).parents[1] / file).read_text(encoding="utf-8")
    table = re.search(rf"<!-- made: {name} -->\n(.*?)<!-- /made", text, re.DOTALL)
    assert table
    rows = [row for row in table[1].splitlines() if row.startswith("| b")]
    return [row.strip("| ").split(" | ") for row in rows]


def test_the_chart_the_readme_and_the_record_are_one() -> None:
    """Ratios of the chart and times of the explorer are those of the pages' tables, all of the
    plain call, and the chart says so; the calls with a host plan have a line of their own."""
    table = made("data/notes/speed.md", "speed")
    plain = {line[0]: line[1] for line in table}
    short = made("README.md", "speed-short")
    assert len(short) >= 8
    assert all(plain[line[0]] == line[1] for line in short)
    figure = plots.speedup_bars(headline_rows())
    assert "plain call" in figure.layout.xaxis.title.text
    (bars,) = figure.data
    assert list(bars.y) == [line[0] for line in table]
    assert list(bars.text) == [line[-3] for line in table], "beside it the figures in a step"
    ours = plain
    planned = {line[0]: line[1] for line in made("data/notes/speed.md", "speed-planned")}
    for heads in (16, 128):
        case = f"b1_q1_h{heads}_kv8192"
        assert f"{recorded_us(case).us:.1f}" == ours[case]
        explorer = RecordExplorer(heads=heads, kv_len=8192, planned=True)
        drawn = {t.name.split(",")[0]: t.y[0] for t in explorer.picture().data}
        assert f"{drawn['ours']:.1f}" == ours[case]
        assert f"{drawn['ours with a host plan']:.1f}" == planned[case]
        over = {t.name.split(",")[0]: t.y[0] for t in explorer.picture(over_floor=True).data}
        assert explorer.title().endswith(f"predicted, {over['ours']:.1f}x recorded")


def test_no_recorded_time_is_below_its_floor() -> None:
    card = measured_card()
    for one in results(headline_rows(), "ok"):
        assert one["us"] > card.roofline_time(problem_of(one)) * 1e6, one["case"]


def test_rates_under_load_are_those_of_the_row() -> None:
    power = {"us": 20.0, "sm_mhz": 1455.0, "watts": 700.0}
    loaded = {**row(CASES[0], 10.0, noise=0.0), "power": power, "flop": 4e9, "tflops": 400.0}
    chart = plots.load_bars([RUN, loaded], CASES[0].name)
    assert list(chart.data[0].x) == [
        "datasheet",
        "best GEMM",
        "ours,<br>timed",
        "ours,<br>under load",
    ]
    assert list(chart.data[0].y)[1:] == pytest.approx([700.0, 400.0, 200.0])
    assert "1455 MHz at 700 W" in chart.layout.title.text
    assert chart.layout.xaxis.title.text == f"{CASES[0].name}: {SOURCE}"
    assert "not recorded" in plots.load_bars([RUN]).layout.title.text


@pytest.mark.parametrize("table", calls.TABLES)
def test_each_published_table_stands_beside_all_of_its_twins(table: str) -> None:
    ours, *theirs = calls.published_series(table).values()
    assert len(theirs) == 2
    assert len(ours) == 10
    assert all(set(times) == set(ours) for times in theirs)
    words = calls.methods(table)
    assert "CUPTI" in words
    assert "events, median of 5 rounds" in words
    assert "Another card" in words


def test_every_published_figure_is_in_one_table() -> None:
    shown = [c for t in calls.TABLES for c in next(iter(calls.published_series(t).values()))]
    published = {row["case"] for row in lines(calls.PUBLISHED)}
    assert sorted(shown) == sorted(published)


def test_calls_of_the_port_are_drawn_with_their_method() -> None:
    explorer = calls.CallsExplorer(table=calls.GROUPED)
    assert "10 calls" in explorer.title()
    assert "NVIDIA H200" in explorer.footer.value
    port, default = calls.xqa_series().values()
    assert set(default) <= set(port)
    assert set(port) == {row["case"] for row in lines("records/h200_cuda.jsonl") if "case" in row}
    assert "median of 9 rounds" in calls.methods(calls.MLA)


def test_a_floor_of_another_run_is_said_beside_calls_with_a_host_plan() -> None:
    explorer = RecordExplorer(heads=16)
    read = f"the floor is of {measured_card().read_tbps:.2f}"
    assert read not in explorer.note(explorer.state)
    assert read in explorer.note({**explorer.state, "planned": True})


@pytest.mark.parametrize("planned", [False, True])
def test_a_shape_that_is_not_recorded_has_no_chip_of_a_record(planned: bool) -> None:
    explorer = RecordExplorer(heads=128, planned=planned, live=True)
    assert "recorded, NVIDIA H200" in explorer.note(explorer.state)
    explorer.set(q_len=4)
    assert names(explorer) == ["floor of the card", "simulator"]
    assert "NVIDIA" not in explorer.note(explorer.state)
    assert "read" not in explorer.note(explorer.state).replace("recorded", "")
    assert "No call of this shape is recorded" in explorer.footer.value


def names(explorer: RecordExplorer) -> list[str]:
    return [trace.name for trace in explorer.figure(explorer.state).data]


def test_predicted_recorded_and_live_share_one_axis(monkeypatch: pytest.MonkeyPatch) -> None:
    """Live points come only where a GPU is; elsewhere the note says so and the record stands in."""
    explorer = RecordExplorer(heads=16)
    assert names(explorer)[:2] == ["floor of the card", "simulator"]
    assert any(name.startswith("ours, recorded") for name in names(explorer))
    monkeypatch.setattr(record_explorer, "gpu_name", lambda: "")
    monkeypatch.setattr(measuring, "gpu_name", lambda: "")
    measuring.live_us.cache_clear()
    explorer.set(live=True)
    assert "nothing to measure" in explorer.footer.value
    assert not any("now" in name for name in names(explorer))
    monkeypatch.setattr(record_explorer, "gpu_name", lambda: "a card")
    monkeypatch.setattr(record_explorer, "live_us", lambda case: 5.0 * case.problem.batch)
    explorer.redraw()
    live = explorer.figure(explorer.state).data[-1]
    assert live.name == "ours, measured here, now"
    assert dict(zip(live.x, live.y, strict=True)) == {1: 5.0, 16: 80.0, 64: 320.0}
    assert "nothing to measure" not in explorer.footer.value
