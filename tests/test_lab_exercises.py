"""Each exercise: its solution passes, a stub and each wrong answer get a sentence that helps."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mla_lab import lab
from mla_lab.core.errors import InvalidInput
from mla_lab.lab import exercises, progress, session
from mla_lab.lab.checks import CHECKS, hints
from mla_lab.lab.eight_bits import e4m3
from mla_lab.lab.measuring import measured_card
from mla_lab.lab.roofline import free_drafts
from mla_lab.lab.steps import STEPS
from mla_lab.lab.workbook_map import NOTEBOOKS, WorkbookMap, progress_table
from mla_lab.plan.policies import fa3_splits

from .needs import needs_cxx
from .notebook_runner import cells_of, execute, path_of

#: (exercise, wrong answer, words that its sentence must have)
WRONG: list[tuple[str, Any, str]] = [
    ("00.1", lambda: (576, 81920), "how many bytes"),
    ("00.1", lambda: (1152, 49152), "key \\*and\\* a value"),
    ("00.1", lambda: (576 * 4, 0), "16 bits; you count 32"),
    ("00.1", lambda: 5, "Return 2 values"),
    ("00.1", lambda: ("much", 1), "should be a number"),
    ("10.1", lambda: (512, 1152, 256), "rope has to be stored"),
    ("10.1", lambda: (640, 576, 256), "multiply-adds; an operation is one"),
    ("10.1", lambda: (640, 1152, 171), "expanding costs the same"),
    ("10.1", lambda: (640, 1152, 255), "expanding costs the same"),
    ("10.1", lambda: (640, 1152, 258), "expanding costs the same"),
    ("11.1", lambda: (free_drafts(measured_card(), 16) + 1, 2), "rows beyond it, and a long cache"),
    ("11.1", lambda: (free_drafts(measured_card(), 16),) * 2, "the ridge is reached sooner"),
    ("20.1", "(6,4):(1,6)", "Place 3 of tile 0"),
    ("20.1", "(4,5):(6,1)", "20 coordinates"),
    ("20.1", "(4,6):(0,1)", "Offset 0 is reached twice, by coordinates 0 and 1"),
    ("20.1", "(4,6):(6,4)", "Offset 12 is reached twice"),
    ("20.1", "(4,6):(1,8)", "Offset 43 is no element"),
    ("20.1", "4 by 6", "not a layout"),
    ("20.1", 24, "as text"),
    ("20.1", "(3,2,2,2):(1,6,3,12)", "modes count \\[3, 2, 2, 2\\] places"),
    ("21.1", lambda: ([48 * r for r in range(8)], 1), "byte offsets"),
    ("21.1", lambda: ([12 * r for r in range(8)], 1), "Row 3 begins 144 bytes in"),
    ("21.1", lambda: ([12 * r % 32 for r in range(8)], 8), "want the same four"),
    ("21.1", lambda: (0, 1), "is a list"),
    ("22.1", lambda: (lambda table, size, t: table[t // size] + t, 2), "first row of its page"),
    ("22.1", lambda: (lambda table, size, t: table[0] * size + t, 2), "which entry is that"),
    ("22.1", lambda: (lambda table, size, t: table[t // size] * size + t % size, 1), "how many"),
    ("22.1", lambda: (lambda table, size, t: table[t // 32] * 32 + t % 32, 2), "pages of 16"),
    ("30.1", lambda tiles, n, a, b, sms: tiles / sms * (a + b * n), "too short"),
    ("30.1", lambda tiles, n, a, b, sms: 0.7 + tiles // sms * (a + b * n), "last wave is not full"),
    ("30.1", lambda tiles, n, a, b, sms: -(-tiles // sms) * (a + b * n), "launch counted once"),
    ("30.1", lambda tiles, n, a, b, sms: -(-tiles // sms) * (0.7 + a + b * n), "4 SMs.*too long"),
    ("30.1", lambda tiles, n, a, b, sms: 0.7 + -(-tiles // 132) * (a + b * n), "4 SMs.*too short"),
    ("31.1", lambda tiles, blocks, sms: 1, "too few"),
    ("31.1", lambda tiles, blocks, sms: min(blocks, sms), "too many"),
    ("31.1", lambda tiles, blocks, sms: fa3_splits(tiles, blocks, sms, sms), "128 splits are"),
    ("31.1", lambda tiles, blocks, sms: fa3_splits(tiles, blocks, 132), "66 SMs.* too many"),
    (
        "31.1",
        lambda tiles, blocks, sms: fa3_splits(tiles, 128, sms) if blocks > 4 else 1,
        "30 blocks, 132 SMs.* too many",
    ),
    ("31.1", lambda tiles, blocks, sms: 1 // 0, "raised ZeroDivisionError"),
    ("32.1", lambda a, la, b, lb: ((a[0] + b[0]) / 2, np.logaddexp(la, lb)), "weigh each out"),
    ("32.1", lambda a, la, b, lb: _naive_merge(a, la, b, lb), "subtract the larger lse"),
    ("32.1", lambda a, la, b, lb: _naive_merge(a, la, b, lb, la), "lse 0 and 1000, out: subtract"),
    ("32.1", lambda a, la, b, lb: _merge_to_second(a, la, b, lb), "lse 1000 and 0, out: subtract"),
    ("32.1", lambda a, la, b, lb: _merge_of_first(a, la, b, lb), "first piece may be the empty"),
    ("32.1", lambda a, la, b, lb: _merge_one(a, la, b, lb), "here 2, and yours has 1"),
    ("33.1", lambda blocks, batch: max(1, min(blocks, 32) // len(batch)), "not invariant"),
    ("33.1", lambda blocks, batch: blocks, "32 are the most"),
    ("33.1", lambda blocks, batch: 1, "at least 4"),
    ("33.1", lambda blocks, batch: 16, "would leave empty ones"),
    ("33.1", lambda blocks, batch: min(32, batch[0]), "not invariant"),
    ("33.1", lambda blocks, batch: min(32, blocks, max(4, max(batch) // 64)), "not invariant"),
    ("33.1", lambda blocks, batch: min(32, max(1, blocks / 10)), "no whole number"),
    ("34.1", lambda drafts, chance: 1 + drafts * chance, "all before it were accepted"),
    ("34.1", lambda drafts, chance: chance**drafts, "own token is always there"),
    ("34.1", lambda drafts, chance: 1 + chance, "too many or too few"),
    ("35.1", lambda parent, good: [i for i, g in enumerate(good) if g], "smaller end"),
    ("35.1", lambda parent, good: 3, "list of token numbers"),
    ("35.1", lambda parent, good: _one_tree(parent, good), "list of token numbers"),
    ("35.1", lambda parent, good: _three_or_none(parent, good), "good \\[1, 0, 1, 1, 1\\]"),
    ("35.1", lambda parent, good: _first_child(parent, good), "a later child"),
    ("35.1", lambda parent, good: _least_path(parent, good), "of equally long paths"),
    ("36.1", lambda position, rank, world: position // world, "too few"),
    ("36.1", lambda position, rank, world: position // world + 1, "too many"),
    ("36.1", lambda position, rank, world: int((position - rank) / world) + 1, "too many"),
    ("40.1", lambda x: (x, 0 * x), "e4m3 can hold"),
    ("40.1", lambda x: (e4m3(x), e4m3(x - e4m3(x))), "in units of a sixteenth"),
    ("40.2", lambda: (0x6240, 0x7351), "lowest digit names the first"),
    ("40.2", lambda: (0x7654, 0x3210), "bytes of both columns"),
    ("51.1", lambda: (2 * 128 * 576 + 64 * 128 * 2, True), "barriers are missing"),
    ("51.1", lambda: (2 * 128 * 576 + 1024, True), "P is missing"),
    ("51.1", lambda: (2 * 128 * 576 + 64 * 128 * 2 + 1024, False), "what a block may have"),
    ("51.1", lambda: (2 * 128 * 576 + 64 * 128 * 2 + 1024, "no"), "True or False"),
    ("53.1", lambda down: 8 * 36 * (64 // down + 8 * down) * 32 / 1024, "scores alone"),
    ("53.1", lambda down: 592, "a warp has 16 rows, 32 keys"),
    ("54.1", lambda waits, arrivers: set(waits.values()), "the way to it"),
    ("54.1", lambda waits, arrivers: _of_arrivers(waits, arrivers), "the way to it"),
    ("54.1", lambda waits, arrivers: set(waits), "barriers are wanted"),
    ("54.1", lambda waits, arrivers: [], "nothing is returned"),
    ("54.1", lambda waits, arrivers: {max(arrivers)}, "follow each arriver"),
    ("54.2", lambda tile, stages: (1, 0), "how often the ring went round"),
    ("54.2", lambda tile, stages: (tile // stages % 2,) * 2, "must pass a fresh barrier"),
    ("54.2", lambda tile, stages: (1, 2 * tile - 1), "a parity is 0 or 1"),
    ("55.1", ["0 x NaN"], "3 more bugs"),
    ("55.1", ["a stage freed early"], "was found"),
    ("55.1", ["a typo"], "copy the first column"),
    ("55.1", [["0 x NaN"]], "copy the first column"),
    ("55.1", "0 x NaN", "A list of names"),
    ("55.2", lambda stages, slots: True, "tile 1 uses the slot of tile 0"),
    ("55.2", lambda stages, slots: slots > stages, "keeps the producer from lapping"),
    ("55.2", lambda stages, slots: slots, "True or False"),
    ("56.1", lambda b, row, token: (0, row, token), "halves the rows"),
    ("56.1", lambda b, row, token: (row // 64, 2 * row % 128, token), "keeps its place"),
    ("56.1", lambda b, row, token: (row // 64, row % 64, token), "later half of the tokens"),
    ("56.1", lambda b, row, token: (row // 64, 200, token), "lanes 0 to 127"),
    ("56.1", lambda b, row, t: (row // 64, row % 64 + t // 64 * 64, 600), "columns 0 to 511"),
    ("56.1", lambda b, row, t: (row // 64, row % 64 + t // 64 * 64, t + 1), "within the half"),
    ("56.1", lambda b, row, t: (row // 64, row % 64 + t // 64 * 64, t % 64), "odd tiles"),
    ("56.1", lambda b, row, t: (0, 0), "3 values"),
    ("70.1", lambda draft, chosen: draft, "more token comes for free"),
    ("70.1", lambda draft, chosen: chosen, "judged behind it|stands in its place"),
    ("70.1", lambda draft, chosen: [], "own next token is always right"),
    ("70.1", lambda draft, chosen: len(draft), "list of tokens"),
    ("70.1", lambda draft, chosen: draft + chosen, "more than the draft and one"),
    ("90.1", lambda a, b: "faster" if sum(b) < sum(a) else "slower", "against itself"),
    ("90.1", lambda a, b: "same", "10 % less time"),
    ("90.1", lambda a, b: True, "in place of True"),
    ("90.1", lambda a, b: _verdict_by_range(a, b), "does not hide 10 %"),
]


def _of_arrivers(waits: dict[int, str], arrivers: dict[str, list[int]]) -> set[str]:
    """Barriers for which a warp waits that should arrive elsewhere: right where one step leads to
    the circle."""
    needed = {warp for barrier in set(waits.values()) for warp in arrivers[barrier]}
    return {barrier for warp, barrier in waits.items() if warp in needed}


def _naive_merge(
    a: list[float], la: float, b: list[float], lb: float, less: float = 0.0
) -> tuple[Any, Any]:
    wa, wb = np.exp(la - less), np.exp(lb - less)
    return (wa * np.array(a) + wb * np.array(b)) / (wa + wb), less + np.log(wa + wb)


def _merge_to_second(a: list[float], la: float, b: list[float], lb: float) -> tuple[Any, Any]:
    """Subtracts the lse of the second piece, wherever that is not empty."""
    return (np.array(a), la) if lb == -np.inf else _naive_merge(a, la, b, lb, lb)


def _merge_of_first(a: list[float], la: float, b: list[float], lb: float) -> tuple[Any, Any]:
    """Looks for an empty piece only in the second place."""
    if lb == -np.inf:
        return np.array(a), la
    return _naive_merge(a, la, b, lb, la if la == -np.inf else max(la, lb))


def _merge_one(a: list[float], la: float, b: list[float], lb: float) -> tuple[Any, Any]:
    """Safe, but only the first number of out."""
    if max(la, lb) == -np.inf:
        return a[:1], la
    return _naive_merge(a[:1], la, b[:1], lb, max(la, lb))


def _first_child(parent: list[int], good: list[bool]) -> list[int]:
    """The longest of the walks that take the first good child each time."""

    def down(token: int) -> list[int]:
        child = next((i for i, p in enumerate(parent) if p == token and good[i]), None)
        return [token] if child is None else [token, *down(child)]

    return max((down(i) for i, p in enumerate(parent) if p < 0 and good[i]), key=len, default=[])


def _one_tree(parent: list[int], good: list[bool]) -> Any:
    """No list where a draft has several roots."""
    return _least_path(parent, good) if parent.count(-1) == 1 else 0


def _three_or_none(parent: list[int], good: list[bool]) -> list[int]:
    """Writes into `good` who counts, and forgets paths of less than three tokens."""
    for token, p in enumerate(parent):
        good[token] &= p < 0 or good[p]
    path = _least_path(parent, good)
    return path if len(path) > 2 else []


def _least_path(parent: list[int], good: list[bool]) -> list[int]:
    """Of the longest paths the least by its first token that differs."""
    paths: dict[int, list[int]] = {-1: []}
    for token, p in enumerate(parent):
        if good[token] and p in paths:
            paths[token] = [*paths[p], token]
    return min(paths.values(), key=lambda path: (-len(path), path))


def _verdict_by_range(a: list[float], b: list[float]) -> str:
    """The spread is the largest time less the least."""
    noise = max(0.03, *((max(x) - min(x)) / np.median(x) for x in (a, b)))
    change = np.median(b) / np.median(a) - 1
    return "same" if abs(change) <= noise else "faster" if change < 0 else "slower"


def stubs(number: str) -> tuple[dict[str, Any], str, str]:
    """Names before the stub of an exercise, the stub's source, and its solution."""
    names: dict[str, Any] = {"__name__": "__main__", "lab": lab, "np": np, "e4m3": e4m3}
    names |= {"free_drafts": free_drafts, "H200": measured_card()}
    for cell in cells_of(path_of(number[:2])):
        if cell["source"].startswith(("from statistics", "import json\nfrom statistics")):
            exec("from statistics import median", names)
        if "from mla_lab.lab import banks" in cell["source"]:
            exec("from mla_lab.lab import banks", names)
        solution = "\n".join(cell["metadata"].get("nbmake", {}).get("post_cell_execute", []))
        if f'lab.solved("{number}")' in solution:
            stub = cell["source"].replace("e4m3 = eight_bits.e4m3", "")
            return names, stub, solution.replace(f'lab.solved("{number}")', "")
    raise AssertionError(f"no stub for {number}")


