"""What every notebook keeps to: its rhythm, its size, an exercise that tests can prove."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mla_lab.lab.session import prose
from mla_lab.lab.workbook_map import NOTEBOOKS as MAP
from mla_lab.lab.workbook_map import PATHS

from .notebook_runner import NOTEBOOKS, cells_of

ALL = sorted(NOTEBOOKS.glob("*.ipynb"))
each = pytest.mark.parametrize("path", ALL, ids=lambda path: path.stem)


def code(path: Path) -> list[str]:
    return [c["source"] for c in cells_of(path) if c["cell_type"] == "code"]


@each
def test_size(path: Path) -> None:
    lines = [len(cell.splitlines()) for cell in code(path)]
    assert 15 <= len(cells_of(path)) <= 30
    assert sum(lines) <= 120
    assert max(lines) <= 30
    assert 500 <= len(re.findall(r"\w[\w'.-]*", prose(path))) <= 1000


@each
def test_frame(path: Path) -> None:
    number = path.name[:2]
    assert f'lab.start("{number}")' in code(path)[0]
    assert code(path)[-1] == "lab.finish()"
    assert cells_of(path)[0]["source"].startswith(f"# {number} · ")
    assert "**Question.**" in cells_of(path)[0]["source"]


@each
def test_rhythm(path: Path) -> None:
    headings = re.findall(r"^## (.*)$", prose(path), re.MULTILINE)
    for part in ("Predict", "Check", "On an H200"):
        assert any(part in heading for heading in headings), f"no section {part!r}"
    asserts = [cell for cell in code(path) if "assert" in cell]
    assert len(asserts) >= 3


@each
def test_exercise(path: Path) -> None:
    cells = cells_of(path)
    number = path.name[:2]
    stubs = [
        (i, c["metadata"]["nbmake"]["post_cell_execute"])
        for i, c in enumerate(cells)
        if c["metadata"].get("nbmake", {}).get("post_cell_execute")
    ]
    assert stubs, "an exercise with a hidden solution"
    for position, (i, solution) in enumerate(stubs, 1):
        assert "..." in cells[i]["source"]
        assert solution[-1] == f'lab.solved("{number}.{position}")'
        assert not any("assert" in line for line in solution)
        answer = re.fullmatch(rf'lab\.check\("{number}\.{position}", \w+\)', cells[i + 1]["source"])
        assert answer, "a check is one call, its text hidden from the reader"


@each
def test_nothing_needs_the_network_or_a_formula_renderer(path: Path) -> None:
    assert "$" not in prose(path)
    for target in re.findall(r"\]\((.*?)\)", prose(path)):
        assert not target.startswith("http"), "the workbook works offline"


def test_the_map_is_complete_and_tells_the_minutes() -> None:
    assert [entry.file for entry in MAP] == [path.name for path in ALL]
    for entry, path in zip(MAP, ALL, strict=True):
        assert f"About {entry.minutes} minutes" in cells_of(path)[0]["source"]


@pytest.mark.parametrize(("name", "minutes"), [("30 minutes", 30), ("90 minutes", 90)])
def test_a_path_takes_the_time_that_it_promises(name: str, minutes: int) -> None:
    taken = sum(entry.minutes for entry in MAP if entry.number in PATHS[name])
    assert taken <= minutes
