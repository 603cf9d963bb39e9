"""The published rules, held to their published numbers and to plain versions of themselves."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mla_lab.core.errors import InvalidInput
from mla_lab.core.problem import Problem
from mla_lab.plan import make_plan, plan_without
from mla_lab.plan.greedy import contiguous_cuts, greedy_payload
from mla_lab.plan.policies import (
    cutlass_splits,
    fa3_splits,
    shrink,
    simplified_splits,
    uniform_splits,
    xqa_splits,
)
from mla_lab.plan.without_plan import INVARIANT

from .plan_oracles import flashmla_pieces


@pytest.mark.parametrize(
    ("beside", "splits"), [([], 43), ([8192] * 3, 15), ([4096] * 63, 2), ([8192] * 63, 1)]
)
def test_greedy_cuts_one_request_by_its_neighbours(beside, splits):
    lens = (8192, *beside)
    problem = Problem((1,) * len(lens), lens, heads=128)
    # 128 heads are two row tiles of 64: 66 parts of 132 SMs
    assert make_plan(problem, policy="greedy").splits()[0] == splits
    assert make_plan(problem, policy="greedy", parts=66, overhead=5).splits()[0] == splits


@pytest.mark.parametrize(("batch", "splits"), [(1, 109), (2, 57), (8, 15), (64, 2), (110, 1)])
def test_fa3(batch, splits):
    assert fa3_splits(batch, 128, 132) == splits
    problem = Problem.uniform(batch, 1, 8192, heads=64)
    assert set(make_plan(problem, policy="fa3").splits()) == {splits}


def test_fa3_keeps_short_and_full_batches_whole():
    assert fa3_splits(1, 4, 132) == 1
    assert fa3_splits(1, 5, 132) == 5
    assert fa3_splits(106, 128, 132) == 1
    assert fa3_splits(105, 128, 132) > 1


@pytest.mark.parametrize(("batch", "splits"), [(1, 132), (2, 64), (4, 32), (8, 16)])
def test_xqa(batch, splits):
    assert xqa_splits(batch, 4096, 132) == splits
    problem = Problem.uniform(batch, 1, 132 * 2 * 64, heads=16)
    assert set(make_plan(problem, policy="xqa").splits()) == {splits}


def test_xqa_leaves_two_tiles_a_split():
    assert xqa_splits(1, 9, 132) == 5
    assert xqa_splits(200, 9, 132) == 1


@pytest.mark.parametrize(
    ("batch", "blocks", "splits"),
    [(1, 128, 128), (1, 1000, 125), (3, 128, 43), (40, 128, 3), (200, 128, 1)],
)
def test_cutlass(batch, blocks, splits):
    # 1000 blocks over 132 SMs: 8 blocks a split, which 125 splits hold already
    assert cutlass_splits(batch, blocks, 132) == splits


@pytest.mark.parametrize(
    ("batch", "q_tiles", "blocks", "splits"),
    [(1, 1, 128, 32), (1, 1, 40, 32), (3, 1, 40, 20), (4, 1, 128, 16), (4, 2, 128, 8)],
)
def test_uniform(batch, q_tiles, blocks, splits):
    # the source shrinks first and has 32 at most afterwards: 40 blocks, 66 SMs a request, 40, 32
    assert uniform_splits(batch, q_tiles, blocks, 132) == splits


@pytest.mark.parametrize(
    ("batch", "q_tiles", "splits"),
    [(1, 1, 32), (3, 1, 22), (4, 2, 8), (100, 1, 1)],
)
def test_simplified_does_not_see_lengths(batch, q_tiles, splits):
    assert simplified_splits(batch, q_tiles, 132) == splits
    problem = Problem((q_tiles,) * batch, (64 * 40,) * batch, heads=64)
    plan = make_plan(problem, policy="simplified", num_workers=132)
    assert set(plan.splits()) == {splits}
    # 40 blocks in the fewest pieces of two blocks are 20; of the length it takes no account
    assert uniform_splits(3, 1, 40, 132) == 20 < simplified_splits(3, 1, 132)


@given(st.integers(1, 4000), st.integers(1, 300))
def test_shrunk_counts_leave_no_split_empty(blocks, splits):
    count = shrink(blocks, splits)
    size = -(-blocks // splits)
    assert count <= splits
    assert (count - 1) * size < blocks <= count * size


@given(st.lists(st.integers(1, 60), min_size=1, max_size=12), st.integers(1, 20), st.integers(0, 9))
def test_greedy_walks_as_flashmla_does(blocks, parts, overhead):
    sizes = np.array(blocks)
    cuts = contiguous_cuts(sizes, parts, overhead, greedy_payload(sizes, parts, overhead))
    assert cuts is not None
    assert cuts.part is not None
    pieces = zip(cuts.part, cuts.request, cuts.begin, cuts.end, strict=True)
    assert [tuple(map(int, p)) for p in pieces] == flashmla_pieces(blocks, parts, overhead)


def test_greedy_refuses_a_payload_that_does_not_fit():
    problem = Problem.uniform(4, 1, 8192, heads=128)
    with pytest.raises(InvalidInput, match="payload: got 6; supported: enough for 66 parts"):
        make_plan(problem, policy="greedy", payload=6)
    assert make_plan(problem, policy="greedy", payload=133).splits().max() == 1


def test_fixed_counts_differ_by_at_most_one_block():
    problem = Problem((1, 1, 1), (64 * 21, 64 * 3, 0), heads=64)
    plan = make_plan(problem, policy="fixed", num_splits=8)
    assert plan.splits().tolist() == [8, 3, 1]
    sizes = {t.block_end - t.block_begin for t in plan if t.request == 0}
    assert sizes == {2, 3}


def test_fixed_size_pieces():
    problem = Problem((1, 1, 1, 1), (1, 1024, 1025, 64 * 16 * 40), heads=64)
    plan = make_plan(problem, policy="fixed_size", split_blocks=16, max_splits=32)
    assert plan.splits().tolist() == [1, 1, 2, 32]
    longest = [(t.block_begin, t.block_end) for t in plan if t.request == 3]
    assert sorted(longest) == [(i * 20, i * 20 + 20) for i in range(32)]


@pytest.mark.parametrize(
    ("policy", "knobs", "message"),
    [
        ("fixed", {"num_splits": 0}, "num_splits: got 0; supported: 1 or more"),
        ("fixed_size", {"split_blocks": 0}, "split_blocks, max_splits: got"),
        ("greedy", {"parts": 0}, "parts, overhead: got"),
        ("none", {"parts": 3}, r"knobs of policy 'none': got \['parts'\]; supported: \[\]"),
        ("best", {}, "policy: got 'best'; supported: "),
        (["fixed"], {}, r"policy: got \['fixed'\]; supported: "),
        ("fixed", {"num_splits": "3"}, "num_splits: got str; supported: an int"),
        ("fixed", {"num_splits": 2.5}, "num_splits: got float; supported: an int"),
        ("fixed", {"num_splits": True}, "num_splits: got bool; supported: an int"),
        ("fixed", {"num_splits": None}, "num_splits: got NoneType; supported: an int"),
        ("fixed", {"num_splits": 1 << 70}, f"num_splits: got {1 << 70}; supported: up to"),
        ("fixed_size", {"half_blocks": 1.5}, "half_blocks: got float; supported: an int"),
        ("greedy", {"parts": 2.5}, "parts: got float; supported: an int"),
        ("greedy", {"payload": 1 << 70}, f"payload: got {1 << 70}; supported: up to"),
    ],
)
def test_wrong_knobs(policy, knobs, message):
    with pytest.raises(InvalidInput, match=message):
        make_plan(Problem.uniform(1, 1, 100, heads=16), policy=policy, **knobs)


@pytest.mark.parametrize(("heads", "rows", "pieces"), [(16, 16, 2), (64, 64, 2), (128, 64, 2)])
def test_a_batch_invariant_call_without_a_plan(heads, rows, pieces):
    problem = Problem((1,) * 20, (64 * 61,) * 20, heads=heads)
    plan = plan_without(problem, INVARIANT, tile_rows=rows)
    assert plan.policy == INVARIANT and set(plan.splits()) == {pieces}
    assert {t.block_end - t.block_begin for t in plan} <= {-(-61 // pieces), 61 // pieces}
    with pytest.raises(
        InvalidInput, match=r"rule: got 'none'; supported: .'plain call', 'batch invariant'"
    ):
        plan_without(problem, "none")
