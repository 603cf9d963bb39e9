"""The CUDA backend on a card: MLA and GQA by their names, graphs, bits, self-checks."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from mla_lab.api import decode, replay
from mla_lab.api.contract import (
    trtllm_batch_decode_with_kv_cache_mla,
    xqa_batch_decode_with_kv_cache_mla,
)
from mla_lab.api.contract_gqa import (
    trtllm_batch_decode_with_kv_cache,
    xqa_batch_decode_with_kv_cache,
)
from mla_lab.backends import self_check
from mla_lab.bench.checks import LIMITS
from mla_lab.core.errors import InvalidInput
from mla_lab.core.problem import Problem
from mla_lab.reference.gqa import decode_gqa_reference
from mla_lab.reference.inputs import DecodeInputs, make_inputs
from mla_lab.reference.inputs_gqa import GqaShape, make_gqa_inputs
from mla_lab.reference.mla import decode_reference
from mla_lab.reference.tolerance import lse_error, rel_error

from .calls import counters_are_zero

pytestmark = pytest.mark.gpu

LSE_TOLERANCE = 2e-3
WORKSPACE_BYTES = 128 << 20

PLAIN = Problem.uniform(4, 1, 3000, 128)
RAGGED = Problem((1, 0, 3, 2), (70, 5, 300, 0), 24)
LONG = Problem.uniform(1, 1, 20_000, 16)
DRAFTS = Problem.uniform(3, 5, 777, 16, page_size=16)


def eight_bit(problem: Problem) -> Problem:
    return replace(problem, q_dtype="e4m3", kv_format="e4m3")


CALLS: list[tuple[Problem, list[str]]] = [
    (PLAIN, []),
    (PLAIN, ["lse", "scales", "cache_4d", "page_gap"]),
    (RAGGED, ["lse", "sinks", "max_q_len"]),
    (RAGGED, ["tree_mask"]),
    (LONG, ["lse", "sinks", "device_scales"]),
    (DRAFTS, ["tree_mask", "sinks", "lse"]),
    (eight_bit(PLAIN), ["lse"]),
    (eight_bit(DRAFTS), ["tree_mask", "sinks"]),
    (replace(LONG, kv_format="e4m3"), ["lse"]),
]


@pytest.fixture(scope="module")
def workspace() -> torch.Tensor:
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device="cuda")


@pytest.fixture
def forgetful() -> Iterator[None]:
    yield
    self_check.clear()
    replay.clear()


def inputs_of(problem: Problem, *features: str, seed: int = 1, **more: Any) -> DecodeInputs:
    return make_inputs(problem, seed, features, device="cuda", workspace_bytes=256, **more)


def native(inputs: DecodeInputs, workspace: torch.Tensor, **more: Any) -> Any:
    arguments = inputs.contract_args() | {"workspace_buffer": workspace}
    return decode.decode(**{**arguments, "backend": "cuda", **more})


def check(inputs: Any, result: Any, want: Any) -> None:
    out, lse = result if inputs.return_lse else (result, None)
    e4m3_query = inputs.query.dtype is torch.float8_e4m3fn
    assert rel_error(out.double(), want.out) < LIMITS["e4m3" if e4m3_query else "bf16"]
    if lse is not None:
        assert lse_error(lse, want.lse) < LSE_TOLERANCE


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("distribution", ["gauss", "heavy_tailed"])
@pytest.mark.parametrize(("problem", "features"), CALLS)
def test_mla(
    workspace: torch.Tensor,
    problem: Problem,
    features: list[str],
    distribution: str,
    batch_invariant: bool,
) -> None:
    inputs = inputs_of(problem, *features, distribution=distribution)
    want = decode_reference(inputs)
    for _ in range(2):  # the second time by repetition
        result = native(inputs, workspace, batch_invariant=batch_invariant)
        check(inputs, result, want)
    assert counters_are_zero(workspace)


def test_xqa_s_name(workspace: torch.Tensor) -> None:
    inputs = inputs_of(eight_bit(PLAIN), "sinks")
    arguments = {**inputs.contract_args(), "workspace_buffer": workspace}
    check(inputs, xqa_batch_decode_with_kv_cache_mla(**arguments), decode_reference(inputs))


def test_a_captured_graph_follows_lengths(workspace: torch.Tensor) -> None:
    inputs = inputs_of(LONG)
    out = torch.empty(1, 1, 16, 512, dtype=torch.bfloat16, device="cuda")
    native(inputs, workspace, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        native(inputs, workspace, out=out)
    for length in (20_000, 1, 700, 12_345):
        inputs.seq_lens.fill_(length)
        out.fill_(torch.nan)
        graph.replay()
        check(inputs, out, decode_reference(inputs))


def test_invariant_bits(workspace: torch.Tensor) -> None:
    """A request alone and among others of other lengths."""
    problem = Problem((1, 1, 1), (5000, 20_000, 64), 16)
    inputs = inputs_of(problem)
    together = native(inputs, workspace, batch_invariant=True)
    alone = replace(
        inputs,
        problem=Problem((1,), (20_000,), 16),
        query=inputs.query[1:2],
        block_tables=inputs.block_tables[1:2],
        seq_lens=inputs.seq_lens[1:2],
        max_seq_len=20_000,
    )
    single = native(alone, workspace, batch_invariant=True)
    assert torch.equal(single[0], together[1])
    again = native(inputs, workspace)
    assert torch.equal(again, native(inputs, workspace))


GQA: list[tuple[GqaShape, list[str]]] = [
    (GqaShape((1,) * 5, (3000, 1, 64, 700, 0), 32, 4), ["lse"]),
    (GqaShape((4, 4), (1000, 6), 16, 2, kv_layout="NHD", page_size=16), ["tree_mask", "sinks"]),
    (GqaShape((33,) * 2, (640, 33), 8, 2, head_dim=64), ["chain_mask", "lse"]),
    (GqaShape((3, 0, 5), (650, 10, 4), 6, 3, window_left=100), ["lse", "sinks"]),
    (GqaShape((1, 1), (9000, 4), 16, 1, window_left=500), ["one_tensor", "device_scales"]),
    (GqaShape((1, 1), (3000, 64), 16, 2, q_dtype="e4m3", kv_format="e4m3"), ["lse"]),
    (GqaShape((2, 2), (3000, 64), 8, 8), ["separate_tables"]),
]


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize(("shape", "features"), GQA)
def test_gqa(
    workspace: torch.Tensor, shape: GqaShape, features: list[str], batch_invariant: bool
) -> None:
    inputs = make_gqa_inputs(shape, 1, features, device="cuda", workspace_bytes=256)
    arguments = {**inputs.contract_args(), "workspace_buffer": workspace, "backend": "cuda"}
    want = decode_gqa_reference(inputs)
    check(
        inputs,
        trtllm_batch_decode_with_kv_cache(**arguments, batch_invariant=batch_invariant),
        want,
    )
    assert counters_are_zero(workspace)


def test_gqa_by_xqa_s_name(workspace: torch.Tensor) -> None:
    shape = GqaShape((1, 1), (3000, 64), 16, 2, kv_layout="NHD")
    inputs = make_gqa_inputs(shape, 1, ("sinks",), device="cuda", workspace_bytes=256)
    result = xqa_batch_decode_with_kv_cache(
        inputs.query,
        inputs.kv_cache,
        workspace,
        inputs.block_tables,
        inputs.seq_lens,
        inputs.max_seq_len,
        inputs.bmm1_scale,
        inputs.bmm2_scale,
        sinks=inputs.sinks,
    )
    check(inputs, result, decode_gqa_reference(inputs))


@pytest.mark.usefixtures("forgetful")
def test_a_card_that_is_not_known_checks_itself(
    workspace: torch.Tensor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(self_check, "PROVED", ())
    inputs = inputs_of(PLAIN, "lse")
    with caplog.at_level(logging.WARNING, "mla_lab"):
        for _ in range(3):
            check(inputs, native(inputs, workspace), decode_reference(inputs))
    assert len(caplog.records) == 1
    shape = GqaShape((1,) * 2, (3000, 64), 32, 4)
    gqa = make_gqa_inputs(shape, 1, device="cuda", workspace_bytes=256)
    arguments = {**gqa.contract_args(), "workspace_buffer": workspace, "backend": "cuda"}
    trtllm_batch_decode_with_kv_cache(**arguments)
    assert len(caplog.records) == 2
    replay.clear()
    self_check.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        inputs.seq_lens.clone()  # torch warns of a graph without work
        with pytest.raises(InvalidInput, match="the self-check of"):
            native(inputs, workspace)


@pytest.mark.parametrize("q_len", [1, 2])
def test_tokens_equally_far_from_each_other(workspace: torch.Tensor, q_len: int) -> None:
    inputs = make_inputs(Problem.uniform(3, q_len, 70, 7), 3, device="cuda")
    wide = inputs.query.new_full((3 * q_len, 9, 576), float("nan"))
    wide[:, :7] = inputs.query.flatten(0, 1)
    apart = replace(inputs, query=wide[:, :7].unflatten(0, (3, q_len)), workspace_buffer=workspace)
    out = trtllm_batch_decode_with_kv_cache_mla(**apart.contract_args(), backend="cuda")
    expected = decode_reference(inputs).out.reshape(out.shape)
    assert rel_error(out.float(), expected) < 5e-3
