"""The planner and the ladder in the emulator: a sample of each, every check on."""

from __future__ import annotations

from typing import Any

import pytest

from mla_lab.core.resources import data_dir
from mla_lab.emulate import EmulatedKernel
from mla_lab.verify import emulated_cuda
from mla_lab.verify.record import read

#: bytes of the recorded kernels and calls
MOST_BYTES = 1 << 17


@pytest.mark.parametrize("name", emulated_cuda.RECORDED)
def test_kernels_around_decode_are_right_and_silent(name: str) -> None:
    assert name in emulated_cuda.names()
    schedule = "random" if "planner" in name or "ladder, 9" in name else "fair"
    row = emulated_cuda.run_case(name, schedule, kernel=emulated_cuda.recorded(name))
    assert row["status"] == "ok", row


def test_recordings_are_small() -> None:
    assert (data_dir() / emulated_cuda.ARCHIVE).stat().st_size < MOST_BYTES


def test_a_result_that_is_off_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulated_cuda, "OUT_ERROR", 1e-9)
    name = emulated_cuda.RECORDED[-1]
    row = emulated_cuda.run_case(name, kernel=emulated_cuda.recorded(name))
    assert row["status"] == "wrong" and row["out_error"] > 1e-9


@pytest.mark.parametrize("part", ["worker_begin", "counts"])
def test_a_plan_that_is_off_is_wrong(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    class Spoilt(EmulatedKernel):
        def __call__(self, *args: Any) -> None:
            super().__call__(*args)
            args[{"worker_begin": 3, "counts": 4}[part]][1] += 1

    name = emulated_cuda.RECORDED[0]
    good = emulated_cuda.recorded(name)
    row = emulated_cuda.run_case(name, kernel=Spoilt(good.text, good.function, good.host))
    assert row["status"] == "wrong" and "findings" not in row


def test_the_whole_list_is_on_record() -> None:
    head, *rows = read(data_dir() / "records/emulated_cuda.jsonl")
    assert [row["name"] for row in rows] == emulated_cuda.names()
    assert {row["status"] for row in rows} == {"ok"} and head["cases"] == len(rows)
