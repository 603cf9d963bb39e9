"""The trial of a peer in a process of its own, and what its end means."""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest
import torch

from mla_lab.bench import preflight as module
from mla_lab.bench.peers.torch_eager import TorchEager
from mla_lab.bench.preflight import preflight, trial
from mla_lab.bench.timers import HostTimer
from mla_lab.cli import main
from mla_lab.core.errors import DeviceLost, unsupported

CPU = torch.device("cpu")
ENDS = {
    "well": "pass",
    "aborts": "import os; os.abort()",
    "says": "print('loading'); raise SystemExit('of a kernel')",
    "hangs": "import time; time.sleep(60)",
}


class Named:
    def __init__(self, name):
        self.name = name


class Peer:
    """Prepares by what `prepare` does."""

    name = "x"

    def __init__(self, prepare, refusal=None):
        self.prepare, self.refusal = prepare, refusal

    def refuses(self, case):
        return self.refusal


def raises(error):
    def prepare(rotation):
        raise error

    return prepare


def test_each_end_of_a_trial_is_told():
    peers: list[Any] = [Named(name) for name in ENDS]
    died = preflight(
        peers,
        CPU,
        timeout=2.0,
        command=lambda name, device: [sys.executable, "-S", "-c", ENDS[name]],
    )
    assert died == {
        "aborts": "preflight: exit code -6: nothing said",
        "says": "preflight: exit code 1: of a kernel",
        "hangs": "preflight: no end in time",
    }


@pytest.mark.serial
def test_the_command_that_is_started_runs_the_peer():
    assert preflight([TorchEager()], CPU) == {}


def test_only_a_lost_device_is_held_against_a_peer(monkeypatch):
    assert trial(TorchEager(), CPU) is None
    assert trial(Peer(raises(RuntimeError("CUDA error: 717"))), CPU) is None
    monkeypatch.setattr(HostTimer, "lost", lambda self: "no more work")
    failing = trial(Peer(raises(RuntimeError("CUDA error: 717"))), CPU)
    assert failing == "RuntimeError: CUDA error: 717"
    assert trial(TorchEager(), CPU) == "no more work", "found out after the launch"
    assert trial(Peer(raises(unsupported("heads", 1, 2))), CPU) is None
    assert trial(Peer(pytest.fail, refusal="no"), CPU) is None


def test_a_trial_ends_with_its_reason_in_one_line(monkeypatch):
    monkeypatch.setattr(module, "trial", lambda peer, device: "an error\nof two lines")
    assert module.main("torch-eager", "cpu") == "an error of two lines"
    monkeypatch.setattr(module, "trial", lambda peer, device: None)
    assert module.main("torch-eager", "cpu") is None


def test_a_lost_device_starts_the_command_again(monkeypatch, tmp_path):
    started = []
    monkeypatch.setattr(os, "execv", lambda path, words: started.append(words))

    class Bench:
        def __init__(self, *args, **kwargs):
            pass

        def run(self, cases, keep_failed):
            raise DeviceLost("b on case: gone")

    monkeypatch.setattr("mla_lab.bench.Bench", Bench)
    words = ["bench", "run", str(tmp_path / "r"), "--device", "cpu", "--rounds", "3"]
    assert main([*words, "--parts", "3"]) == 0
    assert started == [[sys.executable, "-m", "mla_lab", *words, "--parts", "3", "--keep-failed"]]
