"""`mla-lab live`: its steps in order, what it refuses without a card, what it leaves alone."""

from __future__ import annotations

import json
import subprocess
from types import SimpleNamespace

import pytest

from mla_lab import cli
from mla_lab.cli.commands import _live_steps, live
from mla_lab.core.gpu import PRESETS, Gpu
from mla_lab.core.resources import data_dir

#: a row that a stamped build leaves
STAMPED = {"case": "b1_q1_h128_kv8192", "peer": "mla-lab", "kind": "phases", "call_us": 1.0}


@pytest.fixture
def card(monkeypatch):
    """An H200 in this machine, as far as the command looks."""
    monkeypatch.setattr(Gpu, "here", staticmethod(lambda index=0: Gpu.preset("H200")))


@pytest.fixture
def lines(monkeypatch):
    """What would have been run, in order; records come into being, host times are printed."""
    seen = []

    def run(line, env, stdout, text):
        seen.append((line[1:], env["MLA_LAB_DATA"]))
        for part in line:
            if part.endswith("anatomy.jsonl.new"):
                with open(part, "w") as file:
                    file.write(json.dumps(STAMPED) + "\n")
            elif part.endswith(".new"):
                with open(part, "w") as file:
                    file.write("measured\n")
        return SimpleNamespace(returncode=0, stdout='a table\n{"host_us": {}, "device": "x"}\n')

    monkeypatch.setattr(_live_steps, "subprocess", SimpleNamespace(run=run, PIPE=subprocess.PIPE))
    return seen


def test_without_a_card_one_sentence_says_why(monkeypatch, capsys):
    monkeypatch.setattr(Gpu, "here", staticmethod(lambda index=0: None))
    assert cli.main(["live"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert (
        "sweep, record, anatomy, host, notebooks: got a CPU alone; supported: a machine with"
        in line
    )
    assert line.endswith("mla-lab live --only costs,simulator,readme")


def test_another_card_s_times_are_not_these_records(monkeypatch, capsys):
    other = next(gpu for gpu in PRESETS if "H200" not in gpu.name)
    monkeypatch.setattr(Gpu, "here", staticmethod(lambda index=0: other))
    assert cli.main(["live", "--only", "record"]) == 2
    assert f"got {other.name}" in capsys.readouterr().err


@pytest.mark.usefixtures("card")
def test_a_short_run_goes_through_all_steps_in_another_folder(lines, tmp_path, capsys):
    into = tmp_path / "data"
    assert cli.main(["live", "--short", "--into", str(into)]) == 0
    ran = [" ".join(line) for line, _ in lines]
    assert {folder for _, folder in lines} == {str(into)}
    bench = ["bench sweep", "bench fit", "bench run", "studies.call_anatomy", "host_cost"]
    verbs = [*bench, "simulate.fit", "run_all"]
    assert len(ran) == len(verbs)
    assert all(verb in line for verb, line in zip(verbs, ran, strict=True))
    assert "--peers mla-lab" in ran[2], "a short run times nobody else"
    assert (into / "records/h200_anchor.jsonl").read_text() == "measured\n"
    assert not list(into.rglob("*.new"))
    last = (into / "records/host_cost.jsonl").read_text().splitlines()[-1]
    assert {"date", "commit", "host_us"} <= set(json.loads(last))
    assert (data_dir() / "records/h200_anchor.jsonl").read_text() != "measured\n"
    assert "no README beside" in capsys.readouterr().out


@pytest.mark.usefixtures("card")
def test_each_step_can_be_left_out(lines, tmp_path):
    into = str(tmp_path / "data")
    for step in _live_steps.STEPS:
        others = ",".join(s.name for s in _live_steps.STEPS if s is not step)
        only = [s.name for s in live.chosen([], others.split(","))]
        assert only == [step.name] == [s.name for s in live.chosen([step.name], [])]
    assert (
        cli.main(["live", "--skip", "sweep,costs,record,anatomy,host,notebooks", "--into", into])
        == 0
    )
    assert [line[1] for line, _ in lines] == ["mla_lab.simulate.fit"]


@pytest.mark.usefixtures("card", "lines")
def test_only_what_was_taken_anew_is_replaced(tmp_path):
    """Rows of a peer that is not on this machine stay; so do those of other calls."""
    into = tmp_path / "data"
    (into / "records").mkdir(parents=True)
    other, peer = {**STAMPED, "case": "b64"}, {**STAMPED, "peer": "flashmla"}
    rows = [{**STAMPED, "call_us": 9.0}, other, peer]
    file = into / "records/h200_anatomy.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert cli.main(["live", "--only", "anatomy", "--into", str(into)]) == 0
    assert [json.loads(line) for line in file.read_text().splitlines()] == [STAMPED, other, peer]
    assert not list(into.rglob("*.new"))


@pytest.mark.usefixtures("card")
def test_without_stamped_builds_the_rows_stay(monkeypatch, tmp_path, capsys):
    nothing = SimpleNamespace(returncode=0, stdout="")
    quiet = SimpleNamespace(run=lambda *_, **__: nothing, PIPE=subprocess.PIPE)
    monkeypatch.setattr(_live_steps, "subprocess", quiet)
    assert cli.main(["live", "--only", "anatomy", "--into", str(tmp_path / "data")]) == 0
    assert "the rows stay" in capsys.readouterr().out
    kept = (tmp_path / "data/records/h200_anatomy.jsonl").read_text()
    assert kept == (data_dir() / "records/h200_anatomy.jsonl").read_text()


def test_what_is_refused(monkeypatch, capsys):
    assert cli.main(["live", "--only", "sweeps"]) == 2
    assert cli.main(["live", "--only", "costs", "--skip", "costs"]) == 2
    assert cli.main(["live", "--only", "simulator", "--short"]) == 2
    name, none, short = capsys.readouterr().err.splitlines()
    assert "got 'sweeps'" in name
    assert "none left" in none
    assert "--into" in short


def test_a_step_that_fails_ends_the_run(monkeypatch, tmp_path, capsys):
    ended = SimpleNamespace(returncode=3, stdout="")
    broken = SimpleNamespace(run=lambda *_, **__: ended, PIPE=subprocess.PIPE)
    monkeypatch.setattr(_live_steps, "subprocess", broken)
    into = str(tmp_path / "data")
    assert cli.main(["live", "--only", "costs,simulator", "--into", into]) == 2
    assert "bench fit" in capsys.readouterr().err
