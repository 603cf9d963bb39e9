from __future__ import annotations

import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mla_lab.core import kv_cache as formats
from mla_lab.core import masks
from mla_lab.core.errors import InvalidInput
from mla_lab.core.problem import KV_FORMATS, Problem
from mla_lab.reference.inputs import FEATURES, FOREIGN_PAGES, WILD_PAGE_IDS, make_inputs
from mla_lab.reference.mla import TileWalk, attend, skip_tiles
from mla_lab.reference.operands import operands

RAGGED = Problem((1, 3, 0, 2), (10, 2, 0, 130), 4)
#: what the contract's call takes (its own spelling and defaults)
CONTRACT_NAMES = {
    "query", "kv_cache", "workspace_buffer", "qk_nope_head_dim", "kv_lora_rank",
    "qk_rope_head_dim", "block_tables", "seq_lens", "max_seq_len", "sparse_mla_top_k", "out",
    "bmm1_scale", "bmm2_scale", "sinks", "skip_softmax_threshold_scale_factor", "enable_pdl",
    "backend", "is_var_seq", "uses_shared_paged_kv_idx", "lse", "return_lse", "cute_dsl_impl",
    "kv_scale_format", "cum_seq_lens_q", "max_q_len", "multi_ctas_kv_counter_buffer",
    "sparse_mla_top_k_lens", "enable_dcp", "cp_world", "cp_rank", "causal_seqlens_kv_global",
    "use_fp16_softmax", "return_lse_base", "mask", "batch_invariant", "plan",
}  # fmt: skip


def bits(call) -> dict:
    """Every tensor of a call as bytes, the rest as it is (NaN would not equal NaN)."""
    return {
        name: value.contiguous().view(torch.uint8).tolist() if torch.is_tensor(value) else value
        for name, value in call.contract_args().items()
    }


@pytest.mark.parametrize("features", [(), ("tree_mask", "sinks", "device_scales", "max_q_len")])
def test_equal_arguments_give_equal_bits(features):
    def make(seed):
        return bits(make_inputs(RAGGED, seed, features, workspace_bytes=8))

    assert make(4) == make(4)
    assert make(4)["query"] != make(5)["query"]


@given(st.sets(st.sampled_from(FEATURES)), st.sampled_from(KV_FORMATS), st.integers(0, 3))
def test_whatever_the_features_the_contract_knows_the_arguments(features, kv_format, top_k):
    problem = Problem((2, 2), (5, 0), 3, kv_format=kv_format, page_size=4, top_k=top_k)
    masked = {"chain_mask", "tree_mask"} & features
    dense_only = bool(masked) or "separate_tables" in features
    if len(masked) == 2 or (dense_only if top_k else "top_k_lens" in features):
        with pytest.raises(InvalidInput, match="features"):
            make_inputs(problem, 1, features, workspace_bytes=8)
        return
    call = make_inputs(problem, 1, features, workspace_bytes=8)
    arguments = call.contract_args()
    assert set(arguments) <= CONTRACT_NAMES
    assert {"qk_nope_head_dim", "kv_lora_rank", "qk_rope_head_dim"} <= set(arguments)
    assert ("cum_seq_lens_q" in arguments) == bool({"ragged", "max_q_len"} & features)
    assert call.query.shape == ((4, 3, 576) if call.cum_seq_lens_q is not None else (2, 2, 3, 576))
    assert call.kv_cache.dim() == (4 if "cache_4d" in features else 3)
    for name in ("query", "block_tables", "seq_lens", "cum_seq_lens_q", "mask", "sinks"):
        assert name not in arguments or arguments[name].is_contiguous()
    for request in operands(call):
        assert request.keys.isfinite().all()
        assert request.values.isfinite().all()


def test_defaults_are_left_out():
    arguments = make_inputs(Problem.uniform(1, 1, 5, 2), workspace_bytes=8).contract_args()
    assert set(arguments) == {
        "query", "kv_cache", "workspace_buffer", "qk_nope_head_dim", "kv_lora_rank",
        "qk_rope_head_dim", "block_tables", "seq_lens", "max_seq_len", "bmm1_scale",
    }  # fmt: skip
    assert arguments["bmm1_scale"] == pytest.approx(192**-0.5)


