"""FlashInfer's paged wrapper on our call: the oracle's results, tensors where they lie."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from mla_lab.api import contract
from mla_lab.core import masks
from mla_lab.core.errors import InvalidInput, InvalidType, Unsupported
from mla_lab.core.problem import Problem
from mla_lab.flashinfer_names import BatchMLAPagedAttentionWrapper
from mla_lab.interop.flashinfer.first_use import ZEROED_BYTES
from mla_lab.interop.flashinfer.wrapper_plan import all_drafts, side_by_side
from mla_lab.reference.inputs import DecodeInputs, make_inputs
from mla_lab.reference.mla import decode_reference
from mla_lab.reference.tolerance import lse_error, rel_error

EQUAL = Problem((2, 2, 2), (70, 9, 33), 4)
UNEQUAL = Problem((2, 1, 3), (70, 0, 33), 4, q_dtype="fp16", kv_format="fp16")


def workspace() -> torch.Tensor:
    return torch.full((16 << 20,), 7, dtype=torch.int8)


def csr(inputs: DecodeInputs) -> dict[str, Any]:
    """The step as `plan` takes it: prefix sums, and pages of all requests in one list."""
    problem = inputs.problem
    counts = [-(-n // problem.page_size) for n in problem.kv_lens]
    pages = [row[:n] for row, n in zip(inputs.block_tables, counts, strict=True)]
    return {
        "qo_indptr": torch.tensor([0, *problem.q_lens]).cumsum(0).int(),
        "kv_indptr": torch.tensor([0, *counts]).cumsum(0).int(),
        "kv_indices": torch.cat(pages),
        "kv_len_arr": inputs.seq_lens,
        "num_heads": problem.heads,
        "head_dim_ckv": 512,
        "head_dim_kpe": 64,
        "page_size": problem.page_size,
        "causal": True,
        "sm_scale": inputs.bmm1_scale,
        "q_data_type": inputs.query.dtype,
        "kv_data_type": inputs.kv_cache.dtype,
    }


def halves(inputs: DecodeInputs) -> tuple[torch.Tensor, ...]:
    """q_nope, q_pe, ckv_cache, kpe_cache: views of the query and of the cache."""
    query = inputs.query.view(-1, inputs.problem.heads, 576)
    cache = inputs.kv_cache
    return query[..., :512], query[..., 512:], cache[..., :512], cache[..., 512:]


def planned(inputs: DecodeInputs, **changed: Any) -> BatchMLAPagedAttentionWrapper:
    wrapper = BatchMLAPagedAttentionWrapper(workspace())
    wrapper.plan(**{**csr(inputs), **changed})
    return wrapper


@pytest.mark.parametrize("problem", [EQUAL, UNEQUAL, replace(EQUAL, q_lens=(1, 1, 1), page_size=1)])
@pytest.mark.parametrize("causal", [True, False])
def test_results_are_the_oracle_s(problem: Problem, causal: bool) -> None:
    inputs = make_inputs(problem, 1, ["lse"])
    wrapper: Any = planned(inputs, causal=causal)
    out, lse = wrapper.run(*halves(inputs), return_lse=True)
    if not causal:
        seen = [torch.ones(n, n, dtype=torch.bool) for n in problem.q_lens]
        mask = masks.pack_ragged(seen)
        inputs = replace(inputs, mask=mask.view(*inputs.query.shape[:-2], mask.shape[-1]))
    expected = decode_reference(inputs)
    assert out.dtype is inputs.query.dtype and out.shape == (sum(problem.q_lens), 4, 512)
    assert rel_error(out, expected.out.view(out.shape)) < 4e-3
    assert lse_error(lse * math.log(2), expected.lse.view(lse.shape)) < 1e-5


def test_views_are_read_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make_inputs(EQUAL, 1)
    wrapper, seen = planned(inputs), []

    def call(*args: Any, **named: Any) -> Any:
        seen.append(args)
        return named["out"]

    monkeypatch.setattr(contract, "trtllm_batch_decode_with_kv_cache_mla", call)
    wrapper.run(*halves(inputs))
    query, cache = seen[0][:2]
    assert query.data_ptr() == inputs.query.data_ptr() and query.shape == inputs.query.shape
    assert cache.data_ptr() == inputs.kv_cache.data_ptr() and cache.shape == inputs.kv_cache.shape


def test_two_buffers_of_a_cache_are_refused_or_copied() -> None:
    inputs = make_inputs(EQUAL, 1)
    q_nope, q_pe, ckv, kpe = (half.contiguous() for half in halves(inputs))
    with pytest.raises(Unsupported, match="ckv_cache, kpe_cache: got two buffers"):
        planned(inputs).run(q_nope, q_pe, ckv, kpe)
    wrapper = BatchMLAPagedAttentionWrapper(workspace(), copies_caches=True)
    wrapper.plan(**csr(inputs))
    out = torch.empty_like(q_nope)
    assert wrapper.run(q_nope, q_pe, ckv, kpe, out=out) is out
    assert torch.equal(out, planned(inputs).run(*halves(inputs)))


@pytest.mark.parametrize("name", ["float_workspace_buffer", "out", "lse"])
def test_what_is_written_lies_apart_from_caches_that_are_copied(name: str) -> None:
    inputs = make_inputs(EQUAL, 1)
    q_nope, q_pe, ckv, kpe = (half.contiguous() for half in halves(inputs))
    before, buffer, named = ckv.clone(), workspace(), {}
    if name == "float_workspace_buffer":
        buffer = ckv.view(-1).view(torch.int8)[: ZEROED_BYTES + 64]
    elif name == "out":
        named["out"] = ckv.view(-1)[: q_nope.numel()].view(q_nope.shape)
    else:
        named["lse"] = ckv.view(-1)[:48].view(torch.float32).view(6, 4)
    wrapper = BatchMLAPagedAttentionWrapper(buffer, copies_caches=True)
    wrapper.plan(**csr(inputs))  # zeroes the workspace, before it sees a cache
    with pytest.raises(InvalidInput, match=f"{name}: got bytes of another tensor"):
        wrapper.run(q_nope, q_pe, ckv, kpe, **named)
    if named:
        assert torch.equal(ckv.view(torch.int16), before.view(torch.int16))


@pytest.mark.parametrize("problem", [EQUAL, UNEQUAL])
def test_a_plan_keeps_its_lengths(problem: Problem) -> None:
    """A program may count its lengths on in place before the step's last layer has run."""
    inputs = make_inputs(problem, 1)
    given = csr(inputs)
    wrapper = BatchMLAPagedAttentionWrapper(workspace())
    wrapper.plan(**given)
    expected = wrapper.run(*halves(inputs))
    given["kv_len_arr"] += 100
    given["qo_indptr"].copy_(torch.tensor([0, 1, 2, 6]))
    assert torch.equal(wrapper.run(*halves(inputs)), expected)


