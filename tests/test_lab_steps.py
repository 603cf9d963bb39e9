"""The steps of notebooks 60 to 69: the author's kernels are right, wrong ones are told why."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mla_lab import lab
from mla_lab.core.errors import InvalidInput
from mla_lab.emulate import machine
from mla_lab.lab import exercises
from mla_lab.lab.explorers.step import changes, marked_lines
from mla_lab.lab.steps import STEPS, catalogue, kernel, solution, step, text
from mla_lab.lab.steps import live as live_module
from mla_lab.lab.steps.catalogue import Trial, trial
from mla_lab.lab.steps.compiled import DoesNotCompile
from mla_lab.lab.steps.kernel import StepKernel
from mla_lab.lab.steps.live import live
from mla_lab.lab.steps.outcome import emulate
from mla_lab.lab.steps.plain import constants_of
from mla_lab.lab.steps.report import ptx_changes, report

from . import step_answers
from .needs import needs_cxx
from .step_answers import Answer, completed

pytestmark = needs_cxx

#: (step, wrong answer, words that its sentence must have)
WRONG: list[tuple[str, type[Answer], str]] = [
    ("60", step_answers.OnlyThread, "Two threads write element 0"),
    ("60", step_answers.EqualShares, "can do with fewer"),
    ("60", step_answers.TooManyRegisters, "66,560 registers, and the CTA had 64,512"),
    ("60", step_answers.RegistersOfTheSm, "65,536 registers, and the CTA had 64,512"),
    ("60", step_answers.OddRegisters, "multiples of 8 from 24"),
    ("61", step_answers.TooFewThreads, "how many rows do your threads cover"),
    ("61", step_answers.SingleNumbers, "no load is of 16 bytes"),
    ("61", step_answers.ColumnsFirst, "Which mode of your thread layout has stride 1"),
    ("61", step_answers.PageNotTaken, "incorrect profile. Two layouts.* a tile of one page"),
    ("61", step_answers.FirstBox, "does each have a part of its own"),
    ("61", step_answers.NotCute, "name 'layout' is not defined"),
    ("62", step_answers.PlainOffset, "8 turns"),
    ("62", step_answers.TornVectors, "the 8 numbers of a vector have to stay together"),
    ("62", step_answers.LostRows, "taken twice"),
    ("62", step_answers.BackwardRows, "another swizzle than the copy engine's"),
    ("62", step_answers.SwizzleOfBytes, "each unit here is one number of 2 bytes"),
    ("62", step_answers.TooFewSwizzleBits, "number the vectors of a row"),
    ("62", step_answers.ShiftToTheRow, "the row begins at another bit"),
    ("62", step_answers.VectorsThatLeaveTheirRow, "which is in row 9"),
    ("63", step_answers.TableOfABatch, "it has one index"),
    ("63", step_answers.FirstPage, "which entry of the block table"),
    ("63", step_answers.NumbersForBytes, "Count the bytes of a tile.*-12288 bytes pending"),
    ("63", step_answers.TooManyBytes, "Count the bytes of a tile.* 24576 bytes pending"),
    ("64", step_answers.ParityThatStays, "never completes.*mbarrier"),
    ("64", step_answers.ParityOfTheProducer, "never completes"),
    ("64", step_answers.AWarpOfArrivals, "31 of 32 arrivals"),
    ("64", step_answers.NoBytes, "-49152 bytes pending"),
    ("64", step_answers.TileForParity, r"full_parity\(2\) is 2.*a parity is 0 or 1"),
    ("65", step_answers.OneStage, "laps the consumers"),
    ("65", step_answers.FullParityByTile, "only then does its phase go on"),
    ("65", step_answers.EmptyParityOfFull, "on a fresh barrier a wait for parity 1"),
    ("65", step_answers.EmptyParityThatStays, "completed phases 0 to 2"),
    ("65", step_answers.PhaseForParity, r"full_parity\(4\) is 2.*a parity is 0 or 1"),
    ("65", step_answers.ParityOfFiveTiles, r"right for the 5 tiles .* empty_parity\(6\) is 4"),
    ("66", step_answers.AlwaysAdd, "overwrite the accumulator"),
    ("66", step_answers.LatentAlone, "all k-steps"),
    ("66", step_answers.StageZero, "which stage holds tile t"),
    ("66", step_answers.RowsOfAThread, "which row and column has register 2"),
    ("67", step_answers.OwnColumns, "One row lies in four lanes"),
    ("67", step_answers.ForgottenMax, "its max may only grow"),
    ("67", step_answers.RaisedMax, "the old row max included"),
    ("67", step_answers.NoRescale, "become smaller when it grows"),
    ("67", step_answers.RescaleBackwards, "nan"),
    ("67", step_answers.LogOfTwo, "natural log"),
    ("68", step_answers.RowsForColumns, "begin in the next box"),
    ("68", step_answers.OneStageOfValues, "how many numbers is a stage long"),
    ("68", step_answers.FactorsByRegister, "two belong to row r"),
    ("68", step_answers.NothingRescaled, "of four registers"),
    ("69", step_answers.RoundedUp, "which tiles belong to no worker"),
    ("69", step_answers.RoundedDown, "which tiles belong to no worker"),
    ("69", step_answers.ZerosAsTheyAre, "polls a word that stays 0"),
    ("69", step_answers.RoundedToOne, "1.5 travels as the word 0x3fd00000"),
    ("69", step_answers.OneForZero, "0.0 travels as the word 0x00000001"),
    ("69", step_answers.LastBitSet, "1.5 travels as the word 0x3fc00001"),
    ("69", step_answers.EqualWeights, "brought to the greater one"),
    ("69", step_answers.OneSided, "brought to the greater one"),
]  # fmt: skip


@pytest.mark.parametrize("number", STEPS)
def test_the_authors_kernel_is_right_and_its_report_is_small(number: str) -> None:
    author = solution(number)
    assert [o.schedule for o in author.outcomes] == list(STEPS[number].schedules)
    assert author.outcome.is_right, author.hazards()
    assert author.xray.spills == 0
    page = report(author).data + lab.StepExplorer(number).picture().markup
    assert "Right numbers" in page
    assert len(page) < 60_000
    if author.step.before:
        assert ptx_changes(author)


def test_a_compiled_step_is_files_alone_whether_python_writes_bytecode_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLA_LAB_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    compiled = solution("60").compiled
    assert compiled.folder.parent == tmp_path
    assert all(path.is_file() for path in compiled.folder.iterdir())
    assert compiled.folder.joinpath("step_60.py").is_file()


@pytest.mark.parametrize(("number", "wrong", "words"), WRONG)
def test_a_wrong_answer_gets_a_sentence_that_helps(
    number: str, wrong: type[Answer], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "VAIN_ROUNDS", 10)
    verdict = exercises.judge(f"{number}.1", completed(number, wrong))
    assert not verdict.passed
    assert re.search(words, verdict.sentence), verdict.sentence
    assert verdict.sentence[-1] in ".?)"
    author = text.solution_text(step(number))
    bodies = [line.strip() for line in author.splitlines() if line.strip().startswith("return")]
    assert not any(line in verdict.sentence for line in bodies), "the answer is given away"


def test_a_wrong_parity_hangs_or_races_by_when_copies_land() -> None:
    """What notebook 65 says of a parity that changes from tile to tile."""
    wrong = completed("65", step_answers.FullParityByTile)
    emulated, kinds = wrong.compiled.emulated(), {}
    for schedule in ("fair", "late"):
        found = emulate(emulated, trial("65"), schedule).hazards()
        kinds[schedule] = {finding.kind for finding in found}
    assert "deadlock" in kinds["fair"]
    assert "race" in kinds["late"] and "deadlock" not in kinds["late"]


@pytest.mark.parametrize("workers", [1, 11, 14])
def test_a_step_of_splits_takes_any_number_of_workers(
    workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """11 tiles; a worker without one sends nothing, and nobody waits for it."""
    monkeypatch.setattr(catalogue, "WORKERS", workers)
    outcome = emulate(solution("69").compiled.emulated(), trial("69"), "fair")
    assert outcome.is_right, outcome.hazards()


def test_every_step_has_wrong_answers_here() -> None:
    assert {number for number, _, _ in WRONG} == set(STEPS)
    assert {answer for _, answer, _ in WRONG} == set(Answer.__subclasses__())


def element_of(block, thread):
    return block


def test_plain_arithmetic_may_use_the_names_of_the_module() -> None:
    """A reader writes THREADS as the author does, and as the notebook says."""

    def element_of(block, thread):
        return block * THREADS + thread  # type: ignore[name-defined]  # noqa: F821

    def producer_registers():
        return 24

    def consumer_registers():
        return 240

    def swizzled(offset):
        row = offset // BOX  # type: ignore[name-defined]  # noqa: F821
        return offset ^ (row % VECTORS * VECTOR)  # type: ignore[name-defined]  # noqa: F821

    def swizzle_numbers():
        return 3, 3, 3

    mine = kernel("60", element_of, producer_registers, consumer_registers)
    assert exercises.judge("60.1", mine).passed
    assert exercises.judge("62.1", kernel("62", swizzled, swizzle_numbers)).passed


@pytest.mark.parametrize("number", STEPS)
def test_numbers_read_off_a_modules_text_are_those_of_the_module(number: str) -> None:
    module = importlib.import_module(f"mla_lab.cute.steps.{step(number).module}")
    known = constants_of(step(number).path)
    assert {"WARP_GROUP"} < set(known)
    assert known == {name: value for name, value in vars(module).items() if isinstance(value, int)}


def test_a_race_names_both_sides() -> None:
    def element_of(block, thread):
        return thread

    found = kernel("60", element_of).hazards()[0]
    assert re.search(
        r"warp 0 of CTA 1,0,0, at `out.*; the other: warp 0 of CTA 0,0,0, at `out", found
    )


def test_answers_that_are_none() -> None:
    def judged(value: object) -> str:
        return exercises.judge("60.1", value).sentence

    assert "lab.kernel('60', ...)" in judged(5)
    assert "step 61" in judged(solution("61"))
    assert "not handed over: producer_registers" in judged(kernel("60", element_of))
    with pytest.raises(InvalidInput, match="element_of"):
        kernel("60", test_answers_that_are_none)
    with pytest.raises(InvalidInput, match="'59'"):
        kernel("59")
    with pytest.raises(InvalidInput, match="source text"):
        kernel("60", _without_source())


def _without_source() -> Callable[..., int]:
    names: dict[str, Callable[..., int]] = {}
    exec("def element_of(block, thread):\n    return 1", names)
    return names["element_of"]


def test_a_stub_is_shown_and_reported_as_one() -> None:
    def tile_bytes():
        return ...

    stub = kernel("63", tile_bytes)
    assert stub.unfinished == ["tile_bytes"]
    assert "tile_bytes</code> still to write" in report(stub).data
    shown = text.given_text(step("63"))
    assert shown.count("# yours") == len(step("63").functions)
    assert "TILE * WIDTH * 2" not in shown
    assert "TILE * WIDTH * 2" in text.solution_text(step("63"))


def test_what_the_compiler_refuses_is_a_report_too() -> None:
    broken = completed("61", step_answers.NotCute)
    with pytest.raises(DoesNotCompile, match="layout"):
        _ = broken.compiled
    assert "Not compiled" in report(broken).data


def test_decorators_stay_and_other_text_too() -> None:
    module = "import x\n\n\n@d\ndef f(a):\n    return 1\n\n\ndef g():\n    return 2\n"
    changed = text.with_functions(module, {"f": "def f(b):\n    return 3\n"})
    assert changed == module.replace("f(a):\n    return 1", "f(b):\n    return 3")


def test_an_output_that_is_off_is_named_with_its_place() -> None:
    tested = trial("63")
    args = list(tested.fresh())
    args[2] = tested.expected["out"][1].clone()
    args[2][3, 5] += 1
    from mla_lab.lab.steps.outcome import compare

    (wrong,) = compare(tested, args)
    assert (wrong.name, wrong.place) == ("out", (3, 5))
    assert "out[3, 5]" in str(wrong)
    nothing = Trial((torch.zeros(2),), {"out": (0, torch.tensor([0.0, torch.nan]))})
    assert compare(nothing, nothing.args), "a NaN is never right"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_card_the_live_cell_says_so() -> None:
    assert "No Hopper card here" in live(solution("60")).data


def test_on_a_card_the_author_s_kernel_stands_for_a_stub(monkeypatch: pytest.MonkeyPatch) -> None:
    def tile_bytes():
        return ...

    launched: list[StepKernel] = []

    def launch(of: StepKernel) -> tuple[list[object], float]:
        launched.append(of)
        return [], 3.0

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(live_module, "launch", launch)
    monkeypatch.setattr(live_module, "gpu_name", lambda: "a card")
    assert "The author" in live(kernel("63", tile_bytes)).data
    assert "The author" not in live(solution("63")).data
    assert [of.unfinished for of in launched] == [[], []]
    assert [of.step.number for of in launched] == ["63", "63"]


@pytest.mark.parametrize("number", STEPS)
def test_what_is_new_of_a_step_is_its_difference_to_the_step_before(number: str) -> None:
    of, explorer = step(number), lab.StepExplorer(number)
    now = text.given_text(of).splitlines()
    whole = explorer.title(show="the code", mark="nothing")
    assert whole == f"Step {number}: {len(now)} lines"
    assert "<code>WARP_GROUP = 128</code>" in explorer.note(explorer.state)
    changed = changes(of).splitlines()
    if not of.before:
        assert changed == now
        return
    before = text.given_text(step(of.before)).splitlines()
    added = [line[1:] for line in changed if line.startswith("+")]
    removed = [line[1:] for line in changed if line.startswith("-")]
    assert len(now) - len(before) == len(added) - len(removed)
    assert all(line in now for line in added) and all(line in before for line in removed)
    assert f"against step {of.before}" in explorer.title(show="what is new")


def test_marked_lines_are_those_with_the_words() -> None:
    lines = text.given_text(step("64")).splitlines()
    found = marked_lines(step("64"), "\n".join(lines), "your functions")
    wanted = [i for i, t in enumerate(lines, 1) if any(f in t for f in STEPS["64"].functions)]
    assert found == wanted and len(found) >= 3
    assert not marked_lines(step("64"), "\n".join(lines), "nothing")
    assert 'class="hll"' in lab.StepExplorer("64").picture().markup
    titles = [lab.StepExplorer(n).title(mark="products") for n in STEPS]
    assert all(t.endswith(("marked: products", ", none of them about products")) for t in titles)
    assert any("none of them about products" in t for t in titles)


def test_code_takes_the_colours_of_the_page_and_marks_show_on_both_themes() -> None:
    page = text.highlighted("def f():\n    return 1\n", [2])
    assert 'class="k"' in page and "#FFFFFF" not in page and "--jp-cell-editor" in page
    assert page.count('class="hll" style="background:') == 1
    changed = text.highlighted("-a\n+b\n", language="diff")
    assert all(f'class="{name}" style="background:' in changed for name in ("gd", "gi"))
