"""Host time of calls: each in turn, and a slow one seen as such."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mla_lab.studies import host_cost


def test_calls_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_cost, "ROUNDS", 3)
    monkeypatch.setattr(host_cost, "CALLS", 20)
    seen: list[str] = []
    found = host_cost.medians_us(
        {"short": lambda: seen.append("short"), "long": lambda: seen.append(str(sum(range(5000))))},
        lambda: seen.append("settle"),
    )
    assert found["long"] > 5 * found["short"] > 0
    assert seen.count("settle") == 2 * 3 + 1
    assert seen[1:21] == ["short"] * 20
    assert seen[21] == "settle"


def test_a_run_adds_a_line_to_the_record(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = tmp_path / "host_cost.jsonl"
    record.write_text('{"host_us": {}}\n')
    monkeypatch.setattr(host_cost, "measure", lambda: {"kernel entry": 6.0, "native call": 10.5})
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "X")
    monkeypatch.setattr("sys.argv", ["host_cost", str(record)])
    host_cost.main()
    assert "+4.50" in capsys.readouterr().out
    _, line = record.read_text().splitlines()
    row = json.loads(line)
    assert row["host_us"]["native call"] == 10.5 and row["card"] == "X"
    assert {"date", "commit"} < set(row)