def attempt_in(source: str, names: dict[str, Any], number: str) -> Any:
    """What the notebook hands to the check of an exercise, after `source` ran."""
    execute(source, f"attempt {number}: {len(source)}", names)
    calls = [re.search(rf'lab\.check\("{number}", (\w+)\)', c["source"])
             for c in cells_of(path_of(number[:2]))]  # fmt: skip
    (name,) = (found[1] for found in calls if found)
    return names[name]


#: notebooks 60 to 69 compile kernels
NUMBERS = [pytest.param(n, marks=needs_cxx) if n[0] == "6" else n for n in CHECKS]


@pytest.mark.parametrize("number", NUMBERS)
def test_the_solution_passes_and_the_stub_does_not(number: str) -> None:
    names, stub, solution = stubs(number)
    untouched = exercises.judge(number, attempt_in(stub, names, number))
    assert not untouched.passed
    assert untouched.sentence.startswith(hints.NOTHING_YET)
    verdict = exercises.judge(number, attempt_in(solution, names, number))
    assert verdict.passed, verdict.sentence
    assert len(verdict.sentence.split()) > 5


@pytest.mark.parametrize(("number", "wrong", "words"), WRONG)
def test_a_wrong_answer_gets_a_sentence_that_helps(number: str, wrong: Any, words: str) -> None:
    verdict = exercises.judge(number, wrong)
    assert not verdict.passed
    assert re.search(words, verdict.sentence), verdict.sentence
    assert verdict.sentence[-1] in ".?)"
    assert len(verdict.sentence.split()) > 5
    assert "AssertionError" not in verdict.sentence


