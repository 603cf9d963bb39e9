"""The course: sessions cover the workbook, words are used, and a class of three is graded."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from mla_lab import cli
from mla_lab.core.errors import InvalidInput
from mla_lab.lab.checks import CHECKS
from mla_lab.lab.course.answer_code import answers
from mla_lab.lab.course.grade import PASSED, REFUSED, SAID, UNTOUCHED, document, grade, report
from mla_lab.lab.course.submission import plain, works
from mla_lab.lab.course.syllabus import MINUTES, RECAP, SESSIONS, syllabus
from mla_lab.lab.glossary import pattern, terms, used_in, words_html
from mla_lab.lab.session import prose
from mla_lab.lab.workbook_map import NOTEBOOKS

from .notebook_runner import NOTEBOOKS as FOLDER
from .notebook_runner import cells_of, path_of


def handed_in(path: Path, cells: list[str]) -> None:
    """A notebook of code cells, as a student saves it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    nodes = [{"cell_type": "code", "source": text.splitlines(keepends=True)} for text in cells]
    path.write_text(json.dumps({"cells": nodes, "metadata": {}, "nbformat": 4}))


def solved(number: str) -> list[str]:
    """Code cells of a notebook, stubs followed by their solutions."""
    found = []
    for cell in cells_of(path_of(number)):
        if cell["cell_type"] == "code":
            solution = cell["metadata"].get("nbmake", {}).get("post_cell_execute", [])
            lines = [line for line in solution if "lab.solved" not in line]
            found.append("\n".join([cell["source"], *lines]))
    return found


WRONG = [
    'from mla_lab import lab\nlab.start("00")',
    "%time x = 1\n!ls",
    "this is no Python",
    "import base64\nprint(1 / 0)",
    "def cache_bytes():\n    return 576, 81920",
    'lab.check("00.1", cache_bytes)',
    "def my_splits(tiles, blocks, sms):\n    return helper(blocks)\n\n"
    "def helper(n):\n    return min(n, 132)",
    'lab.check("31.1", my_splits)',
    "import os\nmerge = lambda *a: os._exit(0)",
    'lab.check("32.1", merge)',
    'def mine(*a):\n    raise SystemExit("\\x1b[31mred")',
    'lab.check("33.1", mine)',
    "def rest(*a):\n    return ...",
    'lab.check("30.1", rest)',
]


