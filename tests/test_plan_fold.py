"""Plans of more workers than a card runs at once: neighbours become one worker of the launch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from mla_lab.backends.cute.device_plan import folded, on_device
from mla_lab.core.errors import InvalidInput
from mla_lab.core.problem import Problem
from mla_lab.plan import POLICIES, make_plan

from .plan_oracles import problems


@given(problems(), st.sampled_from(sorted(POLICIES)), st.integers(1, 40), st.integers(1, 40))
def test_each_tile_stays_once_and_in_order(
    problem: Problem, policy: str, workers: int, most: int
) -> None:
    try:
        plan = make_plan(problem, policy=policy, num_workers=workers)
    except InvalidInput:  # contiguous splits that do not fit the workers
        assume(False)
    begin = folded(plan, most)
    assert len(begin) - 1 == min(plan.num_workers, most)
    assert (begin[0], begin[-1]) == (0, plan.num_tiles)
    assert (np.diff(begin) >= 0).all()
    assert np.isin(begin, plan.worker_begin).all(), "a worker's tiles are torn apart"


@pytest.mark.parametrize(
    ("most", "begins"), [(6, range(6)), (5, range(6)), (4, [0, 1, 2, 3, 5]), (2, [0, 2, 5])]
)
def test_neighbours_are_one_worker(most: int, begins: list[int]) -> None:
    plan = make_plan(Problem.uniform(5, 1, 64, 16), num_workers=5)
    assert plan.worker_begin.tolist() == list(range(6))
    assert folded(plan, most).tolist() == list(begins)


def test_words_are_copied_once_for_each_number_of_workers() -> None:
    plan, device = make_plan(Problem.uniform(5, 1, 64, 16), num_workers=5), torch.device("cpu")
    first = on_device(plan, device, 4)
    assert on_device(plan, device, 4) is first
    assert on_device(plan, device, 5) is not first
    assert first.worker_begin.tolist() == [0, 1, 2, 3, 5]
    assert torch.equal(first.tiles, torch.tensor(plan.tiles))