@pytest.mark.parametrize("kv_format", KV_FORMATS)
def test_only_the_tokens_of_requests_are_not_nan(kv_format):
    problem = Problem((1, 1, 1), (10, 0, 129), 2, kv_format=kv_format, page_size=64)
    call = make_inputs(problem, 1, workspace_bytes=8)
    stored = formats.unpack(call.kv_cache)
    readable = ~stored.isnan().any(-1)
    assert int(readable.sum()) == 139
    assert stored[~readable].isnan().any(-1).all()
    expected = torch.zeros_like(readable)
    for row, kv_len in zip(call.block_tables.tolist(), problem.kv_lens, strict=True):
        for position in range(kv_len):
            expected[row[position // 64], position % 64] = True
    assert torch.equal(readable, expected)
    assert len(call.kv_cache) == 1 + 0 + 3 + FOREIGN_PAGES


def test_values_pages_hide_their_rope():
    call = make_inputs(RAGGED, 1, ["separate_tables"], workspace_bytes=8)
    first, second = call.block_tables[3, :, 0].tolist()
    assert first != second
    assert call.kv_cache[second, 0, :512].isfinite().all()
    assert call.kv_cache[second, 0, 512:].isnan().all()
    assert not torch.equal(call.kv_cache[second, 0, :512], call.kv_cache[first, 0, :512])


def test_unused_table_entries_are_wild_and_used_ones_distinct():
    call = make_inputs(RAGGED, 1, workspace_bytes=8)
    used = []
    for row, kv_len in zip(call.block_tables.tolist(), RAGGED.kv_lens, strict=True):
        needed = formats.pages_of(kv_len, 64)
        used += row[:needed]
        assert len(row) > needed
        assert set(row[needed:]) <= set(WILD_PAGE_IDS)
    assert len(set(used)) == len(used) == 5
    assert min(used) >= 0
    assert max(used) < len(call.kv_cache)


def test_page_order_is_random():
    problem = Problem.uniform(1, 1, 64 * 50, 1)
    pages = make_inputs(problem, 1, workspace_bytes=8).block_tables[0, :50].tolist()
    assert pages != sorted(pages)
    assert pages != make_inputs(problem, 2, workspace_bytes=8).block_tables[0, :50].tolist()


def test_gaps_between_pages_are_strides():
    plain = make_inputs(RAGGED, 1, workspace_bytes=8).kv_cache
    gapped = make_inputs(RAGGED, 1, ["page_gap"], workspace_bytes=8).kv_cache
    assert plain.is_contiguous()
    assert gapped.shape == plain.shape
    assert gapped.stride(0) > plain.stride(0)
    assert gapped.stride()[1:] == plain.stride()[1:]


def test_sparse_slots_are_the_requests_own():
    problem = Problem((2, 1, 1), (70, 0, 9), 2, top_k=200, page_size=8)
    call = make_inputs(problem, 3, workspace_bytes=8)
    assert call.block_tables.shape == (4, 200)
    owners = [0, 0, 1, 2]
    readable = ~call.kv_cache.isnan().any(-1).flatten()
    for slots, owner in zip(call.block_tables, owners, strict=True):
        taken = slots[slots >= 0]
        assert (slots[slots < 0] == -1).all()
        assert (slots < 0).any()
        assert readable[taken.long()].all()
        assert len(taken.unique()) <= problem.kv_lens[owner]
        assert (len(taken) == 0) == (problem.kv_lens[owner] == 0)
    assert len(call.block_tables[0].unique()) < 200  # duplicates


@pytest.mark.parametrize("feature", ["chain_mask", "tree_mask"])
@pytest.mark.parametrize("extra", [[], ["max_q_len"]])
def test_masks_fit_their_call(feature, extra):
    call = make_inputs(RAGGED, 1, [feature, *extra], workspace_bytes=8)
    assert call.mask is not None
    masks.validate(call.mask, RAGGED.q_lens, max_q_len=call.max_q_len)
    dense = make_inputs(Problem.uniform(3, 35, 50, 1), 1, [feature], workspace_bytes=8)
    assert dense.mask is not None
    masks.validate(dense.mask, [35] * 3)


def test_heavy_tails_have_a_sink_and_favour_the_recent():
    problem = Problem.uniform(1, 1, 2000, 16, q_dtype="fp32", kv_format="fp32")
    weights = {}
    for distribution in ("gauss", "heavy_tailed"):
        call = make_inputs(problem, 1, distribution=distribution, workspace_bytes=8)
        request = next(operands(call))
        scores = float(call.bmm1_scale) * (request.query @ request.keys.mT)[0]
        weights[distribution] = torch.softmax(scores, -1).mean(0)
    gauss, heavy = weights["gauss"], weights["heavy_tailed"]
    assert gauss[0] < 0.02
    assert heavy[0] > 0.2
    assert heavy[-50:].sum() > 5 * heavy[900:950].sum()
    assert gauss[-50:].sum() < 2 * gauss[900:950].sum()


def test_concentrated_weight_lies_on_few_tokens_and_most_tiles_may_be_skipped():
    """For each row of a full tile at once, and never more than the factor is lost."""
    problem = Problem.uniform(1, 1, 4096, 64, q_dtype="fp32", kv_format="fp32")
    call = make_inputs(problem, 1, distribution="concentrated", workspace_bytes=8)
    request, scale = next(operands(call)), float(call.bmm1_scale)
    weights = torch.softmax(scale * (request.query @ request.keys.mT)[0], -1)
    assert (weights.topk(8).values.sum(-1) > 0.8).all()
    assert weights.mean(0).max() < 0.6, "nor on one alone"
    for factor, most in ((0.0, 1.0), (1e-3, 0.25), (1e-2, 0.25)):
        kept = skip_tiles(request, scale, factor, TileWalk())
        share = float(kept.visible.double().mean())
        assert share <= most and (share == 1.0) == (factor == 0.0)
        dropped = 1 - torch.exp(attend(kept, scale).lse - attend(request, scale).lse)
        assert float(dropped.max()) <= factor


def test_unknown_names_are_refused():
    with pytest.raises(InvalidInput, match=r"features.*sink'"):
        make_inputs(RAGGED, features=["sink"])
    with pytest.raises(InvalidInput, match="distribution"):
        make_inputs(RAGGED, distribution="uniform")


def test_a_hundred_thousand_tokens_take_seconds():
    problem = Problem.uniform(16, 1, 6400, 16)
    begin = time.perf_counter()
    call = make_inputs(problem, workspace_bytes=8)
    assert time.perf_counter() - begin < 15
    assert call.kv_cache.numel() == (1600 + FOREIGN_PAGES) * 64 * 576
