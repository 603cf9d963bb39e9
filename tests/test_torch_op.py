"""The native call inside a program that torch.compile traces, on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mla_lab import trtllm_batch_decode_with_kv_cache_mla as call
from mla_lab.core.errors import Unsupported
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


def test_eager_calls_pass_by_the_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops.mla_lab, "decode", None)
    call(**make_inputs(SMALL, 1).contract_args())