@pytest.mark.parametrize("crossing", [256, 256.0, 257])
def test_the_crossing_may_be_the_last_equal_or_the_first_cheaper_one(crossing: float) -> None:
    assert exercises.judge("10.1", lambda: (640, 1152, crossing)).passed


def test_a_bool_of_numpy_is_a_bool() -> None:
    assert exercises.judge("55.2", lambda stages, slots: np.bool_(slots >= stages)).passed


def test_every_exercise_has_a_wrong_answer_here() -> None:
    steps = {f"{number}.1" for number in STEPS}
    assert {number for number, _, _ in WRONG} | steps == set(CHECKS)


#: what a hint may never give away, by exercise
ANSWERS = {
    "00.1": ("1152", "1,152", "81920", "81,920"),
    "10.1": ("640", "1152", "1,152", "256"),
    "20.1": ("((3,2),(2,2)):((1,6),(3,12))",),
    "40.2": ("0x6420", "0x7531"),
    "51.1": ("164,864", "164864"),
    "53.1": ("592", "704", "776"),
}


@pytest.mark.parametrize("number", ANSWERS)
def test_no_hint_gives_the_answer_away(number: str) -> None:
    mine: list[Callable[..., Any]] = [wrong for n, wrong, _ in WRONG if n == number]
    mine += [lambda *_: (0, 0), lambda *_: (0, 0, 0), lambda *_: -1]
    for wrong in mine:
        sentence = exercises.judge(number, wrong).sentence
        assert not any(answer in sentence for answer in ANSWERS[number]), sentence


