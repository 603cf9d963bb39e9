"""`mla-lab decode`: what it runs, what it says of it, and when it says no."""

from __future__ import annotations

import json
import time

import pytest
import torch

from mla_lab import cli
from mla_lab.cli.commands import _run
from mla_lab.cli.commands.decode import OUT_OF_BOUND
from mla_lab.core.gpu import Gpu
from mla_lab.core.models import get_model
from mla_lab.core.problem import Problem
from mla_lab.reference.tolerance import Error
from mla_lab.workload import replay, sample, shipped_trace

SMALL = ["--heads", "16", "--kv-len", "130,40", "--calls", "1", "--device", "cpu"]


def report(capsys, *options, code=0):
    assert cli.main(["decode", *options, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_a_small_call(capsys):
    result = report(capsys, *SMALL)
    problem = Problem((1, 1), (130, 40), heads=16)
    assert result["lengths"]["kv_lens"] == [130, 40]
    assert result["problem"]["heads"] == 16
    assert result["time"]["median_s"] > 0
    assert result["time"]["backend"] == "torch"
    assert result["error"]["good"]
    assert 0 < result["error"]["relative"] <= 2 * result["error"]["sdpa"]["relative"]
    assert result["roofline"]["intensity"] == problem.intensity()
    assert result["roofline"]["floor_us"] == Gpu.preset("H200").roofline_time(problem) * 1e6
    assert result["roofline"]["bound"] == "memory"


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32", "e4m3"])
def test_formats(dtype, capsys):
    result = report(capsys, *SMALL, "--dtype", dtype)
    assert result["problem"]["kv_format"] == dtype
    assert result["error"]["good"]


def test_an_eight_bit_cache_and_features(capsys):
    features = ["--feature", "sinks", "--feature", "tree_mask", "--feature", "device_scales"]
    result = report(capsys, *SMALL, "--kv-format", "fp8_656", "--q-len", "3", *features)
    assert result["problem"]["kv_format"] == "fp8_656"
    assert result["problem"]["q_lens"] == [3, 3]
    assert result["error"]["good"]


def test_a_model_brings_heads_and_scale(monkeypatch, capsys):
    scales = []
    judge = _run.judge

    def judged(call, *more):
        scales.append(call.bmm1_scale)
        return judge(call, *more)

    monkeypatch.setattr(_run, "judge", judged)
    options = ["--model", "kimi-k2", "--tp", "8", *SMALL[2:]]
    result = report(capsys, *options)
    assert result["problem"]["heads"] == 8
    assert result["model"] == "Kimi K2, 8 heads a rank"
    assert scales == [get_model("kimi-k2").softmax_scale]


def test_a_sampled_trace(capsys):
    result = report(
        capsys,
        "--trace",
        "synthetic",
        "--batch",
        "3",
        "--seed",
        "5",
        "--heads",
        "8",
        "--calls",
        "1",
    )
    assert tuple(result["lengths"]["kv_lens"]) == sample(shipped_trace(), 3, 5).kv_lens
    assert "sample of 3 steps, seed 5" in result["lengths"]["from"]


def test_a_replayed_trace(capsys):
    options = ["--trace", "synthetic", "--mode", "replay", "--at", "30"]
    lengths = replay(shipped_trace(), 30, 0.03).kv_lens
    result = report(capsys, *options, "--q-len", "2", "--heads", "8", "--calls", "1", "--no-check")
    assert result["lengths"]["kv_lens"] == [n + 1 for n in lengths]
    assert result["error"] is None


def test_a_policy_and_batch_invariance(capsys):
    assert report(capsys, *SMALL, "--policy", "none")["plan"]["partials"] == 0
    whole = report(capsys, *SMALL, "--batch-invariant")["plan"]
    assert whole["policy"] == "fixed_size"


def test_the_printed_report(capsys):
    assert cli.main(["decode", *SMALL]) == 0
    printed = capsys.readouterr().out
    for word in ("130, 40", "plan ", "time ", "error ", "torch SDPA", "roofline", "peak"):
        assert word in printed


def test_a_result_outside_its_bound_is_code_1(monkeypatch, capsys):
    monkeypatch.setattr("mla_lab.reference.tolerance.error", lambda out, ref: Error(1.0, 1.0))
    result = report(capsys, *SMALL, code=OUT_OF_BOUND)
    assert not result["error"]["good"]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--trace", "absent.csv"], "trace: got absent.csv"),
        (["--trace", "synthetic", "--kv-len", "5"], "--kv-len: got lengths beside --trace"),
        (["--trace", "synthetic", "--mode", "replay", "--batch", "2"], "--batch: got 2 with"),
        (["--trace", "synthetic", "--mode", "replay", "--at", "1e9"], "--at: got 1e+09 s"),
        (["--trace", "synthetic", "--mode", "replay", "--step-ms", "0"], "--step-ms: got 0.0"),
        (["--trace", "synthetic", "--batch", "0"], "--batch: got 0; supported: 1 to 1048576"),
        (["--trace", "synthetic", "--seed", "-1"], "--seed: got -1"),
        (["--seed", "9" * 30], "--seed: got 999"),
        (["--device", "tpu"], "--device: got 'tpu'"),
        (["--backend", "magic"], "backend: got 'magic'"),
        (["--feature", "magic"], "features: got ['magic']"),
        (["--policy", "magic"], "policy: got 'magic'"),
        (["--batch-invariant", "--policy", "fa3"], "plan: got policy 'fa3' with batch_invariant"),
        (["--gpu", "magic"], "gpu: got 'magic'"),
        (["--calls", "0"], "--calls: got 0"),
        (["--heads", "100000000"], "decode: got a call of "),
        (["--heads", "9" * 30], "--heads: got 999"),
        (["--q-len", "100000000"], "decode: got a call of "),
        (["--kv-len", "2000000000"], "decode: got a call of "),
        (["--kv-len", "4000000000"], "--kv-len: got 4000000000; supported: up to 2147483647"),
        (["--batch", "2000000000"], "--batch: got 2000000000; supported: 1 to 1048576"),
    ],
)
def test_what_is_refused(options, named, capsys):
    base = [] if "--trace" in options else ["--kv-len", "64", "--heads", "8", "--batch", "1"]
    assert cli.main(["decode", *base, *options]) == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"mla-lab decode: {named}"), printed
    assert printed.count("\n") == 1


