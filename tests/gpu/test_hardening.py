"""On a card: invariance where tokens are gathered, ranks as masks, streams of one capture."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch

from mla_lab.api.context_parallel import merge, shard
from mla_lab.api.decode import decode
from mla_lab.core.errors import InvalidInput
from mla_lab.core.problem import Problem
from mla_lab.plan import make_plan
from mla_lab.reference.inputs import DecodeInputs, make_inputs
from mla_lab.reference.mla import decode_reference
from mla_lab.reference.tolerance import rel_error

from .calls import check, inputs_of, native

pytestmark = pytest.mark.gpu
FACTOR = "skip_softmax_threshold_scale_factor"


def one_of(whole: DecodeInputs, b: int) -> DecodeInputs:
    """The call of request `b` alone, over the same cache."""
    problem = whole.problem
    lengths = {"q_lens": problem.q_lens[b : b + 1], "kv_lens": problem.kv_lens[b : b + 1]}
    return replace(
        whole,
        problem=replace(problem, **lengths),
        query=whole.query[b : b + 1].contiguous(),
        block_tables=whole.block_tables[b : b + 1].contiguous(),
        seq_lens=whole.seq_lens[b : b + 1].contiguous(),
    )


@pytest.mark.parametrize(
    ("heads", "batch", "kv_format", "top_k", "page_size"),
    [
        (16, 33, "bf16", 700, 64),
        (16, 17, "bf16", 700, 64),
        (128, 7, "fp8_656", 2048, 64),
        (16, 33, "bf16", 0, 1),
        (128, 9, "fp8_656", 0, 2),
    ],
)
def test_gathered_tokens_are_batch_invariant(
    heads: int, batch: int, kv_format: str, top_k: int, page_size: int, workspace: torch.Tensor
) -> None:
    problem = Problem(
        (1,) * batch, (3000,) * batch, heads, kv_format=kv_format, top_k=top_k, page_size=page_size
    )
    whole = inputs_of(problem, "lse")
    together = [r.clone() for r in native(whole, workspace, batch_invariant=True)]
    check(whole, together)
    for b in (0, batch - 1):
        out, lse = native(one_of(whole, b), workspace, batch_invariant=True)
        assert torch.equal(out[0], together[0][b]) and torch.equal(lse[0], together[1][b])


@pytest.mark.parametrize("kv_format", ["bf16", "e4m3", "fp8_656"])
def test_skip_softmax_is_batch_invariant(kv_format: str, workspace: torch.Tensor) -> None:
    problem = Problem((2,) * 9, (5000, 70, 3000) * 3, 16, kv_format=kv_format)
    whole = replace(inputs_of(problem, "lse"), **{FACTOR: 1e-3})
    together = [r.clone() for r in native(whole, workspace, batch_invariant=True)]
    for b in (0, 1, 8):
        out, lse = native(one_of(whole, b), workspace, batch_invariant=True)
        assert torch.equal(out[0], together[0][b])
        assert torch.equal(lse, together[1][2 * b : 2 * b + 2])


@pytest.mark.parametrize("features", [[], ["tree_mask"], ["tree_mask", "max_q_len"]])
@pytest.mark.parametrize("page_size", [8, 64])
def test_ranks_merge_to_the_whole(
    features: list[str], page_size: int, workspace: torch.Tensor
) -> None:
    problem = Problem((4, 4, 4), (3000, 5, 130), 24, page_size=page_size)
    whole = inputs_of(problem, *features)
    parts = []
    for rank in shard(whole, 3):
        for _ in range(2):  # the second time by repetition
            result = native(rank, workspace)
            check(rank, result)
        parts.append([r.clone() for r in result])
    out, lse = merge(*zip(*parts, strict=True))
    expected = decode_reference(whole)
    assert torch.linalg.norm(out.double() - expected.out) <= 8e-3 * torch.linalg.norm(expected.out)
    assert torch.allclose(lse.double(), expected.lse.view(lse.shape), atol=1e-3)


@pytest.mark.parametrize("kv_format", ["bf16", "e4m3", "fp8_656"])
@pytest.mark.parametrize("q_dtype", ["bf16", "e4m3"])
@pytest.mark.parametrize("heads", [16, 32, 128])
@pytest.mark.parametrize("page_size", [4, 64])
def test_a_key_with_nan_is_in_out_and_lse_of_its_request_alone(
    q_dtype: str, kv_format: str, heads: int, page_size: int, workspace: torch.Tensor
) -> None:
    if q_dtype == "e4m3" and kv_format != "e4m3":
        pytest.skip("an e4m3 query has a cache of e4m3")
    for kv_lens in ((300, 70), (5000, 3000), (700,) * 40):
        formats = {"q_dtype": q_dtype, "kv_format": kv_format}
        problem = Problem((1,) * len(kv_lens), kv_lens, heads, page_size=page_size, **formats)
        inputs = inputs_of(problem, "lse")
        page = inputs.kv_cache[int(inputs.block_tables[0, 0])]
        token = page.view(torch.uint8).reshape(page_size, -1)[3]
        # NaN in e4m3, and in bf16 from the first two bytes of a pair
        token[6:8] = 0x7F if kv_format != "bf16" else torch.tensor([0xC0, 0x7F], device="cuda")
        forms: list[dict[str, Any]] = [{}, {"batch_invariant": True}]
        if page_size == 64 and kv_format != "fp8_656":
            forms.append({"backend": "cuda"})
        for form in forms:
            out, lse = native(inputs, workspace, **form)
            assert bool(out[0].isnan().all()) and bool(lse[0].isnan().all())
            assert bool(out[1:].isfinite().all()) and bool(lse[1:].isfinite().all())


def test_two_streams_of_one_capture_need_a_workspace_each(workspace: torch.Tensor) -> None:
    inputs, side = inputs_of(Problem((1,), (4096,), 128), "lse"), torch.cuda.Stream()
    native(inputs, workspace)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        native(inputs, workspace, debug=True)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            with pytest.raises(InvalidInput, match="another stream of this capture"):
                native(inputs, workspace, debug=True)
            native(inputs, torch.zeros_like(workspace), debug=True)
        torch.cuda.current_stream().wait_stream(side)


def test_a_graph_outlives_the_plan_that_it_was_captured_with() -> None:
    problem = Problem.uniform(4, 1, 3000, 128)
    inputs = make_inputs(problem, 5, device="cuda", workspace_bytes=64 << 20)
    arguments = inputs.contract_args()
    plan = make_plan(problem, tile_rows=64, policy="fixed", num_splits=8, num_workers=64)
    out = decode(**arguments, plan=plan, backend="cute").clone()
    again = torch.empty_like(out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode(**arguments, plan=plan, out=again, backend="cute")
    for _ in range(300):  # until no replay of the call is kept either
        other = make_plan(problem, tile_rows=64, policy="fixed", num_splits=7, num_workers=56)
        decode(**arguments, plan=other, backend="cute")
    del plan, other
    gc.collect()
    torch.cuda.empty_cache()
    words = [torch.full((64, 8), 2**30, dtype=torch.int32, device="cuda") for _ in range(100)]
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(again, out)
    assert len(words) == 100


@pytest.mark.parametrize("length", [None, 2**31 - 1])
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("kv_format", ["bf16", "e4m3", "fp8_656"])
def test_a_request_longer_than_its_row_of_the_table_is_nan_and_harms_no_other(
    kv_format: str, heads: int, length: int | None, workspace: torch.Tensor
) -> None:
    for kv_lens in ((5184,), (5184, 70, *(700,) * 20)):
        inputs = inputs_of(Problem((1,) * len(kv_lens), kv_lens, heads, kv_format=kv_format), "lse")
        lens = inputs.seq_lens.clone()
        lens[0] = length or 64 * inputs.block_tables.shape[1] + 1
        forms: list[dict[str, Any]] = [{}, {"batch_invariant": True}]
        if kv_format != "fp8_656":
            forms.append({"backend": "cuda"})
        for form in forms:
            right, _ = native(inputs, workspace, **form)
            out, lse = native(replace(inputs, seq_lens=lens), workspace, **form)
            assert bool(out[0].isnan().all()) and bool(lse[0].isnan().all())
            assert len(out) == 1 or rel_error(out[1:], right[1:]) < 0.01
            again, _ = native(inputs, workspace, **form)
            assert torch.equal(again, right)


@pytest.mark.parametrize("offsets", [(0, 2, 9, 6), (0, 2, 5, 2**31 - 1), (-9, 2, 5, 6)])
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("backend", ["cute", "cuda"])
def test_query_offsets_outside_of_the_query_write_nothing_around_out(
    backend: str, heads: int, offsets: tuple[int, ...], workspace: torch.Tensor
) -> None:
    inputs = inputs_of(Problem((2, 3, 1), (900, 70, 3000), heads), "ragged", "max_q_len")
    whole = torch.full((38, heads, 512), 7.0, dtype=torch.bfloat16, device="cuda")
    begin = torch.tensor(offsets, dtype=torch.int32, device="cuda")
    native(replace(inputs, cum_seq_lens_q=begin), workspace, out=whole[16:22], backend=backend)
    assert bool((whole[:16] == 7).all()) and bool((whole[22:] == 7).all())
    out = native(inputs, workspace, out=whole[16:22], backend=backend)
    assert rel_error(out, decode_reference(inputs).out) < 0.01
