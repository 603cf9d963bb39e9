"""The native call inside a program that torch.compile traces, on a CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from mla_lab import trtllm_batch_decode_with_kv_cache_mla as call
from mla_lab.api.decode import decode
from mla_lab.core.errors import InvalidInput, Unsupported
from mla_lab.core.problem import Problem
from mla_lab.plan import make_plan
from mla_lab.reference.inputs import make_inputs

SMALL = Problem((1, 2), (70, 100), 8)


@pytest.fixture(autouse=True)
def no_old_graphs() -> None:
    torch.compiler.reset()


def traced(**named: Any) -> Any:
    """The call's results from one graph, between operations that the compiler owns."""

    def step(query: torch.Tensor) -> Any:
        result: Any = call(**{**named, "query": query * 1.0})
        return tuple(r * 1.0 for r in result) if named.get("return_lse") else result * 1.0

    return torch.compile(step, backend="aot_eager", fullgraph=True)(named["query"])


@pytest.mark.parametrize("features", [[], ["lse", "device_scales", "sinks"]])
def test_the_same_bits_as_an_eager_call(features: list[str]) -> None:
    named = make_inputs(SMALL, 1, features).contract_args()
    eager: Any = call(**named)
    compiled = traced(**named)
    if not features:
        eager, compiled = (eager,), (compiled,)
    assert all(torch.equal(a, b) for a, b in zip(eager, compiled, strict=True))


def test_a_given_out_is_written() -> None:
    named = make_inputs(SMALL, 1).contract_args()
    out = torch.full((*named["query"].shape[:-1], 512), torch.nan, dtype=torch.float16)
    expected: Any = call(**named, out=out.clone())
    assert torch.equal(traced(**named, out=out), expected)
    assert torch.equal(out, expected)


def test_a_plan_is_no_part_of_a_program() -> None:
    named = make_inputs(SMALL, 1).contract_args()
    with pytest.raises((Unsupported, torch._dynamo.exc.TorchDynamoException), match="plan"):
        traced(**named, plan=make_plan(SMALL))


@pytest.mark.parametrize(
    "more", [{"plan": make_plan(Problem((2, 2), (3000, 9), 16))}, {"bmm1_scale": np.float64(0.07)}]
)
def test_what_no_program_holds_runs_between_two(more: dict[str, Any]) -> None:
    """NumPy's arithmetic, of plans and of scales, is not compiled."""
    problem = Problem((2, 2), (3000, 9), 16)
    named = make_inputs(problem, 1, ["lse"]).contract_args() | more
    compiled = torch.compile(lambda query: call(**{**named, "query": query}), backend="eager")
    for got, wanted in zip(compiled(named["query"]), call(**named), strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"sinks": [torch.zeros(8), torch.zeros(8)]}, "sinks: got a list of 2"),
        ({"sinks": [None]}, "sinks: got a list of None"),
        ({"bmm1_scale": "0.05"}, "bmm1_scale: got str"),
        ({"bmm2_scale": True}, "bmm2_scale: got bool"),
        ({"max_seq_len": None}, "max_seq_len: got NoneType"),
        ({"sparse_mla_top_k": False}, "sparse_mla_top_k: got bool"),
        ({"is_var_seq": 1}, "is_var_seq: got int"),
        ({"kv_lora_rank": -1}, "kv_lora_rank: got -1"),
        ({"skip_softmax_threshold_scale_factor": True}, "scale_factor: got bool"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_traced_call_refuses_what_an_eager_one_does(
    changed: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = {**make_inputs(SMALL, 1).contract_args(), **changed}
    for compiling in (False, True):
        monkeypatch.setitem(call.__globals__, "is_compiling", lambda found=compiling: found)
        with pytest.raises(InvalidInput, match=says):
            call(**named)


def test_a_compiled_call_ends_in_the_error_of_an_eager_one() -> None:
    named = {**make_inputs(SMALL, 1).contract_args(), "bmm2_scale": True}
    compiled = torch.compile(lambda: call(**named), backend="eager")
    with pytest.raises(InvalidInput, match="bmm2_scale: got bool"):
        compiled()


def test_debug_mode_is_part_of_a_program() -> None:
    named = {**make_inputs(SMALL, 1).contract_args(), "max_seq_len": 3, "debug": True}
    compiled = torch.compile(lambda: decode(**named), backend="eager", fullgraph=True)
    for run in (lambda: decode(**named), compiled):
        with pytest.raises(InvalidInput, match="max_seq_len: got 3; supported: at least the long"):
            run()


def test_numbers_may_change_between_runs() -> None:
    named = make_inputs(SMALL, 1).contract_args()
    del named["bmm1_scale"], named["max_seq_len"]

    def step(scale: float, bound: int) -> Any:
        return call(**named, bmm1_scale=scale, max_seq_len=bound)

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    for scale, bound in ((0.5, 128), (0.25, 100), (0.125, 2048), (1, 128)):
        assert torch.equal(compiled(scale, bound), step(scale, bound))


def test_eager_calls_pass_by_the_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops.mla_lab, "decode", None)
    call(**make_inputs(SMALL, 1).contract_args())
