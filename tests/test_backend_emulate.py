"""`backend="emulate"`: our public call on CPU tensors, by the PTX of the CuTe kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from mla_lab import trtllm_batch_decode_with_kv_cache_mla
from mla_lab.backends import ORDER
from mla_lab.backends.emulate import backend
from mla_lab.backends.emulate.backend import EmulateBackend
from mla_lab.call.form import Features
from mla_lab.core.errors import InvalidInput, Unsupported
from mla_lab.core.gpu import H200
from mla_lab.core.problem import Problem
from mla_lab.emulate import EmulatedKernel
from mla_lab.plan import KernelConfig, make_plan
from mla_lab.reference.inputs import DecodeInputs, make_inputs
from mla_lab.reference.mla import decode_reference
from mla_lab.reference.tolerance import error, lse_error

from .needs import needs_cxx, needs_time

WORKSPACE = 64 << 20


def call(inputs: DecodeInputs, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
    given = inputs.contract_args() | {"backend": "emulate", "return_lse": True} | more
    out, lse = trtllm_batch_decode_with_kv_cache_mla(**given)
    return out, lse


@needs_cxx
@pytest.mark.parametrize(
    ("heads", "features", "calls"),
    [
        (16, (), 2),
        (128, (), 1),
        pytest.param(16, ("sinks", "device_scales"), 2, marks=needs_time),
    ],
)
def test_results_are_those_of_the_reference(
    heads: int, features: tuple[str, ...], calls: int
) -> None:
    """A second call is checked and run anew."""
    problem = Problem(q_lens=(1, 1), kv_lens=(300, 77), heads=heads)
    inputs = make_inputs(problem, 3, ["lse", *features], workspace_bytes=WORKSPACE)
    for _ in range(calls):
        results = call(inputs)
    check(inputs, *results)


def check(inputs: DecodeInputs, out: torch.Tensor, lse: torch.Tensor) -> None:
    expected = decode_reference(inputs)
    assert error(out, expected.out.reshape(out.shape)).relative < 0.008
    assert lse_error(lse, expected.lse.reshape(lse.shape)) < 1e-5


@needs_cxx
@pytest.mark.parametrize(("tile_rows", "q_len", "page_size"), [(64, 1, 64), (16, 2, 128)])
def test_a_plan_of_more_workers_than_the_card_has_sms(
    monkeypatch: pytest.MonkeyPatch, tile_rows: int, q_len: int, page_size: int
) -> None:
    """Neighbours run as one CTA, which then has several pieces of a row tile."""
    monkeypatch.setattr(EmulateBackend, "gpu", replace(H200, sms=3, resident_clusters=()))
    kernel_of, grids = backend.EmulatedLaunch.kernel_of, []

    def kernel(config: KernelConfig, device: torch.device) -> Callable[..., None]:
        found = cast("EmulatedKernel", kernel_of(config, device))

        def launch(*arguments: Any) -> None:
            found(*arguments)
            grids.append(found.run.launches[0].grid)

        return launch

    monkeypatch.setattr(backend.EmulatedLaunch, "kernel_of", staticmethod(kernel))
    lengths, heads = (700, 77, 0), tile_rows // q_len
    problem = Problem((q_len,) * 3, lengths, heads, page_size=page_size)
    inputs = make_inputs(problem, 3, ["lse"], workspace_bytes=WORKSPACE)
    how = {"tile_rows": tile_rows, "policy": "fixed", "num_splits": 7}
    for workers in (10, 2):
        check(inputs, *call(inputs, plan=make_plan(problem, num_workers=workers, **how)))
        assert not inputs.workspace_buffer[:65536].any()
    assert grids == [(3, 1, 1), (2, 1, 1)]


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


def test_a_context_parallel_call_is_launched_with_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[Features] = []
    monkeypatch.setattr(
        EmulateBackend, "launch", lambda self, call, *rest: launched.append(call.features)
    )
    inputs = make_inputs(Problem((2,), (20,), 16, page_size=16), 1, ["lse"])
    of_all = torch.tensor([39], dtype=torch.int32)
    call(inputs, enable_dcp=True, cp_world=2, causal_seqlens_kv_global=of_all)
    assert launched[0].mask
    assert not launched[0].context_parallel


def test_values_are_checked_in_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the host a repeated call is not taken as right, as a replay would."""
    monkeypatch.setattr(EmulateBackend, "launch", lambda *_: None)
    inputs = make_inputs(Problem((1,), (40,), 16, page_size=16), 1, ["lse"])
    call(inputs)
    for name, value in (("seq_lens", 999), ("seq_lens", -1), ("block_tables", 999)):
        wrong = torch.full_like(inputs.contract_args()[name], value)
        with pytest.raises(InvalidInput, match=name):
            call(inputs, **{name: wrong})
