"""lse of eight-bit calls with an H200's arithmetic: the command's cases, and its record."""

from __future__ import annotations

import math
import os
from typing import Any

import pytest

from mla_lab.api.contract import trtllm_batch_decode_with_kv_cache_mla as right
from mla_lab.core.resources import data_dir
from mla_lab.verify import emulated_lse
from mla_lab.verify.record import read

from .needs import needs_cxx

RECORD = data_dir() / "records/emulated_lse.jsonl"


@needs_cxx
@pytest.mark.parametrize(
    "case",
    [
        ("fp8_656", 64, True, "concentrated", 4),
        pytest.param(
            ("e4m3", 16, False, "heavy_tailed", 16),
            marks=pytest.mark.skipif("MLA_LAB_LONG" not in os.environ, reason="a build of its own"),
        ),
    ],
    ids=["keep_ab", "swap_ab"],
)
def test_lse_is_as_recorded_and_its_error_within_the_bound(case: emulated_lse.Case) -> None:
    """A new kernel has other figures: then `mla-lab verify lse` makes the record anew."""
    row = emulated_lse.run_case(case)
    assert row["status"] == "ok" and 1e-6 < row["lse_error"] <= emulated_lse.MOST
    names = ("cache", "heads", "sparse", "inputs", "query_times")
    recorded = next(r for r in read(RECORD)[1:] if tuple(r[name] for name in names) == case)
    # with one token a request the mask is either, whichever build is there
    either = [[name.replace("_mask-causal", "") for name in r["builds"]] for r in (row, recorded)]
    assert either[0] == either[1]
    for figure in ("lse_error", "greatest_lse", "error"):
        assert row[figure] == pytest.approx(recorded[figure], rel=0.02), figure


@pytest.mark.parametrize("off", [0.01, math.nan])
def test_an_lse_that_is_off_is_wrong(monkeypatch: pytest.MonkeyPatch, off: float) -> None:
    def call(**given: Any) -> Any:
        out, lse = right(**given | {"backend": "torch"})
        return out, lse * (1 + off)

    monkeypatch.setattr(emulated_lse, "trtllm_batch_decode_with_kv_cache_mla", call)
    row = emulated_lse.run_case(("fp8_656", 16, False, "concentrated", 4))
    assert row["status"] == "wrong" and not row["lse_error"] < 5e-3


def test_the_record_has_every_case() -> None:
    head, *rows = read(RECORD)
    assert len(rows) == head["cases"] == len(emulated_lse.cases())
    assert not emulated_lse.failed([head, *rows])
    assert emulated_lse.failed([head, rows[0] | {"status": "wrong"}])
