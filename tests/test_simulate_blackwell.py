"""The four constants of a B200: they predict the published tables that they were not fitted to."""

from __future__ import annotations

from dataclasses import astuple, replace

import pytest

from mla_lab.core.gpu import Gpu
from mla_lab.core.problem import Problem
from mla_lab.simulate import blackwell
from mla_lab.simulate.blackwell import Constants, errors, fit, in_order, tables


@pytest.mark.parametrize("peer", blackwell.PEERS)
def test_the_tables_of_drawn_lengths_are_predicted(peer: str) -> None:
    fitted, judged = tables()
    assert len(fitted) == len(judged) == 20
    assert {case.name for case in fitted + judged} == set(blackwell.published())
    assert max(map(abs, errors(fitted, peer))) < 0.2
    assert max(map(abs, errors(judged, peer))) < 0.2
    assert min(astuple(fit(peer))) > 0


def test_the_fit_is_the_least_of_its_neighbours() -> None:
    cases, _ = tables()

    def loss(constants: Constants) -> float:
        times = blackwell.published()
        return sum(
            (constants.published(c.problem) / times[c.name]["cute-dsl"] - 1) ** 2 for c in cases
        )

    best = fit()
    for name, value in vars(best).items():
        for factor in (0.97, 1.03):
            assert loss(replace(best, **{name: value * factor})) > loss(best)


def test_no_block_is_faster_than_the_datasheet() -> None:
    gpu = Gpu.preset("B200")
    flop = 2 * 128 * 128 * (576 + 512)
    least = flop / (gpu.tflops("bf16") / blackwell.PAIRS) / 1e6
    assert fit().bf16_block_us > least
    assert fit().e4m3_block_us > least / 2


def test_pairs_take_work_tiles_in_order() -> None:
    assert in_order([4, 1, 1, 4], 2) == 6
    assert in_order([3], 5) == 3


def test_our_shares_are_even() -> None:
    problem = Problem((1,) * 3, (8192, 64, 64), 128)
    constants = Constants(0.0, 1.0, 0.5, 0.0)
    total = 66 + 2 * 0.5
    assert constants.ours(problem) < constants.published(problem) + 1
    assert constants.ours(problem) >= total / blackwell.PAIRS
