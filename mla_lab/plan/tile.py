"""A plan is a value: which worker walks which tiles of KV, and where its partial goes.

Kernels, the simulator and the torch backend share one meaning of it.

- *row* `token * heads + head` of a request; a *row tile* is `tile_rows` consecutive rows.
- *block* `i` of a request: KV positions `[i * tile_kv, (i + 1) * tile_kv)`, cut at `kv_len`.
- a *work tile* attends one row tile over blocks `[block_begin, block_end)`; an empty range
  (a request without keys) still writes out 0 and lse -inf.
- all row tiles of a request are cut at the same blocks.
- a *worker* is what the kernel runs as a unit: a CTA, or a cluster that shares one work tile.
- where a row tile has one work tile, it writes the result itself (slot -1). Otherwise each
  writes a partial (out fp32, lse base e) into its slot; slots of a row tile are consecutive in
  split order and are merged in that order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ..problem import Problem


class WorkTile(NamedTuple):
    """One row of `Plan.tiles`; the same eight int32 words that a kernel loads."""

    request: int
    row_tile: int
    block_begin: int
    block_end: int
    split_idx: int
    num_splits: int
    #: partial's index in the workspace, -1 where the tile is the whole row tile
    slot: int
    #: index among the split row tiles (the merge counter), -1 where slot is -1
    group: int


@dataclass(frozen=True, eq=False)
class Plan:
    """Work tiles in the order that workers walk them. Equal plans compare equal."""

    problem: Problem
    tile_rows: int
    tile_kv: int
    #: name of the split policy, and "persistent" or "grid"
    policy: str
    schedule: str
    #: int32 [num_tiles, 8], columns as in `WorkTile`
    tiles: np.ndarray
    #: int32 [num_workers + 1]: worker w walks tiles[worker_begin[w]:worker_begin[w + 1]]
    worker_begin: np.ndarray

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Plan):
            return NotImplemented
        return (
            (self.problem, self.tile_rows, self.tile_kv, self.policy, self.schedule)
            == (other.problem, other.tile_rows, other.tile_kv, other.policy, other.schedule)
            and np.array_equal(self.tiles, other.tiles)
            and np.array_equal(self.worker_begin, other.worker_begin)
        )

    def __hash__(self) -> int:
        return hash((self.problem, self.tile_rows, self.tile_kv, self.policy, self.schedule))

    def __iter__(self) -> Iterator[WorkTile]:
        return (WorkTile(*row) for row in self.tiles.tolist())

    @property
    def num_tiles(self) -> int:
        return len(self.tiles)

    @property
    def num_workers(self) -> int:
        return len(self.worker_begin) - 1

    @cached_property
    def num_slots(self) -> int:
        """Partials that go through the workspace."""
        return int(self.tiles[:, 6].max(initial=-1)) + 1

    @cached_property
    def num_groups(self) -> int:
        """Row tiles that are merged from partials."""
        return int(self.tiles[:, 7].max(initial=-1)) + 1
