"""Merge, neighbour and mask explorers: exact merges, known cuts, pictures that speak."""

from __future__ import annotations

import inspect
import math
import re

import numpy as np
import pytest

from mla_lab.api import contract
from mla_lab.core.errors import InvalidInput
from mla_lab.core.problem import Problem
from mla_lab.lab import measuring
from mla_lab.lab.explorers import mask as mask_explorer
from mla_lab.lab.explorers import merge as merge_explorer
from mla_lab.lab.explorers import neighbour as neighbour_explorer
from mla_lab.plan.choose import choose


def test_pieces_merge_to_the_whole() -> None:
    explorer = merge_explorer.MergeExplorer(splits=7, sharpness=8)
    scores, values = merge_explorer.tokens(3, 8)
    out, lse, weights = merge_explorer.merge(explorer.partials(explorer.state))
    whole = merge_explorer.attend(scores, values, 0, 48)
    assert np.abs(out - whole.out).max() < 1e-12
    assert lse == pytest.approx(whole.lse, abs=1e-12)
    assert weights.sum() == pytest.approx(1)


def test_nothing_seen_is_zero_and_minus_infinity() -> None:
    empty = merge_explorer.Partial(0, 0, np.full(8, math.nan), -math.inf)
    out, lse, weights = merge_explorer.merge([empty, empty])
    assert (out == 0).all()
    assert lse == -math.inf
    assert (weights == 0).all()


def test_an_empty_split_is_shown_and_weighs_nothing() -> None:
    explorer = merge_explorer.MergeExplorer(splits=3)
    before = explorer.figure(explorer.state)
    explorer.widgets["empty"].value = True
    after = explorer.figure(explorer.state)
    assert len(after.data) == len(before.data) + 1
    assert 0.0 in list(after.data[-1].y)
    assert "differ by" in after.layout.title.text


@pytest.mark.parametrize(
    ("neighbours", "length", "splits"), [(0, 8192, 43), (3, 8192, 15), (63, 4096, 2), (63, 8192, 1)]
)
def test_neighbours_decide_greedys_splits_and_not_the_invariant_ones(
    neighbours: int, length: int, splits: int
) -> None:
    greedy = neighbour_explorer.first_request_plan("greedy", neighbours, length)
    fixed = neighbour_explorer.first_request_plan("fixed_size", neighbours, length)
    assert len(neighbour_explorer.pieces(greedy)) == splits
    assert neighbour_explorer.pieces(fixed) == [(0, 64), (64, 128)]


def test_the_drawn_invariant_rule_is_the_one_that_kernels_run_by() -> None:
    problem = Problem.uniform(1, 1, neighbour_explorer.KV_LEN, 64)
    choice = choose(problem, batch_invariant=True)
    drawn = neighbour_explorer.first_request_plan(choice.policy, 0, neighbour_explorer.KV_LEN)
    run = neighbour_explorer.pieces(choice.plan(problem))
    assert neighbour_explorer.pieces(drawn) == run


def test_the_price_of_batch_invariance_is_the_recorded_one() -> None:
    costs = neighbour_explorer.invariance_costs()
    title = neighbour_explorer.invariance_chart().layout.title.text
    most, least = costs["b1_q1_h16_kv8192"], costs["b1_q1_h128_kv8192"]
    assert f"up to {most:.1f}x alone" in title
    plain = neighbour_explorer.invariance_costs(neighbour_explorer.PLAIN_RECORD)
    chart = neighbour_explorer.invariance_chart()
    axis = chart.layout.xaxis.title.text
    assert axis.count("<br>") == 2, "one line for each half of the chart"
    for record in (neighbour_explorer.RECORD, neighbour_explorer.PLAIN_RECORD):
        run = measuring.runs(record)[-1]
        assert run.card in axis and run.date in axis
    drawn = {bar.name: bar.y for bar in chart.data}
    for heads in (16, 128):
        expected = [plain[f"b{batch}_q1_h{heads}_kv8192"] for batch in (64, 128)]
        assert list(drawn[f"{heads} heads"])[2:] == expected
    text = inspect.getdoc(contract.trtllm_batch_decode_with_kv_cache_mla) or ""
    told = re.search(r"(\S+) or (\S+) times\s+as\s+long\s+alone\s+\(16 or 128\s+heads", text)
    assert told
    assert told.groups() == (f"{most:.1f}", f"{least:.1f}")
    large = [cost for case, cost in costs.items() if re.match("b(64|128)_", case)]
    among = re.search(r"at\s+most\s+(\S+) times\s+from batch 64 on", text)
    assert among
    assert among[1] == f"{max(large):.2f}"


def test_the_strips_name_their_splits() -> None:
    explorer = neighbour_explorer.NeighbourExplorer(neighbours=3)
    picture = explorer.figure(explorer.state)
    assert "greedy 15, batch invariant 2" in picture.alt
    assert picture.markup.count("<title>split") == 15 + 2


@pytest.mark.parametrize("shape", mask_explorer.SHAPES)
def test_parents_come_before_their_children(shape: str) -> None:
    for count in (1, 2, 15):
        parent = mask_explorer.parents(shape, count)
        assert len(parent) == count
        assert all(-1 <= p < token for token, p in enumerate(parent))


def test_the_mask_explorer_shows_a_rows_ancestors_and_its_words() -> None:
    explorer = mask_explorer.MaskExplorer(shape="binary tree", count=7, row=4)
    assert "row 4 attends to 3" in explorer.figure(explorer.state).alt
    assert "0x0013" in explorer.footer.value
    nodes = re.findall(
        r'<rect x="([\d.]+)".*?width="40.00"', explorer.figure(explorer.state).markup
    )
    assert len(set(nodes)) == 3, "a column for each depth of the tree"
    explorer.widgets["shape"].value = "chain"
    assert "row 4 attends to 5" in explorer.figure(explorer.state).alt
    with pytest.raises(InvalidInput, match="shape"):
        mask_explorer.parents("ring", 3)
