"""What a plan will cost: a few measured constants, and the time that they predict.

A worker spends `tile_ns` on each work tile, one block time on each step and, where the tile is
one of several, time on leaving its partial. A step is one block, or one block for each of
the `kv_ways` CTAs of a cluster that divide a tile's keys. It takes the longest of: the matrix side
(`block_ns`, rising to `hot_block_ns` as all workers get busy: a card under full matrix load is held
by its power cap and lowers its clock), what one CTA can take in, and the worker's share of the
card's bandwidth.

Partials are left, and taken again by a merge, at the rate of one CTA (`copy_ns`) or, where many do
it at once, at that of the card: `exchange_ns` times their number. Fused, every worker that has
split a row tile merges a share of it behind its last tile, and has the weights of all its splits to
find first. Separate, a second kernel begins when all workers are done, with every SM at work on all
partials together.

The loads of a tile's first two steps are asked for together, so that the second one comes
`head_start` of a step earlier than the rest follow each other. The first ones of all workers are
asked for at once, and wait for each other as `fill` says.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..errors import invalid


@dataclass(frozen=True)
class CostModel:
    """Constants of one kernel on one problem: nanoseconds, bytes, bytes per nanosecond (GB/s)."""

    #: launch, to the first instruction of a worker
    launch_ns: float
    #: a work tile without its blocks: Q, first KV in flight, last block's drain, output
    tile_ns: float
    #: matrix and softmax side of one block: with few workers busy, and with all
    block_ns: float
    hot_block_ns: float
    block_bytes: int
    #: most that one CTA takes in, and the card's read bandwidth
    cta_rate: float
    card_rate: float
    #: leaving a partial instead of an output, without its bytes
    partial_ns: float
    #: the bytes of one partial: for one worker alone, and of the card's rate for them all
    copy_ns: float
    exchange_ns: float
    #: merging: once a plan, and (separate) once a partial
    merge_ns: float
    merge_partial_ns: float
    fused_merge: bool = True
    #: CTAs of a worker that divide a tile's blocks
    kv_ways: int = 1
    #: merging (fused): once for each split of the row tile that has most
    merge_split_ns: float = 0.0
    #: of a step, saved by a work tile that has more than one
    head_start: float = 0.0
    #: of the card's time for one step of all streams, passed before a work tile's first step
    fill: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not 0 <= value < float("inf"):
                raise invalid(f"CostModel.{name}", value, "a finite number of 0 or more")
        if min(self.cta_rate, self.card_rate, self.kv_ways) == 0:
            raise invalid("CostModel rates and kv_ways", 0, "above 0")

    def step_time(self, streams: float, busy: float) -> float:
        """Nanoseconds of one step while `streams` workers read different keys and the share `busy`
        of all workers (0 to 1) is at work.
        """
        matrix = self.block_ns + (self.hot_block_ns - self.block_ns) * busy
        return max(matrix, self.block_bytes / self.cta_rate, self._shared(streams))

    def start_time(self, streams: float) -> float:
        """Nanoseconds of a work tile without its steps, its first blocks' way from memory
        included, while `streams` workers read different keys.
        """
        return self.tile_ns + self.fill * self._shared(streams)

    def _shared(self, streams: float) -> float:
        return self.kv_ways * self.block_bytes * max(streams, 1.0) / self.card_rate

    def partial_time(self, partials: np.ndarray, workers: int) -> np.ndarray:
        """Nanoseconds that a worker spends on leaving one of so many partials of a plan."""
        at_once = np.minimum(partials, workers)
        return self.partial_ns + np.maximum(self.copy_ns, at_once * self.exchange_ns)

    def tile_times(
        self,
        blocks: np.ndarray,
        split: np.ndarray,
        start_ns: float,
        step_ns: float,
        partial_ns: float,
    ) -> np.ndarray:
        """Nanoseconds of each work tile, int64: whole numbers keep assignment reproducible."""
        steps = self.steps(-(-blocks // self.kv_ways))
        times = start_ns + steps * step_ns + split * partial_ns
        return np.rint(times).astype(np.int64)

    def steps(self, steps: np.ndarray) -> np.ndarray:
        """So many steps of one work tile, as many times as long as one that stands alone."""
        return steps - self.head_start * (steps > 1)

    def merge_time(self, partials: np.ndarray, splits: np.ndarray) -> np.ndarray:
        """Nanoseconds from the last of so many partials of a plan to the last merged row, where
        no row tile has more than so many `splits`.
        """
        if self.fused_merge:
            moved = np.maximum(self.copy_ns, partials * self.exchange_ns)
            moved = moved + splits * self.merge_split_ns
        else:
            moved = partials * self.merge_partial_ns
        return np.where(partials > 0, self.merge_ns + moved, 0.0)


def makespan(
    model: CostModel, tiles: np.ndarray, times: np.ndarray, worker_begin: np.ndarray
) -> float:
    """Predicted nanoseconds from launch to the last result.

    `tiles` and `worker_begin` as in `Plan`, `times` the nanoseconds of each tile.
    """
    if not len(tiles):
        return model.launch_ns
    worker = np.repeat(np.arange(len(worker_begin) - 1), np.diff(worker_begin))
    ends = np.bincount(worker, weights=times)
    split = tiles[:, 7] >= 0
    last = float(ends.max())
    if split.any():
        # a worker merges behind its own last tile, and waits for those it shares a row tile with
        ready = float(ends[worker[split]].max()) if model.fused_merge else last
        partials = np.count_nonzero(split, keepdims=True)
        merge = float(model.merge_time(partials, tiles[:, 5].max())[0])
        last = max(last, ready + merge)
    return model.launch_ns + last
