"""A call between the other kernels of a step."""

from __future__ import annotations

from dataclasses import replace

import torch

from mla_lab.bench.measure import CaseRun
from mla_lab.bench.step_rest import COPIES, EXPERTS, LAYERS, TAKEN, WEIGHTS, StepRest

from .test_bench_harness import CASES, METHOD, FakeLaunch, FakePeer, FakeTimer


def test_a_call_between_the_kernels_of_a_step():
    timer = FakeTimer(a=[10.0], rest=[30.0])
    run_of_case = CaseRun(
        CASES[0],
        replace(METHOD, isolated=False, planned=False),
        timer,
        torch.device("cpu"),
        rest=lambda tokens, device: FakeLaunch("rest", lambda: torch.zeros(tokens)),
    )
    (row,) = run_of_case.rows([FakePeer("a")])
    # the fake clock counts launches, whosever they are, by that of the first: 32 of 10 us
    assert row["us_in_step"] == (32 * 10.0 - 16 * 30.0) / 16
    alone, step = timer.replays[0], timer.replays[2]
    assert [launch.peer for launch in alone] == ["rest"] * LAYERS
    assert [launch.peer for launch in step] == ["a", "rest"] * LAYERS


def test_a_step_without_room_for_its_other_kernels_leaves_the_reason():
    def rest(tokens, device):
        raise torch.OutOfMemoryError("no room for 264 MB\nof 80 GB")

    method = replace(METHOD, isolated=False, planned=False)
    timer = FakeTimer(a=[10.0])
    (row,) = CaseRun(CASES[0], method, timer, torch.device("cpu"), rest=rest).rows([FakePeer("a")])
    assert row["status"] == "ok" and row["us"] == 10.0 and "us_in_step" not in row
    assert row["notes"]["in_step"] == "no room for 264 MB"


def test_the_rest_is_five_kernels_over_weights_that_change(monkeypatch):
    monkeypatch.setattr("mla_lab.bench.step_rest.WEIGHTS", (64, 32))
    rest = StepRest(3, torch.device("cpu"))
    used = []
    plain = torch.mm

    def multiply(x, weights, out):
        used.append(weights)
        return plain(x, weights, out=out)

    monkeypatch.setattr(torch, "mm", multiply)
    assert rest().shape == rest().shape == (3, 64)
    assert len(used) == 2 and used[0] is not used[1] and used[0].shape == (64, 32)
    # above, small; on a card all copies are larger than the L2 of an H200
    assert WEIGHTS[0] * WEIGHTS[1] * 2 > 2 * 60e6 and COPIES > 1 and TAKEN < EXPERTS
