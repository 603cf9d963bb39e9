"""The merge, the planner and the ladder in the emulator: a sample of each, every check on."""

from __future__ import annotations

import shutil

import pytest

from mla_lab.verify import emulated_cuda

pytestmark = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("merge, bf16, sinks, 3 splits", "random"),
        ("merge, fp16, device scale, 3 splits", "fair"),
        ("planner, greedy, mixed", "random"),
        ("planner, fixed_size, many", "fair"),
        ("ladder, 3 shared", "fair"),
        ("ladder, 9 look_ahead", "random"),
    ],
)
def test_kernels_around_decode_are_right_and_silent(name: str, schedule: str) -> None:
    assert name in emulated_cuda.names()
    row = emulated_cuda.run_case(name, schedule)
    assert row["status"] == "ok", row


def test_a_result_that_is_off_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(emulated_cuda.OUT_ERRORS, "fp32", 1e-9)
    row = emulated_cuda.run_case("merge, fp32, plain, 1 splits")
    assert row["status"] == "wrong" and row["out_error"] > 1e-9
