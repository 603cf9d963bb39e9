"""Pieces that are dealt by falling cost: each block once, splits in the first two rounds."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_lab.core.problem import Problem
from mla_lab.plan.dealt import LEAST, MOST_ROUNDS, SPLIT, WHOLE, deal, dealt_tiles, pieces_for
from mla_lab.plan.self_schedule import Costs, self_schedule

BLOCKS = st.lists(st.integers(1, 60) | st.integers(1, 4000), min_size=1, max_size=256)


@settings(max_examples=300, deadline=None)
@given(BLOCKS, st.integers(1, 132))
def test_each_block_is_dealt_once_and_splits_early(lengths: list[int], bundles: int) -> None:
    blocks = np.array(lengths)
    dealt = deal(blocks, bundles, 1 << 30)
    if dealt is None:
        return
    tiles, owner = dealt_tiles(blocks, dealt)
    load = np.zeros(bundles, dtype=int)
    for item, n in enumerate(lengths):
        mine = tiles[tiles[:, 0] == item]
        mine = mine[np.argsort(mine[:, 4])]
        assert mine[:, 4].tolist() == list(range(len(mine)))
        assert set(mine[:, 5]) == {len(mine)}
        edges = [0, *mine[:, 3].tolist()]
        assert mine[:, 2].tolist() == edges[:-1] and edges[-1] == n
        sizes = np.diff(edges)
        assert sizes.max() - sizes.min() <= 1
        if len(mine) > 1:
            first = int(mine[0, 6])
            assert mine[:, 6].tolist() == list(range(first, first + len(mine)))
            assert first + len(mine) <= 2 * bundles
            assert set(mine[:, 7]) == {first // 2}
    for (item, _, _, _, _, pieces, slot, _), bundle in zip(tiles.tolist(), owner, strict=True):
        load[bundle] += -(-lengths[item] // pieces) + (WHOLE if pieces == 1 else SPLIT)
        assert (slot < 0) == (pieces == 1)
    assert dealt.load == load.max()
    assert np.bincount(owner).max() <= MOST_ROUNDS
    for bundle in range(bundles):
        assert (tiles[owner == bundle][1:-1, 5] == 1).all()


@settings(max_examples=200, deadline=None)
@given(BLOCKS, st.integers(LEAST, 4000))
def test_a_piece_costs_no_more_than_the_target(lengths: list[int], target: int) -> None:
    blocks = np.array(lengths)
    pieces = pieces_for(blocks, target)
    cost = -(-blocks // pieces) + np.where(pieces == 1, WHOLE, SPLIT)
    assert (cost <= target).all()
    assert (cost[pieces > 1] > target / 2).all()


def test_short_requests_share_a_worker_and_long_ones_are_split() -> None:
    """Of 8 workers, six requests of 20 blocks, one of 45, and three of 5, 6 and 7."""
    lengths = [20, 45, 5, 20, 20, 6, 20, 20, 7, 20]
    problem = Problem((1,) * len(lengths), tuple(64 * n for n in lengths), 16)
    plan = self_schedule(problem, tile_rows=16, num_workers=8, costs=Costs(3, 4))
    runs = [[(t.request, t.split_idx, t.num_splits) for t in plan.worker(w)] for w in range(8)]
    assert [run[0] for run in runs] == [
        (1, 0, 2), (1, 1, 2), (0, 0, 1), (3, 0, 1), (4, 0, 1), (6, 0, 1), (7, 0, 1), (9, 0, 1),
    ]  # fmt: skip
    assert [run[1:] for run in runs] == [[]] * 5 + [[(2, 0, 1)], [(5, 0, 1)], [(8, 0, 1)]]


def test_the_last_of_three_rounds_goes_to_the_least_loaded() -> None:
    """Of 4 bundles, with loads of 31, 30, 29 and 28 blocks after two rounds."""
    dealt = deal(np.array([20, 18, 16, 14, 10, 9, 8, 7, 3, 2]), 4, 1 << 30)
    assert dealt is not None and dealt.item.tolist() == list(range(10))
    assert dealt.bundle.tolist() == [0, 1, 2, 3, 3, 2, 1, 0, 3, 2]
    assert dealt.load == 33
