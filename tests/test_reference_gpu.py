"""Inputs and oracle on a GPU: the numbers of a CPU, soon enough to check a benchmark."""

from __future__ import annotations

import time
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from mla_lab.core.problem import Problem
from mla_lab.reference.gqa import decode_gqa_reference
from mla_lab.reference.inputs import FEATURES, DecodeInputs, make_inputs
from mla_lab.reference.inputs_gqa import GqaShape, make_gqa_inputs
from mla_lab.reference.mla import TileWalk, decode_reference
from mla_lab.reference.tolerance import lse_error, rel_error

pytestmark = pytest.mark.gpu

FORMATS = [("bf16", "bf16"), ("fp16", "fp16"), ("e4m3", "e4m3"), ("bf16", "fp8_656")]
#: of dense calls
EACH_FEATURE = [[name] for name in FEATURES if name != "top_k_lens"]


def on_cpu(call: DecodeInputs) -> DecodeInputs:
    tensors: dict[str, Any] = {
        f.name: value.cpu()
        for f in fields(call)
        if isinstance(value := getattr(call, f.name), torch.Tensor)
    }
    return replace(call, **tensors)


@pytest.mark.parametrize(("q_dtype", "kv_format"), FORMATS)
@pytest.mark.parametrize("features", [[], *EACH_FEATURE], ids=lambda f: "-".join(f) or "plain")
def test_the_oracle_agrees_with_itself_on_the_cpu(q_dtype, kv_format, features):
    problem = Problem((2, 2, 2), (70, 0, 301), 16, q_dtype=q_dtype, kv_format=kv_format)
    call = make_inputs(problem, 1, features, device="cuda", workspace_bytes=8)
    there, here = decode_reference(call), decode_reference(on_cpu(call))
    assert rel_error(there.out.cpu(), here.out) < 1e-12
    assert lse_error(there.lse.cpu(), here.lse) < 1e-12


def test_sparse_and_skipping_calls_too():
    problem = Problem.uniform(2, 2, 300, 16, top_k=64)
    sparse = make_inputs(problem, 1, ["top_k_lens"], device="cuda")
    assert (
        rel_error(decode_reference(sparse).out.cpu(), decode_reference(on_cpu(sparse)).out) < 1e-12
    )
    dense = make_inputs(
        Problem.uniform(2, 2, 900, 16), 1, distribution="heavy_tailed", device="cuda"
    )
    dense = replace(dense, skip_softmax_threshold_scale_factor=0.5)
    walk = TileWalk(16, 32)
    there = decode_reference(dense, walk=walk)
    here = decode_reference(on_cpu(dense), walk=walk)
    assert rel_error(there.out.cpu(), here.out) < 1e-12


@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_gqa(layout):
    shape = GqaShape((2, 1), (70, 300), 16, 2, kv_layout=layout, kv_format="e4m3")
    call = make_gqa_inputs(shape, 1, ["tree_mask", "sinks"], device="cuda")
    assert decode_gqa_reference(call).out.isfinite().all()


def test_a_full_benchmark_shape_is_made_and_checked_within_a_minute():
    problem = Problem.uniform(128, 1, 8192, 128)
    begin = time.perf_counter()
    call = make_inputs(problem, 1, device="cuda")
    exact = decode_reference(call)
    torch.cuda.synchronize()
    assert time.perf_counter() - begin < 60
    quick = decode_reference(call, dtype=torch.float32)
    assert rel_error(quick.out, exact.out) < 1e-5
