"""Checks of a plan that was not made by `make_plan`: its tiles against its problem."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from ..core.errors import invalid
from ..core.problem import Problem
from .config import KernelConfig
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
    def config(self) -> KernelConfig | None: ...
    @property
    def tiles(self) -> np.ndarray: ...
    @property
    def worker_begin(self) -> np.ndarray: ...


def check_plan(plan: Plan) -> None:
    """Raise InvalidInput unless sizes are those of the plan's kernel, every block of every row tile
    is covered exactly once, no two row tiles share a slot or a group, the slots of each are in
    split order, and the workers' ranges partition the tiles.
    """
    _check_sizes(plan)
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
    _check_numbers(tiles, max(0, begins.size - 1))


def _require(condition: bool, what: str, supported: str) -> None:
    if not condition:
        raise invalid("plan", f"inconsistent {what}", supported)


def _check_sizes(plan: Plan) -> None:
    """Rows and tokens of a tile: above 0, and those of the kernel where the plan names one."""
    for name in ("tile_rows", "tile_kv"):
        size = getattr(plan, name)
        if size < 1:
            raise invalid(f"plan.{name}", size, "1 or more")
        if plan.config is not None and size != getattr(plan.config, name):
            supported = f"{getattr(plan.config, name)}, as in its config"
            raise invalid(f"plan.{name}", size, supported)


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


def _check_numbers(tiles: np.ndarray, workers: int) -> None:
    """Slots of each split row tile follow its first one, and no two have a slot or a group."""
    split = tiles[:, 5] > 1
    begins = split & (tiles[:, 4] == 0)
    (pieces, first, group), slots = tiles[begins, 5:].T, tiles[split, 6]
    owner, position = spread(pieces)
    _require(
        bool((tiles[~split, 6:] == -1).all())
        and np.array_equal(slots, first[owner] + position)
        and np.array_equal(tiles[split, 7], group[owner])
        and _are_apart(slots, max(slots.size, 2 * workers))
        and _are_apart(group, max(group.size, workers)),
        "slots or groups",
        "slots of a row tile in split order, and a group, that no other row tile has",
    )


def _are_apart(numbers: np.ndarray, end: int) -> bool:
    """Whether all are different, and in [0, end)."""
    inside = (numbers >= 0) & (numbers < end)
    return bool(inside.all()) and np.unique(numbers).size == numbers.size
