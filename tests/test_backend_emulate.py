"""`backend="emulate"`: our public call on CPU tensors, by the PTX of the CuTe kernels."""

from __future__ import annotations

import shutil

import pytest
import torch

from mla_lab import trtllm_batch_decode_with_kv_cache_mla
from mla_lab.backends import ORDER
from mla_lab.core.errors import Unsupported
from mla_lab.core.problem import Problem
from mla_lab.reference.inputs import DecodeInputs, make_inputs
from mla_lab.reference.mla import decode_reference
from mla_lab.reference.tolerance import error, lse_error

needs_cxx = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
WORKSPACE = 64 << 20


def call(inputs: DecodeInputs) -> tuple[torch.Tensor, torch.Tensor]:
    given = inputs.contract_args() | {"backend": "emulate", "return_lse": True}
    out, lse = trtllm_batch_decode_with_kv_cache_mla(**given)
    return out, lse


@needs_cxx
@pytest.mark.parametrize(
    ("heads", "features", "calls"),
    [(16, (), 1), (16, ("sinks", "device_scales"), 2), (128, (), 1)],
)
def test_results_are_those_of_the_reference(
    heads: int, features: tuple[str, ...], calls: int
) -> None:
    """A second call is a replay."""
    problem = Problem(q_lens=(1, 1), kv_lens=(300, 77), heads=heads)
    inputs = make_inputs(problem, 3, ["lse", *features], workspace_bytes=WORKSPACE)
    for _ in range(calls):
        out, lse = call(inputs)
    expected = decode_reference(inputs)
    assert error(out, expected.out.reshape(out.shape)).relative < 0.008
    assert lse_error(lse, expected.lse.reshape(lse.shape)) < 1e-5


def refused(problem: Problem, *features: str, **changes: object) -> str:
    inputs = make_inputs(problem, 0, ["lse", *features], workspace_bytes=64)
    with pytest.raises(Unsupported) as caught:
        trtllm_batch_decode_with_kv_cache_mla(
            **inputs.contract_args() | {"backend": "emulate", **changes}
        )
    return str(caught.value)


def test_what_takes_too_long_is_refused_with_the_bound() -> None:
    words = refused(Problem(q_lens=(1,) * 8, kv_lens=(4096,) * 8, heads=128))
    assert "at most 2097152" in words


def test_without_a_compiler_the_refusal_names_recorded_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CXX", "/nowhere/c++")
    words = refused(Problem(q_lens=(1,), kv_lens=(71,), heads=16))
    assert "/nowhere/c++" in words and "mla-lab emulate --recorded" in words


def test_it_runs_where_it_is_named_alone() -> None:
    assert "emulate" not in ORDER
