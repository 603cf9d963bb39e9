"""Pictures of records show the numbers of their rows."""

from __future__ import annotations

import json

import pytest

from mla_lab.bench.gate import compare
from mla_lab.core.resources import data_dir
from mla_lab.lab import bench_plots as plots
from mla_lab.lab.explorers import record as record_explorer
from mla_lab.lab.explorers.record import RecordExplorer

from .test_bench_records import CASES, record_of, refused, row

RUN = {"kind": "run", "ceilings": {"gemm_tflops": 700.0, "read_tbps": 4.0}}
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
    assert figure.layout.title.text == "Ours is faster in 5 of 6 cases"
    assert len(set(bars.marker.color)) == 2
    assert not plots.speedup_bars(ROWS, "trace").data[0].x


def test_the_roofline_bends_where_the_ceilings_meet():
    ceiling, points = plots.roofline(ROWS).data
    assert ceiling.x[1] == pytest.approx(700 / 4.0)
    assert ceiling.y[1] == 700
    assert len(points.x) == len(CASES)
    assert len(plots.roofline(ROWS[1:]).data) == 1, "without a GPU there is no ceiling to draw"


def test_lines_over_the_kv_length():
    lines = {line.name: line for line in plots.times_by_kv_len(ROWS, batch=16, heads=128).data}
    assert list(lines["mla-lab"].x) == [1024, 8192]
    assert list(lines["flashmla"].y) == [12.0, 12.0]
    assert lines["mla-lab"].marker.symbol != lines["flashmla"].marker.symbol


def test_raw_rounds():
    boxes = plots.rounds_strip([*ROWS, refused(CASES[1])], CASES[0].name).data
    assert [box.name for box in boxes] == ["mla-lab", "flashmla"]
    assert len(boxes[0].y) == 9


def test_the_gate():
    chart = plots.gate_chart(compare(record_of(0), record_of(1, slow=1.1)))
    assert chart.layout.title.text == "6 of 6 slower"
    assert set(chart.data[0].marker.symbol) == {"x"}
    assert plots.gate_chart(compare(record_of(0), record_of(0))).layout.title.text == (
        "Nothing is slower"
    )


def test_two_cards():
    text = (data_dir() / "published/published_blackwell.jsonl").read_text(encoding="utf-8")
    published = [json.loads(line) for line in text.splitlines()]
    twin = {**row(CASES[0], 30.0, noise=0.0), "case": "b1_q1_h128_kv8192_p32"}
    bars = plots.cards_side_by_side([twin], published).data
    assert [bar.x[0] for bar in bars] == [30.0, 24.1, 18.5]


def names(explorer: RecordExplorer) -> list[str]:
    return [trace.name for trace in explorer.figure(explorer.state).data]


def test_predicted_recorded_and_live_share_one_axis(monkeypatch: pytest.MonkeyPatch) -> None:
    """Live points come only where a GPU is; elsewhere the note says so and the record stands in."""
    explorer = RecordExplorer(heads=16)
    assert names(explorer)[:2] == ["floor of the card", "simulator"]
    assert any(name.startswith("ours, recorded") for name in names(explorer))
    monkeypatch.setattr(record_explorer, "gpu_name", lambda: "")
    record_explorer.live_us.cache_clear()
    explorer.set(live=True)
    assert "nothing to measure" in explorer.footer.value
    assert not any("now" in name for name in names(explorer))
    monkeypatch.setattr(record_explorer, "gpu_name", lambda: "a card")
    monkeypatch.setattr(record_explorer, "live_us", lambda batch, *_: 5.0 * batch)
    explorer.redraw()
    live = explorer.figure(explorer.state).data[-1]
    assert live.name == "ours, measured here, now"
    assert dict(zip(live.x, live.y, strict=True)) == {1: 5.0, 16: 80.0, 64: 320.0}
    assert "nothing to measure" not in explorer.footer.value
