"""Launches of the CuTe backend on a card: graphs, streams, one workspace, nothing allocated."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from mla_lab.api import replay
from mla_lab.backends.cute import device_plan
from mla_lab.backends.cute.families import costs
from mla_lab.core.errors import InvalidInput
from mla_lab.core.gpu import Gpu
from mla_lab.core.problem import Problem
from mla_lab.plan import choose, make_plan
from mla_lab.reference.mla import decode_reference

from .calls import check, chosen_plan, counters_are_zero, inputs_of, native, no_synchronisation

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_a_captured_graph_follows_lengths(batch_invariant: bool, workspace: torch.Tensor) -> None:
    problem = Problem((2,) * 6, (4096,) * 6, 128)
    inputs = inputs_of(problem, "lse")
    out = torch.zeros(6, 2, 128, 512, dtype=torch.bfloat16, device="cuda")
    lse = torch.zeros(12, 128, device="cuda")
    more = {"out": out, "lse": lse, "batch_invariant": batch_invariant}
    native(inputs, workspace, **more)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        native(inputs, workspace, **more)
    for lengths in ((4096,) * 6, (1, 64, 65, 0, 4096, 2), (0,) * 6, (100, 3000, 7, 7, 1, 4000)):
        inputs.seq_lens.copy_(torch.tensor(lengths, dtype=torch.int32))
        out.fill_(torch.nan)
        graph.replay()
        check(inputs, (out, lse))
    assert counters_are_zero(workspace)


FORMULAS = [
    # heads, q_len, batch, bound: 8 and 16 rows, clusters of 1, 8 and 16, mail and pairs
    (16, 1, 1, 1024),
    (16, 1, 4, 4096),
    (64, 1, 1, 1024),
    (128, 1, 1, 1024),
    (128, 1, 1, 4096),
    (16, 4, 1, 8192),
    (7, 3, 3, 2048),
]


@pytest.mark.parametrize("want_lse", [True, False])
@pytest.mark.parametrize(("heads", "q_len", "batch", "bound"), FORMULAS)
def test_a_captured_graph_by_formula_follows_lengths(
    heads: int, q_len: int, batch: int, bound: int, want_lse: bool, workspace: torch.Tensor
) -> None:
    problem = Problem((q_len,) * batch, (bound,) * batch, heads)
    gpu = Gpu.here()
    assert gpu is not None
    assert choose(problem, gpu, costs=costs()).schedule == "grid"
    inputs = inputs_of(problem, *(["lse"] if want_lse else []))
    out = torch.zeros(batch, q_len, heads, 512, dtype=torch.bfloat16, device="cuda")
    more: dict[str, Any] = {"out": out, "max_seq_len": bound}
    if want_lse:
        more["lse"] = torch.zeros(batch * q_len, heads, device="cuda")
    native(inputs, workspace, **more)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):  # the next one may begin while the last one's merge runs
            result = native(inputs, workspace, **more)
    for length in (bound, 1, 64, 0, 65, bound - 1, 700):
        lengths = [(length + 97 * i) % (bound + 1) for i in range(batch)]
        inputs.seq_lens.copy_(torch.tensor(lengths, dtype=torch.int32))
        out.fill_(torch.nan)
        graph.replay()
        check(inputs, result)
    assert counters_are_zero(workspace)


def test_a_formula_of_one_plan_for_layers(workspace: torch.Tensor) -> None:
    problem = Problem((1,) * 4, (3000, 1, 0, 700), 16)
    layers = [inputs_of(problem, seed=seed) for seed in range(3)]
    plan = make_plan(problem, tile_rows=16, policy="fixed", schedule="grid", num_splits=32)
    for _ in range(3):
        for layer in layers:
            check(layer, native(layer, workspace, plan=plan))
    assert counters_are_zero(workspace)


def test_a_graph_of_layers_with_one_plan(workspace: torch.Tensor) -> None:
    problem = Problem((1,) * 9, (1000, 1, 0, 64, 5000, 3, 900, 77, 63), 128)
    layers = [inputs_of(problem, seed=seed) for seed in range(3)]
    plan = chosen_plan(problem)
    outs = [torch.zeros(9, 1, 128, 512, dtype=torch.bfloat16, device="cuda") for _ in layers]
    graph = torch.cuda.CUDAGraph()
    for layer, out in zip(layers, outs, strict=True):
        native(layer, workspace, plan=plan, out=out)
    with torch.cuda.graph(graph):
        for layer, out in zip(layers, outs, strict=True):
            native(layer, workspace, plan=plan, out=out)
    for out in outs:
        out.fill_(torch.nan)
    graph.replay()
    for layer, out in zip(layers, outs, strict=True):
        check(layer, out)


def test_a_plan_first_used_in_a_capture_is_refused(workspace: torch.Tensor) -> None:
    problem = Problem((1,) * 2, (100, 2000), 128)
    inputs = inputs_of(problem)
    native(inputs, workspace, plan=chosen_plan(problem))
    new = make_plan(problem, tile_rows=128, policy="fixed", num_splits=2)
    out = torch.zeros(2, 1, 128, 512, dtype=torch.bfloat16, device="cuda")
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        out.fill_(1)
        with pytest.raises(InvalidInput, match="capture of a CUDA graph"):
            native(inputs, workspace, plan=new, out=out)
    check(inputs, native(inputs, workspace, plan=new))


@pytest.mark.parametrize("with_plan", [True, False])
def test_nothing_is_allocated_or_waited_for(with_plan: bool, workspace: torch.Tensor) -> None:
    problem = Problem((1,) * 5, (1000, 1, 0, 64, 5000), 128)
    inputs = inputs_of(problem)
    plan = chosen_plan(problem) if with_plan else None
    more: dict[str, Any] = {
        "out": torch.zeros(5, 1, 128, 512, dtype=torch.bfloat16, device="cuda"),
        "lse": torch.zeros(5, 128, device="cuda"),
        "plan": plan,
    }
    native(inputs, workspace, **more)
    replay.clear()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    with no_synchronisation():
        for _ in range(3):
            native(inputs, workspace, **more)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_a_first_call_waits_for_nothing(workspace: torch.Tensor) -> None:
    problem = Problem((1,) * 3, (1000, 1, 77), 64)
    inputs = inputs_of(problem)
    plan = chosen_plan(problem)
    with no_synchronisation():
        results = [native(inputs, workspace, plan=plan), native(inputs, workspace)]
    for result in results:
        check(inputs, result)


def test_the_current_stream_is_taken(workspace: torch.Tensor) -> None:
    problem = Problem((1,) * 3, (1000, 1, 77), 64)
    inputs = inputs_of(problem)
    query = inputs.query.clone()
    native(inputs, workspace)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        inputs.query.zero_()
        torch.cuda._sleep(50_000_000)
        inputs.query.copy_(query)
        result = native(inputs, workspace)
    stream.synchronize()
    check(inputs, result)


def test_constants_of_a_busy_stream_s_first_call_are_there_for_another(
    workspace: torch.Tensor,
) -> None:
    inputs = inputs_of(Problem((1,) * 13, tuple(range(100, 1400, 100)), 128))
    expected = decode_reference(inputs)
    native(inputs, workspace)  # compiled or loaded
    torch.cuda.synchronize()
    replay.clear()
    device_plan.uniform_q_begin.cache_clear()
    busy, other = torch.cuda.Stream(), torch.cuda.Stream()
    others = torch.zeros_like(workspace)
    # a copy to the host takes no SM: the kernels of both calls need all of them
    near = torch.zeros(1 << 30, dtype=torch.uint8, device="cuda")
    far = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    torch.cuda.synchronize()
    with torch.cuda.stream(busy):
        for _ in range(4):
            far.copy_(near, non_blocking=True)
        first = native(inputs, workspace)
    with torch.cuda.stream(other):
        second = native(inputs, others)
    other.synchronize()
    assert not busy.query(), "the first call is still behind what its stream had to do"
    check(inputs, second, expected)
    busy.synchronize()
    check(inputs, first, expected)


def test_one_workspace_for_any_shapes(workspace: torch.Tensor) -> None:
    problems = [
        Problem((1,) * 3, (8000, 1, 77), 128),
        Problem((3, 1), (700, 70_000), 16),
        Problem((1,) * 40, tuple(range(40)), 64),
    ]
    calls = [inputs_of(problem, seed=i) for i, problem in enumerate(problems)]
    expected = [decode_reference(call) for call in calls]
    results = []
    for i, j in itertools.product(range(3), repeat=2):
        for k in (i, j):
            invariant = (i + j) % 2 == 1
            results.append((k, native(calls[k], workspace, batch_invariant=invariant)))
    for k, result in results:
        check(calls[k], result, expected[k])
    assert counters_are_zero(workspace)


def test_a_bound_that_is_too_low_writes_nothing_outside(workspace: torch.Tensor) -> None:
    problem = Problem((1,) * 4, (9000, 20_000, 1, 5000), 128)
    inputs = replace(inputs_of(problem), max_seq_len=100)
    guard = torch.full((6, 1, 128, 512), 7.0, dtype=torch.bfloat16, device="cuda")
    for invariant in (False, True):
        native(inputs, workspace, out=guard[1:5], batch_invariant=invariant)
        assert (guard[0] == 7).all() and (guard[5] == 7).all()
    assert counters_are_zero(workspace)


# --- the contract ------------------------------------------------------------------------------
