from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_lab.api.context_parallel import shard
from mla_lab.core.errors import InvalidInput, Unsupported
from mla_lab.core.masks import chain, pack
from mla_lab.core.problem import Problem
from mla_lab.reference.inputs import DISTRIBUTIONS, FEATURES, DecodeInputs, make_inputs
from mla_lab.reference.mla import TileWalk, attend, decode_reference, merge_partials, skip_tiles
from mla_lab.reference.operands import Operands, operands
from mla_lab.reference.tolerance import Error, error, lse_error, rel_error, sdpa_error

from .brute_force import brute_force

#: dims that let Python loops keep up; nothing in the oracle depends on 512 and 64
SMALL = {"latent_dim": 6, "rope_dim": 3, "page_size": 4, "q_dtype": "fp32", "kv_format": "fp32"}


def agree(call: DecodeInputs) -> None:
    """The oracle and the loops give the same numbers."""
    out, lse = brute_force(call)
    result = decode_reference(call)
    assert result.out.shape == (*call.query.shape[:-1], call.kv_lora_rank)
    assert result.out.isfinite().all()
    assert rel_error(result.out.reshape(out.shape), out) < 1e-12
    assert lse_error(result.lse, lse) < 1e-12


def small(q_lens, kv_lens, heads=2, **fields) -> Problem:
    return Problem(tuple(q_lens), tuple(kv_lens), heads, **{**SMALL, **fields})


lengths = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 11)), min_size=1, max_size=4).filter(
    lambda pairs: any(q for q, _ in pairs)
)
DENSE = tuple(name for name in FEATURES if name != "top_k_lens")
dense_features = st.sets(st.sampled_from(DENSE)).filter(
    lambda f: not {"chain_mask", "tree_mask"} <= f
)


@settings(max_examples=200)
@given(lengths, dense_features, st.sampled_from(DISTRIBUTIONS), st.integers(0, 99))
def test_dense_and_ragged_calls(pairs, features, distribution, seed):
    problem = small(*zip(*pairs, strict=True))
    agree(make_inputs(problem, seed, features, distribution=distribution, workspace_bytes=0))


@given(lengths, st.integers(1, 7), st.booleans(), st.booleans(), st.integers(0, 99))
def test_sparse_calls(pairs, top_k, with_sinks, cut, seed):
    problem = small(*zip(*pairs, strict=True), top_k=top_k)
    features = ["sinks", "scales", "cache_4d"] if with_sinks else []
    features += ["top_k_lens"] if cut else []
    agree(make_inputs(problem, seed, features, workspace_bytes=0))


@pytest.mark.parametrize("kv_format", ["bf16", "fp16", "e4m3", "fp8_656"])
def test_formats(kv_format):
    q_dtype = kv_format if kv_format in ("fp16", "e4m3") else "bf16"
    problem = Problem((2, 1), (7, 3), 1, q_dtype=q_dtype, kv_format=kv_format, page_size=4)
    agree(make_inputs(problem, 3, ["page_gap", "separate_tables"], workspace_bytes=0))


def test_the_small_latent():
    problem = Problem((2, 1), (7, 3), 1, latent_dim=256, rope_dim=64, page_size=4)
    agree(make_inputs(problem, 3, ["sinks"], workspace_bytes=0))


@given(lengths, st.integers(1, 4), st.booleans(), st.booleans(), st.integers(0, 99))
def test_ranks_alone_and_merged(pairs, world, tree, with_sinks, seed):
    features = [*["tree_mask"] * tree, *["sinks"] * with_sinks]
    whole = make_inputs(small(*zip(*pairs, strict=True)), seed, features, workspace_bytes=0)
    ranks = shard(whole, world)
    for rank in ranks:
        agree(rank)
    parts = [decode_reference(rank) for rank in ranks]
    outs, lses = (torch.stack(list(p)) for p in zip(*parts, strict=True))
    merged, expected = merge_partials(outs, lses, whole.sinks), decode_reference(whole)
    assert rel_error(merged.out, expected.out) < 1e-13
    assert lse_error(merged.lse, expected.lse) < 1e-13


def test_one_key_by_hand():
    """One key: its value whatever the score; a sink equal to the score halves it."""
    call = make_inputs(small([1], [1]), 5, workspace_bytes=0)
    result = decode_reference(call)
    value = call.kv_cache[call.block_tables[0, 0], 0].double()
    score = call.bmm1_scale * (call.query[0, 0].double() @ value)
    assert torch.allclose(result.out[0, 0, 0], value[:6])
    assert torch.allclose(result.lse[0], score)
    halved = decode_reference(replace(call, sinks=score.float()))
    assert torch.allclose(halved.out[0, 0], result.out[0, 0] / 2, rtol=1e-6)
    assert torch.equal(halved.lse, result.lse)


