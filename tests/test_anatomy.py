"""Anatomies: phases add up to the call, spans nest in a timeline, wrong rows are refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from mla_lab.bench.cases import uniform_case
from mla_lab.core.errors import InvalidInput
from mla_lab.core.resources import data_dir
from mla_lab.lab.attempt_log import AttemptExplorer, attempts
from mla_lab.lab.explorers import anatomy as anatomy_explorer
from mla_lab.lab.explorers.anatomy import AnatomyExplorer, cta_figure, role_figure
from mla_lab.simulate import anatomy

COMMON = {
    "schema": anatomy.SCHEMA,
    "case": "b1_q1_h16_kv8192",
    "peer": "mla-lab",
    "kernel": "cute_swap_ab_sm90",
    "card": "a card of this test",
    "date": "2026-01-02",
    "commit": "0123456",
}
PHASES = [["launch", 700], ["setup", 300], ["first_byte", 1500], ["loop", 4000], ["merge", 2500]]
CALL: dict[str, Any] = {**COMMON, "kind": "phases", "call_us": 9.0, "phases": PHASES}
ROLES: dict[str, Any] = {
    **COMMON,
    "kind": "spans",
    "lanes": "role",
    "clock_ghz": 1.6,
    "ns": [
        row
        for block in range(4)
        for row in (
            [0, "load", 5000 + 1500 * block, 5800 + 1500 * block, block + 7],
            [1, "qk", 6000 + 1500 * block, 6700 + 1500 * block, block + 7],
            [2, "softmax", 6700 + 1500 * block, 7200 + 1500 * block, block + 7],
            [3, "pv", 7500 + 1500 * block, 8200 + 1500 * block, block + 7],
        )
    ],
}
VALIDATOR = jsonschema.Draft202012Validator(
    json.loads((data_dir() / "runtime/anatomy.schema.json").read_text(encoding="utf-8"))
)


def written(tmp_path: Path, *rows: dict[str, Any]) -> Path:
    path = tmp_path / "anatomy.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_both_kinds_are_read_and_obey_the_schema(tmp_path: Path) -> None:
    phases, spans = anatomy.read(written(tmp_path, CALL, ROLES))
    assert phases[0].call_us == 9.0
    assert anatomy.summed(phases[0].phases)["loop"] == 4.0
    assert spans[0].timeline.lanes == 4
    assert spans[0].timeline.makespan == 12.7
    for row in (CALL, ROLES):
        VALIDATOR.validate(row)
    assert anatomy.read(tmp_path / "none.jsonl") == ([], [])


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"call_us": 10.0}, "9.00 us together, 10.00 us the call"),
        ({"call_us": math.nan}, "9.00 us together, nan us the call"),
        ({"phases": [["loop", math.nan]]}, "nan us together, 9.00 us the call"),
        ({"phases": [["loop", "9000"]]}, "pairs of a phase and its ns"),
        ({"phases": [["loop"]]}, "pairs of a phase and its ns"),
        ({"phases": [[["loop"], 9000]]}, "pairs of a phase and its ns"),
        ({"plain_us": "6"}, "got plain_us '6'"),
        ({"phases": [["lunch", 9000]]}, "lunch"),
        ({"phases": [["loop", 9900], ["other", -900]]}, "one of -0.90 us"),
        ({"schema": 1}, "anatomy/1"),
        ({"commit": None}, "got commit None"),
        ({"phases": []}, "phases: got none"),
        ({"phases": None}, "got phases None"),
        ({"call_us": "9"}, "got call_us '9'"),
        ({"kind": "spans"}, "anatomy.jsonl:1: got no lanes"),
        ({"kind": "spans", "lanes": "role", "ns": []}, "ns: got none"),
        ({"kind": "spans", "lanes": "role", "ns": [[0, "lunch", 0, 1, 0]]}, "lunch"),
        ({"kind": "spans", "lanes": "role", "ns": [[0, "load"]]}, "lane, role, begin and end"),
        ({"kind": "spans", "lanes": "role", "ns": [7]}, "lane, role, begin and end"),
        ({"kind": "spans", "lanes": "role", "ns": [[0, "load", None, 1, 0]]}, "begin and end"),
        ({**ROLES, "clock_ghz": "fast"}, "got clock_ghz 'fast'"),
    ],
)
def test_a_row_that_breaks_a_rule_is_refused(
    tmp_path: Path, change: dict[str, Any], match: str
) -> None:
    with pytest.raises(InvalidInput, match=match):
        anatomy.read(written(tmp_path, {**CALL, **change}))


def test_a_line_that_is_no_row_is_named(tmp_path: Path) -> None:
    path = tmp_path / "anatomy.jsonl"
    for line in (b"[1]\n", b"\xff\n", b"{\n"):
        path.write_bytes(line)
        with pytest.raises(InvalidInput, match=r"anatomy\.jsonl:1: got"):
            anatomy.read(path)


def test_spans_of_a_lane_do_not_overlap(tmp_path: Path) -> None:
    overlap = {**ROLES, "ns": [[0, "load", 0, 900, 0], [0, "load", 800, 1000, 1]]}
    with pytest.raises(InvalidInput, match="lanes without overlap"):
        anatomy.read(written(tmp_path, overlap))
    backwards = {**ROLES, "ns": [[0, "load", 900, 800, 0]]}
    with pytest.raises(InvalidInput, match="end after they begin"):
        anatomy.read(written(tmp_path, backwards))
    with pytest.raises(InvalidInput, match="lanes"):
        anatomy.read(written(tmp_path, {**ROLES, "lanes": "warp"}))


@pytest.mark.parametrize("shape", [(1, 16, 1024), (1, 128, 8192), (4, 128, 4096)])
def test_a_prediction_adds_up_to_its_call(shape: tuple[int, int, int]) -> None:
    batch, heads, kv_len = shape
    guess = anatomy.predicted("case", uniform_case(batch, 1, heads, kv_len).problem)
    assert sum(us for _, us in guess.phases) == pytest.approx(guess.call_us)
    assert {"launch", "setup", "first_byte", "loop"} <= set(anatomy.summed(guess.phases))


def test_recorded_rows_are_in_order() -> None:
    """Whatever `data/` holds of them today: read at all, and by the schema's rules."""
    phases, spans = anatomy.read()
    path = data_dir() / anatomy.RECORD
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    assert len(phases) + len(spans) == len(lines)
    for line in lines:
        VALIDATOR.validate(json.loads(line))


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peer = {**CALL, "peer": "flashmla", "call_us": 18.0}
    peer["phases"] = [["launch", 700], ["loop", 12000], ["gap", 1300], ["merge", 4000]]
    rows = anatomy.read(written(tmp_path, peer, CALL, ROLES))
    monkeypatch.setattr(anatomy_explorer, "recorded_rows", lambda: rows)


