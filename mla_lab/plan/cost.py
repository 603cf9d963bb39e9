"""What a plan will cost: a few measured constants, and the time that they predict.

A worker spends `tile_ns` on each work tile, `block_ns` on each step (its matrix and softmax side,
and a CTA's own way to memory), and, where the tile is one of several, time on leaving its partial.
A step is one block, or one block for each of the `kv_ways` CTAs of a cluster that divide a tile's
keys. The longest worker is the chain. All keys that a plan reads, at the card's bandwidth, are its
memory side, and so are all that its tiles take out of L2, where row tiles read the same. None of
these waits for the others where one is much longer; where they are alike each takes from the rest,
and a plan lasts their norm, (chain^p + memory^p + L2^p)^(1/p), p `sharpness`.

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

from ..core.errors import invalid

Numbers = float | np.ndarray


@dataclass(frozen=True)
class CostModel:
    """Constants of one kernel on one problem: nanoseconds, bytes, bytes per nanosecond (GB/s)."""

    #: launch, to the first instruction of a worker
    launch_ns: float
    #: a work tile without its blocks: Q, first KV in flight, last block's drain, output
    tile_ns: float
    #: one step of a worker
    block_ns: float
    block_bytes: int
    #: the card's read bandwidth
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
    #: until reads run at the card's bandwidth, and after their last
    memory_ns: float = 0.0
    #: bytes per nanosecond that all work tiles together take out of L2
    l2_rate: float = 1e9
    #: how sharply the longer one of chain and memory decides
    sharpness: float = 4.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not (np.greater_equal(value, 0) & np.isfinite(value)).all():
                raise invalid(f"CostModel.{name}", value, "a finite number of 0 or more")
        for name in ("card_rate", "l2_rate", "kv_ways"):
            if np.min(getattr(self, name)) == 0:
                raise invalid(f"CostModel.{name}", 0, "above 0")
        if np.min(self.sharpness) < 1:
            raise invalid("CostModel.sharpness", self.sharpness, "1 or more")

    def start_time(self, streams: Numbers) -> Numbers:
        """Nanoseconds of a work tile without its steps, its first blocks' way from memory
        included, while `streams` workers read different keys.
        """
        shared = self.kv_ways * self.block_bytes * np.maximum(streams, 1.0) / self.card_rate
        return self.tile_ns + self.fill * shared

    def memory_time(self, blocks: Numbers, taken: Numbers) -> Numbers:
        """Nanoseconds for reading so many different blocks from memory, and for so many in all that
        work tiles take out of L2.
        """
        read = self.memory_ns + blocks * self.block_bytes / self.card_rate
        return self.both(np.asarray(read), taken * self.block_bytes / self.l2_rate)

    def both(self, chain: np.ndarray, memory: Numbers) -> np.ndarray:
        """Nanoseconds of a chain of work and the card's reading beside it."""
        longer, shorter = np.maximum(chain, memory), np.minimum(chain, memory)
        share = shorter / np.maximum(longer, 1e-9)
        return longer * (1.0 + share**self.sharpness) ** (1.0 / self.sharpness)

    def partial_time(self, partials: np.ndarray, workers: int | np.ndarray) -> np.ndarray:
        """Nanoseconds that a worker spends on leaving one of so many partials of a plan."""
        at_once = np.minimum(partials, workers)
        return self.partial_ns + np.maximum(self.copy_ns, at_once * self.exchange_ns)

    def tile_times(
        self, blocks: np.ndarray, split: np.ndarray, start_ns: float, partial_ns: float
    ) -> np.ndarray:
        """Nanoseconds of each work tile, int64: whole numbers keep assignment reproducible."""
        steps = self.steps(-(-blocks // self.kv_ways))
        times = start_ns + steps * self.block_ns + split * partial_ns
        return np.rint(times).astype(np.int64)

    def ends(
        self,
        last: np.ndarray,
        ready: np.ndarray,
        merge: np.ndarray,
        memory_ns: Numbers,
    ) -> np.ndarray:
        """Nanoseconds after the launch: `last` is the longest worker's chain, `ready` that of those
        with partials, `merge` what follows them, 0 without any.
        """
        merged = np.where(merge > 0, self.both(ready, memory_ns) + merge, 0.0)
        return np.maximum(self.both(last, memory_ns), merged)

    def steps(self, steps: np.ndarray) -> np.ndarray:
        """So many steps of one work tile, as many times as long as one that stands alone."""
        return steps - self.head_start * (steps > 1)

    def merge_time(self, partials: np.ndarray, splits: np.ndarray) -> np.ndarray:
        """Nanoseconds from the last of so many partials of a plan to the last merged row, where
        no row tile has more than so many `splits`.
        """
        shares = np.maximum(self.copy_ns, partials * self.exchange_ns)
        shares = shares + splits * self.merge_split_ns
        moved = np.where(self.fused_merge, shares, partials * self.merge_partial_ns)
        return np.where(partials > 0, self.merge_ns + moved, 0.0)


def makespan(
    model: CostModel,
    tiles: np.ndarray,
    times: np.ndarray,
    worker_begin: np.ndarray,
    memory_ns: float,
) -> float:
    """Predicted nanoseconds from launch to the last result.

    `tiles` and `worker_begin` as in `Plan`, `times` the nanoseconds of each tile, `memory_ns` those
    of reading all keys.
    """
    if not len(tiles):
        return model.launch_ns
    worker = np.repeat(np.arange(len(worker_begin) - 1), np.diff(worker_begin))
    ends = np.bincount(worker, weights=times)
    split = tiles[:, 7] >= 0
    last = ends.max()
    # a worker merges behind its own last tile, and waits for those it shares a row tile with
    ready = ends[worker[split]].max(initial=0.0) if model.fused_merge else last
    partials = np.count_nonzero(split, keepdims=True)
    merge = model.merge_time(partials, tiles[:, 5].max())[0]
    return float(model.launch_ns + model.ends(last, ready, merge, memory_ns))
