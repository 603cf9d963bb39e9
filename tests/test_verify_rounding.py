"""Errors over a cache of eight bits beside torch's with the same rounding."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from mla_lab.api.decode import decode
from mla_lab.core.errors import unsupported
from mla_lab.core.problem import Problem
from mla_lab.plan import Plan
from mla_lab.plan.check import check_plan
from mla_lab.plan.launch_modes import keep_ab_tiles
from mla_lab.reference.inputs import DecodeInputs
from mla_lab.reference.mla import Result
from mla_lab.verify import rounding, tables


def by_torch(inputs: DecodeInputs, plan: Plan | None) -> Result:
    return Result(*decode(**inputs.contract_args(), backend="torch"))


def rows(*formats: tuple[str, str], run: Any = by_torch) -> list[dict[str, Any]]:
    found = []
    for query, cache in formats:
        for times in rounding.TIMES:
            inputs = rounding.made(query, cache, "heavy_tailed", 64, times, "cpu")
            found += list(rounding.judge(inputs, times, run))
    return found


@pytest.mark.parametrize(("query", "cache"), rounding.FORMATS)
def test_every_kernel_of_a_format_has_whole_requests(query: str, cache: str) -> None:
    problem = Problem.uniform(2, 1, 700, 128, q_dtype=query, kv_format=cache)
    plans = dict(rounding.plans(problem))
    assert plans.pop(rounding.GATHERED) is None
    for name, plan in plans.items():
        assert plan is not None
        check_plan(plan)
        assert not plan.num_slots and name.endswith(f" {plan.tile_rows} rows")
    assert {n for n in plans if n.startswith("keep_ab")} == {
        f"keep_ab {height} rows" for height, _ in keep_ab_tiles(query, cache, 64)
    }
    assert "swap_ab 16 rows" in plans


def test_rounding_of_weights_is_what_torch_is_off_by() -> None:
    eight, two = (rows(formats) for formats in (("e4m3", "e4m3"), ("bf16", "e4m3")))
    assert {row["query_times"] for row in eight} == {1, 4} and {r["status"] for r in eight} == {
        "ok"
    }
    # the torch backend rounds no weights: it is nearer than what rounds them to e4m3
    assert all(row["times_torch"] < 0.7 for row in eight)
    assert all(0.3 < row["times_torch"] < 1.2 for row in two)
    for times in rounding.TIMES:
        e4m3, bf16 = (
            {r["torch_error"] for r in own if r["query_times"] == times} for own in (eight, two)
        )
        assert min(e4m3) > 2 * max(bf16)
    assert all(row["lse_error"] < 1e-5 for row in two)


def test_a_kernel_that_is_not_there_is_told() -> None:
    def none(inputs: DecodeInputs, plan: Plan | None) -> Result:
        raise unsupported("backend", "cute", "a card")

    found = rows(("bf16", "fp8_656"), run=none)
    assert {(row["status"], row["reason"][:7]) for row in found} == {("refused", "backend")}


def test_a_result_that_is_not_finite_is_wrong() -> None:
    def spoilt(inputs: DecodeInputs, plan: Plan | None) -> Result:
        out, lse = by_torch(inputs, plan)
        return Result(torch.full_like(out, torch.nan), lse)

    found = rows(("bf16", "e4m3"), run=spoilt)
    assert {row["status"] for row in found} == {"wrong"}
    assert found[0]["reason"] == f"{2 * 128 * 512} elements are not finite"
    assert set(rounding.worst_of(found).values()) == {math.inf}
    environment = {"card": None, "commit": "0123456789ab", "date": "2026-01-02"}
    head = {"kind": "run", "environment": environment}
    table = tables.rounding_table([head, *({**row, "kind": "case"} for row in found)])
    assert "| bf16 | e4m3 | swap_ab 16 rows | inf | inf |" in table


def test_the_command_writes_a_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        rounding, "rows", lambda device: [{**r, "inputs": "gauss"} for r in rows(("bf16", "e4m3"))]
    )
    path = tmp_path / "r.jsonl"
    assert rounding.main([str(path), "--device", "cpu"]) == 0
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["run"] + ["case"] * (len(lines) - 1)
    assert "bf16 e4m3 swap_ab 16 rows: at most" in capsys.readouterr().out


@pytest.mark.parametrize(("times", "code"), [(2.0, 0), (2.001, 1), (math.inf, 1)])
def test_more_than_twice_torch_s_error_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: float, code: int
) -> None:
    row = {"query": "bf16", "cache": "e4m3", "kernel": "swap_ab 16 rows", "kv_len": 64}
    rows = [row | {"status": "ok", "times_torch": each} for each in (1.0, times)]
    monkeypatch.setattr(rounding, "rows", lambda device: rows)
    assert rounding.main([str(tmp_path / "r.jsonl"), "--device", "cpu"]) == code


def test_what_choose_does_not_make_is_told_apart() -> None:
    def one(query: str, kernel: str, kv_len: int, times: float) -> dict[str, Any]:
        row = {"query": query, "cache": "e4m3", "kernel": kernel, "kv_len": kv_len}
        return {**row, "times_torch": times}

    assert rounding.worst_of(
        [
            one("e4m3", "keep_ab 64 rows", 16384, 1.1),
            one("e4m3", "keep_ab 64 rows", 1024, 1.2),
            one("e4m3", "keep_ab 64 rows", 65536, 2.2),
            one("e4m3", "swap_ab 16 rows", 65536, 1.0),
            one("bf16", "keep_ab 64 rows", 65536, 1.3),
        ]
    ) == {
        ("e4m3", "e4m3", "keep_ab 64 rows", False): 1.2,
        ("e4m3", "e4m3", "keep_ab 64 rows", True): 2.2,
        ("e4m3", "e4m3", "swap_ab 16 rows", False): 1.0,
        ("bf16", "e4m3", "keep_ab 64 rows", False): 1.3,
    }


def test_the_table_says_what_each_kernel_is_off_by() -> None:
    environment = {"card": {"name": "X"}, "commit": "0123456789ab", "date": "2026-01-02"}
    case = {"kind": "case", "query": "e4m3", "cache": "e4m3", "status": "ok", "lse_error": 0.012}
    rows = [
        {"kind": "run", "environment": environment},
        {**case, "kernel": "keep_ab 64 rows", "kv_len": 64, "times_torch": 1.25},
        {**case, "kernel": "keep_ab 64 rows", "kv_len": 65536, "times_torch": 2.5},
        {**case, "kernel": "swap_ab 16 rows", "kv_len": 64, "status": "refused"},
    ]
    lines = tables.rounding_table(rows).splitlines()
    assert lines[2] == "| e4m3 | e4m3 | keep_ab 64 rows | 1.25 | 1.2e-02 |"
    assert lines[3].startswith("| e4m3 | e4m3 | keep_ab 64 rows, pieces of more than 8192 keys")
    assert lines[-1].startswith("Worst over 64 and 65536 keys, whole requests, 2 calls on X, ")
    assert len(lines) == 6