@pytest.fixture(scope="module")
def school(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three students: all right; wrong in several ways; empty and torn files."""
    folder = tmp_path_factory.mktemp("class")
    handed_in(folder / "ada" / "00_start_here.ipynb", solved("00"))
    handed_in(folder / "ada" / "70.ipynb", solved("70"))
    said = {"10.1": "2026-11-20", "00.1": "2026-11-20", "no": 1}
    (folder / "ada" / "progress.json").write_text(json.dumps(said))
    handed_in(folder / "bob" / "wrong.ipynb", WRONG)
    torn = folder / "carl"
    torn.mkdir()
    text = (FOLDER / "31_split_kv_policies.ipynb").read_text()
    (torn / "31.ipynb").write_text(text[: len(text) // 2])
    (torn / "32.ipynb").write_text("")
    (torn / "33.ipynb").write_text("[" * 100_000)
    (torn / "34.ipynb").write_text('{"cells": [1, {"cell_type": "code", "source": 5}]}')
    (torn / "progress.json").write_text("[1]")
    (torn / "zero.json").symlink_to("/dev/zero")
    return folder


@pytest.fixture(scope="module")
def graded(school: Path) -> dict[str, Any]:
    return {g.student: g for g in grade(school, seconds=120)}


@pytest.mark.slow
def test_right_answers_pass_and_a_progress_file_is_what_a_student_says(graded: dict) -> None:
    ada = graded["ada"]
    assert {n: m.state for n, m in ada.marks.items()} == {
        "00.1": PASSED,
        "70.1": PASSED,
        "10.1": SAID,
    }
    assert ada.is_good


@pytest.mark.slow
def test_wrong_answers_get_a_sentence_and_never_the_answer(graded: dict) -> None:
    marks = graded["bob"].marks
    assert {n for n, m in marks.items() if m.state == REFUSED} == {"00.1", "31.1", "32.1", "33.1"}
    assert marks["30.1"].state == UNTOUCHED
    assert "how many bytes" in marks["00.1"].sentence
    assert "too many" in marks["31.1"].sentence
    assert "ended its process" in marks["32.1"].sentence
    assert "SystemExit" in marks["33.1"].sentence
    assert "\x1b" not in marks["33.1"].sentence
    shown = report(list(graded.values()))
    assert "1152" not in shown and "1,152" not in shown
    assert re.search(r"^ada +\+ ", shown, re.M)
    assert json.loads(json.dumps(document(list(graded.values()))))["students"][1]["refused"] == 4


@pytest.mark.slow
def test_torn_files_are_named_and_stop_nothing(graded: dict) -> None:
    carl = graded["carl"]
    assert not carl.marks and not carl.is_good
    said = "\n".join(carl.problems)
    for name in ("31.ipynb is torn", "32.ipynb is empty", "33.ipynb is torn", "34.ipynb has no"):
        assert name in said
    assert "progress.json is no progress file" in said and "zero.json is no plain file" in said


@pytest.mark.slow
def test_an_answer_that_does_not_end_is_ended(tmp_path: Path) -> None:
    loop = ["def cache_bytes():\n    while True: pass", 'check("00.1", cache_bytes)']
    handed_in(tmp_path / "eve" / "a.ipynb", loop)
    begin = time.monotonic()
    (eve,) = grade(tmp_path, seconds=2)
    assert time.monotonic() - begin < 60
    said = [mark.sentence for mark in eve.marks.values()] + eve.problems
    assert any("did not end within 2 s" in sentence for sentence in said)


def test_the_command_prints_a_table_or_json_and_says_by_its_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ada").mkdir()
    (tmp_path / "ada" / "progress.json").write_text('{"00.1": "2026-11-20"}')
    assert cli.main(["course", "grade", str(tmp_path)]) == 0
    assert re.search(r"^ada +\? +0 of 1$", capsys.readouterr().out, re.M)
    (tmp_path / "bob").mkdir()
    assert cli.main(["course", "grade", str(tmp_path), "--json"]) == 1
    students = json.loads(capsys.readouterr().out)["students"]
    assert students[1]["problems"] == ["Nothing was handed in: no notebook and no progress file."]
    for folder in (tmp_path / "absent", tmp_path / "bob"):
        assert cli.main(["course", "grade", str(folder)]) == 2
        assert "folder" in capsys.readouterr().err
    with pytest.raises(InvalidInput, match="seconds"):
        grade(tmp_path, seconds=0)


def test_only_what_an_answer_depends_on_is_taken() -> None:
    cells = [
        "import math\nrows = 1 / 0",
        "k = [1]\nk[0] = 2\ndef f(x):\n    rows = x\n    return rows",
    ]
    cells += ["def g(x):\n    return f(x) + k[0] + math.pi", 'lab.check("00.1", g)']
    (answer,) = answers(cells)
    assert [sorted(s.binds) for s in answer.needs] == [["math"], ["k"], ["k"], ["f"], ["g"]]
    assert answers(["x = (" * 500, "\0", 'lab.check("99.9", x)', 'lab.check("00.1")']) == []


def test_names_of_files_are_harmless(tmp_path: Path) -> None:
    (tmp_path / "\x1b[2Jeve").mkdir()
    (work,) = works(tmp_path)
    assert work.student == "[2Jeve"
    assert plain("a\nb\x00" + "c" * 999, 10) == "a b ccc..."


def test_each_notebook_and_exercise_has_one_session_of_ninety_minutes() -> None:
    taught = [n for s in SESSIONS for n in s.notebooks]
    assert sorted(taught) == sorted(e.number for e in NOTEBOOKS)
    assert sorted(n for s in SESSIONS for n in s.exercises) == sorted(CHECKS)
    assert [s.number for s in SESSIONS] == list(range(1, 9))
    for session in SESSIONS:
        assert all(need < session.number for need in session.needs)
        assert RECAP + session.minutes + session.for_talk == MINUTES
        assert session.for_talk >= 15, session.number
        assert 2 <= len(session.goals) <= 4
    assert "31_split_kv_policies.ipynb" in syllabus()


def test_words_of_the_glossary_are_in_order_and_used() -> None:
    names = [term.name for term in terms()]
    assert names == sorted(names, key=str.lower)
    forms = [form for term in terms() for form in (term.name, *term.forms)]
    assert len(forms) == len(set(forms))
    texts = {e.number: prose(FOLDER / e.file) for e in NOTEBOOKS}
    used = {t.name for text in texts.values() for t in used_in(text)}
    used |= {t.name for t in used_in(" ".join(e.after for e in NOTEBOOKS))}
    assert set(names) == used
    for number, text in texts.items():
        assert len(used_in(text)) >= 3, number
    for term in terms():
        assert term.meaning.endswith(".") and 5 <= len(term.meaning.split()) <= 40, term.name
    assert pattern().findall("Warps and `tile` of a CTA, mytiles") == ["Warps", "tile", "CTA"]
    assert "title=" in words_html("a warp")
