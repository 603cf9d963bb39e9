"""Lengths of slot lists, query rows that lie apart, and dtypes of tokens of 656 bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mla_lab import backends
from mla_lab.api.decode import decode
from mla_lab.backends.cuda.backend import CudaBackend
from mla_lab.backends.cute.backend import CuteBackend
from mla_lab.call.checks import form_of
from mla_lab.call.decode_args import native_args
from mla_lab.call.form import Features
from mla_lab.call.slots import slots_of_rows
from mla_lab.core.errors import InvalidInput, Unsupported
from mla_lab.core.gpu import H200
from mla_lab.core.problem import Problem
from mla_lab.interop.capture import definition_of
from mla_lab.reference.inputs import DecodeInputs, make_inputs
from mla_lab.reference.mla import decode_reference
from mla_lab.reference.tolerance import LSE_TOLERANCE, error, lse_error, sdpa_error

SPARSE = Problem((2, 2), (90, 7), 5, kv_format="fp8_656", page_size=16, top_k=40)
RAGGED = replace(SPARSE, q_lens=(3, 1))


def run(inputs: DecodeInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse of the torch backend."""
    arguments = inputs.contract_args() | {"return_lse": True, "backend": "torch"}
    out, lse = decode(**arguments)
    return out, lse


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_lengths_of_requests_are_those_of_their_query_tokens() -> None:
    of_requests = make_inputs(SPARSE, 1, workspace_bytes=0)
    of_requests = replace(of_requests, sparse_mla_top_k_lens=ints(13, 0))
    of_tokens = replace(of_requests, sparse_mla_top_k_lens=ints(13, 13, 0, 0))
    for got, want in zip(run(of_requests), run(of_tokens), strict=True):
        assert torch.equal(got, want)
    out, lse = run(of_requests)
    oracle = decode_reference(of_requests)
    assert error(out, oracle.out).within(sdpa_error(of_requests))
    assert lse_error(lse, oracle.lse) <= LSE_TOLERANCE
    assert not out[1].any()
    assert bool(lse.view(2, 2, 5)[1].isneginf().all())


def test_lengths_of_ragged_requests() -> None:
    lens = ints(13, 2)
    args = replace(make_inputs(RAGGED, 1, workspace_bytes=0), sparse_mla_top_k_lens=lens)
    assert slots_of_rows(args, 4).tolist() == [13, 13, 13, 2]
    out, _ = run(args)
    assert error(out, decode_reference(args).out.reshape(out.shape)).relative < 5e-3


def test_slots_that_do_not_count_may_hold_anything() -> None:
    inputs = make_inputs(SPARSE, 2, ["top_k_lens"], workspace_bytes=0)
    clean = inputs.block_tables.clamp_min(-1)
    lens = inputs.sparse_mla_top_k_lens
    assert lens is not None
    unused = torch.arange(40) >= lens.view(2, 2, 1)
    assert not torch.equal(clean, inputs.block_tables), "some are invalid"
    as_none = replace(
        inputs, block_tables=clean.masked_fill(unused, -1), sparse_mla_top_k_lens=None
    )
    for got, want in zip(run(inputs), run(as_none), strict=True):
        assert torch.equal(got, want)
    used = inputs.block_tables.clone()
    used[0, 0, 0] = 1 << 29
    with pytest.raises(InvalidInput, match="token slots"):
        run(replace(inputs, block_tables=used, sparse_mla_top_k_lens=lens.clamp_min(1)))


def test_a_recorded_definition_has_no_lengths_of_slot_lists() -> None:
    inputs = make_inputs(SPARSE, 2, ["top_k_lens"], workspace_bytes=0)
    args = native_args(**inputs.contract_args())
    with pytest.raises(Unsupported, match="sparse_mla_top_k_lens"):
        definition_of(args, form_of(args))


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("top_k", [0, 40])
def test_rows_of_the_query_may_lie_apart(ragged: bool, top_k: int) -> None:
    problem = replace(SPARSE, top_k=top_k)
    inputs = make_inputs(problem, 3, ["ragged"] if ragged else [], workspace_bytes=0)
    wide = torch.full((*inputs.query.shape[:-2], 9, 640), torch.nan, dtype=torch.bfloat16)
    wide[..., :5, :576] = inputs.query
    apart = replace(inputs, query=wide[..., :5, :576])
    assert not apart.query.is_contiguous()
    for got, want in zip(run(apart), run(inputs), strict=True):
        assert torch.equal(got, want)
    assert torch.equal(decode_reference(apart).out, decode_reference(inputs).out)


def test_kernels_that_take_rows_side_by_side_refuse_others_by_name() -> None:
    bounds = Problem((1,) * 4, (4096,) * 4, 16)
    reason = CuteBackend().supports(Features(strided_query=True), bounds, H200)
    assert reason is not None
    assert "query whose rows lie apart" in reason
    reason = CudaBackend().supports(Features(strided_query=True), bounds, H200)
    assert reason is None or "rows" not in reason, "its kernel takes strides"


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("problem", [SPARSE, replace(SPARSE, top_k=0)])
@pytest.mark.parametrize("features", [[], ["cache_4d", "page_gap"]])
def test_656_bytes_are_the_same_however_they_are_typed(
    dtype: torch.dtype, problem: Problem, features: list[str]
) -> None:
    inputs = make_inputs(problem, 4, features, workspace_bytes=0)
    typed = replace(inputs, kv_cache=inputs.kv_cache.view(dtype))
    for got, want in zip(run(typed), run(inputs), strict=True):
        assert torch.equal(got, want)
    assert torch.equal(decode_reference(typed).out, decode_reference(inputs).out)


def test_an_e4m3_query_has_no_tokens_of_656_bytes() -> None:
    inputs = make_inputs(SPARSE, 4, workspace_bytes=0)
    query = inputs.query.to(torch.float8_e4m3fn)
    for dtype in (torch.uint8, torch.int8, torch.float8_e4m3fn):
        with pytest.raises(InvalidInput, match="kv_cache"):
            run(replace(inputs, query=query, kv_cache=inputs.kv_cache.view(dtype)))


def test_every_backend_that_has_sparse_calls_takes_the_lengths() -> None:
    bounds = replace(SPARSE, q_lens=(1, 1), kv_lens=(40, 40), heads=16, page_size=64)
    features = Features(sparse=True, top_k_lens=True)
    for name in backends.ORDER:
        plain = backends.load(name).supports(Features(sparse=True), bounds, H200)
        assert backends.load(name).supports(features, bounds, H200) == plain