@pytest.mark.usefixtures("recorded")
def test_recorded_calls_stand_above_the_prediction() -> None:
    explorer = AnatomyExplorer()
    calls = explorer.calls("b1_q1_h16_kv8192")
    assert [c.peer for c in calls] == ["mla-lab", "flashmla", "simulator"]
    figure = explorer.figure(explorer.state)
    assert figure.layout.title.text.startswith("loop over blocks: 44% of 9.0 us")
    loop = next(bar for bar in figure.data if bar.name == "loop over blocks")
    assert list(loop.x[:2]) == [4.0, 12.0]
    assert list(loop.marker.pattern.shape) == ["", "", "/"]
    assert "recorded, a card of this test, 2026-01-02" in explorer.note(explorer.state)
    explorer.set(share=True)
    bars = explorer.figure(explorer.state).data
    assert sum(bar.x[0] for bar in bars) == pytest.approx(1.0)


@pytest.mark.usefixtures("recorded")
def test_measured_roles_lie_below_the_predicted_ones() -> None:
    figure = role_figure()
    title = figure.layout.title.text
    assert title.startswith("A block takes ") and " us predicted and 1.50 us recorded;" in title
    assert title.endswith(" and 91%")  # 2176 clocks at 1.6 GHz
    assert {bar.name for bar in figure.data if bar.xaxis == "x2"} == {"load", "QK", "softmax", "PV"}
    assert min(bar.base[0] for bar in figure.data if bar.xaxis == "x2") == 0.0
    table = anatomy_explorer.anatomy_table()
    assert table.column("kernel of")[:2] == ["flashmla", "mla-lab"]


def test_without_a_record_both_pictures_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(anatomy_explorer, "recorded_rows", lambda: ((), ()))
    explorer = AnatomyExplorer(case="b1_q1_h128_kv8192")
    assert "not recorded" in explorer.note(explorer.state)
    assert "not recorded yet" in role_figure().layout.title.text


def test_attempts_are_told_with_their_reason() -> None:
    everything, alone = attempts("cute/keep_ab_sm90"), attempts("cute/keep_ab_sm90", "B1 H128")
    assert 0 < len(alone.rows) < len(everything.rows)
    assert all("B1 H128" in row[0] + row[1] for row in alone.rows)
    assert len(set(everything.column("date"))) > 1
    assert set(everything.column("card")) >= {"NVIDIA H200"}
    with pytest.raises(InvalidInput, match="cute/swap_ab_sm90"):
        attempts("cute/none")


def test_an_attempt_is_shown_with_its_own_card_and_date() -> None:
    log = AttemptExplorer()
    first = log.state["kernel"]
    kernels = [k for k in log.widgets["kernel"].options if k != first]
    for kernel in kernels:
        rows = attempts(kernel)
        log.widgets["kernel"].value = kernel
        assert log.widgets["number"].max == len(rows.rows)
        for number, row in enumerate(rows.rows, 1):
            note = log.note({"kernel": kernel, "number": number})
            assert all(word in note for word in row[5:])
    last = max(kernels, key=lambda k: len(attempts(k).rows))
    log.set(kernel=last).set(number=len(attempts(last).rows))
    shortest = min(kernels, key=lambda k: len(attempts(k).rows))
    log.widgets["kernel"].value = shortest
    assert log.state["number"] == len(attempts(shortest).rows) == log.widgets["number"].max


def test_ctas_are_drawn_beside_their_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lanes of a launch: predicted left, recorded right, both from their first instruction on."""
    spans = [[lane, "load", 5000, 6000, -1] for lane in range(4)]
    spans += [[lane, "attend", 6000, 8000 + 500 * lane, -1] for lane in range(4)]
    row = {**ROLES, "lanes": "CTA", "case": "b1_q1_h16_kv8192", "ns": spans}
    found = anatomy._spans(row, "here")
    monkeypatch.setattr(anatomy_explorer, "recorded_rows", lambda: ((), (found,)))
    figure = cta_figure("b1_q1_h16_kv8192")
    assert "3.8 recorded" in figure.layout.title.text  # mean of 3.0, 3.5, 4.0 and 4.5
    assert {bar.name for bar in figure.data if bar.xaxis == "x2"} == {"load", "attend"}
    assert min(min(bar.base) for bar in figure.data) == 0.0
    monkeypatch.setattr(anatomy_explorer, "recorded_rows", lambda: ((), ()))
    assert "not recorded yet" in cta_figure("b1_q1_h16_kv8192").layout.title.text
    with pytest.raises(InvalidInput, match="b1_q1_h128_kv8192"):
        cta_figure("b2")
