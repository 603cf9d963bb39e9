"""The rule by which CTAs find their own work: every block once, slots apart, even loads."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_lab.core.errors import InvalidInput
from mla_lab.core.problem import Problem
from mla_lab.plan.self_schedule import COARSE, LARGE, LEAST, SNAP, Costs, Line, self_schedule
from mla_lab.plan.tile import Plan

COSTS = st.builds(Costs, st.integers(0, 12), st.integers(0, 12), least=st.sampled_from([1, 1, 2]))


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Uniform and drawn lengths, requests without keys or query rows, one to 60 requests."""
    batch = draw(st.integers(1, 60))
    longest = draw(st.sampled_from([1, 64, 700, 9000, 300_000]))
    lens = draw(st.lists(st.integers(0, longest), min_size=batch, max_size=batch))
    if draw(st.booleans()):
        lens = [longest] * batch
    tokens = draw(st.sampled_from([(1, 1), (4, 4), (0, 5)]))
    q_lens = draw(st.lists(st.integers(*tokens), min_size=batch, max_size=batch))
    lens = [max(n, q) if n else 0 for n, q in zip(lens, q_lens, strict=True)]
    return Problem(tuple(q_lens), tuple(lens), draw(st.sampled_from([16, 64, 128])))


def pieces(plan: Plan) -> dict[tuple[int, int], list[list[int]]]:
    """Work tiles of each row tile, in split order."""
    found: dict[tuple[int, int], list[list[int]]] = defaultdict(list)
    for tile in plan.tiles.tolist():
        found[tile[0], tile[1]].append(tile)
    return {key: sorted(tiles, key=lambda tile: tile[4]) for key, tiles in found.items()}


