"""Layer loops of an engine's step on a CPU; layers of vLLM and SGLang where they are installed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from mla_lab.interop.engines import step as engine
from mla_lab.studies import engine_steps
from mla_lab.studies.engine_layers import Shape

from .absent import stand_in

SMALL = {"layers": 2, "heads": 2, "batch": 2, "kv_len": 70, "max_len": 128}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_steps, "ROUNDS", 1)
    monkeypatch.setattr(engine_steps, "WARMUPS", 1)
    monkeypatch.setattr(engine, "WORKSPACE_BYTES", 16 << 20)
    monkeypatch.setattr(engine, "_WORKSPACES", {})


def run(out: Path, backends: str) -> list[dict]:
    sizes = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    assert engine_steps.main([str(out), "--backend", backends, "--device", "cpu", *sizes]) == 0
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_our_step_is_right_in_every_layer(tmp_path: Path) -> None:
    (row,) = run(tmp_path / "steps.jsonl", "STEP")
    assert row["ok"] and row["layers"] == 2 and 0 < row["error"] < engine_steps.LIMIT
    assert row["host_us_a_layer"] > 0


def test_a_wrong_layer_is_seen() -> None:
    loop = engine_steps.Loop("STEP", Shape(**SMALL), torch.device("cpu"))
    outs = loop.step(loop.build())
    assert loop.error(outs, 1) < engine_steps.LIMIT
    outs[1] = outs[1].roll(128, -1)
    assert loop.error(outs, 1) > 0.1


@pytest.mark.filterwarnings("ignore")
def test_vllm_s_layers_over_the_plugin(tmp_path: Path) -> None:
    stand_in("torchvision")  # of its image models alone
    pytest.importorskip("vllm")
    rows = run(tmp_path / "steps.jsonl", "MLA_LAB,STEP")
    assert [row["backend"] for row in rows] == ["MLA_LAB", "STEP"]
    assert rows[0]["vllm"] and rows[1]["difference"] < engine_steps.LIMIT


@pytest.mark.filterwarnings("ignore")
def test_sglang_s_layers_over_the_plugin_beside_its_own(tmp_path: Path) -> None:
    stand_in("torchvision")  # of its image models alone
    pytest.importorskip("sglang.srt.layers.attention.attention_registry", exc_type=ImportError)
    rows = run(tmp_path / "steps.jsonl", "SGLANG_MLA_LAB,SGLANG_TORCH_NATIVE")
    assert all(row["ok"] and row["sglang"] for row in rows)
    assert rows[1]["difference"] < engine_steps.LIMIT


def test_a_step_that_waits_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = engine_steps.Loop("STEP", Shape(**SMALL), torch.device("cpu"))
    assert not engine_steps._synchronises(loop)

    def waits(metadata: object) -> None:
        raise RuntimeError("called a synchronizing CUDA operation")

    monkeypatch.setattr(loop, "step", waits)
    assert engine_steps._synchronises(loop)
