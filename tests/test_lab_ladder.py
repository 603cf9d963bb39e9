"""The ladder in the workbook: pictures, tables, x-ray from the record, a record that cannot be."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest

from mla_lab.backends.cuda.ladder import STEPS
from mla_lab.bench import ladder, records
from mla_lab.core.errors import InvalidInput
from mla_lab.core.resources import data_dir
from mla_lab.jit.source import source_hash
from mla_lab.lab import ladder_facts, session, xray_facts
from mla_lab.lab.explorers.ladder import LABELS, LadderExplorer, LadderXray

from . import notebook_runner


@pytest.fixture(autouse=True)
def forgetful() -> Iterator[None]:
    caches = (ladder_facts.rungs, ladder_facts.recorded_rows, ladder_facts.facts)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()
    for widget in session._instances():
        widget.close()


@pytest.fixture
def from_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine where nothing was compiled."""
    monkeypatch.setattr(xray_facts, "find", lambda config, arch: None)


def test_every_case_has_a_picture_that_says_what_it_found() -> None:
    explorer = LadderExplorer()
    for case in ladder.CASES:
        for gains in (False, True):
            figure = explorer.figure({"case": case.name, "gains": gains})
            guessed, came = figure.data
            assert list(guessed.x) == list(came.x) == LABELS
            assert guessed.marker.pattern.shape == "/" and came.marker.pattern.shape == ""
            assert "times faster in 9 steps" in figure.layout.title.text
    assert "recorded, NVIDIA H200" in explorer.note(explorer.state)


def test_without_a_record_only_predictions_are_drawn(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ladder, "data_dir", lambda: tmp_path)
    explorer = LadderExplorer()
    assert explorer.figure(explorer.state).layout.title.text.endswith("predicted only")
    assert "not recorded" in explorer.note(explorer.state)
    assert "not recorded" in str(ladder_facts.last_step(ladder.CASES[0].name))


@pytest.mark.usefixtures("from_record")
def test_the_x_ray_comes_from_the_record_where_nothing_is_compiled() -> None:
    steps, source = ladder_facts.facts()
    assert source.kind == "recorded"
    assert [step.step for step in steps] == list(range(len(STEPS)))
    assert all(step.spills == 0 and step.registers <= 255 for step in steps)
    assert steps[4].count("HMMA") and not steps[3].count("HMMA")
    explorer = LadderXray()
    for label in LABELS[1:]:
        explorer.set(step=label)
        assert label in explorer.figure(explorer.state).layout.title.text
    assert "bank conflicts" in explorer.set(step=LABELS[5]).note(explorer.state)


def test_the_recorded_x_ray_is_of_these_sources() -> None:
    row = json.loads((data_dir() / ladder_facts.RECORD).read_text())
    fix = "fix: python -m mla_lab.lab.ladder_facts"
    assert row["source_hash"] == source_hash("cuda/ladder"), fix


def test_the_record_is_one_and_keeps_what_was_predicted() -> None:
    rows = ladder.recorded()
    for row in rows:
        jsonschema.validate(row, records.schema())
    for row in ladder_facts.recorded_rows():
        rung = ladder_facts.rungs(row["case"])[row["notes"]["step"]]
        assert row["notes"]["predicted_us"] == pytest.approx(rung.predicted_us, rel=1e-5)


def test_a_step_s_source_by_its_words() -> None:
    text = ladder_facts.code(5, "static __device__ int at", "}")
    assert "piece ^ (row & 7)" in text
    with pytest.raises(InvalidInput, match=r"text of step5_swizzle\.cuh"):
        ladder_facts.code(5, "no such line", "}")
    with pytest.raises(InvalidInput, match="case: got 'b1'"):
        ladder_facts.case_of("b1")


def test_a_table_shows_where_its_numbers_come_from() -> None:
    shown = ladder_facts.gains_table(ladder.CASES[0].name)
    assert len(shown.rows) == len(STEPS)
    assert shown.source is not None and shown.source.kind == "recorded"


@pytest.mark.usefixtures("from_record")
@pytest.mark.parametrize(
    ("field", "value", "message"),
    [("us", 1.0, "below the floor"), ("status", "wrong", "a step is wrong")],
)
def test_the_notebook_refuses_a_record_that_cannot_be(
    monkeypatch: pytest.MonkeyPatch, field: str, value: object, message: str
) -> None:
    rows = [dict(row) for row in ladder.recorded()]
    rows[-2][field] = value
    monkeypatch.setattr(ladder, "recorded", lambda: rows)
    with pytest.raises(AssertionError, match=message):
        notebook_runner.run("53")
