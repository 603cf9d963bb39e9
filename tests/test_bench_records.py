"""Records, the regression gate, tables and the command."""

from __future__ import annotations

import json
import random
from unittest.mock import Mock

import pytest

from mla_lab.bench.cases import uniform_case
from mla_lab.bench.gate import compare, geometric_mean_change, passes
from mla_lab.bench.records import (
    Record,
    describe_case,
    medians,
    problem_of,
    read,
    rerun_spread,
    results,
)
from mla_lab.bench.report import (
    call_note,
    gate_table,
    headline,
    own_table,
    power_table,
    rates_table,
    refusals_table,
    times_table,
)
from mla_lab.bench.telemetry import Telemetry, smi_name
from mla_lab.cli import main
from mla_lab.core.errors import InvalidInput
from mla_lab.core.problem import Problem

CASES = [uniform_case(b, 1, 128, kv, "anchor") for b in (1, 16, 128) for kv in (1024, 8192)]


def row(case, us, peer="mla-lab", part=0, rounds=9, noise=0.004, seed=0, **fields):
    """A result whose rounds scatter by `noise` around `us`."""
    draw = random.Random(f"{seed} {case.name} {peer} {part}")
    values = [us * (1 + draw.gauss(0, noise)) for _ in range(rounds)]
    measured = {
        "us": sorted(values)[rounds // 2],
        "rounds": {"us": values},
        "status": "ok",
        "reason": None,
        "tflops": 1.0,
        "tbps": 1.0,
        "rel_error": 2e-3,
    }
    base = {"kind": "result", **describe_case(case), "peer": peer, "part": part}
    return {**base, **measured, **fields}


def record_of(seed, slow=1.0, noise=0.004, peers=("mla-lab",), parts=1):
    """A run in which each case drifts a little, as reruns do, times `slow`."""
    draw = random.Random(seed)
    return [
        row(case, 10.0 * (i + 1) * slow * (1 + draw.gauss(0, 0.004)), peer, part, 9, noise, seed)
        for part in range(parts)
        for i, case in enumerate(CASES)
        for peer in peers
    ]


def refused(case, status="refused", reason="no kernel"):
    base = {"kind": "result", **describe_case(case), "peer": "mla-lab", "part": 0}
    return {**base, "status": status, "reason": reason}


def test_a_case_survives_its_row():
    ragged = Problem((1, 2), (5, 70), 16, q_dtype="fp16", kv_format="fp16", page_size=32)
    for problem in (ragged, Problem.uniform(3, 1, 9, 128)):
        case = uniform_case(1, 1, 1, 1)
        described = describe_case(type(case)("x", "test", problem))
        assert problem_of(json.loads(json.dumps(described))) == problem


def test_a_torn_last_line_is_no_row_and_a_bad_one_is_an_error(tmp_path):
    path = tmp_path / "r.jsonl"
    record = Record(path)
    record.append({"kind": "end", "value": 0.123456789})
    record.close()
    text = path.read_text(encoding="utf-8")
    path.write_text(text + text[:20], encoding="utf-8")
    assert [r["value"] for r in read(path)] == [0.123457], "six digits are kept"
    Record(path).append({"kind": "end", "value": 1})
    assert [r["value"] for r in read(path)] == [0.123457, 1], "the torn line is gone"
    path.write_text("torn\n" + text, encoding="utf-8")
    with pytest.raises(InvalidInput, match="1: "):
        list(read(path))
    path.write_text('{"schema": 99, "time": "", "kind": "end"}\n', encoding="utf-8")
    with pytest.raises(InvalidInput, match="schema 1"):
        list(read(path))


def test_of_rows_with_one_key_the_last_counts():
    rows = [refused(CASES[0], "failed", "flaky"), row(CASES[0], 7.0, noise=0.0)]
    assert [r["status"] for r in results(rows)] == ["ok"]
    assert medians(rows) == {(CASES[0].name, "mla-lab"): 7.0}


def test_spread_needs_repetitions():
    assert rerun_spread(record_of(0)) is None
    spread = rerun_spread(record_of(0, parts=2))
    assert spread is not None
    assert 0 < spread["median"] <= spread["p90"] <= spread["worst"] < 0.03


@pytest.mark.parametrize("seed", range(20))
def test_a_rerun_passes_and_a_planted_slow_down_is_caught(seed):
    before = record_of(seed)
    assert passes(compare(before, record_of(seed + 1000)))
    slower = compare(before, record_of(seed + 1000, slow=1.05))
    assert not passes(slower)
    assert sum(v.verdict == "slower" for v in slower) >= len(CASES) // 2
    mean = geometric_mean_change(slower)
    assert mean == pytest.approx(0.05, abs=0.012)


def test_one_slow_case_is_enough():
    before = record_of(0)
    after = [*record_of(1)[1:], row(CASES[0], 10.0 * 1.06, noise=0.002)]
    assert [v.case for v in compare(before, after) if v.verdict == "slower"] == [CASES[0].name]


def test_faster_is_no_failure():
    verdicts = compare(record_of(0), record_of(1, slow=0.9))
    assert passes(verdicts)
    assert {v.verdict for v in verdicts} == {"faster"}


def test_noise_is_no_verdict():
    wild = record_of(0, noise=0.2)
    verdicts = compare(wild, record_of(1, slow=1.04, noise=0.2))
    assert passes(verdicts)
    assert all(v.noise is not None and v.noise > 0.04 for v in verdicts)


def test_repetitions_that_disagree_are_noise():
    before = [row(CASES[0], us, part=i, noise=0.0) for i, us in enumerate((10.0, 10.0))]
    after = [row(CASES[0], us, part=i, noise=0.0) for i, us in enumerate((10.0, 11.0))]
    assert compare(before, after)[0].change == pytest.approx(0.05)
    assert compare(before, after)[0].noise == pytest.approx(1 / 10.5)
    assert passes(compare(before, after))


def test_what_broke_or_vanished_fails():
    before = record_of(0)
    broken = [*record_of(1)[1:], refused(CASES[0], "wrong", "relative error 1")]
    verdicts = compare(before, broken)
    assert verdicts[0].verdict == "broken"
    assert verdicts[0].reason == "wrong: relative error 1"
    assert not passes(verdicts)
    vanished = compare(before, record_of(1)[1:])
    assert vanished[0].verdict == "missing"
    assert not passes(vanished)


def test_what_is_new_passes_and_what_never_ran_is_no_baseline():
    before = [refused(CASES[0]), *record_of(0)[1:]]
    verdicts = compare(before, record_of(1))
    assert verdicts[-1].verdict == "new"
    assert passes(verdicts)
    assert len(verdicts) == len(CASES)


def test_a_name_that_stands_for_another_problem_is_not_compared():
    after = record_of(2)
    after[0] = {**after[0], "problem": {**after[0]["problem"], "page_size": 1}}
    with pytest.raises(InvalidInput, match=f"another problem by the name {CASES[0].name}"):
        compare(record_of(1), after)


def test_a_table_of_our_calls_shows_the_median_of_the_parts():
    rows = [row(CASES[0], us, "mla-lab", part, noise=0) for part, us in enumerate((10, 11, 40))]
    assert own_table(rows).splitlines()[-1].split("|")[2].strip() == "11.0"


def test_only_the_named_peers():
    both = record_of(0, peers=("mla-lab", "flashmla"))
    assert {v.peer for v in compare(both, both, peers=["flashmla"])} == {"flashmla"}


def test_a_table_shows_every_peer_and_the_best_public_one():
    rows = [
        row(CASES[0], 10.0, noise=0.0),
        row(CASES[0], 15.0, "flashmla", noise=0.0),
        row(CASES[0], 14.0, "fa3-qv", noise=0.0),
        row(CASES[0], 12.0, "fa3-qv-32", noise=0.0),
        row(CASES[0], 500.4, "torch-eager", noise=0.0),
        refused(CASES[1]),
    ]
    table = times_table(rows, "anchor").splitlines()
    assert times_table(rows[::-1], "anchor").splitlines()[2] == table[2], "in any order"
    assert len(table) == 3
    cells = [cell.strip() for cell in table[2].split("|")[1:-1]]
    assert cells == [CASES[0].name, "10.0", "15.0", "12.0", "500", "1.20"], "no empty column"
    assert "no kernel" in refusals_table(rows)
    by_torch = times_table([row(CASES[0], 1204.0, "mla-lab-torch", noise=0.0)], "anchor")
    assert "mla-lab-torch us" in by_torch and "1204" in by_torch, "by its own name"


def test_a_plain_call_is_the_headline_as_soon_as_a_record_has_one():
    planned = [row(CASES[0], 10.0, noise=0.0), row(CASES[0], 15.0, "flashmla", noise=0.0)]
    assert headline(planned) == "mla-lab" and "with a host plan" in call_note(planned)
    tight = row(CASES[0], 11.5, "mla-lab-plain-tight", noise=0.0)
    assert headline([*planned, tight]) == "mla-lab", "its bound is not what an engine captures"
    rows = [row(CASES[0], 12.0, "mla-lab-plain", noise=0.0), *planned, tight]
    assert headline(rows) == "mla-lab-plain" and "with a host plan" not in call_note(rows)
    names, _, line = times_table(rows, "anchor").splitlines()
    assert names.startswith("| case | mla-lab us | mla-lab, tight bound us | mla-lab, host plan us")
    assert [c.strip() for c in line.split("|")[2:6]] == ["12.0", "11.5", "10.0", "15.0"]
    assert line.endswith("| 1.25 |")
    assert "not timed apart" in call_note(rows)
    rows.append(row(CASES[1], 12.0, "mla-lab-plain", noise=0.0, us_first_layer=13.0))
    names, _, without, line = times_table(rows, "anchor").splitlines()
    assert names.startswith("| case | mla-lab us | mla-lab, first layer us | mla-lab, tight bound")
    assert [c.strip() for c in line.split("|")[2:4]] == ["12.0", "13.0"]
    assert [c.strip() for c in without.split("|")[2:4]] == ["12.0", ""]
    assert "is timed apart" in call_note(rows)
    step = {"mla-lab-plain": 20.0, "flashmla": 30.0, "fa3-qv": 26.0, "mla-lab": 1.0}
    rows = [row(CASES[0], 12.0, peer, noise=0.0, us_in_step=us) for peer, us in step.items()]
    names, _, line = times_table(rows, "anchor").splitlines()
    assert names.endswith(
        "| best public / ours | mla-lab, in a step us | the same ratio, in a step |"
    )
    assert line.endswith("| 1.00 | 20.0 | 1.30 |"), "the headline's call, the quickest public one"
    assert times_table(rows[::-1], "anchor").splitlines()[2] == line, "in any order"
    older, now = ({"kind": "run", "method": m} for m in ({}, {"rest": "a norm and a GEMM"}))
    assert "layer runs a GEMM over 132 MB of weights and the call" in call_note([older, *rows])
    assert "layer runs a norm and a GEMM and the call, so that the call's code and" in call_note(
        [now, *rows]
    )
    with pytest.raises(InvalidInput, match="mla-lab-plain or mla-lab"):
        headline([row(CASES[0], 15.0, "flashmla", noise=0.0)])


def test_the_gate_s_table_ends_with_the_verdict():
    assert gate_table(compare(record_of(0), record_of(0))).endswith("change +0.0%")
    text = gate_table(compare(record_of(0), record_of(1, slow=1.2)))
    assert "FAILS" in text
    assert text.count("slower") == len(CASES)


def test_power_table_shows_what_was_under_load():
    load = {"watts": 650.0, "sm_mhz": 1400.0, "us": 120.0, "joules": 0.078, "seconds": 0.4}
    rows = [row(CASES[5], 110.0, power={**load, "readings": 14}), row(CASES[0], 7.0, power=None)]
    lines = power_table(rows, "anchor").splitlines()[2:]
    assert lines == [f"| {CASES[5].name} | mla-lab | 120 | 1400 | 650 | 78.0 |"]


def test_rates_are_those_of_the_median_part():
    parts = [(12.0, 500.0), (10.0, 600.0), (11.0, 550.0)]
    rows = [row(CASES[0], us, part=i, noise=0.0, tflops=rate) for i, (us, rate) in enumerate(parts)]
    (line,) = rates_table(rows, "anchor").splitlines()[2:]
    assert line == f"| {CASES[0].name} | 11.0 |  | 550 | 1.00 | 2.0e-03 |"


def test_readings_are_those_of_the_card_that_runs(monkeypatch):
    opened = Mock(return_value=Mock(stdout=[]))
    monkeypatch.setattr("shutil.which", lambda name: name)
    monkeypatch.setattr("subprocess.Popen", opened)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: Mock(uuid="1c-d2"))
    assert smi_name("cpu") == "0" and smi_name("cuda:1") == "GPU-1c-d2"
    telemetry = Telemetry(card=smi_name("cuda:1"))
    telemetry.__enter__()
    (command,) = opened.call_args.args
    assert command[command.index("-i") + 1] == "GPU-1c-d2"