def test_lists_of_a_plan_may_lie_apart() -> None:
    inputs = make_inputs(UNEQUAL, 1)
    given = csr(inputs)
    apart = {n: torch.stack([v, v], 1)[:, 0] for n, v in given.items() if torch.is_tensor(v)}
    expected = planned(inputs).run(*halves(inputs))
    assert torch.equal(planned(inputs, **apart).run(*halves(inputs)), expected)


def test_a_mask_of_too_many_query_tokens_is_refused() -> None:
    tokens = torch.tensor([0, 1, 2, 2**40])
    with pytest.raises(Unsupported, match=r"qo_indptr: got .* with causal=False; supported: up to"):
        planned(make_inputs(UNEQUAL, 1), qo_indptr=tokens, causal=False)


def test_a_pool_without_pages_has_no_tokens() -> None:
    inputs = make_inputs(replace(EQUAL, kv_lens=(0, 0, 0)), 1)
    wrapper = planned(inputs, kv_indices=torch.empty(0, dtype=torch.int32))
    q_nope, q_pe, ckv, kpe = halves(inputs)
    out, lse = wrapper.run(q_nope, q_pe, ckv[:0], kpe[:0], return_lse=True)
    assert not out.any() and lse.isneginf().all()


def test_a_step_without_a_query_token_is_told_by_the_run_s_names() -> None:
    inputs = make_inputs(Problem((1, 1), (70, 9), 4), 1)
    wrapper = planned(inputs, qo_indptr=torch.zeros(3, dtype=torch.int32))
    q_nope, q_pe, *caches = halves(inputs)
    with pytest.raises(InvalidInput, match=r"^q_nope and q_pe: got shape"):
        wrapper.run(q_nope[:0], q_pe[:0], *caches)


