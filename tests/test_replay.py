"""What may be replayed and what must be checked again, without any backend."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mla_lab.api import replay
from mla_lab.call.bind import bind
from mla_lab.call.checks import form_of
from mla_lab.call.decode_args import DecodeArgs, native_args
from mla_lab.core.problem import Problem
from mla_lab.plan import make_plan
from mla_lab.reference.inputs import make_inputs

TWO = Problem((2, 2), (70, 9), 4)
THREE = Problem((2, 2, 2), (70, 9, 30), 4)


@pytest.fixture(autouse=True)
def nothing_recorded() -> Any:
    replay.clear()
    yield
    replay.clear()


class Launches:
    """A launch that keeps the arguments of its calls."""

    def __init__(self) -> None:
        self.args: list[DecodeArgs] = []

    def __call__(self, given: DecodeArgs, out: torch.Tensor, lse: torch.Tensor | None) -> None:
        self.args.append(given)


def arguments(problem: Problem = TWO, *features: str, **more: Any) -> DecodeArgs:
    named = make_inputs(problem, 1, features, workspace_bytes=4096).contract_args()
    return native_args(**{"backend": "cute", **named, **more})


def record(given: DecodeArgs, needs: int = 0) -> Launches:
    """As after a first call, whose plan needs so many bytes of workspace."""
    launches = Launches()
    call = bind(given, form_of(given), reads_lengths=True, debug=False)
    planned = SimpleNamespace(workspace=SimpleNamespace(nbytes=needs))
    replay.record(call, planned, launches)  # type: ignore[arg-type]
    return launches


def test_other_tensors_of_the_same_call_are_replayed() -> None:
    launches = record(arguments(), needs=1)
    assert replay.replay(arguments()) is None, "another workspace"
    launches = record(arguments())
    for _ in range(3):
        fresh = arguments()
        out = replay.replay(fresh)
        assert isinstance(out, torch.Tensor) and out.shape == (2, 2, 4, 512)
        assert launches.args[-1] is fresh
    assert replay.replay(arguments(backend="torch")) is None


def test_calls_in_turn_are_each_replayed() -> None:
    kept = {problem: record(arguments(problem)) for problem in (TWO, THREE)}
    for problem in (TWO, THREE, THREE, TWO, THREE):
        assert replay.replay(arguments(problem)) is not None
    assert [len(kept[problem].args) for problem in (TWO, THREE)] == [2, 3]


def test_results_are_the_caller_s_or_new() -> None:
    out = torch.zeros(2, 2, 4, 512, dtype=torch.float16)
    lse = torch.zeros(2, 2, 4)
    given = arguments(TWO, "lse", out=out, lse=lse)
    record(given)
    found = replay.replay(given)
    assert isinstance(found, tuple) and found[0] is out and found[1] is lse
    record(arguments(TWO, "lse"))
    found = replay.replay(arguments(TWO, "lse"))
    assert isinstance(found, tuple) and found[1].shape == (4, 4)


@pytest.mark.parametrize(
    ("features", "change"),
    [
        ([], {"max_seq_len": 200}),
        ([], {"return_lse": True}),
        ([], {"return_lse": 0}),
        ([], {"is_var_seq": 1}),
        ([], {"kv_lora_rank": 512.0}),
        ([], {"bmm1_scale": 0.0}),
        ([], {"bmm1_scale": float("inf")}),
        ([], {"bmm1_scale": 1}),
        ([], {"bmm1_scale": torch.ones(1)}),
        ([], {"bmm2_scale": float("nan")}),
        ([], {"bmm2_scale": "1"}),
        ([], {"block_tables": torch.zeros(2, 1, dtype=torch.int32)}),
        ([], {"seq_lens": torch.zeros(3, dtype=torch.int32)}),
        ([], {"out": torch.zeros(2, 2, 4, 512, dtype=torch.bfloat16)}),
        ([], {"lse": torch.zeros(4, 4)}),
        ([], {"cum_seq_lens_q": torch.zeros(3, dtype=torch.int32)}),
        ([], {"sinks": torch.zeros(4)}),
        ([], {"sinks": [torch.zeros(4)]}),
        ([], {"mask": torch.zeros(2, 2, 2, dtype=torch.uint16)}),
        ([], {"causal_seqlens_kv_global": torch.zeros(2, dtype=torch.int32)}),
        ([], {"plan": make_plan(TWO)}),
        ([], {"query": None}),
        (["sinks"], {"sinks": None}),
        (["sinks"], {"sinks": torch.zeros(5)}),
        (["sinks"], {"sinks": [torch.zeros(4)]}),
        (["tree_mask"], {"mask": torch.zeros(2, 2, 4, dtype=torch.uint16)}),
        (["tree_mask", "sinks"], {"mask": None}),
        (["device_scales"], {"bmm1_scale": 1.0}),
        (["ragged", "max_q_len"], {"max_q_len": 4}),
    ],
)
def test_what_differs_is_not(features: list[str], change: dict[str, Any]) -> None:
    launches = record(arguments(TWO, *features))
    assert replay.replay(arguments(TWO, *features, **change)) is None
    assert replay.replay(arguments(TWO, *features)) is not None
    assert replay.replay(arguments(TWO, *features, **change)) is None
    assert len(launches.args) == 1


@pytest.mark.parametrize("features", [["sinks"], ["tree_mask", "sinks"], ["device_scales"]])
def test_calls_with_more_tensors_are_replayed_too(features: list[str]) -> None:
    record(arguments(TWO, *features))
    assert replay.replay(arguments(TWO, *features)) is not None


def test_a_bound_may_grow_to_the_next_power_of_two() -> None:
    record(arguments(max_seq_len=70))
    for bound, same in ((65, True), (128, True), (129, False), (64, False)):
        assert (replay.replay(arguments(max_seq_len=bound)) is not None) == same
    plan = make_plan(TWO)
    record(arguments(max_seq_len=70, plan=plan))
    assert replay.replay(arguments(max_seq_len=70, plan=plan)) is not None
    assert replay.replay(arguments(max_seq_len=71, plan=plan)) is None


def test_scales_may_change() -> None:
    record(arguments())
    assert replay.replay(arguments(bmm1_scale=2.5, bmm2_scale=-3.0)) is not None


@pytest.mark.parametrize("used", [True, False])
def test_a_workspace_that_is_gone_takes_the_call_along(used: bool) -> None:
    """The repetition holds views of the buffer: they must not keep its memory."""
    given = arguments()
    launches = record(given, needs=1)
    if used:
        assert replay.replay(given) is not None
    launches.args.clear()
    del given
    gc.collect()
    assert not replay._RECORDED and replay._last is None