@settings(max_examples=300, deadline=None)
@given(problems(), st.sampled_from([16, 64, 128]), st.sampled_from([1, 3, 66, 132]), COSTS)
def test_each_block_is_in_one_tile_and_each_partial_in_a_slot_of_its_own(
    problem: Problem, tile_rows: int, workers: int, costs: Costs
) -> None:
    plan = self_schedule(problem, tile_rows=tile_rows, num_workers=workers, costs=costs)
    found = pieces(plan)
    row_tiles = -(-problem.rows // tile_rows)
    assert len(found) == row_tiles.sum()
    assert plan.num_workers == workers
    slots, groups = [], []
    for (request, _), tiles in found.items():
        blocks = -(-problem.kv_lens[request] // 64)
        assert [tile[4] for tile in tiles] == list(range(len(tiles)))
        assert {tile[5] for tile in tiles} == {len(tiles)}
        edges = [0, *(tile[3] for tile in tiles)]
        assert [tile[2] for tile in tiles] == edges[:-1]
        assert edges[-1] == blocks
        assert len(tiles) == 1 or all(before < after for before, after in pairwise(edges))
        if len(tiles) > 1:
            slots += [tile[6] for tile in tiles]
            groups += [tiles[0][7]]
            assert slots[-len(tiles) :] == list(range(tiles[0][6], tiles[0][6] + len(tiles)))
        else:
            assert tiles[0][6:] == [-1, -1]
    assert len(set(slots)) == len(slots)
    assert max(slots, default=-1) < 2 * workers
    assert len(set(groups)) == len(groups)
    assert max(groups, default=-1) < workers


@settings(max_examples=200, deadline=None)
@given(problems(), st.sampled_from([1, 3, 66, 132]), COSTS)
def test_only_the_first_and_last_tile_of_a_worker_are_pieces(
    problem: Problem, workers: int, costs: Costs
) -> None:
    plan = self_schedule(problem, tile_rows=64, num_workers=workers, costs=costs)
    for worker in range(workers):
        assert all(tile.slot < 0 for tile in plan.worker(worker)[1:-1])


@settings(max_examples=200, deadline=None)
@given(problems(), st.sampled_from([3, 66, 132]), COSTS)
def test_no_part_of_the_line_is_longer_than_its_share_and_what_is_moved(
    problem: Problem, workers: int, costs: Costs
) -> None:
    tiles = -(-problem.rows // 64)
    blocks = -(-np.array(problem.kv_lens) // 64)
    line = Line.of(blocks, tiles, workers, costs)
    if line.kind != "shares" or not len(line.blocks):
        return
    plan = self_schedule(problem, tile_rows=64, num_workers=workers, costs=costs)
    share = -(-int(line.begin[-1]) // line.parts)
    assert line.parts == 1 or share >= LEAST
    for worker in range(workers):
        walked = plan.worker(worker)
        load = sum(max(1, t.block_end - t.block_begin) + costs.piece for t in walked)
        # a piece's own cost lies before its item's first block alone; a cut near an end moves
        assert load <= share + 2 * costs.piece + 2 * SNAP + 1


def test_row_tiles_of_a_request_lie_beside_each_other() -> None:
    problem = Problem.uniform(3, 1, 5000, 128)
    plan = self_schedule(problem, tile_rows=64, num_workers=132, costs=Costs(6, 8))
    spans = [[tuple(tile[2:6]) for tile in plan.worker(worker)] for worker in range(132)]
    assert spans[::2] == spans[1::2]
    assert {tile.row_tile for tile in plan.worker(7)} == {1}


def test_requests_of_one_length_stay_whole_where_pieces_cost_more() -> None:
    problem = Problem.uniform(128, 1, 1024, 16)
    plan = self_schedule(problem, tile_rows=16, num_workers=132, costs=Costs(4, 6))
    assert plan.num_slots == 0
    assert np.diff(plan.worker_begin).max() == 1


@settings(max_examples=200, deadline=None)
@given(problems(), st.sampled_from([3, 66, 132]), COSTS)
def test_even_pieces_have_a_worker_each_and_are_as_short_as_fits(
    problem: Problem, workers: int, costs: Costs
) -> None:
    tiles = -(-problem.rows // 64)
    blocks = -(-np.array(problem.kv_lens) // 64)
    line = Line.of(blocks, tiles, workers, costs)
    if line.kind != "even":
        return
    plan = self_schedule(problem, tile_rows=64, num_workers=workers, costs=costs)
    assert np.diff(plan.worker_begin).max() == 1
    counts = np.diff(line.begin)
    largest = int((-(-line.blocks // counts)).max())
    sizes = plan.tiles[:, 3] - plan.tiles[:, 2]
    assert int(sizes.max()) == largest
    for tiles_of_one in pieces(plan).values():
        own = [tile[3] - tile[2] for tile in tiles_of_one]
        assert max(own) - min(own) <= 1
    # the search stops within 1/64 of its bounds above the least
    exact = next(
        size for size in range(1, largest + 1) if (-(-line.blocks // size)).sum() <= line.bundles
    )
    assert largest <= exact + max(0, -(-exact // 32) * 2 - 1)


@pytest.mark.parametrize(
    ("batch", "heads", "kv_len", "rows", "workers", "pieces_each"),
    [(16, 16, 1024, 16, 132, 8), (64, 16, 1024, 16, 132, 2), (16, 128, 1024, 128, 66, 4)],
)
def test_requests_of_one_length_are_cut_evenly(
    batch: int, heads: int, kv_len: int, rows: int, workers: int, pieces_each: int
) -> None:
    problem = Problem.uniform(batch, 1, kv_len, heads)
    plan = self_schedule(problem, tile_rows=rows, num_workers=workers, costs=Costs(4, 6))
    assert set(plan.tiles[:, 5].tolist()) == {pieces_each}
    assert np.diff(plan.worker_begin).max() == 1


def test_long_lines_are_cut_at_coarse_steps() -> None:
    blocks = np.full(64, LARGE // 32)
    line = Line.of(blocks, np.ones_like(blocks), 100, Costs(4, 6))
    item, block = line.cuts()
    at = line.begin[item] + line.piece + block
    assert int(line.begin[-1]) >= LARGE
    inside = block[1:-1] > 0
    assert inside.any()
    assert not (at[1:-1][inside] % (1 << COARSE)).any()


def test_costs_fit_into_one_number() -> None:
    assert Costs(255, 3).packed == 255 | 3 << 8
    with pytest.raises(InvalidInput, match="piece"):
        Costs(256, 0)


def test_bad_calls_are_refused() -> None:
    problem = Problem.uniform(2, 1, 100, 16)
    with pytest.raises(InvalidInput, match="num_workers"):
        self_schedule(problem, tile_rows=16, num_workers=257, costs=Costs(4, 6))
    sparse = Problem.uniform(2, 1, 100, 16, top_k=64)
    with pytest.raises(InvalidInput, match="top_k"):
        self_schedule(sparse, tile_rows=16, num_workers=132, costs=Costs(4, 6))


def test_a_line_that_int32_does_not_hold_is_refused() -> None:
    """A kernel's sum would be negative, and no worker would have a tile."""
    problem = Problem.uniform(1, 200_000, 64 * 11_000, 16)
    with pytest.raises(InvalidInput, match="problem: got 2200800000 blocks of all items"):
        self_schedule(problem, tile_rows=16, num_workers=132, costs=Costs(4, 6))
