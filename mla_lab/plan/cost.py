"""What a plan will cost: a few measured constants, and the time that they predict.

A worker spends `tile_ns` on each work tile, one block time on each block and, where the tile is
one of several, `partial_ns` on leaving its partial. A block takes the longest of: the matrix side
(`block_ns`), what one worker can stream, and its share of the card's bandwidth. A group's last
arriver then merges (`merge_ns`, and `merge_partial_ns` a partial). The plan is done when the last
worker and the last merge are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..errors import invalid
from ..problem import Problem

#: clocks of one 64-token block for 64 rows, with softmax, and the matrix unit's share of them:
#: one H200, 2026-11-20, prototype of a two-CTA cluster over 128 rows
BLOCK64_CLOCKS = 2419
CLOCK_GHZ = 1.98


@dataclass(frozen=True)
class CostModel:
    """Constants in nanoseconds and bytes per nanosecond (= GB/s); one worker, one kernel.

    The defaults of `default_model` come from prototypes on one H200 (2026-11-20): calibrated
    figures replace them by records of the kernels themselves.
    """

    #: launch, to the first instruction of a worker
    launch_ns: float
    #: a work tile without its blocks: Q, first KV in flight, last block's drain, output
    tile_ns: float
    #: matrix and softmax side of one block
    block_ns: float
    block_bytes: int
    #: most that one worker streams, and the card's read bandwidth
    worker_rate: float
    card_rate: float
    #: leaving a partial instead of an output
    partial_ns: float
    #: merging: once a group, and once a partial
    merge_ns: float
    merge_partial_ns: float

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value >= 0 or value == float("inf"):
                raise invalid(f"CostModel.{name}", value, "a finite number of 0 or more")
        if min(self.worker_rate, self.card_rate) == 0:
            raise invalid("CostModel rates", 0, "above 0 bytes per ns")

    def block_time(self, streams: float) -> float:
        """Nanoseconds of one block while `streams` workers read different keys."""
        rate = min(self.worker_rate, self.card_rate / max(streams, 1.0))
        return max(self.block_ns, self.block_bytes / rate)

    def tile_times(self, blocks: np.ndarray, split: np.ndarray, streams: float) -> np.ndarray:
        """Nanoseconds of each work tile, int64: whole numbers keep assignment reproducible."""
        times = self.tile_ns + blocks * self.block_time(streams) + split * self.partial_ns
        return np.rint(times).astype(np.int64)

    def merge_time(self, splits: np.ndarray) -> np.ndarray:
        """Nanoseconds to merge row tiles cut into `splits` pieces; none where there is one."""
        return np.where(splits > 1, self.merge_ns + splits * self.merge_partial_ns, 0.0)


def default_model(
    problem: Problem, tile_rows: int = 64, tile_kv: int = 64, cluster: int = 1
) -> CostModel:
    """Constants of an H200 for tiles of this shape.

    Measured there on 2026-11-20: 2419 clocks a 64 x 64 block a CTA; 4.33 TB/s; 0.7 us a launch;
    1.7 us from a CTA's start to its first scores, 0.6 us from there to the end of its first block;
    0.9 us until a peer sees a partial. A CTA moves about 64 bytes a clock to and from L2, which
    sets the time of writing and merging partials: 64 rows of 512 fp32 are 131 KB, or 1.0 us.
    """
    rows = tile_rows / cluster
    share = max(rows, 16) / 64 if rows <= 32 else max(rows, 64) / 64
    partial_copy = rows * problem.latent_dim * 4 / (64 * CLOCK_GHZ)
    return CostModel(
        launch_ns=700.0,
        tile_ns=1700.0,
        block_ns=max(0.25, share) * BLOCK64_CLOCKS / CLOCK_GHZ * tile_kv / 64,
        block_bytes=tile_kv * problem.kv_token_bytes,
        worker_rate=64 * CLOCK_GHZ * cluster,
        card_rate=4330.0,
        partial_ns=300.0 + partial_copy,
        merge_ns=900.0,
        merge_partial_ns=partial_copy,
    )


def finish_times(times: np.ndarray, worker_begin: np.ndarray) -> np.ndarray:
    """When each tile ends, its worker having walked those before it; `times` in walking order."""
    total = np.cumsum(times)
    counts = np.diff(worker_begin)
    before = np.append(0, total)[worker_begin[:-1]]
    return total - np.repeat(before, counts)


def makespan(
    model: CostModel, tiles: np.ndarray, times: np.ndarray, worker_begin: np.ndarray
) -> float:
    """Predicted nanoseconds from launch to the last result.

    `tiles` and `worker_begin` as in `Plan`, `times` the nanoseconds of each tile.
    """
    if not len(tiles):
        return model.launch_ns
    ends = finish_times(times, worker_begin)
    last = float(ends.max())
    split = tiles[:, 7] >= 0
    if split.any():
        group = tiles[split, 7]
        arrival = np.zeros(int(group.max()) + 1)
        np.maximum.at(arrival, group, ends[split])
        splits = np.zeros(arrival.size, dtype=np.int64)
        splits[group] = tiles[split, 5]
        last = max(last, float((arrival + model.merge_time(splits)).max()))
    return model.launch_ns + last
