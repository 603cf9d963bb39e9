"""The keep_ab kernel that fetches tokens one by one, at timed shapes and at odd ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mla_lab.core.problem import Problem
from mla_lab.plan.launch_modes import FORMATS
from mla_lab.reference.mla import decode_reference

from .calls import check, counters_are_zero, inputs_of, native

pytestmark = pytest.mark.gpu

SHAPES = [
    Problem((1,) * 64, (4096,) * 64, 128, top_k=2048),
    Problem((2,) * 20, (3000,) * 20, 64, top_k=700),
    Problem((1,) * 5, (400, 0, 70, 9000, 64), 128, top_k=300),
    Problem((1,) * 200, (500,) * 200, 70, top_k=65),
    Problem((1,), (40000,), 16, top_k=8192),
]


@pytest.mark.parametrize("formats", FORMATS, ids="-".join)
@pytest.mark.parametrize("problem", SHAPES, ids=lambda p: f"b{p.batch}_h{p.heads}_k{p.top_k}")
def test_lists_of_slots(
    problem: Problem, formats: tuple[str, str], workspace: torch.Tensor
) -> None:
    made = replace(problem, q_dtype=formats[0], kv_format=formats[1])
    inputs = inputs_of(made, "lse")
    expected = decode_reference(inputs)
    for _ in range(3):
        check(inputs, native(inputs, workspace, backend="cute-keep-ab-gather"), expected)
    assert counters_are_zero(workspace)


@pytest.mark.parametrize("feature", ["sinks", "device_scales", "top_k_lens", "ragged"])
def test_features_of_656_byte_tokens(feature: str, workspace: torch.Tensor) -> None:
    problem = Problem((2,) * 9, (777,) * 9, 96, top_k=333, kv_format="fp8_656")
    inputs = inputs_of(problem, "lse", feature)
    check(inputs, native(inputs, workspace, backend="cute-keep-ab-gather"))