@pytest.mark.parametrize("ratio", [1.0, 0.5])
def test_scales_of_eight_bits(ratio: float) -> None:
    problem = replace(EQUAL, kv_format="e4m3")
    inputs = make_inputs(problem, 1)
    out = planned(inputs).run(*halves(inputs), ckv_scale=0.5, kpe_scale=0.5 * ratio)
    query = inputs.query.clone()
    query[..., 512:] *= ratio  # exact: a power of two
    scaled = replace(inputs, query=query, bmm1_scale=0.5 * float(inputs.bmm1_scale))
    expected = 0.5 * decode_reference(scaled).out
    assert rel_error(out, expected.view(out.shape)) < 4e-3
    with pytest.raises(InvalidInput, match="kpe_scale: got None"):
        planned(inputs).run(*halves(inputs), ckv_scale=0.5)
    for wrong, says in (("0.5", "got str"), (0.0, "got 0.0"), (math.inf, "a finite number")):
        with pytest.raises(InvalidInput, match=f"ckv_scale: .*{says}"):
            planned(inputs).run(*halves(inputs), ckv_scale=wrong, kpe_scale=0.5)


def test_other_wrappers_may_write_the_workspace_between_steps() -> None:
    # SGLang's FlashInfer backend lends one buffer to all wrappers, those of prefill among them
    inputs, buffer = make_inputs(EQUAL, 1), workspace()
    wrapper = BatchMLAPagedAttentionWrapper(buffer)
    for _ in range(2):
        wrapper.plan(**csr(inputs))
        assert not buffer[:ZEROED_BYTES].any() and (buffer[-65536:] == 7).all()
        out = wrapper.run(*halves(inputs))
        assert rel_error(out, decode_reference(inputs).out.view(out.shape)) < 4e-3
        buffer.fill_(7)


def with_graphs(inputs: DecodeInputs, **changed: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """A wrapper that has planned `inputs` with CUDA graphs, and its buffers."""
    sizes = {"qo_indptr": 4, "kv_indptr": 4, "kv_indices": 60, "kv_len_arr": 3}
    buffers = {name: torch.empty(size, dtype=torch.int32) for name, size in sizes.items()}
    wrapper = BatchMLAPagedAttentionWrapper(workspace(), True, **buffers)
    wrapper.plan(**{**csr(inputs), **changed})
    return wrapper, buffers


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"causal": False}, "causal: got False; supported: as in the first plan"),
        ({"num_heads": 8}, "num_heads: got 8; supported: 4, as in the first plan"),
        ({"page_size": 128}, "page_size: got 128; supported: 64, as in the first plan"),
        ({"sm_scale": 0.5}, "sm_scale: got 0.5; supported: .*, as in the first plan"),
        ({"head_dim_ckv": 256}, "head_dim_ckv: got 256; supported: 512, as in the first plan"),
        ({"kv_data_type": torch.float8_e4m3fn}, "kv_data_type: got torch.float8_e4m3fn"),
    ],
    ids=str,
)
def test_a_refused_plan_leaves_a_graph_s_memory(changed: dict[str, Any], says: str) -> None:
    inputs = make_inputs(replace(EQUAL, page_size=64), 1)
    wrapper, buffers = with_graphs(inputs)
    wrapper._workspace.fill_(7)
    before = {name: buffer.clone() for name, buffer in buffers.items()}
    table = wrapper._planned.block_tables.clone()
    given = csr(inputs)
    others = {"kv_len_arr": torch.tensor([5, 5, 5]), "kv_indices": given["kv_indices"].flip(0)}
    with pytest.raises(InvalidInput, match=says):
        wrapper.plan(**{**given, **others, **changed})
    assert all(torch.equal(buffers[name], before[name]) for name in buffers)
    assert torch.equal(wrapper._planned.block_tables, table)
    assert (wrapper._workspace == 7).all()


def test_drafts_that_see_each_other_keep_their_mask_s_memory() -> None:
    inputs = make_inputs(EQUAL, 1)
    wrapper, _ = with_graphs(inputs, causal=False)
    mask = wrapper._planned.mask
    expected = wrapper.run(*halves(inputs))
    wrapper.plan(**{**csr(inputs), "causal": False})
    assert wrapper._planned.mask is mask
    assert torch.equal(wrapper.run(*halves(inputs)), expected)


def test_what_inference_mode_made_is_written_outside_of_it() -> None:
    inputs = make_inputs(EQUAL, 1)
    with torch.inference_mode():
        wrapper, buffers = with_graphs(inputs)
    wrapper.plan(**csr(inputs))
    assert buffers["kv_len_arr"].tolist() == [70, 9, 33]
    out = wrapper.run(*halves(inputs))
    assert rel_error(out, decode_reference(inputs).out.view(out.shape)) < 4e-3


@pytest.mark.parametrize("name", ["kv_indices", "kv_len_arr"])
def test_a_workspace_apart_from_the_plan_s_tensors(name: str) -> None:
    given = csr(make_inputs(EQUAL, 1))
    wrapper = BatchMLAPagedAttentionWrapper(given[name].view(torch.uint8))
    before = given[name].clone()
    with pytest.raises(InvalidInput, match="float_workspace_buffer: got bytes of another tensor"):
        wrapper.plan(**given)
    assert torch.equal(given[name], before)


