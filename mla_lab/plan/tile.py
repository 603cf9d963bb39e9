"""A plan as a value: the work tiles of each worker, and the slot of each partial.

Kernels, the simulator and the torch backend read it alike.

- *row* `token * heads + head` of a request; a *row tile* is `tile_rows` consecutive rows. In a
  sparse problem (`top_k` > 0) each query token attends its own slots, so there a row tile stays
  inside one token: row tile `t * k + j` of k = ceil(heads / tile_rows) holds heads
  `[j * tile_rows, (j + 1) * tile_rows)` of token t. `Plan.rows` handles both.
- *block* `i` of a request: KV positions `[i * tile_kv, (i + 1) * tile_kv)`, cut at `kv_len`
  (sparse: entries of the token's list, cut at `top_k`).
- a *work tile* attends one row tile over blocks `[block_begin, block_end)`; an empty range
  (a request without keys) still writes out 0 and lse -inf. A request without query rows has none.
- all row tiles of a request are split at the same blocks.
- a *worker* is what the kernel runs as a unit: a CTA, or a cluster that shares one work tile.
- the only work tile of a row tile writes the result itself (slot -1). Several each
  write a partial (out fp32, lse base e) into their slots; slots of a row tile are consecutive in
  split order and are merged in that order.
- slots and groups are numbered in the order (request, row tile, split), independent of the order in
  which workers run the tiles; by the rule of `self_schedule` some between them are free.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from ..core.errors import InvalidInput, invalid
from ..core.problem import Problem
from .check import check_plan
from .config import KernelConfig
from .promotion import promoted_slots
from .workspace import WorkspaceLayout


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
    """Work tiles, worker by worker. Equal plans compare equal."""

    problem: Problem
    tile_rows: int
    tile_kv: int
    #: name of the split policy, and "persistent" or "grid"
    policy: str
    schedule: str
    #: int32 [num_tiles, 8], columns as in `WorkTile`
    tiles: np.ndarray
    #: int32 [num_workers + 1]: worker w runs tiles[worker_begin[w]:worker_begin[w + 1]]
    worker_begin: np.ndarray
    #: the kernel that the plan was made for, None for any with such tiles;
    #: no part of the comparison
    config: KernelConfig | None = None

    def __post_init__(self) -> None:
        for array in (self.tiles, self.worker_begin):
            array.flags.writeable = False

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
        """Slots of the workspace up to the last one that a partial goes through."""
        return int(self.tiles[:, 6].max(initial=-1)) + 1

    @property
    def num_partials(self) -> int:
        """Partials that go through the workspace."""
        return int(np.count_nonzero(self.tiles[:, 6] >= 0))

    @cached_property
    def num_groups(self) -> int:
        """Merge counters up to the last one in use."""
        return int(self.tiles[:, 7].max(initial=-1)) + 1

    @cached_property
    def workspace(self) -> WorkspaceLayout:
        """Where this plan's counters and partials lie in the caller's buffer.

        A static grid has a slot for each of `num_splits` partials of every row tile, used or not,
        as its kernels compute slots from block indices (see `formula`).
        """
        slots = self.num_slots
        if slots and (self.policy, self.schedule) == ("fixed", "grid"):
            row_tiles, splits = int(self.tiles[:, 1].max()) + 1, int(self.tiles[:, 5].max())
            slots = self.problem.batch * row_tiles * splits
        if self.schedule == "persistent":
            slots += promoted_slots(self.problem, self.tile_rows, self.num_workers, self.config)
        return WorkspaceLayout.of(slots, self.num_groups, self.tile_rows, self.problem.latent_dim)

    def worker(self, index: int) -> list[WorkTile]:
        """The tiles of one worker, in its order."""
        begin, end = self.worker_begin[index : index + 2].tolist()
        return [WorkTile(*row) for row in self.tiles[begin:end].tolist()]

    def splits(self) -> np.ndarray:
        """Parts that each request's keys are cut into, int64 [batch]; 0 without query rows."""
        result = np.zeros(self.problem.batch, dtype=np.int64)
        result[self.tiles[:, 0]] = self.tiles[:, 5]
        return result

    def rows(self, tile: WorkTile) -> tuple[int, int]:
        """Rows [begin, end) of the tile inside its request, cut at the request's last row."""
        heads, step = self.problem.heads, self.tile_rows
        if self.problem.top_k:
            token, part = divmod(tile.row_tile, -(-heads // step))
            return token * heads + part * step, token * heads + min((part + 1) * step, heads)
        end = self.problem.q_lens[tile.request] * heads
        return tile.row_tile * step, min((tile.row_tile + 1) * step, end)

    def kv_range(self, tile: WorkTile) -> tuple[int, int]:
        """KV positions (sparse: list entries) [begin, end) of the tile, cut at the length."""
        tokens = self.problem.top_k or self.problem.kv_lens[tile.request]
        return min(tile.block_begin * self.tile_kv, tokens), min(
            tile.block_end * self.tile_kv, tokens
        )

    def summary(self) -> str:
        """A few lines: sizes, splits, balance, workspace."""
        blocks = (self.tiles[:, 3] - self.tiles[:, 2]).astype(np.int64)
        owner = np.repeat(np.arange(self.num_workers), np.diff(self.worker_begin))
        load = np.bincount(owner, weights=blocks, minlength=self.num_workers)
        busy = int(np.count_nonzero(np.diff(self.worker_begin)))
        splits = self.splits()
        merged = np.count_nonzero((self.tiles[:, 7] >= 0) & (self.tiles[:, 4] == 0))
        lengths = self.problem.kv_lens
        return "\n".join(
            (
                f"plan {self.policy}/{self.schedule}: batch {self.problem.batch}, "
                f"heads {self.problem.heads}, kv {min(lengths)} to {max(lengths)}",
                f"  tiles      {self.num_tiles} of {self.tile_rows} rows, blocks of {self.tile_kv}",
                f"  workers    {busy} busy of {self.num_workers}; blocks a worker: "
                f"most {int(load.max(initial=0))}, mean {load.mean() if load.size else 0:.1f}",
                f"  splits     {splits.min(initial=10**9)} to {splits.max(initial=0)} a request; "
                f"{self.num_partials} partials in {merged} groups",
                f"  workspace  {self.workspace.nbytes:,} bytes",
            )
        )

    def __str__(self) -> str:
        shown = 12
        lines = [self.summary(), "  worker " + " ".join(f"{n:>11}" for n in WorkTile._fields)]
        owner = np.repeat(np.arange(self.num_workers), np.diff(self.worker_begin))
        for w, row in zip(owner[:shown].tolist(), self.tiles[:shown].tolist(), strict=True):
            lines.append(f"  {w:>6} " + " ".join(f"{value:>11}" for value in row))
        if self.num_tiles > shown:
            lines.append(f"  ... {self.num_tiles - shown} more tiles")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; `from_dict` gives an equal plan."""
        return {
            "problem": asdict(self.problem),
            "tile_rows": self.tile_rows,
            "tile_kv": self.tile_kv,
            "policy": self.policy,
            "schedule": self.schedule,
            "tiles": self.tiles.tolist(),
            "worker_begin": self.worker_begin.tolist(),
            "config": self.config and self.config.as_dict(),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Plan:
        """The plan that `to_dict` wrote; its tiles are checked against its problem."""
        try:
            plan = cls(
                problem=Problem(**values["problem"]),
                tile_rows=operator.index(values["tile_rows"]),
                tile_kv=operator.index(values["tile_kv"]),
                policy=str(values["policy"]),
                schedule=str(values["schedule"]),
                tiles=np.array(values["tiles"], dtype=np.int32).reshape(-1, 8),
                worker_begin=np.array(values["worker_begin"], dtype=np.int32),
                config=KernelConfig.from_dict(values["config"]) if values.get("config") else None,
            )
        except InvalidInput:
            raise
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise invalid("plan", f"{type(error).__name__} {error}", "the output of to_dict") from (
                error
            )
        check_plan(plan)
        return plan
