"""Timing of GQA decode: cases as numbers, a row on a CPU, a record that others leave alone."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from mla_lab.api.contract_gqa import trtllm_batch_decode_with_kv_cache
from mla_lab.bench.timers import HostTimer
from mla_lab.core.errors import Unsupported
from mla_lab.core.resources import data_dir
from mla_lab.lab import measuring
from mla_lab.reference.inputs_gqa import GqaShape
from mla_lab.studies import gqa_decode as gqa
from mla_lab.studies.gqa_decode import CASES, flop, kv_bytes, least_bytes, name_of

SMALL = GqaShape.uniform(2, 1, 100, 8, 2, head_dim=64)


def test_bytes_and_operations_of_a_case() -> None:
    case = GqaShape.uniform(64, 1, 8192, 64, 8)
    assert name_of(case) == "b64_q1_h64x8_d128_kv8192"
    assert kv_bytes(case) == 64 * 8192 * 8 * 128 * 2 * 2
    assert least_bytes(case) == kv_bytes(case) + 2 * 64 * 64 * 128 * 2
    assert flop(case) == 4 * 64 * 64 * 8192 * 128
    eight = GqaShape.uniform(64, 1, 8192, 64, 8, q_dtype="e4m3", kv_format="e4m3")
    assert name_of(eight).endswith("_e4m3_e4m3") and kv_bytes(eight) * 2 == kv_bytes(case)
    recorded = (data_dir() / "records/h200_gqa.jsonl").read_text().splitlines()
    rows = {row["case"]: row for row in map(json.loads, recorded)}
    assert list(rows) == [name_of(case) for case in CASES]
    for case, row in zip(CASES, rows.values(), strict=True):
        assert (row["bytes"], row["flop"]) == (least_bytes(case), flop(case))


def test_a_row_on_a_cpu() -> None:
    row = gqa.time_case(SMALL, HostTimer(), device="cpu", rotation_bytes=3 * kv_bytes(SMALL) - 1)
    assert row["kv_copies"] == 3 and len(row["rounds"]) == gqa.ROUNDS
    assert row["us"] > 0 and row["rel_error"] < 4e-3
    assert row["tbps"] == pytest.approx(least_bytes(SMALL) / row["us"] / 1e6)


@pytest.mark.parametrize("spoilt", [0.5, math.nan])
def test_a_wrong_result_is_not_timed(monkeypatch: pytest.MonkeyPatch, spoilt: float) -> None:
    right = trtllm_batch_decode_with_kv_cache

    def off(**arguments: Any) -> None:
        right(**arguments)
        arguments["out"][-1] += spoilt

    monkeypatch.setattr(gqa, "trtllm_batch_decode_with_kv_cache", off)
    with pytest.raises(Unsupported, match=r"b2_q1_h8x2_d64_kv100: got a relative error of"):
        gqa.time_case(SMALL, HostTimer(), device="cpu", rotation_bytes=1)


def test_a_record_that_the_benchmark_of_mla_leaves_alone(tmp_path: Path) -> None:
    (tmp_path / "gqa.jsonl").write_text(json.dumps({"form": gqa.FORM, "us": 1.0}) + "\n")
    assert measuring.runs(folder=tmp_path) == []
