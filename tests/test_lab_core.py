"""The workbook's frame: sessions, swallowed errors, exercises, explorers, SVG, sources."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import ipywidgets as widgets
import plotly.graph_objects as go
import plotly.io as pio
import pytest

from mla_lab import lab
from mla_lab.core.errors import InvalidInput, invalid
from mla_lab.lab import exercises, explorer, progress, session, source, style, svg
from mla_lab.lab.checks import CHECKS, Attempt, Hint
from mla_lab.lab.workbook_map import PATHS, WorkbookMap


class Squares(explorer.Explorer):
    """A small explorer for these tests."""

    name = "Squares"
    source = source.PREDICTED
    frames_over = "n"

    knobs = explorer.knobs(n=explorer.integers("n", 1, 4, 2), word=explorer.field("word", "so"))

    def figure(self, state: dict[str, Any]) -> go.Figure:
        if state["word"] == "fail":
            raise ZeroDivisionError("planted")
        if state["word"] == "bad":
            raise invalid("word", "bad", "so")
        figure = style.new_figure(f"{state['n']} squared is {state['n'] ** 2}")
        figure.add_bar(x=[1], y=[state["n"] ** 2])
        return figure


@pytest.fixture
def notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> session.Session:
    cell = {
        "cell_type": "code",
        "id": "a",
        "metadata": {"nbmake": {"post_cell_execute": ["answer = 42", 'lab.solved("77.1")']}},
        "source": [],
    }
    (tmp_path / "77_test.ipynb").write_text(json.dumps({"cells": [cell]}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(session, "_SESSIONS", [])
    monkeypatch.setattr(exercises, "_SOLVED", set())
    session.start("77")
    return session.current()


def shown(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out


def test_setting_a_value_redraws_before_the_next_statement() -> None:
    squares = Squares()
    before = squares.out.outputs[0]["data"]
    squares.widgets["n"].value = 3
    after = squares.out.outputs[0]["data"]
    assert before["text/plain"] == "2 squared is 4"
    assert after["text/plain"] == "3 squared is 9"
    assert squares.draws == 2


def test_the_state_line_makes_the_same_explorer_again() -> None:
    squares = Squares(n=4)
    again = eval(squares.line(), {"Squares": Squares})
    assert again.state == squares.state == {"n": 4, "word": "so"}
    assert squares.line() in squares.footer.value


def test_an_error_in_a_callback_reaches_the_cell_that_set_the_value() -> None:
    with pytest.raises(ZeroDivisionError, match="planted"):
        Squares().widgets["word"].value = "fail"


def test_a_burst_from_the_browser_is_drawn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import asyncio

    monkeypatch.setattr(explorer, "called_from_browser", lambda: True)

    async def burst() -> Squares:
        squares = Squares()
        for n in (1, 3, 4):
            squares.widgets["n"].value = n
        assert squares.draws == 1
        await asyncio.sleep(3 * explorer.DEBOUNCE_S)
        return squares

    squares = asyncio.run(burst())
    assert squares.draws == 2
    assert squares.out.outputs[0]["data"]["text/plain"] == "4 squared is 16"


def test_an_error_after_a_browser_move_is_shown_and_found_by_finish(
    notebook: session.Session, capsys: pytest.CaptureFixture[str]
) -> None:
    squares = Squares()
    squares.widgets["word"].unobserve_all()
    squares.widgets["word"].value = "fail"
    squares._redraw_shown()
    assert squares.out.outputs[0]["ename"] == "ZeroDivisionError"
    with pytest.raises(session.WidgetFailed, match="ZeroDivisionError: planted"):
        session.finish()
    squares.out.outputs = ()
    squares.widgets["word"].value = "so"
    session.finish()
    assert notebook.passed == []


def test_a_value_that_is_refused_after_a_browser_move_is_one_sentence() -> None:
    squares = Squares()
    squares.widgets["word"].unobserve_all()
    squares.widgets["word"].value = "bad"
    squares._redraw_shown()
    assert squares.out.outputs[0]["traceback"] == ["InvalidInput: word: got bad; supported: so"]
    assert not squares.footer.value, "words of the picture before"
    squares.widgets["word"].value = "fail"
    squares._redraw_shown()
    assert len(squares.out.outputs[0]["traceback"]) > 3, "an error of ours has its frames"
    squares.out.outputs = ()


def test_the_state_line_shows_what_was_typed() -> None:
    squares = Squares(word="<b>a</b> & 'b'")
    assert "word=\"&lt;b&gt;a&lt;/b&gt; &amp; 'b'\")</code>" in squares.footer.value


def test_several_controls_are_set_with_one_drawing() -> None:
    squares = Squares()
    squares.set(n=3, word="then")
    assert squares.draws == 2
    assert squares.state == {"n": 3, "word": "then"}


def test_an_unknown_control_is_named() -> None:
    with pytest.raises(InvalidInput, match=r"m: got 3; supported: a control of Squares"):
        Squares(m=3)
    with pytest.raises(InvalidInput, match=r"m: got 3; supported: a control of Squares"):
        Squares().picture(m=3)


def test_a_value_that_a_control_does_not_have_is_refused_with_those_that_it_has() -> None:
    with pytest.raises(InvalidInput, match=r"m: got 3; supported: a control of Squares"):
        Squares().set(m=3)
    with pytest.raises(InvalidInput, match=r"n: got 'two'; supported: a value as 2"):
        Squares(n="two")
    waves = lab.WaveExplorer()
    with pytest.raises(InvalidInput, match=r"heads: got 17; supported: \(16, 64, 128\)"):
        waves.set(heads=17, batch=16)
    assert waves.state == waves.first


def test_a_picture_of_another_state_leaves_the_controls_alone() -> None:
    squares = Squares()
    assert squares.title(n=4) == "4 squared is 16"
    assert squares.state["n"] == 2
    assert squares.draws == 1


def test_a_cell_that_leaves_an_explorer_moved_fails_where_a_budget_is_set(
    notebook: session.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    squares = Squares(n=3)
    monkeypatch.setenv(session.BUDGET, "1")
    session.finish()
    squares.set(n=4)
    with pytest.raises(session.WidgetFailed, match="Squares\\(n=4"):
        session.finish()
    squares.set(n=3)
    session.finish()


def test_frames_are_every_value_of_the_chosen_slider() -> None:
    frames = Squares().frames()
    assert [value for value, _, _ in frames] == ["1", "2", "3", "4"]
    assert [f"n={n}" in words for n, (_, _, words) in enumerate(frames, 1)] == [True] * 4
    last = frames[3][1]
    assert isinstance(last, go.Figure)
    assert last.layout.title.text == "4 squared is 16"


def test_a_wrong_solution_fails_and_a_wrong_attempt_does_not(
    notebook: session.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    def towel(attempt: Attempt) -> str:
        if attempt() != 42:
            raise Hint("think of a towel")
        return "42 it is"

    monkeypatch.setitem(CHECKS, "77.1", towel)
    monkeypatch.setattr(progress, "keep", lambda number: True)
    exercises.check("77.1", lambda: 41)
    exercises.check("77.1", lambda: ...)
    assert notebook.passed == []
    exercises.solved("77.1")
    with pytest.raises(exercises.ExerciseFailed, match="towel"):
        exercises.check("77.1", lambda: 41)
    with pytest.raises(exercises.ExerciseFailed, match="Nothing is filled in"):
        exercises.check("77.1", lambda: ...)
    exercises.check("77.1", lambda: 42)
    assert notebook.passed == ["77.1"]


def test_reveal_knows_the_solutions_of_the_open_notebook(notebook: session.Session) -> None:
    exercises.reveal("77.1")
    with pytest.raises(InvalidInput, match="an exercise of 77_test"):
        exercises.reveal("77.2")


def test_a_record_without_card_or_date_is_refused() -> None:
    with pytest.raises(InvalidInput, match="recorded with both"):
        source.Source("recorded", card="NVIDIA H200")
    chip = source.Source("recorded", card="NVIDIA H200", date="2026-11-20").chip()
    assert "recorded, NVIDIA H200, 2026-11-20" in chip


def test_the_palette_is_told_apart_by_lightness_and_hue() -> None:
    assert len(set(style.PALETTE)) == 8
    assert set(style.HATCH) == set(source.KINDS)
    assert style.HATCH["predicted"]
    assert not style.HATCH["measured"]


def test_a_grid_has_alt_text_and_a_title_per_cell() -> None:
    cells = [[svg.Cell(f"{i},{j}", svg.tint(i), f"row {i}") for j in range(3)] for i in range(2)]
    picture = svg.grid(cells, "two by three", rows=("a", "b"), columns=("x", "y", "z"))
    assert 'aria-label="two by three"' in picture.markup
    assert len(re.findall("<title>row", picture.markup)) == 6
    assert svg.ramp(0.0) != svg.ramp(1.0)


def test_a_notebook_that_takes_too_much_fails_where_a_budget_is_set(
    notebook: session.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seconds, size, words in ((15.1, 0, "15.1 s of processor"), (1.0, 1_000_001, "1,000,001")):
        with pytest.raises(session.OverBudget, match=words):
            session.check_budget(seconds, size)
    slider = widgets.HTML("x" * 1_100_000)
    monkeypatch.setenv(session.BUDGET, "1")
    with pytest.raises(session.OverBudget, match="bytes of widgets"):
        session.finish()
    slider.close()
    session.finish()
    monkeypatch.delenv(session.BUDGET)
    session.check_budget(15.0, 1_000_000)


def test_no_public_name_is_a_module_s() -> None:
    """`lab.x` would be the function at first, and the module once somebody has imported it."""
    modules = {path.stem for path in Path(lab.__file__).parent.glob("*.py")}
    assert not modules & set(dir(lab))


def test_no_tool_bar_lies_over_a_title(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pio.renderers, "default", "plotly_mimetype")
    chart = pio.renderers._build_mime_bundle(style.new_figure("a long title").to_dict())
    assert chart[explorer.PLOTLY_MIME]["config"]["displayModeBar"] is False
    drawn = Squares().out.outputs[0]["data"]
    assert drawn[explorer.PLOTLY_MIME]["config"]["displayModeBar"] is False


def test_boxes_on_the_page_follow_a_dark_theme(
    notebook: session.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []
    monkeypatch.setattr(session, "display", lambda html: shown.append(html.data))
    session.finish()
    assert "background:var(--jp-layout-color2" in shown[0]
    assert "color:var(--jp-content-font-color1" in shown[0]
    links = WorkbookMap().note({"path": "30 minutes"})
    assert links.count("text-decoration:underline") == len(PATHS["30 minutes"])
