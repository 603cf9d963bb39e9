"""Timing of GQA decode: cases as numbers, a row on a CPU, a record that others leave alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mla_lab.bench.timers import HostTimer
from mla_lab.lab import measuring
from mla_lab.studies import gqa_decode as gqa
from mla_lab.studies.gqa_decode import CASES, GqaCase

SMALL = GqaCase(2, 1, 8, 2, 100, head_dim=64)


def test_bytes_and_operations_of_a_case() -> None:
    case = GqaCase(64, 1, 64, 8, 8192)
    assert case.name == "b64_q1_h64x8_d128_kv8192"
    assert case.kv_bytes == 64 * 8192 * 8 * 128 * 2 * 2
    assert case.bytes == case.kv_bytes + 2 * 64 * 64 * 128 * 2
    assert case.flop == 4 * 64 * 64 * 8192 * 128
    eight = GqaCase(64, 1, 64, 8, 8192, q_dtype="e4m3", kv_format="e4m3")
    assert eight.name.endswith("_e4m3_e4m3") and eight.kv_bytes * 2 == case.kv_bytes
    assert len({case.name for case in CASES}) == len(CASES)


def test_a_row_on_a_cpu() -> None:
    row = gqa.time_case(SMALL, HostTimer(), device="cpu", rotation_bytes=3 * SMALL.kv_bytes - 1)
    assert row["kv_copies"] == 3 and len(row["rounds"]) == gqa.ROUNDS
    assert row["us"] > 0 and row["rel_error"] < 4e-3
    assert row["tbps"] == pytest.approx(SMALL.bytes / row["us"] / 1e6)


def test_a_record_that_the_benchmark_of_mla_leaves_alone(tmp_path: Path) -> None:
    (tmp_path / "gqa.jsonl").write_text(json.dumps({"form": gqa.FORM, "us": 1.0}) + "\n")
    assert measuring.runs(folder=tmp_path) == []