def test_plans_with_cuda_graphs_write_into_the_same_memory() -> None:
    first, second = make_inputs(EQUAL, 1), make_inputs(replace(EQUAL, kv_lens=(200, 5, 0)), 2)
    wrapper, given = with_graphs(first)
    kept = wrapper._planned
    wrapper.plan(**csr(second))
    now = wrapper._planned
    assert kept is not None and now is not None
    for name in ("block_tables", "seq_lens", "cum_seq_lens_q"):
        assert getattr(kept, name).data_ptr() == getattr(now, name).data_ptr()
    assert now.max_seq_len == kept.max_seq_len == 20 * EQUAL.page_size
    assert given["kv_len_arr"].tolist() == [200, 5, 0]
    out = wrapper.run(*halves(second))
    assert rel_error(out, decode_reference(second).out.view(out.shape)) < 4e-3
    sums = torch.tensor([0, 1, 3, 6], dtype=torch.int32)
    with pytest.raises(InvalidInput, match="query tokens for each request, as in the first plan"):
        wrapper.plan(**{**csr(second), "qo_indptr": sums})
    long = make_inputs(replace(EQUAL, kv_lens=(21 * EQUAL.page_size, 5, 0)), 2)
    with pytest.raises(InvalidInput, match="pages_per_request"):
        wrapper.plan(**csr(long))


@pytest.mark.parametrize(
    ("changed", "error", "says"),
    [
        ({"use_profiler": True}, Unsupported, "use_profiler"),
        ({"head_dim_kpe": 0}, Unsupported, "head_dim_kpe: got .512, 0."),
        ({"kv_data_type": torch.uint8}, InvalidType, "kv_data_type"),
        (
            {"q_data_type": torch.float16, "kv_data_type": torch.float8_e4m3fn},
            InvalidType,
            "bfloat",
        ),
        ({"kv_indptr": torch.tensor([0, 5, 4, 9])}, InvalidInput, "kv_indptr: got .*prefix sums"),
        ({"kv_indptr": torch.tensor([0, 5])}, InvalidInput, "kv_indptr: got 2 entries"),
        ({"kv_len_arr": torch.tensor([999, 1, 1])}, InvalidInput, "kv_len_arr: got 999"),
        ({"kv_len_arr": torch.tensor([9])}, InvalidInput, "kv_len_arr: got 1 lengths"),
        ({"kv_indices": torch.tensor([0])}, InvalidInput, "kv_indices: got 1 pages"),
        ({"sm_scale": math.nan}, InvalidInput, "sm_scale: got nan"),
        ({"page_size": 0}, InvalidInput, "page_size: got 0"),
        ({"head_dim_ckv": 512.0}, InvalidType, "head_dim_ckv: got float"),
        ({"head_dim_kpe": torch.tensor(64)}, InvalidType, "head_dim_kpe: got Tensor"),
        ({"causal": "False"}, InvalidType, "causal: got str"),
        ({"num_heads": 4.0}, InvalidType, "num_heads: got float"),
        ({"qo_indptr": [0, 2, 4, 6]}, InvalidType, "qo_indptr: got list"),
        ({"qo_indptr": None}, InvalidType, "qo_indptr: got NoneType"),
        ({"kv_indptr": np.array([0, 3, 4, 6])}, InvalidType, "kv_indptr: got ndarray"),
        ({"qo_indptr": torch.tensor([0.0, 2.0, 4.0, 6.0])}, InvalidType, "qo_indptr: got torch.fl"),
        ({"kv_len_arr": torch.tensor([[70], [9], [33]])}, InvalidInput, "kv_len_arr: got shape"),
        (
            {"kv_indices": torch.tensor([2**32 + 1] * 60)},
            InvalidInput,
            "kv_indices: got 4294967297",
        ),
        ({"kv_indices": torch.tensor([-1] * 60)}, InvalidInput, "kv_indices: got -1"),
    ],
)
def test_a_wrong_plan_is_refused(changed: dict[str, Any], error: Any, says: str) -> None:
    with pytest.raises(error, match=says):
        planned(make_inputs(EQUAL, 1), **changed)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("q_nope", torch.zeros(6, 4, 512), "q_nope.dtype: got torch.float32"),
        ("q_pe", torch.zeros(1, 4, 64, dtype=torch.bfloat16).expand(1 << 20, -1, -1), "q_pe: got"),
        ("ckv_scale", 1.0, "ckv_scale: got 1.0"),
        ("ckv_scale_arr", torch.ones(1), "ckv_scale_arr: got a value"),
        ("o_scale", 1.0, "o_scale: got a value"),
        ("kpe_cache", None, "kpe_cache: got NoneType"),
        ("return_lse_base_on_e", "False", "return_lse_base_on_e: got str"),
        ("q_pe", torch.zeros(6, 4, 64, dtype=torch.bfloat16, device="meta"), "q_pe: got device"),
    ],
)
def test_a_wrong_run_is_refused(name: str, value: Any, says: str) -> None:
    inputs = make_inputs(EQUAL, 1)
    listed = dict(zip(("q_nope", "q_pe", "ckv_cache", "kpe_cache"), halves(inputs), strict=True))
    with pytest.raises((InvalidInput, Unsupported), match=says):
        planned(inputs).run(**{**listed, name: value})


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("out", torch.zeros(1, dtype=torch.float64), "out: got torch.float64"),
        ("out", torch.zeros(6, 4, 512, dtype=torch.bfloat16), "out: got shape .6, 4, 512."),
        ("lse", torch.zeros(3), "lse: got shape .3."),
        ("lse", [], "lse: got list"),
    ],
)
def test_results_are_checked_before_a_query_is_copied(name: str, value: Any, says: str) -> None:
    """The query's copy would take 79 TB, so that a call that made it could not refuse."""
    rows, heads = 1 << 20, 1 << 16
    given = csr(make_inputs(Problem((1,), (70,), 4), 1))
    query = torch.zeros(1, 1, 576, dtype=torch.bfloat16).expand(rows, heads, -1)
    given |= {"qo_indptr": torch.tensor([0, rows]), "num_heads": heads}
    wrapper = BatchMLAPagedAttentionWrapper(workspace())
    wrapper.plan(**given)
    cache = torch.zeros(4, given["page_size"], 576, dtype=torch.bfloat16)
    halves_of_both = (query[..., :512], query[..., 512:], cache[..., :512], cache[..., 512:])
    with pytest.raises(InvalidInput, match=says):
        wrapper.run(*halves_of_both, **{name: value})


