"""Two mainloops in one kernel: the gate between them, and which calls have such a build."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mla_lab.core.errors import InvalidInput
from mla_lab.core.gpu import H100, H200, Gpu
from mla_lab.core.problem import Problem
from mla_lab.plan.gate import MOST_BLOCKS, gated
from mla_lab.plan.kernel_costs import recorded_of
from mla_lab.plan.launch_modes import KEEP_AB_PERSISTENT, SWAP_AB_LL
from mla_lab.plan.pricing import Candidate
from mla_lab.plan.schedule import predicted_us
from mla_lab.plan.selection import EQUAL, SCHEDULE_US, all_selections, dual_of, profiles, select
from mla_lab.plan.without_plan import PLAIN, plan_without


@pytest.mark.parametrize("gate", [0, 1, MOST_BLOCKS])
def test_a_word_and_its_gate_are_found_again_in_an_int32(gate: int) -> None:
    word = gated(0xABCD, gate)
    assert -(1 << 31) <= word < 1 << 31
    assert (word & 0xFFFF, word >> 16) == (0xABCD, gate)


@pytest.mark.parametrize(("word", "gate"), [(1 << 16, 0), (-1, 0), (0, -1), (0, MOST_BLOCKS + 1)])
def test_what_does_not_fit_is_refused(word: int, gate: int) -> None:
    with pytest.raises(InvalidInput):
        gated(word, gate)


@pytest.mark.parametrize("gpu", [H100, H200], ids=lambda gpu: gpu.name)
@pytest.mark.parametrize(("q_len", "blocks"), [(1, 3 * 16), (2, 2 * 8), (4, 2 * 4)])
def test_one_request_of_many_rows_has_swap_ab_up_to_few_tiles_a_cta(
    q_len: int, blocks: int, gpu: Gpu
) -> None:
    problem = Problem.uniform(1, q_len, q_len, 128)
    one = select(problem, gpu)
    assert one is not None
    dual = dual_of(one, problem, gpu, lambda _: True)
    assert dual.config.kernel == "cute/keep_ab_sm90"
    assert dual.config.option("dual") == (1 if q_len == 1 else 2)
    assert dual.gate == blocks + 1
    assert dual_of(one, problem, gpu, lambda _: False) == one


@pytest.mark.parametrize(
    "problem",
    [
        Problem.uniform(1, 1, 1, 16),
        Problem.uniform(2, 1, 1, 128),
        Problem.uniform(1, 8, 8, 128),
        Problem.uniform(1, 1, 1, 128, kv_format="e4m3"),
    ],
)
def test_other_calls_have_no_dual_build(problem: Problem) -> None:
    one = select(problem, H200)
    assert one is not None
    assert dual_of(one, problem, H200, lambda _: True) == one


def test_rows_that_may_differ_are_not_taken_by_formula() -> None:
    chosen = select(Problem.uniform(4, 1, 1, 16), H200, ragged=True)
    assert chosen is not None
    assert chosen.num_splits == 0


@pytest.mark.parametrize("q_len", [1, 2, 3])
def test_one_ragged_request_which_has_all_query_tokens_is_taken_by_formula(q_len: int) -> None:
    problem = Problem.uniform(1, q_len, q_len, 16)
    chosen = select(problem, H200, ragged=True)
    assert chosen == select(problem, H200)
    assert chosen is not None
    assert chosen.config.option("grid") == 1


@pytest.mark.parametrize("gpu", [H200, H100], ids=lambda gpu: gpu.name)
@pytest.mark.parametrize("batch", [16, 128, 256])
def test_one_tile_of_few_rows_is_swap_ab_s_where_prices_are_equal(gpu: Gpu, batch: int) -> None:
    problem = Problem((1,) * batch, (1024,) * batch, 16)
    found = all_selections(problem, gpu)
    assert found[0].config.kernel == SWAP_AB_LL.kernel
    assert found[0].regret <= min(each.regret for each in found) * EQUAL
    assert select(problem, gpu) == found[0]
    # of more rows the lower price alone counts
    wide = all_selections(replace(problem, heads=64), gpu)
    assert wide[0].regret == min(each.regret for each in wide)


def test_prices_of_walks_and_their_regret() -> None:
    problem = Problem((1,) * 16, (1024,) * 16, 64)
    found = all_selections(problem, H200)
    over = np.array([each.us for each in found]) / np.min([each.us for each in found], axis=0)
    for each, factors in zip(found, over, strict=True):
        assert each.regret == pytest.approx(np.exp(np.log(factors).mean()))
        assert each.worst == pytest.approx(factors.max())
    walk = next(e for e in found if e.config.kernel == KEEP_AB_PERSISTENT.kernel)
    family = recorded_of(KEEP_AB_PERSISTENT.key)
    rows, cluster = walk.config.tile_rows, walk.config.cluster
    model = Candidate(problem, H200, family, rows, cluster).model
    for sized, us in zip(profiles(problem), walk.us, strict=True):
        plan = plan_without(sized, PLAIN, rows, H200.workers(cluster))
        assert us == pytest.approx(predicted_us(plan, model) + SCHEDULE_US)


@pytest.mark.parametrize(
    ("problem", "splits"),
    [
        (Problem.uniform(1, 1, 4096, 128), 32),
        (Problem.uniform(1, 1, 4096, 128, q_dtype="fp16", kv_format="fp16"), 32),
        (Problem.uniform(1, 1, 8192, 128), 64),
        (Problem.uniform(1, 1, 4096, 64), 64),
        (Problem.uniform(1, 2, 2048, 128), 32),
        (Problem.uniform(1, 1, 4096, 128, q_dtype="e4m3", kv_format="e4m3"), 64),
    ],
)
def test_splits_of_one_request_of_two_row_tiles_have_two_blocks_at_least(
    problem: Problem, splits: int
) -> None:
    """Of 66 CTAs a row tile, in the build with both mainloops."""
    plan = plan_without(problem, PLAIN)
    assert set(plan.tiles[:, 5]) == {splits}