def test_odd_answers_are_told_apart_from_wrong_ones() -> None:
    assert "has another form" in exercises.judge("40.1", lambda x: ("a", "b")).sentence
    assert "None: is a `return` missing" in exercises.judge("00.1", lambda: None).sentence
    assert "A function is expected" in exercises.judge("00.1", 5).sentence
    with pytest.raises(InvalidInput, match=r"00\.1"):
        exercises.judge("99.9", 5)


def test_what_is_solved_is_kept_and_shown_on_the_map(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "state" / "progress.json"
    monkeypatch.setenv(progress.VARIABLE, str(file))
    monkeypatch.setattr(exercises, "_SOLVED", set())
    lab.start("00")
    assert progress.solved_on() == {}
    exercises.check("00.1", lambda: (1, 2))
    assert not file.exists()
    exercises.check("00.1", lambda: (1152, 81920))
    day = json.loads(file.read_text())["00.1"]
    assert progress_table().rows[0] == ("Start", "1 of 1", "00.1", day)
    assert WorkbookMap().picture().markup.count("✓") == 1  # type: ignore[union-attr]
    exercises.check("40.1", lambda x: (e4m3(x), e4m3(16 * (x - e4m3(x)))))
    done = {row[0]: row[1:3] for row in progress_table().rows}
    assert done["Eight bits"] == ("1 of 2", "40.1")
    assert WorkbookMap().picture().markup.count("✓") == 1  # type: ignore[union-attr]


@pytest.mark.parametrize("content", ["", "[1]", "not json"])
def test_a_damaged_file_of_progress_counts_as_none(
    content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "progress.json"
    file.write_text(content)
    monkeypatch.setenv(progress.VARIABLE, str(file))
    assert progress.solved_on() == {}
    assert progress.keep("00.1")
    assert list(progress.solved_on()) == ["00.1"]


def test_progress_that_cannot_be_written_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(progress.VARIABLE, str(tmp_path / "file" / "progress.json"))
    monkeypatch.setattr(exercises, "_SOLVED", set())
    shown: list[str] = []
    monkeypatch.setattr(exercises, "_show", lambda word, color, text: shown.append(text))
    lab.start("00")
    for _ in range(2):
        exercises.check("00.1", lambda: (1152, 81920))
    assert session.current().passed == ["00.1"], "solved twice is listed once"
    assert f"cannot be written: set {progress.VARIABLE}" in shown[0]


def test_injected_solutions_are_not_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(progress.VARIABLE, str(tmp_path / "progress.json"))
    monkeypatch.setattr(exercises, "_SOLVED", {"00.1"})
    lab.start("00")
    exercises.check("00.1", lambda: (1152, 81920))
    assert progress.solved_on() == {}


def test_exercises_belong_to_notebooks_of_the_map() -> None:
    assert {number[:2] for number in CHECKS} <= {entry.number for entry in NOTEBOOKS}
