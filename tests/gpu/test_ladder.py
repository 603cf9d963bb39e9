"""Every step of the ladder on a card, against the float64 oracle, under poisoned caches."""

from __future__ import annotations

import pytest
import torch

from mla_lab.backends.cuda.ladder import STEPS, Ladder
from mla_lab.core.problem import Problem
from mla_lab.reference.inputs import make_inputs
from mla_lab.reference.mla import Result, decode_reference
from mla_lab.reference.tolerance import ALLOWED_RATIO, lse_error, rel_error, sdpa_error

pytestmark = pytest.mark.gpu

LSE_TOLERANCE = 2e-5
PROBLEMS = {
    "one key": Problem((1,), (1,), 16),
    "one request": Problem.uniform(1, 1, 8192, 128),
    "odd heads": Problem((1, 1, 1), (63, 64, 65), 23),
    "causal": Problem((4, 4), (1000, 3), 40),
    "ragged": Problem((3, 0, 1, 7), (65, 10, 0, 129), 33),
    "small pages": Problem.uniform(5, 2, 777, 16, page_size=16),
    "more heads than a tile": Problem.uniform(2, 1, 300, 200, page_size=128),
}


def check(got: Ladder, want: Result, limit: float) -> None:
    assert rel_error(got().view(want.out.shape), want.out) <= limit
    assert lse_error(got.lse.view(want.lse.shape), want.lse) < LSE_TOLERANCE


@pytest.mark.parametrize("distribution", ["gauss", "heavy_tailed"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_every_step_is_right(name: str, distribution: str) -> None:
    problem = PROBLEMS[name]
    features = ("scales", "page_gap")
    inputs = make_inputs(
        problem, 1, features, distribution=distribution, device="cuda", workspace_bytes=256
    )
    want = decode_reference(inputs)
    limit = ALLOWED_RATIO * sdpa_error(inputs).relative + 1e-6
    for step in STEPS:
        check(Ladder(step.number, inputs), want, limit)


@pytest.mark.parametrize("splits", [1, 2, 7, 40])
def test_any_number_of_splits(splits: int) -> None:
    inputs = make_inputs(Problem((1, 2), (1234, 70), 64), 2, device="cuda", workspace_bytes=256)
    want = decode_reference(inputs)
    for step in (7, 8, 9):
        check(Ladder(step, inputs, splits), want, 4e-3)


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_equal_bits_again_and_in_a_graph(step) -> None:
    inputs = make_inputs(Problem.uniform(3, 1, 500, 64), 3, device="cuda", workspace_bytes=256)
    ladder = Ladder(step.number, inputs, 3 if step.number >= 7 else None)
    first = ladder().clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ladder()
    ladder.out.fill_(torch.nan)
    graph.replay()
    assert torch.equal(ladder.out.view_as(first), first)
