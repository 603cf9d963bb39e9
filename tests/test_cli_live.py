"""`mla-lab live`: its steps in order, what it refuses without a card, what it leaves alone."""

from __future__ import annotations

import argparse
import itertools
import json
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

from mla_lab import cli
from mla_lab.bench.records import read, results
from mla_lab.cli.commands import _live_steps, live
from mla_lab.cli.commands._bench_cases import add_flags, chosen
from mla_lab.cli.commands._bench_run import DEFAULT_PEERS
from mla_lab.core import revision
from mla_lab.core.gpu import H100, H200, Gpu
from mla_lab.core.resources import data_dir
from mla_lab.verify import plain_tables

from .house import ROOT, tracked_files

#: a row that a stamped build leaves
STAMPED = {"case": "b1_q1_h128_kv8192", "peer": "mla-lab", "kind": "phases", "call_us": 1.0}


@pytest.fixture
def card(monkeypatch):
    """An H200 in this machine, as far as the command looks."""
    monkeypatch.setattr(Gpu, "here", staticmethod(lambda index=0: Gpu.preset("H200")))


@pytest.fixture
def lines(monkeypatch):
    """What would have been run, in order; records come into being."""
    seen = []

    def run(line, env):
        seen.append((line[1:], env["MLA_LAB_DATA"]))
        for part in line:
            if part.endswith("anatomy.jsonl.new"):
                with open(part, "w") as file:
                    file.write(json.dumps(STAMPED) + "\n")
            elif part.endswith(".new"):
                with open(part, "w") as file:
                    file.write("measured\n")
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(_live_steps, "subprocess", SimpleNamespace(run=run))
    return seen


