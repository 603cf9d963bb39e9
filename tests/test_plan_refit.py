"""A plan is a schedule: with other key lengths than its own it gives right results."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_lab.api.decode import decode
from mla_lab.core.errors import InvalidInput
from mla_lab.core.problem import Problem
from mla_lab.plan import Plan, make_plan
from mla_lab.plan.refit import refit
from mla_lab.reference.inputs import make_inputs
from mla_lab.reference.mla import decode_reference

MADE = Problem((1, 2, 1), (300, 70, 0), 4)
LENS = st.tuples(*[st.integers(0, 500)] * 3)
PLANS = [
    make_plan(MADE, tile_rows=4, policy="fixed", num_splits=3, num_workers=5),
    make_plan(MADE, tile_rows=8, num_workers=3),
    make_plan(MADE, tile_rows=4, policy="none", schedule="grid"),
]


def run(problem: Problem, plan: Plan, **more: Any) -> tuple[Any, Any]:
    """Result and expected result of a call by the torch backend."""
    inputs = make_inputs(problem, 3, ("lse",))
    given = {**inputs.contract_args(), "backend": "torch", "plan": plan, **more}
    return decode(**given), decode_reference(inputs)


@settings(max_examples=20, deadline=None)
@given(LENS, st.sampled_from(PLANS))
def test_other_lengths_give_right_results(lens: tuple[int, int, int], plan: Plan) -> None:
    problem = replace(MADE, kv_lens=(lens[0], max(2, lens[1]) if lens[1] else 0, lens[2]))
    (out, lse), expected = run(problem, plan)
    torch.testing.assert_close(out.float(), expected.out.float(), atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse.double(), expected.lse.double(), atol=1e-4, rtol=1e-4)


@given(LENS, st.sampled_from(PLANS))
def test_the_last_split_takes_the_rest_and_those_beyond_are_empty(
    lens: tuple[int, int, int], plan: Plan
) -> None:
    fitted = refit(plan, replace(MADE, kv_lens=lens))
    assert fitted.worker_begin is plan.worker_begin
    for before, tile in zip(plan, fitted, strict=True):
        blocks = -(-lens[tile.request] // 64)
        assert (before.request, before.slot) == (tile.request, tile.slot)
        assert tile.block_begin == min(before.block_begin, blocks)
        last = tile.split_idx + 1 == tile.num_splits
        assert tile.block_end == (blocks if last else min(before.block_end, blocks))


def test_a_plan_for_these_lengths_stays_as_it_is() -> None:
    assert refit(PLANS[0], MADE) is PLANS[0]


@pytest.mark.parametrize(
    "problem",
    [Problem((1, 2), (300, 70), 4), replace(MADE, heads=8), replace(MADE, q_lens=(1, 1, 1))],
)
def test_another_batch_head_count_or_query_length_is_refused(problem: Problem) -> None:
    with pytest.raises(InvalidInput, match="plan"):
        run(problem, PLANS[0])
