"""A few seconds of the soak on the CPU, and that it sees what is wrong."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mla_lab.api.contract import trtllm_batch_decode_with_kv_cache_mla as right
from mla_lab.cli import main
from mla_lab.core.errors import unsupported
from mla_lab.verify import soak
from mla_lab.verify.cases import FORMATS
from mla_lab.verify.record import read, write


@pytest.fixture(scope="module", autouse=True)
def earlier_tests_left_nothing_to_collect() -> None:
    """A run collects garbage to see what it holds: of what other tests keep, once."""
    gc.collect()
    gc.freeze()


def quiet(text: str) -> None:
    """Nothing is said."""


def test_every_format_is_served_and_every_result_checked(tmp_path: Path) -> None:
    record = tmp_path / "soak.jsonl"
    assert main(["verify", "soak", str(record), "--device", "cpu", "--seconds", "2"]) == 0
    head, row = map(json.loads, record.read_text(encoding="utf-8").splitlines())
    assert head["what"] == "soak" and head["environment"]["command"] == [
        "mla-lab",
        "verify",
        "soak",
    ]
    assert row["status"] == "ok" and row["wrong"] == row["refused"] == 0
    assert row["calls"] == row["checked"] == row["sessions"] * soak.STEPS["cpu"] >= 40
    assert set(row["formats"]) == set(FORMATS) and row["seconds"] >= 2
    assert row["flat"] and row["memory_before"]["resident"] > 0
    assert row["seed"] == 1 and row["commit"] == head["environment"]["commit"]


def test_runs_add_up_in_one_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = tmp_path / "soak.jsonl"
    command = ["verify", "soak", str(record), "--device", "cpu", "--seconds", "0"]
    assert main(command) == 0
    one = record.read_text(encoding="utf-8")
    capsys.readouterr()
    assert main(command) == 0
    assert record.read_text(encoding="utf-8").startswith(one)
    _, first, _, second = read(record)
    assert (first["seed"], second["seed"]) == (1, 2) and first["backends"] != {}
    calls = first["calls"] + second["calls"]
    said = capsys.readouterr().out
    assert f"in 2 runs on a CPU (commits {(first['commit'] or 'unknown')[:9]}; " in said
    assert f"{calls} results checked, 0 wrong" in said and "grew by 0 bytes at most" in said


def test_one_wrong_result_of_any_run_is_an_exit_code(tmp_path: Path) -> None:
    record = tmp_path / "soak.jsonl"
    command = ["verify", "soak", str(record), "--device", "cpu", "--seconds", "0"]
    assert main(command) == 0
    head, row = read(record)
    write(record, [head, row | {"wrong": 1, "status": "wrong"}])
    assert main(command) == 1 and len(read(record)) == 4


def test_a_record_of_something_else_stays_as_it_is(tmp_path: Path) -> None:
    record = tmp_path / "pairs.jsonl"
    write(record, [{"kind": "run", "what": "pairwise"}])
    assert main(["verify", "soak", str(record), "--device", "cpu", "--seconds", "0"]) == 2
    assert read(record) == [{"kind": "run", "what": "pairwise"}]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("[" * 5000, "soak.jsonl:2: got nested too deeply"),
        ('{"kind": "case"', "soak.jsonl:2: got broken JSON"),
        ('{"what": "soak"}', "soak.jsonl:2"),
        ('{"kind": "case", "seconds": "long"}', "soak.jsonl, case"),
    ],
)
def test_a_damaged_record_is_one_sentence_and_stays(
    line: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = tmp_path / "soak.jsonl"
    text = json.dumps({"kind": "run", "what": "soak", "environment": {}}) + "\n" + line + "\n"
    record.write_text(text, encoding="utf-8")
    assert main(["verify", "soak", str(record), "--device", "cpu", "--seconds", "0"]) == 2
    assert says in capsys.readouterr().err
    assert record.read_text(encoding="utf-8") == text


def test_a_run_of_long_steps_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "GRACE", -1.0)
    row = list(soak.run("cpu", 0.0, quiet))[-1]
    assert row["status"] == "ok" and row["calls"] == row["sessions"] == len(FORMATS)


def test_requests_grow_end_and_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[int]] = []
    step = soak.Session.step

    def watched(self: soak.Session) -> None:
        before = list(self.lengths)
        step(self)
        assert self.inputs.seq_lens.tolist() == self.lengths
        seen.extend(map(list, zip(before, self.lengths, strict=True)))

    monkeypatch.setattr(soak.Session, "step", watched)
    assert list(soak.run("cpu", 0.0, quiet))[-1]["status"] == "ok"
    assert any(0 < b < a <= b + 4 for b, a in seen), "grew by its new tokens"
    assert any(b and not a for b, a in seen) and any(a and not b for b, a in seen)


@pytest.mark.parametrize("kind", ["out", "lse", "refused"])
def test_it_sees_what_is_wrong(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    calls: list[dict[str, Any]] = []

    def spoilt(**given: Any) -> Any:
        calls.append(given)
        if kind == "refused" and len(calls) == 5:
            raise unsupported("query", "the fifth call", "others")
        result = right(**given)
        spoil = given.get(kind)
        if spoil is not None and len(calls) > 4:
            assert isinstance(spoil, torch.Tensor)
            spoil.view(torch.uint8).fill_(0x3C)  # finite in every dtype
        return result

    monkeypatch.setattr(soak, "decode", spoilt)
    told: list[str] = []
    row = list(soak.run("cpu", 0.0, told.append))[-1]
    if kind == "refused":
        assert row["refused"] == 1 and row["status"] == "ok"
        assert "the fifth call" in told[0]
        return
    assert row["status"] == "wrong" and 0 < row["wrong"] < row["checked"]
    assert len(told) == row["wrong"] and row["reasons"]


def test_a_run_without_a_call_is_not_ok(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(**given: Any) -> Any:
        raise unsupported("query", "every call", "none")

    monkeypatch.setattr(soak, "decode", refused)
    row = list(soak.run("cpu", 0.0, quiet))[-1]
    assert row["calls"] == 0 < row["refused"] and row["status"] == "wrong"


def test_results_are_written_anew_in_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def watched(**given: Any) -> Any:
        results = [given["out"], *([given["lse"]] if "lse" in given else [])]
        assert all(bool(t.float().isnan().all()) for t in results), "left of the step before"
        return right(**given)

    monkeypatch.setattr(soak, "decode", watched)
    assert list(soak.run("cpu", 0.0, quiet))[-1]["status"] == "ok"


def test_tensors_that_grow_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = iter((0, soak.FLAT_BYTES + 1))
    monkeypatch.setattr(soak.Soak, "memory", lambda self: soak.Memory(next(taken), 0))
    row = list(soak.run("cpu", 0.0, quiet))[-1]
    assert not row["flat"] and row["status"] == "wrong" and not row["wrong"]
