"""Host time of calls: each in turn, and a slow one seen as such."""

from __future__ import annotations

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
