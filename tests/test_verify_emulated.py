"""The record of every shipped build in the emulator, of its deletions, and of its speed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mla_lab.core.errors import InvalidInput
from mla_lab.core.problem import Problem
from mla_lab.core.resources import data_dir
from mla_lab.emulate import calls, mutate
from mla_lab.emulate.ptx import Place
from mla_lab.jit.shipped import CUTE
from mla_lab.plan import Plan
from mla_lab.plan.fixed_pieces import RING, fixed_pieces
from mla_lab.verify import emulated, emulator_speed, emulator_tables, mutations
from mla_lab.verify.mutation_cases import cases
from mla_lab.verify.record import Continued, read, write

from .house import ROOT

DUAL = emulated.DUAL_CASES
RECORDS = data_dir() / "records"
ATTENTION = [c for c in CUTE if c.kernel != "cute/empty"]


def test_every_build_has_five_cases_that_it_takes() -> None:
    assert sorted(c.name() for c in emulated.builds()) == sorted(c.name() for c in ATTENTION)
    for config in ATTENTION:
        found = list(emulated.cases(config))
        if config.option("dual"):
            assert len(found) == 5 and {c.kv_lens for c in found} == {c.kv_lens for c in DUAL}
            assert {c.q_len for c in found} == {1, config.option("dual")}
            continue
        if config.option("pieces"):
            assert len(found) == 5 and {c.splits for c in found} == {0}
            assert {c.schedule for c in found} == {"fair", "random", "adverse"}
            continue
        assert len(found) == 5 and {0, 77, 140, 800} < {n for c in found for n in c.kv_lens}
        assert max(c.splits for c in found) == 3
        *_, last = found
        assert last.schedule == "adverse" and {c.schedule for c in found} == {"fair", "adverse"}
        # a CTA takes several work tiles where the grid has not one for each
        assert (last.splits == 0 or last.workers) != bool(config.option("grid"))


def pieces_of(case: emulated.Case, rows: int) -> Plan:
    """The plan of a case, of one row tile of `rows` rows a request."""
    problem = Problem((1,) * len(case.kv_lens), case.kv_lens, rows)
    cuts, workers = calls.PIECE_CUTS, calls.PIECE_WORKERS
    return fixed_pieces(problem, tile_rows=rows, num_workers=workers, cuts=cuts)


@pytest.mark.parametrize("rows", [8, 16, 64])
def test_pieces_of_a_case_use_slots_again(rows: int) -> None:
    plan = pieces_of(emulated.PIECE_CASES[1], rows)
    assert np.diff(plan.worker_begin).max() > RING


@pytest.mark.parametrize("rows", [8, 16, 64])
def test_workers_of_a_case_run_whole_items(rows: int) -> None:
    case = emulated.PIECE_CASES[0]
    plan = pieces_of(case, rows)
    owners = np.repeat(np.arange(plan.num_workers), np.diff(plan.worker_begin))
    held = {b: set(owners[plan.tiles[:, 0] == b]) for b in range(len(case.kv_lens))}
    assert all(len(mine) == 1 for mine in held.values()) and plan.tiles[:, 5].max() == 3
    first = plan.tiles[plan.worker_begin[:-1], 0]
    assert 0 not in [case.kv_lens[request] for request in first]


def test_a_build_with_pieces_refuses_a_plan() -> None:
    config = next(c for c in ATTENTION if c.option("pieces"))
    with pytest.raises(InvalidInput, match="splits: got 2; supported: 0"):
        calls.make_call(config, calls.problem_for(config, (70,)), splits=2)


def test_what_is_on_record_is_right_and_without_findings() -> None:
    head, *rows = read(RECORDS / "emulated.jsonl")
    assert rows and {row["name"] for row in rows} <= {c.name() for c in ATTENTION}
    assert {row["status"] for row in rows} == {"ok"}
    assert all(len(row["problems"]) == 5 for row in rows)
    assert emulated.summary([head, *rows]).startswith(f"{len(rows)} of {head['cases']}")


def test_deletions_on_record_are_reported() -> None:
    _, *rows = read(RECORDS / "mutations.jsonl")
    assert {row["name"] for row in rows} <= set(cases())
    assert {row["family"] for row in rows} == {case.family for case in cases().values()}
    for row in rows:
        assert row["reported"] >= 0.95 * row["tried"] > 0
        assert mutations.UNEXPLAINED not in [left["why"] for left in row["unreported"]]
    exceptions = emulator_tables.exceptions_table([{}, *rows]).splitlines()[2:]
    argued = sum(row["tried"] - row["reported"] for row in rows)
    assert sum(int(line.split("|")[4]) for line in exceptions) == argued


def test_what_kernels_of_deletions_write_are_arguments_of_their_calls() -> None:
    for case in cases().values():
        for call in case.calls():
            written, args = {id(t) for t in call.written}, set(map(id, call.args))
            assert {id(t) for t in call.results} <= written <= args


def test_a_run_goes_on_where_the_record_ends(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    path.write_text((RECORDS / "emulated.jsonl").read_text())
    before = read(path)
    assert emulated.run(path, "", 0.0, print)[1:] == before[1:]
    assert mutations.run(tmp_path / "none.jsonl", "", 0.0, print)[1:] == []


def test_a_continued_record_keeps_the_order_of_its_list_and_loses_old_cases(tmp_path: Path) -> None:
    path, seen = tmp_path / "record.jsonl", []
    write(path, [{"kind": "run"}, *({"kind": "case", "name": name} for name in ("c", "old"))])
    record = Continued(path, "sm100", ["a", "b", "c"])
    made = iter([{"kind": "case", "name": "b"}, None, {"kind": "case", "name": "a"}])

    def told(row: dict[str, str]) -> None:
        seen.append([each.get("name") for each in read(path)[1:]])

    head, *rows = record.extend(made, 3, told, lambda done, total: None)
    assert (head["what"], head["cases"]) == ("sm100", 3)
    assert [row["name"] for row in rows] == ["a", "b", "c"]
    assert seen == [["c", "old"], ["b", "c"]] and read(path)[1:] == rows


def test_what_was_not_ok_or_ran_other_cases_runs_again() -> None:
    rows = {row["name"]: row for row in read(RECORDS / "emulated.jsonl")[1:]}
    for config in ATTENTION:
        row = rows[config.name()]
        assert emulated.settled(config, row) == row["ptx"]
    assert emulated.settled(config, row | {"status": "fault"}) == ""
    first, *others = row["problems"]
    assert emulated.settled(config, row | {"problems": others}) == ""
    assert emulated.settled(config, row | {"problems": [first | {"splits": 9}, *others]}) == ""
    assert emulated.settled(config, {}) == ""


def test_deletions_in_other_calls_are_made_again() -> None:
    rows = read(RECORDS / "mutations.jsonl")[1:]
    for row in rows:
        assert mutations.settled(row["name"], row) == row["ptx"]
    calls = [rows[0]["calls"][0] | {"workers": 99}]
    assert mutations.settled(rows[0]["name"], rows[0] | {"calls": calls}) == ""
    assert mutations.settled(rows[0]["name"], {}) == ""


def test_reasons_of_deletions_without_a_report() -> None:
    """Each is of one line of today's source, and of no more deletions behind it than were argued;
    another deletion of that kind in that file has none."""
    (known,) = (r for r in mutations.REASONS if "own quarter" in r.why)
    for reason in (*mutations.REASONS, *mutations.PACERS):
        text = (ROOT / "mla_lab/cute" / reason.file).read_text()
        assert reason.line in map(str.strip, text.splitlines()), reason
    file = f"mla_lab/cute/{known.file}"
    lines = [line.strip() for line in (ROOT / file).read_text().splitlines()]
    mutant = mutate.Mutant(known.kind, 3, Place("mla_lab/none.py", 1), "bar.sync 1;")
    behind = replace(mutant, near=Place(file, 1 + lines.index(known.line)))
    elsewhere = replace(mutant, near=Place(file, lines.index(known.line)))
    found = mutations.reasons([mutant, elsewhere, behind, behind])
    assert found == [mutations.UNEXPLAINED] * 2 + [known.why, mutations.UNEXPLAINED]
    row = {"tried": 50, "reported": 48, "nobody_waits": ["x"]}
    words = mutations.summary([{"cases": 2}, row, row])
    assert words.startswith("2 of 2 builds: 96 of 100 deletions reported (96.0 %), 2")


@pytest.mark.parametrize("row", read(RECORDS / "emulator_speed.jsonl")[1:], ids=lambda r: r["what"])
def test_speed_on_record_is_what_was_allowed(row: dict[str, float]) -> None:
    assert 0 < row["cpu_seconds"] <= row["allowed"]
    assert emulator_speed.summary([{}, row])
