"""batch_invariant: a request's bits are its own; and calls in which the default's are not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_lab.api.decode import decode
from mla_lab.core.problem import Problem
from mla_lab.reference.inputs import FEATURES, DecodeInputs, make_inputs

FORMATS = [("fp32", "fp32"), ("bf16", "bf16"), ("bf16", "fp8_656"), ("e4m3", "e4m3")]


def call(inputs: DecodeInputs, batch_invariant: bool = True) -> list[tuple[bytes, bytes]]:
    """The bits of out and lse of each request."""
    arguments = inputs.contract_args() | {"return_lse": True, "workspace_buffer": None}
    out, lse = decode(**arguments, batch_invariant=batch_invariant)
    heads, latent = out.shape[-2:]
    outs = out.reshape(-1, heads, latent).split(inputs.problem.q_lens)
    lses = lse.reshape(-1, heads).split(inputs.problem.q_lens)
    return [(bits(o), bits(s)) for o, s in zip(outs, lses, strict=True)]


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def chosen(inputs: DecodeInputs, order: list[int]) -> DecodeInputs:
    """The call with the given requests, in that order, over the same cache."""
    problem = inputs.problem
    starts = torch.tensor([0, *problem.q_lens]).cumsum(0).tolist()
    q_lens = [problem.q_lens[b] for b in order]
    ragged = inputs.cum_seq_lens_q is not None

    def tokens(value: torch.Tensor) -> torch.Tensor:
        if not ragged:
            return value[order]
        return torch.cat([value[starts[b] : starts[b + 1]] for b in order])

    sums = torch.tensor([0, *q_lens]).cumsum(0).int()
    sparse = problem.top_k > 0
    return replace(
        inputs,
        problem=replace(
            problem, q_lens=tuple(q_lens), kv_lens=tuple(problem.kv_lens[b] for b in order)
        ),
        query=tokens(inputs.query),
        block_tables=tokens(inputs.block_tables) if sparse else inputs.block_tables[order],
        seq_lens=inputs.seq_lens[order],
        cum_seq_lens_q=sums if ragged else None,
        mask=None if inputs.mask is None else tokens(inputs.mask),
    )


def moved(inputs: DecodeInputs, seed: int) -> DecodeInputs:
    """The same tokens in other pages of a larger pool whose pages lie further apart."""
    cache, table = inputs.kv_cache, inputs.block_tables
    pages, size, width = cache.shape
    new_page = torch.randperm(2 * pages, generator=torch.Generator().manual_seed(seed))[:pages]
    pool = torch.zeros(2 * pages, size + 3, width * cache.itemsize, dtype=torch.uint8)
    pool = pool.view(cache.dtype)[:, :size]
    pool.view(torch.uint8)[new_page] = cache.view(torch.uint8)
    if inputs.problem.top_k:
        slot = table.long().clamp_min(0)
        there = new_page[slot // size] * size + slot % size
        new_table = torch.where(table < 0, table, there.int())
    else:
        used = (table >= 0) & (table < pages)
        new_table = torch.where(used, new_page[table.clamp(0, pages - 1).long()].int(), table)
    return replace(inputs, kv_cache=pool, block_tables=new_table)


lengths = st.lists(
    st.tuples(st.integers(0, 3), st.one_of(st.integers(0, 70), st.integers(900, 2300))),
    min_size=2,
    max_size=5,
).filter(lambda pairs: sum(q > 0 for q, _ in pairs) > 1)
#: of layouts, and of sparse calls alone
OTHERS = ("cache_4d", "page_gap", "top_k_lens")
features = st.sets(st.sampled_from([f for f in FEATURES if f not in OTHERS]))


@settings(max_examples=40)
@given(lengths, st.sampled_from(FORMATS), st.sampled_from([2, 16, 40]), features, st.randoms())
def test_alone_in_any_batch_in_any_order_in_any_pages(pairs, formats, heads, used, random):
    if {"chain_mask", "tree_mask"} <= used:
        used -= {"tree_mask"}
    q_lens, kv_lens = zip(*pairs, strict=True)
    problem = Problem(q_lens, kv_lens, heads, q_dtype=formats[0], kv_format=formats[1])
    whole = make_inputs(problem, heads, sorted(used | {"ragged"}), workspace_bytes=0)
    expected = call(whole)
    order = list(range(len(pairs)))
    random.shuffle(order)
    for some in (order, order[: len(order) // 2 + 1]):
        if any(q_lens[b] for b in some):
            assert call(chosen(whole, some)) == [expected[b] for b in some]
    for b in order:
        if q_lens[b]:
            assert call(chosen(whole, [b])) == [expected[b]]
    assert call(moved(whole, len(pairs))) == expected


@pytest.mark.parametrize("formats", FORMATS)
def test_sparse_calls(formats):
    problem = Problem((2,) * 4, (300, 9, 0, 1500), 16, top_k=1200, q_dtype=formats[0],
                      kv_format=formats[1])  # fmt: skip
    whole = make_inputs(problem, 1, ["sinks"], workspace_bytes=0)
    expected = call(whole)
    assert call(chosen(whole, [3, 1])) == [expected[3], expected[1]]
    assert call(chosen(whole, [2])) == [expected[2]]
    assert call(moved(whole, 5)) == expected


@pytest.mark.parametrize("threads", [1, 2])
def test_dense_queries_and_threads(threads):
    """A dense batch, and the same requests one at a time, with torch's threads at work."""
    problem = Problem.uniform(6, 2, 1500, heads=32, q_dtype="fp32", kv_format="fp32")
    whole = make_inputs(problem, 3, workspace_bytes=0)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        expected = call(whole)
        for b in (0, 5):
            assert call(chosen(whole, [b])) == [expected[b]]
    finally:
        torch.set_num_threads(before)


def test_bounds_and_hints_do_not_matter():
    problem = Problem((2, 1), (1500, 70), 16)
    inputs = make_inputs(problem, 3, ["max_q_len"], workspace_bytes=0)
    expected = call(inputs)
    assert call(replace(inputs, max_q_len=77)) == expected
    assert call(replace(inputs, max_seq_len=100_000)) == expected


class TestTheDefaultDiffers:
    """The negative control: a cost-driven plan looks at the whole batch."""

    PROBLEM = Problem.uniform(16, 1, 4096, heads=16, q_dtype="fp32", kv_format="fp32")

    def test_in_company_and_alone(self):
        whole = make_inputs(self.PROBLEM, 1, workspace_bytes=0)
        together, alone = (
            call(whole, batch_invariant=False)[0],
            call(chosen(whole, [0]), batch_invariant=False)[0],
        )
        assert together != alone
        assert call(whole)[0] == call(chosen(whole, [0]))[0]

    def test_equal_calls_still_give_equal_bits(self):
        whole = make_inputs(self.PROBLEM, 1, workspace_bytes=0)
        assert call(whole, batch_invariant=False) == call(whole, batch_invariant=False)