def test_drafts_that_see_each_other_by_words() -> None:
    q_lens = [1, 16, 40, 33, 7]
    seen = [torch.ones(n, n, dtype=torch.bool) for n in q_lens]
    expected = masks.pack_ragged(seen)
    made = all_drafts(q_lens, 40, torch.device("cpu"))
    assert made.dtype is torch.uint16 and torch.equal(made, expected)


def test_run_before_plan_and_wrong_constructors() -> None:
    with pytest.raises(InvalidInput, match="a call before plan"):
        BatchMLAPagedAttentionWrapper(workspace()).run(*halves(make_inputs(EQUAL, 1)))
    with pytest.raises(Unsupported, match="backend: got 'cutlass'"):
        BatchMLAPagedAttentionWrapper(workspace(), backend="cutlass")
    with pytest.raises(InvalidType, match="qo_indptr: got NoneType"):
        BatchMLAPagedAttentionWrapper(workspace(), True)
    with pytest.raises(InvalidType, match="float_workspace_buffer"):
        BatchMLAPagedAttentionWrapper([])
    with pytest.raises(Unsupported, match=r"float_workspace_buffer: got .*sparse_coo"):
        BatchMLAPagedAttentionWrapper(workspace().to_sparse())
    for flag in ("use_cuda_graph", "copies_caches"):
        with pytest.raises(InvalidType, match=f"{flag}: got str"):
            BatchMLAPagedAttentionWrapper(workspace(), **{flag: "False"})
    with pytest.raises(InvalidInput, match="pages_per_request: got 0"):
        BatchMLAPagedAttentionWrapper(workspace(), pages_per_request=0)


def test_neighbours_of_one_buffer_only() -> None:
    whole = torch.zeros(4, 3, 576)
    joined = side_by_side(whole[..., :512], whole[..., 512:])
    assert joined is not None and joined.data_ptr() == whole.data_ptr()
    assert joined.stride() == whole.stride()
    assert side_by_side(whole[..., :512], whole[1:, :, 512:]) is None
    assert side_by_side(whole[..., :512], whole[..., 511:575]) is None
    assert side_by_side(whole[..., :512], torch.zeros(4, 3, 64)) is None
    wide = torch.zeros(4, 3, 600)
    assert side_by_side(wide[..., :512], wide[..., 512:576]) is None
    apart = torch.zeros(4, 5, 576)[:, :3]
    pages = side_by_side(apart[..., :512], apart[..., 512:])
    assert pages is not None and pages.stride() == (5 * 576, 576, 1)