def test_without_a_card_one_sentence_says_why(monkeypatch, capsys):
    monkeypatch.setattr(Gpu, "here", staticmethod(lambda index=0: None))
    assert cli.main(["live"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert (
        "sweep, plain, plain-traces, plain-uniform, record, traces, formats, sparse, verify, cuda, "
        "rank-kernels, ladder, anatomy, host, notebooks: got a CPU alone; supported: a machine with"
        in line
    )
    assert line.endswith("mla-lab live --only costs,simulator,pages")


@pytest.mark.parametrize(
    "other", [H100, replace(H200, name="NVIDIA GH200 480GB"), replace(H200, sms=60, ceilings=None)]
)
def test_another_card_s_times_are_not_these_records(other, monkeypatch, capsys):
    monkeypatch.setattr(Gpu, "here", staticmethod(lambda index=0: other))
    assert cli.main(["live", "--only", "record"]) == 2
    assert f"got {other.name}" in capsys.readouterr().err


@pytest.mark.usefixtures("card")
def test_a_short_run_goes_through_all_steps_in_another_folder(lines, tmp_path, capsys):
    into = tmp_path / "data"
    assert cli.main(["live", "--short", "--into", str(into)]) == 0
    ran = [" ".join(line) for line, _ in lines]
    assert {folder for _, folder in lines} == {str(into)}
    verbs = ["bench sweep"] * 4 + ["bench fit"] * 2 + ["bench run"] * 21
    verbs += [
        "verify pairwise",
        "verify published",
        "rounding",
        "verify costs",
        "sanitizer",
        "verify soak",
        "verify card-bits",
    ]
    verbs += ["bench run"] * 3 + ["gqa_decode", "xqa_rounding", "bench rank-kernels", "ladder"]
    verbs += ["call_anatomy", "host_cost", "simulate.fit", "run_all"]
    assert len(ran) == len(verbs)
    assert all(verb in line for verb, line in zip(verbs, ran, strict=True))
    (anchor,) = (line for line in ran if "h200_anchor.jsonl.new" in line)
    assert anchor.endswith("kv(1024|8192)") and "--peers mla-lab --" in anchor, "nobody else"
    held_out = next(line for line in ran if "h200_plain_heldout.jsonl.new" in line)
    short = "--rounds 3 --peers mla-lab-plain --only ^b[1-4]_"
    assert "--cases heldout" in held_out and held_out.endswith(short)
    power = next(line for line in ran if "h200_sparse_power.jsonl.new" in line)
    assert power.endswith("--batch 64 --q-len 1") and "kv-len 32768" in power
    assert (into / "records/h200_anchor.jsonl").read_text() == "measured\n"
    assert not list(into.rglob("*.new"))
    assert ran[-3].endswith(f"host_cost {into / 'records/host_cost.jsonl'}")
    assert (data_dir() / "records/h200_anchor.jsonl").read_text() != "measured\n"
    assert "no README beside" in capsys.readouterr().out


@pytest.mark.usefixtures("card")
def test_each_step_can_be_left_out(lines, tmp_path):
    into = str(tmp_path / "data")
    for step in _live_steps.STEPS:
        others = ",".join(s.name for s in _live_steps.STEPS if s is not step)
        only = [s.name for s in live.chosen([], others.split(","))]
        assert only == [step.name] == [s.name for s in live.chosen([step.name], [])]
    assert cli.main(["live", "--only", "simulator,pages", "--into", into]) == 0
    assert [line[1] for line, _ in lines] == ["mla_lab.simulate.fit"]


@pytest.mark.usefixtures("card")
def test_traces_are_measured_where_their_folder_is_given(lines, tmp_path, monkeypatch):
    into = tmp_path / "data"
    monkeypatch.setattr(_live_steps, "_mean_lengths", lambda record: [1168, 900, 900])
    given = ["--traces", str(tmp_path)]
    assert cli.main(["live", "--only", "traces", "--into", str(into), *given]) == 0
    samples, uniform = (" ".join(line) for line, _ in lines)
    files = ",".join(str(tmp_path / name) for name in _live_steps.TRACES)
    assert f"--trace {files} --model deepseek-v2-lite,deepseek-v3 --peers" in samples
    assert "--kv-len 900,1168" in uniform


@pytest.mark.usefixtures("card")
def test_a_short_run_gives_seeds_to_samples_alone(lines, tmp_path, monkeypatch):
    """Beside a grid they would have no effect, and are refused."""
    monkeypatch.setattr(_live_steps, "_mean_lengths", lambda record: [1168])
    given = ["--short", "--into", str(tmp_path / "data"), "--traces", str(tmp_path)]
    assert cli.main(["live", "--only", "traces", *given]) == 0
    samples, uniform = (line for line, _ in lines)
    assert "--seeds" in samples
    assert "--seeds" not in uniform


@pytest.mark.usefixtures("card")
def test_steps_and_uniform_batches_are_measured_by_one_command(lines, tmp_path):
    into, given = tmp_path / "data", ["--traces", str(tmp_path)]
    assert cli.main(["live", "--only", "plain-uniform", "--into", str(into), *given]) == 0
    ((line, _),) = lines
    assert line[:4] == ["-m", "mla_lab", "bench", "run"] and "--uniform" in line
    asked = dict(itertools.pairwise(line))
    assert asked["--peers"] == "mla-lab-plain"
    assert asked["--trace"] == ",".join(str(tmp_path / name) for name in _live_steps.TRACES)
    assert asked["--model"] == "deepseek-v2-lite,deepseek-v3"
    assert asked["--requests"] == "16,64,128"
    assert (into / plain_tables.UNIFORM).read_text() == "measured\n"


@pytest.mark.usefixtures("card")
def test_without_traces_no_uniform_batches_are_measured(lines, tmp_path, capsys):
    assert cli.main(["live", "--only", "plain-uniform", "--into", str(tmp_path / "data")]) == 0
    assert not lines and "the rows stay" in capsys.readouterr().out


def test_invariant_plain_calls_are_those_of_planned_calls():
    """From batch 64 on, whatever is measured with a host plan is measured without one."""

    def asked(record):
        parser = argparse.ArgumentParser()
        add_flags(parser)
        commands = [line.split()[3:] for line in _live_steps.COMMANDS[record]]
        cases = [case for line in commands for case in chosen(parser.parse_known_args(line)[0])]
        return [case.name for case in cases if case.problem.batch >= 64]

    plain = asked("h200_plain_invariant")
    assert plain == asked("h200_invariant")
    recorded = results(read(data_dir() / "records/h200_invariant.jsonl"))
    assert set(plain) == {row["case"] for row in recorded if row["problem"]["batch"] >= 64}
    assert sum(name.endswith("_invariant") for name in plain) == 20


def test_every_record_has_its_origin():
    """Each file of data/records, and each record that code, notes and notebooks name, has its row
    in data/README.md; so has each record of a step, which no other step makes.
    """
    stepped = [name for step in _live_steps.STEPS for name in step.records]
    assert len(set(stepped)) == len(stepped)
    rows = re.findall(r"^\|([^|]*)\|", (ROOT / "data/README.md").read_text("utf-8"), re.MULTILINE)
    listed = set(re.findall(r"`records/(\w+)\.jsonl`", " ".join(rows)))
    there = {path.stem for path in (ROOT / "data" / "records").glob("*.jsonl")}
    assert there == listed and set(stepped) < listed
    shown = set()
    for path in tracked_files():
        inside = path.relative_to(ROOT).parts[0] in ("mla_lab", "notebooks", "README.md")
        if path.suffix in (".py", ".ipynb", ".md", ".jsonl") and (inside or "notes" in path.parts):
            text = path.read_text(encoding="utf-8")
            shown |= set(re.findall(r"records/(\w+)\.jsonl", text))
    assert shown and shown <= listed


def test_the_commands_of_data_readme_have_the_peers_and_rounds_of_their_records():
    text = (ROOT / "data/README.md").read_text("utf-8")
    commands = re.findall(r"`mla-lab bench run (data/records/\w+\.jsonl) ([^`]*)`", text)
    assert len(commands) > 8
    for record, options in commands:
        run = next(row for row in read(ROOT / record) if row["kind"] == "run")
        given = re.search(r"--peers (\S+)", options)
        peers = [peer["name"] for peer in run["peers"]]
        assert (given[1].split(",") if given else DEFAULT_PEERS.split(",")) == peers, record
        rounds = re.search(r"--rounds (\d+)", options)
        assert run["method"]["rounds"] == (int(rounds[1]) if rounds else 9), record
        assert run["method"]["isolated"] == ("--quick" not in options), record


def test_steps_measure_as_their_records_were_measured():
    """By the peers and over the rotation of which the fits and the pages are."""
    for name in ("h200_sweep", "h200_sweep_drawn", "h200_sweep_heldout", "h200_sweep_eight_bits"):
        run = next(
            row for row in read(data_dir() / f"records/{name}.jsonl") if row["kind"] == "run"
        )
        asked = dict(itertools.pairwise(_live_steps.COMMANDS[name][0].split()))
        assert float(asked["--rotation-mb"]) * 1e6 == run["method"]["rotation_bytes"], name
    run = next(row for row in read(data_dir() / "records/h200_anchor.jsonl"))
    asked = dict(itertools.pairwise(_live_steps.COMMANDS["h200_anchor"][0].split()))
    assert asked["--peers"].split(",") == [peer["name"] for peer in run["peers"]]


@pytest.mark.usefixtures("card", "lines")
def test_records_of_changed_code_are_refused(monkeypatch, capsys):
    monkeypatch.setattr(revision.Revision, "here", lambda: revision.Revision("a" * 40, True))
    assert cli.main(["live", "--only", "record"]) == 2
    said = capsys.readouterr().err
    assert "record h200_anchor.jsonl: got changed code" in said and "MLA_LAB_FORCE_RECORD" in said


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
    quiet = SimpleNamespace(run=lambda *_, **__: SimpleNamespace(returncode=0))
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
    broken = SimpleNamespace(run=lambda *_, **__: SimpleNamespace(returncode=3))
    monkeypatch.setattr(_live_steps, "subprocess", broken)
    into = str(tmp_path / "data")
    assert cli.main(["live", "--only", "costs,simulator", "--into", into]) == 2
    assert "bench fit" in capsys.readouterr().err