def test_sinks_may_come_in_a_list_and_be_infinite():
    call = make_inputs(small([2], [1]), 5, ["sinks"], workspace_bytes=0)
    assert isinstance(call.sinks, torch.Tensor)
    listed = replace(call, sinks=[call.sinks])
    assert torch.equal(decode_reference(listed).out, decode_reference(call).out)
    none = replace(call, sinks=torch.full((2,), -math.inf))
    assert torch.equal(decode_reference(none).out, decode_reference(replace(call, sinks=None)).out)


def test_lse_bases():
    call = make_inputs(small([1, 2], [0, 5]), 5, workspace_bytes=0)
    natural = decode_reference(call).lse
    for name in (None, "basee"):
        assert torch.equal(decode_reference(replace(call, return_lse_base=name)).lse, natural)
    base2 = decode_reference(replace(call, return_lse_base="base2")).lse
    assert torch.allclose(torch.exp2(base2), torch.exp(natural))
    assert base2[0].isneginf().all()
    with pytest.raises(InvalidInput, match="return_lse_base"):
        decode_reference(replace(call, return_lse_base="10"))


def test_rows_without_a_key():
    call = make_inputs(small([3, 1], [2, 0]), 5, ["sinks", "scales"], workspace_bytes=0)
    result = decode_reference(call)
    empty = [0, 3]  # row 0 of three over two keys, and the request without keys
    assert result.lse.isneginf().all(-1).nonzero().flatten().tolist() == empty
    assert (result.out[empty] == 0).all()


def test_a_chain_mask_is_the_causal_rule():
    call = make_inputs(small([3, 3], [2, 9]), 5, workspace_bytes=0)
    masked = replace(call, mask=pack(torch.stack([chain(3)] * 2)))
    assert torch.equal(decode_reference(call).out, decode_reference(masked).out)


def test_nothing_unread_matters():
    """Other rubbish in every unread slot and table entry, the same bits out."""
    call = make_inputs(
        Problem((2, 1), (70, 3), 4), 5, ["separate_tables", "page_gap"], workspace_bytes=0
    )
    cache = call.kv_cache.clone()
    cache[cache.isnan()] = 1e30
    table = call.block_tables.clone()
    table[(table < 0) | (table >= len(cache))] = 123456
    other = replace(call, kv_cache=cache, block_tables=table)
    assert torch.equal(decode_reference(call).out, decode_reference(other).out)
    assert torch.equal(decode_reference(call).lse, decode_reference(other).lse)


def test_a_read_slot_matters():
    call = make_inputs(small([1], [5]), 5, workspace_bytes=0)
    call.kv_cache[call.block_tables[0, 1], 0] = math.nan  # position 4, the last one
    assert decode_reference(call).out.isnan().any()


def test_float32_is_near():
    call = make_inputs(Problem.uniform(2, 2, 300, 16), 1, ["sinks"], workspace_bytes=0)
    exact, quick = decode_reference(call), decode_reference(call, dtype=torch.float32)
    assert quick.out.dtype is torch.float32
    assert rel_error(quick.out, exact.out) < 2e-6
    assert lse_error(quick.lse, exact.lse) < 2e-6


@given(st.permutations(range(4)), st.integers(0, 99))
def test_merge_does_not_mind_order_or_empty_partials(order, seed):
    call = make_inputs(small([2], [13]), seed, workspace_bytes=0)
    request = next(operands(call))
    whole = attend(request, 0.5)
    cuts = [0, 3, 3, 9, 13]
    parts = []
    for begin, end in pairwise(cuts):
        part = replace(
            request,
            keys=request.keys[:, begin:end],
            values=request.values[:, begin:end],
            visible=request.visible[..., begin:end],
        )
        out, lse = attend(part, 0.5)
        # what an unwritten partial would hold
        parts.append((torch.where(lse.isneginf().unsqueeze(-1), math.nan, out), lse))
    outs, lses = (torch.stack([parts[i][k] for i in order]) for k in (0, 1))
    merged = merge_partials(outs, lses)
    assert rel_error(merged.out, whole.out) < 1e-13
    assert lse_error(merged.lse, whole.lse) < 1e-13


