"""Checks of a plan that was not made by `make_plan`: its tiles against its problem."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from ..core.errors import invalid
from ..core.problem import Problem
from .extent import kv_tokens, row_tiles, spread


class Plan(Protocol):
    """The fields of a `tile.Plan` that are checked."""

    @property
    def problem(self) -> Problem: ...
    @property
    def tile_rows(self) -> int: ...
    @property
    def tile_kv(self) -> int: ...
    @property
    def tiles(self) -> np.ndarray: ...
    @property
    def worker_begin(self) -> np.ndarray: ...


def check_plan(plan: Plan) -> None:
    """Raise InvalidInput unless every block of every row tile is covered exactly once, slots and
    groups are dense and in split order, and the workers' ranges partition the tiles.
    """
    begins = plan.worker_begin
    _require(
        begins.ndim == 1
        and begins.size >= 1
        and begins[0] == 0
        and begins[-1] == len(plan.tiles)
        and bool((np.diff(begins) >= 0).all()),
        "worker_begin",
        "prefix sums from 0 to the number of tiles",
    )
    order = np.lexsort((plan.tiles[:, 4], plan.tiles[:, 1], plan.tiles[:, 0]))
    tiles = plan.tiles[order].astype(np.int64)
    _check_row_tiles(plan, tiles)
    _check_coverage(plan, tiles)
    _check_numbers(tiles)


def _require(condition: bool, what: str, supported: str) -> None:
    if not condition:
        raise invalid("plan", f"inconsistent {what}", supported)


def _check_row_tiles(plan: Plan, tiles: np.ndarray) -> None:
    """Row tiles are exactly the problem's, and the splits of each count up from 0."""
    count = row_tiles(plan.problem, plan.tile_rows)
    request, index = spread(count)
    firsts = np.flatnonzero(tiles[:, 4] == 0)
    _require(
        np.array_equal(tiles[firsts, 0], request) and np.array_equal(tiles[firsts, 1], index),
        "row tiles",
        "each row tile of each request once",
    )
    splits = np.diff(np.append(firsts, len(tiles)))
    owner, position = spread(splits)
    expected = np.stack([request[owner], index[owner], position, splits[owner]], axis=1)
    _require(
        np.array_equal(tiles[:, [0, 1, 4, 5]], expected),
        "splits",
        "split_idx from 0 to num_splits - 1",
    )


def _check_coverage(plan: Plan, tiles: np.ndarray) -> None:
    """Splits join end to end, from block 0 to the last block."""
    blocks = -(-kv_tokens(plan.problem) // plan.tile_kv)
    first = tiles[:, 4] == 0
    last = tiles[:, 4] == tiles[:, 5] - 1
    begin, end = tiles[:, 2], tiles[:, 3]
    joined = np.append(True, begin[1:] == end[:-1])[: len(tiles)]
    _require(
        bool(
            (begin[first] == 0).all()
            and (end[last] == blocks[tiles[last, 0]]).all()
            and joined[~first].all()
            and (end >= begin).all()
        ),
        "blocks",
        "each KV block of each row tile once",
    )


def _check_numbers(tiles: np.ndarray) -> None:
    """Slots and groups count up in the order (request, row tile, split)."""
    split = tiles[:, 5] > 1
    slot = np.where(split, np.cumsum(split) - 1, -1)
    group = np.where(split, np.cumsum(split & (tiles[:, 4] == 0)) - 1, -1)
    _require(
        np.array_equal(tiles[:, 6], slot) and np.array_equal(tiles[:, 7], group),
        "slots or groups",
        "dense numbers in the order (request, row tile, split)",
    )