def test_memory_that_the_system_does_not_tell_refuses_nothing(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(_run, "MEMORY", tmp_path / "absent")
    assert report(capsys, *SMALL)["error"]["good"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu_is_said(capsys):
    assert cli.main(["decode", "--device", "cuda"]) == 2
    assert "torch finds no GPU here" in capsys.readouterr().err


def test_calls_are_counted():
    made: list[int] = []

    def call():
        made.append(len(made))
        time.sleep(0.01)
        return torch.zeros(1), torch.full((1,), float(len(made)))

    measured = _run.measure(call, "cpu", calls=4)
    assert len(made) == 4
    assert len(measured.seconds) == 3, "the first call warms up"
    assert measured.lse.item() == 4
    assert 0.01 <= measured.median_seconds < 1


def test_a_long_call_is_made_once(monkeypatch):
    monkeypatch.setattr(_run, "BUDGET_SECONDS", 0.0)
    measured = _run.measure(lambda: (torch.zeros(1), torch.zeros(1)), "cpu")
    assert len(measured.seconds) == 1


@pytest.mark.serial
def test_peak_memory_is_seen():
    def call():
        big = torch.ones(64 << 20, dtype=torch.uint8)
        return big[:1].clone(), torch.zeros(1)

    peak = _run.measure(call, "cpu", calls=2).peak_bytes
    if peak is None:
        pytest.skip("the system does not let a process reset its high-water mark")
    assert 60e6 < peak < 90e6


def test_unknown_memory_is_said(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(_run, "PROCESS", tmp_path / "absent")
    assert report(capsys, *SMALL)["memory"]["peak_extra_bytes"] is None
    assert cli.main(["decode", *SMALL]) == 0
    assert "unknown here" in capsys.readouterr().out