def test_readings_are_medians_of_their_window():
    telemetry = Telemetry()
    assert telemetry.between(0, 1) is None
    for line in ("1500, 3201, 600.5, 60", "1400, 3201, 650.5, 62", "[N/A], 1, 2, 3", "1, 2"):
        telemetry.add(line)
    first, second = telemetry.samples
    both = telemetry.between(first.at, second.at)
    assert both == {"sm_mhz": 1450, "mem_mhz": 3201, "watts": 625.5, "celsius": 61}
    later = telemetry.between(second.at + 5, second.at + 6)
    assert later is not None
    assert later["sm_mhz"] == 1400, "the nearest sample stands in"


@pytest.mark.serial
def test_the_command_measures_compares_and_reports(tmp_path, capsys):
    record = str(tmp_path / "cpu.jsonl")
    sweep = ["--batch", "1,2", "--heads", "4", "--kv-len", "30", "--device", "cpu"]
    peers = ["--peers", "mla-lab-torch,torch-eager,flashmla", "--rounds", "3"]
    assert main(["bench", "run", record, *sweep, *peers, "--rotation-mb", "0.05"]) == 0
    assert "4 results" in capsys.readouterr().out
    assert main(["bench", "compare", record, record, "--all"]) == 0
    assert "passes: 4 compared" in capsys.readouterr().out
    slow = list(read(tmp_path / "cpu.jsonl"))
    for r in slow:
        if r["kind"] == "result":
            r["rounds"]["us"] = [50 * us for us in r["rounds"]["us"]]
    (tmp_path / "slow.jsonl").write_text("\n".join(map(json.dumps, slow)), encoding="utf-8")
    threshold = ["--threshold", "0.5", "--peers", "mla-lab-torch"]
    assert main(["bench", "compare", record, str(tmp_path / "slow.jsonl"), *threshold]) == 1
    assert "FAILS: 2 compared" in capsys.readouterr().out
    assert main(["bench", "report", record, "--table", "method"]) == 0
    assert "CPU" in capsys.readouterr().out


