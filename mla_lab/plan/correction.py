"""What the cost model leaves out: a factor on its time, learnt from the record it is fitted to.

A tile of a way (see `ways`) has one weight for each of `FEATURES`, which are read off the work
tiles and their assignment. They say in words where the model's few constants are wrong: what a
fuller card costs, a longer piece, a worker's second tile, one more piece to merge, uneven workers;
and what a count of pieces that is a power of two spares, of which every share of a merge is a whole
number of rows. What then is left lies smoothly over the kinds of calls: a few bumps, each around
a place in `PLACE`, add to it. The factor is e to the sum, within `MOST`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..core.problem import Problem
from .cuts import Shape
from .tile import Plan

FEATURES = ("constant", "busy", "longest", "walked", "pieces", "uneven", "binary")
#: where a launch stands among others, each in about its standard deviation over the cases drawn:
#: row tiles, blocks and rows of a request, pieces (logarithms), the share of SMs with work
PLACE = ("groups", "blocks", "rows", "pieces", "busy")
SPREADS = (2.4, 1.8, 1.6, 1.6, 0.28)
#: a bump's standard deviation, in those
WIDTH = 1.2
#: the factor's logarithm at most, either way: it corrects, and no more than that
MOST = 0.25


@dataclass(frozen=True)
class Correction:
    """Of one tile: a weight a feature, and bumps, each a place and its height."""

    weights: tuple[float, ...]
    bumps: tuple[tuple[float, ...], ...] = ()

    def factor(self, measures: np.ndarray) -> np.ndarray:
        """What the model's time is multiplied by, for measures [..., features + place]."""
        log = measures[..., : len(FEATURES)] @ np.array(self.weights)
        if self.bumps:
            bumps = np.array(self.bumps)
            log = log + near(measures, bumps[:, : len(PLACE)]) @ bumps[:, len(PLACE)]
        return np.asarray(np.exp(np.clip(log, -MOST, MOST)))


def near(measures: np.ndarray, places: np.ndarray) -> np.ndarray:
    """How near launches are to places [n, len(PLACE)]: 1 at one, float64 [..., n]."""
    apart = measures[..., None, len(FEATURES) :] - places
    return np.asarray(np.exp(-(apart**2).sum(axis=-1) / (2 * WIDTH**2)))


@dataclass(frozen=True)
class Call:
    """What a launch's measures need of its call besides the work tiles."""

    shape: Shape
    #: query rows of a request, the mean of those that have any
    rows: float
    #: workers that the card has room for, SMs / cluster
    room: float

    @classmethod
    def of(cls, problem: Problem, shape: Shape, room: float) -> Call:
        """A call on a card with room for so many workers."""
        return cls(shape, float(problem.rows.sum()) / max(1, shape.batch), room)

    def measures(
        self,
        tiles: np.ndarray,
        longest: np.ndarray,
        walked: np.ndarray,
        pieces: np.ndarray,
        uneven: np.ndarray,
    ) -> np.ndarray:
        """float64 [..., features + place] of launches of so many work tiles: `longest` are the
        blocks of the longest piece, `walked` the most tiles of a worker, `pieces` the most of a row
        tile, `uneven` the longest worker's blocks over the mean.
        """
        ones, logs = np.ones_like(uneven), np.log2(pieces)
        busy = np.minimum(1.0, tiles / self.room)
        groups = np.log2(max(1, self.shape.row_tiles.sum())) * ones
        blocks = np.log2(max(1.0, self.shape.blocks.mean())) * ones
        rows = np.log2(max(1.0, self.rows)) * ones
        features = [
            ones,
            busy,
            np.log2(np.maximum(1, longest)) / 3,
            np.log2(np.maximum(1, walked)),
            logs / 3,
            uneven - 1,
            (logs % 1 == 0).astype(np.float64),
        ]
        place = [groups, blocks, rows, logs, busy]
        scaled = [value / spread for value, spread in zip(place, SPREADS, strict=True)]
        return np.stack([*features, *scaled], axis=-1)

    def of_tiles(self, tiles: np.ndarray, worker_begin: np.ndarray) -> np.ndarray:
        """Measures of one launch: int32 `tiles` [n, 8] in walking order."""
        if not len(tiles):
            return np.zeros(len(FEATURES) + len(PLACE))
        counts = np.diff(worker_begin)
        blocks = (tiles[:, 3] - tiles[:, 2]).astype(np.float64)
        loads = np.bincount(np.repeat(np.arange(len(counts)), counts), weights=blocks)
        at_work = loads[loads > 0]
        return self.measures(
            tiles=np.array(len(tiles)),
            longest=blocks.max(),
            walked=counts.max(),
            pieces=tiles[:, 5].max(),
            uneven=np.array(loads.max() / at_work.mean() if len(at_work) else 1.0),
        )

    def of_formula(self, splits: np.ndarray) -> np.ndarray:
        """Measures of grids by formula [counts, features + place], with every request in so many
        pieces, int64 [counts].
        """
        shape = self.shape
        blocks, row_tiles = shape.blocks * shape.has_keys, shape.row_tiles
        pieces = np.minimum(splits[:, None], shape.blocks)
        longest = (-(-blocks // pieces)).max(axis=1, initial=0)
        # a piece without keys is no load
        loaded = (pieces * shape.has_keys) @ row_tiles
        mean = (blocks @ row_tiles) / np.maximum(1, loaded)
        return self.measures(
            tiles=pieces @ row_tiles,
            longest=longest,
            walked=np.ones(len(splits)),
            pieces=pieces.max(axis=1, initial=1),
            uneven=np.where(longest > 0, longest / np.maximum(mean, 1e-9), 1.0),
        )


def of_plan(plan: Plan, room: float) -> np.ndarray:
    """Measures of a plan on a card that has room for so many workers."""
    shape = Shape.of(plan.problem, plan.tile_rows, plan.tile_kv, max(1, plan.num_workers))
    return Call.of(plan.problem, shape, room).of_tiles(plan.tiles, plan.worker_begin)
