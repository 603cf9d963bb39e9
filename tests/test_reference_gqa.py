from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_lab.call.decode_args import native_args
from mla_lab.core.errors import InvalidInput
from mla_lab.reference.gqa import decode_gqa_reference
from mla_lab.reference.inputs_gqa import GQA_FEATURES, GqaInputs, GqaShape, make_gqa_inputs
from mla_lab.reference.mla import TileWalk, decode_reference
from mla_lab.reference.tolerance import lse_error, rel_error


def small(q_lens, kv_lens, heads, kv_heads, layout="HND", window_left=-1) -> GqaShape:
    """Dims that let Python loops keep up."""
    return GqaShape(
        q_lens,
        kv_lens,
        heads,
        kv_heads,
        head_dim=4,
        q_dtype="fp32",
        kv_format="fp32",
        page_size=4,
        kv_layout=layout,
        window_left=window_left,
    )


def brute_force(call: GqaInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """out [num_tokens, heads, head_dim] and natural lse, by loops over rows and keys."""
    shape = call.shape
    sums = [0]
    for q_len in shape.q_lens:
        sums.append(sums[-1] + q_len)
    outs, lses = [], []
    for b, (begin, end) in enumerate(pairwise(sums)):
        for token in range(begin, end):
            seen = [
                p for p in range(shape.kv_lens[b]) if sees(call, b, token - begin, end - begin, p)
            ]
            for head in range(shape.heads):
                out, lse = one_row(call, b, token, head, seen)
                outs.append(out)
                lses.append(lse)
    out = torch.tensor(outs, dtype=torch.float64).reshape(call.query.shape)
    return out, torch.tensor(lses, dtype=torch.float64).reshape(call.query.shape[:2])


def sees(call: GqaInputs, b: int, row: int, q_len: int, position: int) -> bool:
    own = call.shape.kv_lens[b] - q_len + row
    if 0 <= call.window_left < own - position:
        return False
    column = position - (call.shape.kv_lens[b] - q_len)
    if call.mask is None or column < 0:
        return position <= own
    ragged_row = sum(call.shape.q_lens[:b]) + row
    words = call.mask.reshape(-1, call.mask.shape[-1])[ragged_row].tolist()
    return bool(words[column // 16] & 1 << column % 16)


def stored(call: GqaInputs, which: int, b: int, kv_head: int, position: int) -> list[float]:
    """A key (which 0) or value (which 1) vector."""
    pages = call.kv_cache[which] if isinstance(call.kv_cache, tuple) else call.kv_cache[:, which]
    table = call.block_tables[b] if call.uses_shared_paged_kv_idx else call.block_tables[b, which]
    page, offset = int(table[position // call.shape.page_size]), position % call.shape.page_size
    place = (page, kv_head, offset) if call.kv_layout == "HND" else (page, offset, kv_head)
    return pages[place].double().tolist()


def one_row(call: GqaInputs, b: int, token: int, head: int, seen: list[int]):
    kv_head = head * call.shape.kv_heads // call.shape.heads
    query = call.query[token, head].double().tolist()
    if not seen:
        return [0.0] * len(query), -math.inf
    scores = [
        float(call.bmm1_scale)
        * math.fsum(a * k for a, k in zip(query, stored(call, 0, b, kv_head, p), strict=True))
        for p in seen
    ]
    top = max(scores)
    weights = [math.exp(s - top) for s in scores]
    total = math.fsum(weights)
    sink = 0.0 if call.sinks is None else math.exp(float(call.sinks[head]) - top)
    values = [stored(call, 1, b, kv_head, p) for p in seen]
    out = [
        float(call.bmm2_scale)
        / (total + sink)
        * math.fsum(w * v[d] for w, v in zip(weights, values, strict=True))
        for d in range(len(query))
    ]
    return out, top + math.log(total)


def agree(call: GqaInputs) -> None:
    out, lse = brute_force(call)
    result = decode_gqa_reference(call)
    assert result.out.isfinite().all()
    assert rel_error(result.out, out) < 1e-12
    assert lse_error(result.lse, lse) < 1e-12


lengths = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 11)), min_size=1, max_size=3).filter(
    lambda pairs: any(q for q, _ in pairs)
)


@settings(max_examples=200)
@given(
    pairs=lengths,
    groups=st.sampled_from([(1, 1), (4, 1), (4, 2), (3, 3)]),
    features=st.sets(st.sampled_from(GQA_FEATURES)).filter(
        lambda f: not {"chain_mask", "tree_mask"} <= f
    ),
    layout=st.sampled_from(["HND", "NHD"]),
    window_left=st.integers(-1, 6),
    seed=st.integers(0, 99),
)
def test_gqa_calls(pairs, groups, features, layout, window_left, seed):
    q_lens, kv_lens = zip(*pairs, strict=True)
    shape = small(q_lens, kv_lens, groups[0], groups[1], layout=layout, window_left=window_left)
    agree(make_gqa_inputs(shape, seed, features, workspace_bytes=8))


@pytest.mark.parametrize("kv_format", ["bf16", "fp16", "e4m3"])
@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_formats(kv_format, layout):
    q_dtype = "fp16" if kv_format == "fp16" else "bf16"
    shape = GqaShape((2, 2), (9, 5), 4, 2, 64, q_dtype, kv_format, 4, kv_layout=layout)
    agree(make_gqa_inputs(shape, 1, ["one_tensor"], workspace_bytes=8))


def test_mqa_with_one_pool_is_mla_without_rope():
    """All heads on one KV head: the MLA oracle with no rope, keys and values in two pools."""
    call = make_gqa_inputs(GqaShape((2, 2), (70, 5), 8, 1, 64), 1, ["sinks"], workspace_bytes=8)
    keys, values = call.kv_cache
    pages = len(keys)
    mla = native_args(
        query=call.query.unflatten(0, (2, 2)),
        kv_cache=torch.cat([keys, values])[:, 0],
        block_tables=torch.stack([call.block_tables, call.block_tables + pages], 1),
        seq_lens=call.seq_lens,
        kv_lora_rank=64,
        qk_rope_head_dim=0,
        bmm1_scale=call.bmm1_scale,
        bmm2_scale=call.bmm2_scale,
        sinks=call.sinks,
        uses_shared_paged_kv_idx=False,
    )
    expected, result = decode_reference(mla), decode_gqa_reference(call)
    assert rel_error(result.out, expected.out.flatten(0, 1)) < 1e-14
    assert lse_error(result.lse, expected.lse) < 1e-14


def test_a_window_of_zero_sees_only_itself():
    call = make_gqa_inputs(small((3,), (9,), 2, 1, window_left=0), 1, ["lse"])
    result = decode_gqa_reference(call)
    own = [stored(call, 1, 0, 0, 6 + row) for row in range(3)]
    expected = torch.tensor(own).double().unsqueeze(1).expand(3, 2, 4) * call.bmm2_scale
    assert torch.allclose(result.out, expected)


def test_skip_softmax_drops_at_most_its_factor():
    shape = GqaShape((2,), (300,), 4, 2, 64, "fp32", "fp32")
    call = make_gqa_inputs(shape, 1, workspace_bytes=8)
    sharp = replace(call, bmm1_scale=2.0)
    full = decode_gqa_reference(sharp)
    for factor in (0.0, 0.5, 50.0):
        part = decode_gqa_reference(
            replace(sharp, skip_softmax_threshold_scale_factor=factor), walk=TileWalk(4, 8)
        )
        dropped = 1 - torch.exp(part.lse - full.lse)
        assert dropped.max() <= factor + 1e-12
        assert (dropped.max() > 0) == (factor > 0)


def test_equal_arguments_give_equal_bits_and_only_known_names():
    shape = small((1, 3), (5, 9), 4, 2)
    first, second = (make_gqa_inputs(shape, 3, ["tree_mask", "lse"]) for _ in range(2))
    arguments = first.contract_args()
    assert set(arguments) == {
        "query", "kv_cache", "workspace_buffer", "block_tables", "seq_lens", "max_seq_len",
        "bmm1_scale", "bmm2_scale", "kv_layout", "q_len_per_req", "mask", "max_q_len",
        "cum_seq_lens_q", "return_lse",
    }  # fmt: skip
    assert torch.equal(first.query, second.query)
    assert torch.equal(decode_gqa_reference(first).out, decode_gqa_reference(second).out)


def test_calls_without_a_meaning_are_refused():
    shape = small((2, 2), (5, 9), 4, 2)
    call = make_gqa_inputs(shape, workspace_bytes=8)
    with pytest.raises(InvalidInput, match="kv_layout"):
        decode_gqa_reference(replace(call, kv_layout="DNH"))
    with pytest.raises(InvalidInput, match="q_len_per_req 3"):
        decode_gqa_reference(replace(call, q_len_per_req=3))
    with pytest.raises(InvalidInput, match="heads"):
        decode_gqa_reference(replace(call, query=call.query[:, :3]))
    with pytest.raises(InvalidInput, match="kv_cache"):
        decode_gqa_reference(replace(call, kv_cache=call.kv_cache[0]))
    with pytest.raises(InvalidInput, match="features"):
        make_gqa_inputs(shape, features=["window"])
    with pytest.raises(InvalidInput, match="heads"):
        GqaShape((1,), (1,), 3, 2)
    with pytest.raises(InvalidInput, match="kv_lens"):
        GqaShape((1, 1), (1,), 2, 2)
    with pytest.raises(InvalidInput, match="kv_layout"):
        GqaShape((1,), (1,), 2, 2, kv_layout="D")
