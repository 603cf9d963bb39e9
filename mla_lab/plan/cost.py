"""Cost model of a plan: predicted time from a few measured constants.

A worker spends `tile_ns` on each work tile, `block_ns` on each step (tensor cores, softmax, and the
CTA's own loads), and, where a row tile is split, time on storing its partial. A step is one block,
or one block for each of the `kv_ways` CTAs of a cluster that split a tile's KV. Three terms limit a
plan: the chain of the longest worker; all KV reads at the card's HBM bandwidth; all KV reads from
L2, where row tiles read the same KV. A term that is much longer than the others is the time of the
plan; terms of similar length slow each other down. So the time is their norm,
(chain^p + memory^p + L2^p)^(1/p) with p `sharpness`.

Partials are stored, and read again by the merge, at the rate of one CTA (`copy_ns`) or, where many
CTAs do so at once, at the card's rate: `exchange_ns` times their number. In a cooperative merge,
every worker of a split row tile merges a part of its rows after its own last tile, and first
reads the lse of all splits. A separate merge kernel starts when all workers are done, and all SMs
share all partials.

The loads of a tile's first two steps are issued together, so that the second arrives `head_start`
of a step earlier than in the steady state. The first loads of all workers are issued at the same
time and queue in HBM, which costs `fill`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..core.errors import invalid

Numbers = float | np.ndarray


@dataclass(frozen=True)
class CostModel:
    """Constants of one kernel on one problem: nanoseconds, bytes, bytes a nanosecond (GB/s)."""

    #: launch, to the first instruction of a worker
    launch_ns: float
    #: a work tile without its blocks: Q, first KV in flight, last block's drain, output
    tile_ns: float
    #: one step of a worker
    block_ns: float
    block_bytes: int
    #: the card's read bandwidth
    card_rate: float
    #: storing a partial in place of an output, without its bytes
    partial_ns: float
    #: time of one partial's bytes: for one worker alone, and at the card's rate for all of them
    copy_ns: float
    exchange_ns: float
    #: merge: once a plan, and (merge kernel) once a partial
    merge_ns: float
    merge_partial_ns: float
    fused_merge: bool = True
    #: CTAs of a worker that split a tile's blocks
    kv_ways: int = 1
    #: cooperative merge: once for each split of the row tile with the most splits
    merge_split_ns: float = 0.0
    #: part of a step that a work tile of more than one step saves
    head_start: float = 0.0
    #: delay before a tile's first step, in units of the card's time for one step of all streams
    fill: float = 0.0
    #: time in which reads do not run at the card's bandwidth: ramp-up, and after the last read
    memory_ns: float = 0.0
    #: bytes a nanosecond that all work tiles together read from L2
    l2_rate: float = 1e9
    #: exponent of the norm of chain, memory and L2
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
        """Nanoseconds of a work tile before its first step, the latency of its first loads
        included, while `streams` workers read different keys.
        """
        shared = self.kv_ways * self.block_bytes * np.maximum(streams, 1.0) / self.card_rate
        return self.tile_ns + self.fill * shared

    def memory_time(self, blocks: Numbers, taken: Numbers) -> Numbers:
        """Nanoseconds for reading so many different blocks from HBM, and for so many in all from
        L2.
        """
        read = self.memory_ns + blocks * self.block_bytes / self.card_rate
        return self.both(np.asarray(read), taken * self.block_bytes / self.l2_rate)

    def both(self, chain: np.ndarray, memory: Numbers) -> np.ndarray:
        """Nanoseconds of the longest worker with the card's reads beside it: their norm."""
        longer, shorter = np.maximum(chain, memory), np.minimum(chain, memory)
        share = shorter / np.maximum(longer, 1e-9)
        return longer * (1.0 + share**self.sharpness) ** (1.0 / self.sharpness)

    def partial_time(self, partials: np.ndarray, workers: int | np.ndarray) -> np.ndarray:
        """Nanoseconds for storing one partial, of so many in a plan."""
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
        """Nanoseconds after the launch. last: the longest worker's time; ready: that of the workers
        with partials; merge: time of the merge, 0 without partials.
        """
        merged = np.where(merge > 0, self.both(ready, memory_ns) + merge, 0.0)
        return np.maximum(self.both(last, memory_ns), merged)

    def steps(self, steps: np.ndarray) -> np.ndarray:
        """Effective number of steps of a work tile, after `head_start`."""
        return steps - self.head_start * (steps > 1)

    def merge_time(self, partials: np.ndarray, splits: np.ndarray) -> np.ndarray:
        """Nanoseconds from the last stored partial to the last merged row. splits: of the row tile
        that has most.
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
    # a worker merges after its own last tile, and waits for the other splits of the row tile
    ready = ends[worker[split]].max(initial=0.0) if model.fused_merge else last
    partials = np.count_nonzero(split, keepdims=True)
    merge = model.merge_time(partials, tiles[:, 5].max())[0]
    return float(model.launch_ns + model.ends(last, ready, merge, memory_ns))
