"""Two builds for one call: gates that are never both open, and where two pay."""

from __future__ import annotations

import pytest

from mla_lab.core.errors import InvalidInput
from mla_lab.core.gpu import H200
from mla_lab.core.problem import Problem
from mla_lab.plan.gate import LONG, gated
from mla_lab.plan.kernel_costs import recorded_costs
from mla_lab.plan.selection import GAIN, IDLE_US, all_selections, pair_of, select


@pytest.mark.parametrize("gate", [0, 1, -1, LONG, -LONG])
def test_a_word_and_its_gate_are_found_again_in_an_int32(gate: int) -> None:
    word = gated(0xABCD, gate)
    assert -(1 << 31) <= word < 1 << 31
    assert (word & 0xFFFF, word >> 16) == (0xABCD, gate)


@pytest.mark.parametrize(("word", "gate"), [(1 << 16, 0), (-1, 0), (0, LONG + 1)])
def test_what_does_not_fit_is_refused(word: int, gate: int) -> None:
    with pytest.raises(InvalidInput):
        gated(word, gate)


def test_four_requests_over_e4m3_have_a_build_for_short_and_one_for_long_lengths() -> None:
    problem = Problem.uniform(4, 1, 1, 64, kv_format="e4m3")
    found = all_selections(problem, H200, recorded_costs())
    chosen = select(problem, H200)
    assert chosen is not None
    assert chosen.beyond is not None
    assert chosen.config != chosen.beyond.config
    assert chosen.gate > 0
    assert chosen.regret < found[0].regret * GAIN
    assert chosen.worst < found[0].worst
    few, many = chosen.us[0] + IDLE_US, chosen.us[-1] + IDLE_US
    assert few <= found[0].us[0] + IDLE_US
    assert many < min(each.us[-1] for each in found) * 1.1


def test_requests_of_different_rows_and_large_batches_have_one_build() -> None:
    ragged = Problem((1, 2), (1, 2), 128)
    for problem in (ragged, Problem.uniform(128, 1, 1, 128)):
        chosen = select(problem, H200)
        assert chosen is not None
        assert chosen.beyond is None
    chosen = select(Problem.uniform(1, 1, 1, 128), H200, ragged=True)
    assert chosen is not None
    assert chosen.beyond is None
    assert chosen.num_splits == 0


def test_one_build_stays_where_a_second_one_gains_too_little() -> None:
    found = all_selections(Problem.uniform(16, 1, 1, 64), H200, recorded_costs())
    assert pair_of(found, 16) == found[0]


def test_long_pieces_of_e4m3_are_not_added_up_by_the_matrix_unit_alone() -> None:
    problem = Problem.uniform(64, 1, 1, 128, q_dtype="e4m3", kv_format="e4m3")
    short, long = select(problem, H200), select(problem, H200, long=True)
    assert short is not None
    assert long is not None
    assert short.config.kernel == long.config.kernel == "cute/keep_ab_sm90"
    assert short.beyond is None
    assert long.gate == LONG
    assert long.beyond is not None
    assert long.beyond.config.kernel == "cute/swap_ab_sm90"
    assert long.beyond.num_splits == 0