def test_a_gate_that_compares_nothing_does_not_pass(tmp_path, capsys):
    (tmp_path / "empty.jsonl").touch()
    records = [str(tmp_path / "empty.jsonl")] * 2
    assert main(["bench", "compare", *records]) == 2
    assert "baseline: got no figure; supported" in capsys.readouterr().err
    assert main(["bench", "compare", *records, "--peers", "typo"]) == 2
    assert "baseline: got no figure of peers typo" in capsys.readouterr().err
    assert main(["bench", "compare", *records, "--threshold", "nan"]) == 2
    assert "--threshold: got nan" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--cases", "anchors"], "--cases|cases"),
        (["--peers", "nobody"], "peers"),
        (["--cases", "anchor", "--batch", "1"], "--cases"),
        (["--only", "no such case"], "--only"),
        (["--only", "("], "--only: got '('"),
        (["--device", "tpu"], "--device: got 'tpu'"),
        (["--device", "cuda:99"], "--device: got cuda:99"),
        (["--rounds", "0"], "--rounds: got 0"),
        (["--parts", "0"], "--parts: got 0"),
        (["--rotation-mb", "nan"], "--rotation-mb: got nan"),
        (["--rotation-mb", "-1"], "--rotation-mb: got -1.0"),
        (["--top-k", "-1"], "--top-k: got -1"),
        (["--peers", ""], "--peers: got none"),
        (["--seed", "9" * 30], "--seed: got 999"),
    ],
)
def test_the_command_refuses_in_one_line(tmp_path, capsys, arguments, words):
    assert main(["bench", "run", str(tmp_path / "r"), "--device", "cpu", *arguments]) == 2
    line = capsys.readouterr().err
    assert any(word in line for word in words.split("|"))
    assert not (tmp_path / "r").exists()