def test_merge_of_nothing_is_nothing():
    merged = merge_partials(
        torch.full((3, 1, 2, 6), math.nan), torch.full((3, 1, 2), -math.inf), torch.zeros(2)
    )
    assert (merged.out == 0).all()
    assert merged.lse.isneginf().all()


def skipped_tiles(call: DecodeInputs, factor: float, walk: TileWalk, b: int) -> set:
    """(row tile, KV tile) pairs that the definition skips, by loops over single scores."""
    request = list(operands(call))[b]
    q_len, heads, _ = request.query.shape
    kv_len = request.keys.shape[1]
    scores = float(call.bmm1_scale) * torch.einsum("thd,kd->thk", request.query, request.keys[0])
    rows = scores.reshape(-1, kv_len).tolist()
    seen = request.visible[:, 0].tolist()
    skipped = set()
    for first in range(0, q_len * heads, walk.tile_rows):
        tile_rows = range(first, min(first + walk.tile_rows, q_len * heads))
        running = dict.fromkeys(tile_rows, -math.inf)
        for tile in range(-(-kv_len // walk.tile_kv)):
            columns = range(tile * walk.tile_kv, min((tile + 1) * walk.tile_kv, kv_len))
            tops = {
                r: max((rows[r][c] for c in columns if seen[r // heads][c]), default=-math.inf)
                for r in tile_rows
            }
            if walk.split_begins is not None and tile in walk.split_begins[b]:
                running = dict.fromkeys(tile_rows, -math.inf)
            elif tile and all(
                top == -math.inf or top - running[r] < math.log(factor / kv_len)
                for r, top in tops.items()
            ):
                skipped.add((first // walk.tile_rows, tile))
                continue
            running = {r: max(running[r], tops[r]) for r in tile_rows}
    return skipped


@settings(max_examples=300)
@given(
    st.integers(1, 3),
    st.integers(1, 40),
    st.floats(0.01, 100),
    st.sampled_from([None, [0, 2], [0, 1, 3]]),
    st.integers(0, 99),
)
def test_skip_softmax_skips_what_its_definition_says(q_len, kv_len, factor, begins, seed):
    call = make_inputs(
        small([q_len], [kv_len], heads=3), seed, distribution="heavy_tailed", workspace_bytes=0
    )
    walk = TileWalk(4, 5, None if begins is None else [begins])
    request = next(operands(call))
    kept = skip_tiles(request, float(call.bmm1_scale), factor, walk).visible
    skipped = skipped_tiles(call, factor, walk, 0)
    for row in range(q_len * 3):
        for c in range(kv_len):
            expected = request.visible[row // 3, 0, c] and (row // 4, c // 5) not in skipped
            assert kept[row // 3, row % 3, c] == expected

    full = decode_reference(call)
    part = decode_reference(replace(call, skip_softmax_threshold_scale_factor=factor), walk=walk)
    seen = full.lse.isfinite()
    dropped = 1 - torch.exp(part.lse - full.lse)[seen]
    assert (dropped <= factor + 1e-12).all()


def test_skip_softmax_keeps_a_tile_at_its_threshold():
    """Equal keys: each tile's weight is 1, which is not below factor / kv_len = 1."""
    request = Operands(
        torch.ones(1, 1, 4).double(),
        torch.ones(1, 16, 4).double(),
        torch.ones(1, 16, 4).double(),
        torch.ones(1, 1, 16, dtype=torch.bool),
    )
    walk = TileWalk(1, 4)
    assert skip_tiles(request, 1.0, 16.0, walk).visible.all()
    kept = skip_tiles(request, 1.0, 16.1, walk).visible
    assert kept[..., :4].all() and not kept[..., 4:].any()


def test_skip_softmax_skips_something_and_factor_0_nothing():
    call = make_inputs(small([2, 1], [400, 90]), 3, distribution="heavy_tailed", workspace_bytes=0)
    walk = TileWalk(4, 8)
    full = decode_reference(call)
    zero = decode_reference(replace(call, skip_softmax_threshold_scale_factor=0.0), walk=walk)
    some = decode_reference(replace(call, skip_softmax_threshold_scale_factor=1.0), walk=walk)
    assert torch.equal(zero.out, full.out)
    assert torch.equal(zero.lse, full.lse)
    assert (some.lse < full.lse).any()


def test_calls_without_a_meaning_are_refused():
    dense = make_inputs(small([2], [5]), workspace_bytes=0)
    sparse = make_inputs(small([2], [5], top_k=3), workspace_bytes=0)
    with pytest.raises(Unsupported, match="skip_softmax"):
        decode_reference(replace(sparse, skip_softmax_threshold_scale_factor=1.0))
    with pytest.raises(Unsupported, match="mask"):
        decode_reference(replace(sparse, mask=pack(chain(2)[None])))
    with pytest.raises(InvalidInput, match="block_tables"):
        decode_reference(replace(dense, uses_shared_paged_kv_idx=False))
    with pytest.raises(InvalidInput, match="query"):
        decode_reference(replace(dense, kv_lora_rank=512))
    with pytest.raises(InvalidInput, match="causal_seqlens_kv_global"):
        decode_reference(replace(dense, enable_dcp=True))
    with pytest.raises(Unsupported, match="sparse"):
        shard(sparse, 2)
    with pytest.raises(InvalidInput, match="world"):
        shard(dense, 0)


# --- errors of a result ---------------------------------------------------------------------


def test_error_of_known_differences():
    ref = torch.tensor([3.0, 4.0, 0.0]).double()
    assert error(ref, ref) == Error(0.0, 0.0)
    assert error(ref + torch.tensor([0.0, 0.0, 0.5]), ref) == Error(0.1, 0.5)
    assert rel_error(torch.tensor([3.0, math.nan, 0.0]), ref) == math.inf
    assert error(torch.zeros(0, 4), torch.zeros(0, 4)) == Error(0.0, 0.0)
    with pytest.raises(InvalidInput, match="shape"):
        error(ref[None], ref)


def test_error_of_lse_takes_minus_infinity_literally():
    ref = torch.tensor([-math.inf, 100.0, 0.5]).double()
    assert lse_error(ref.float(), ref) == 0.0
    assert lse_error(ref + torch.tensor([0.0, 1.0, 0.0]), ref) == pytest.approx(0.01)
    assert lse_error(torch.tensor([-1e30, 100.0, 0.5]), ref) == math.inf
    assert lse_error(ref + torch.tensor([0.0, 0.0, 0.25]), ref) == pytest.approx(0.25)
    assert lse_error(torch.tensor([3.0]), torch.tensor([2.0])) == pytest.approx(0.5)
    assert lse_error(torch.tensor([-math.inf, -math.inf, 0.5]), ref) == math.inf


def test_within_looks_at_both_figures():
    baseline = Error(0.01, 0.1)
    assert Error(0.02, 0.2).within(baseline)
    assert not Error(0.021, 0.1).within(baseline)
    assert not Error(0.01, 0.21).within(baseline)
    assert not Error(math.inf, math.inf).within(baseline)
    # torch's own result may overflow: that allows any finite error, and no other
    assert not Error(math.inf, math.inf).within(Error(math.inf, math.inf))
    assert Error(0.02, 0.2).within(Error(math.inf, math.inf))


@pytest.mark.parametrize(
    ("q_dtype", "kv_format", "low", "high"),
    [
        ("fp32", "fp32", 1e-9, 1e-6),
        ("bf16", "bf16", 5e-4, 4e-3),
        ("fp16", "fp16", 5e-5, 5e-4),
        ("e4m3", "e4m3", 5e-4, 4e-3),
        ("bf16", "fp8_656", 5e-4, 4e-3),
    ],
)
def test_sdpa_is_as_wrong_as_its_precision(q_dtype, kv_format, low, high):
    problem = Problem((1, 3, 2), (0, 2, 90), 4, q_dtype=q_dtype, kv_format=kv_format)
    call = make_inputs(problem, 2, ["sinks", "scales", "tree_mask"], workspace_bytes=0)
    assert low < sdpa_error(call).relative < high


def test_sdpa_rounds_after_sinks_too():
    """One key: attention itself is exact, so all the error is the last rounding."""
    call = make_inputs(Problem.uniform(2, 1, 1, 4), 2, ["sinks"], workspace_bytes=0)
    assert sdpa_error(replace(call, sinks=None)).relative == 0.0
    assert 5e-4 < sdpa_error(call).relative < 4e-3
    base2 = replace(call, return_lse_base="base2", skip_softmax_threshold_scale_factor=1.0)
    assert sdpa_error(base2) == sdpa_error(call)


def test_sdpa_knows_sparse_calls():
    call = make_inputs(Problem.uniform(2, 2, 90, 4, top_k=20), 2, workspace_bytes=0)
    assert 5e-4 < sdpa_error(call).relative < 4e-3
