"""Each feature on a card inside a graph, a compiled program, another stream; without a wait, an
allocation or a copy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from mla_lab import trtllm_batch_decode_with_kv_cache_mla as call
from mla_lab.api import decode, replay
from mla_lab.core.problem import Problem
from mla_lab.reference.inputs import DecodeInputs

from .calls import check, inputs_of, native, no_synchronisation

pytestmark = pytest.mark.gpu

LENGTHS = (4096, 700, 64, 1, 2500)
DENSE = Problem((2,) * 5, LENGTHS, 16)
MANY = Problem((2,) * 60, (300,) * 60, 128)
EIGHT: dict[str, Any] = {"q_dtype": "e4m3", "kv_format": "e4m3"}
#: problem, features of its inputs, other arguments
FEATURES: dict[str, tuple[Problem, list[str], dict[str, Any]]] = {
    "dense": (DENSE, [], {}),
    "planned on the device": (MANY, [], {}),
    "ragged": (Problem((1, 4, 2, 3, 2), LENGTHS, 16), ["max_q_len"], {}),
    "tree mask": (DENSE, ["tree_mask"], {}),
    "tree mask, ragged": (Problem((1, 4, 2, 3, 2), LENGTHS, 16), ["tree_mask", "max_q_len"], {}),
    "sinks": (DENSE, ["sinks"], {}),
    "device scales": (DENSE, ["device_scales"], {}),
    "sinks, device scales, 128 heads": (MANY, ["sinks", "device_scales"], {}),
    "strided 4-D cache": (DENSE, ["page_gap", "cache_4d"], {}),
    "small pages": (replace(DENSE, page_size=2), [], {}),
    "sparse": (replace(DENSE, top_k=300), [], {}),
    "batch invariant": (DENSE, ["sinks"], {"batch_invariant": True}),
    "skip-softmax": (DENSE, [], {"skip_softmax_threshold_scale_factor": 1e-3}),
    "skip-softmax, ragged, tree mask, device scales": (
        Problem((1, 4, 2, 3, 2), LENGTHS, 16),
        ["tree_mask", "max_q_len", "device_scales"],
        {"skip_softmax_threshold_scale_factor": 1e-3},
    ),
    "pages of 16 with sinks": (replace(DENSE, page_size=16), ["sinks"], {}),
    "one query token": (replace(DENSE, q_lens=(1,) * 5), [], {}),
    "e4m3 with sinks": (replace(DENSE, **EIGHT), ["sinks"], {}),
    "e4m3, pages of 32, device scales": (
        replace(DENSE, page_size=32, **EIGHT),
        ["device_scales"],
        {},
    ),
    "e4m3, ragged, tree mask, 128 heads": (
        Problem((1, 4, 2, 3, 2), LENGTHS, 128, **EIGHT),
        ["tree_mask", "max_q_len"],
        {},
    ),
    "bf16 over e4m3": (replace(DENSE, kv_format="e4m3"), [], {}),
    "656 bytes with sinks": (replace(DENSE, kv_format="fp8_656"), ["sinks"], {}),
}


@pytest.fixture(params=FEATURES)
def made(request: pytest.FixtureRequest) -> tuple[DecodeInputs, dict[str, Any]]:
    problem, features, more = FEATURES[request.param]
    return inputs_of(problem, "lse", *features), dict(more)


def results(inputs: DecodeInputs) -> dict[str, torch.Tensor]:
    """An out and an lse of the caller's."""
    shape = inputs.query.shape[:-1]
    return {
        "out": torch.full((*shape, 512), torch.nan, dtype=torch.bfloat16, device="cuda"),
        "lse": torch.full((shape.numel() // shape[-1], shape[-1]), torch.nan, device="cuda"),
    }


def change(inputs: DecodeInputs, step: int) -> None:
    """Other lengths, or other slots, in the same tensors."""
    if inputs.sparse:
        slots = inputs.block_tables
        slots.copy_(slots.roll(step, -1).masked_fill(slots % (step + 2) == 0, -1))
        return
    lengths = torch.tensor(inputs.problem.kv_lens, dtype=torch.int32)
    inputs.seq_lens.copy_(((lengths * (step + 1)) // (step + 2)).clamp_min(0))
    inputs.seq_lens[step] = 0


def test_a_graph_follows_what_changes(
    made: tuple[DecodeInputs, dict[str, Any]], workspace: torch.Tensor
) -> None:
    inputs, more = made
    more |= results(inputs)
    native(inputs, workspace, **more)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        native(inputs, workspace, **more)
    for step in range(3):
        if step:
            change(inputs, step)
        more["out"].fill_(torch.nan)
        more["lse"].fill_(torch.nan)
        graph.replay()
        check(inputs, (more["out"], more["lse"]))


def test_prefix_sums_may_change_under_a_bound(workspace: torch.Tensor) -> None:
    problem, features, _ = FEATURES["ragged"]
    inputs = inputs_of(problem, "lse", *features)
    more = results(inputs)
    native(inputs, workspace, **more)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        native(inputs, workspace, **more)
    for q_lens in ((0, 5, 2, 3, 2), (6, 0, 0, 6, 0), (3, 2, 3, 2, 2)):
        sums = torch.tensor([0, *q_lens]).cumsum(0).int()
        inputs.cum_seq_lens_q.copy_(sums)  # type: ignore[union-attr]
        more["out"].fill_(torch.nan)
        more["lse"].fill_(torch.nan)
        graph.replay()
        check(replace(inputs, problem=replace(problem, q_lens=q_lens)), (more["out"], more["lse"]))


def test_tables_may_change_in_a_graph(workspace: torch.Tensor) -> None:
    inputs = inputs_of(DENSE, "lse")
    more = results(inputs)
    native(inputs, workspace, **more)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        native(inputs, workspace, **more)
    order = torch.tensor([4, 3, 2, 1, 0], device="cuda")
    inputs.block_tables.copy_(inputs.block_tables[order])
    inputs.seq_lens.copy_(inputs.seq_lens[order])
    graph.replay()
    check(inputs, (more["out"], more["lse"]))


@pytest.mark.parametrize("repeated", [True, False])
def test_nothing_is_allocated_waited_for_or_copied(
    repeated: bool, made: tuple[DecodeInputs, dict[str, Any]], workspace: torch.Tensor
) -> None:
    inputs, more = made
    more |= results(inputs)
    native(inputs, workspace, **more)
    torch.cuda.synchronize()
    if not repeated:
        replay.clear()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as seen:
        with no_synchronisation():
            native(inputs, workspace, **more)
        torch.cuda.synchronize()
    allocated = torch.cuda.memory_stats()["allocation.all.allocated"] - before
    assert allocated <= (0 if repeated else 2), "a launch made anew keeps an empty tensor"
    kernels = [event.name for event in seen.events() if event.device_type.name == "CUDA"]
    copies = ("memcpy", "memset", "copy", "cat", "index", "gather_kernel", "fill")
    assert not [name for name in kernels if any(word in name.lower() for word in copies)], kernels
    assert len(kernels) <= 3, kernels
    check(inputs, (more["out"], more["lse"]))


def test_a_compiled_program(
    made: tuple[DecodeInputs, dict[str, Any]], workspace: torch.Tensor
) -> None:
    inputs, more = made
    named = {**inputs.contract_args(), "workspace_buffer": workspace, "backend": "cute", **more}
    native(inputs, workspace, **more)

    def step(query: torch.Tensor) -> Any:
        out, lse = call(**{**named, "query": query.clone()})
        return out * 1.0, lse

    torch.compiler.reset()
    check(inputs, torch.compile(step, backend="aot_eager", fullgraph=True)(inputs.query))


def test_the_current_stream_is_taken(
    made: tuple[DecodeInputs, dict[str, Any]], workspace: torch.Tensor
) -> None:
    inputs, more = made
    query = inputs.query.clone()
    native(inputs, workspace, **more)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        inputs.query.zero_()
        torch.cuda._sleep(20_000_000)
        inputs.query.copy_(query)
        result = native(inputs, workspace, **more)
    stream.synchronize()
    check(inputs, result)


def test_auto_takes_the_kernels(made: tuple[DecodeInputs, dict[str, Any]]) -> None:
    inputs, more = made
    verdicts = decode.explain(**inputs.contract_args(), **more)
    assert [v.name for v in verdicts if v.taken] == ["cute"], [str(v) for v in verdicts]
    assert [v.name for v in verdicts] == ["cute", "cuda", "torch"]
