"""What a plan will cost: a few measured constants, and the time that they predict.

A worker spends `tile_ns` on each work tile, one block time on each step and, where the tile is
one of several, `partial_ns` on leaving its partial. A step is one block, or one block for each of
the `kv_ways` CTAs of a cluster that divide a tile's keys. It takes the longest of: the matrix side
(`block_ns`, rising to `hot_block_ns` as all workers get busy: a card under full matrix load is held
by its power cap and lowers its clock), what one CTA can take in, and the worker's share of the
card's bandwidth. A group's last arriver then merges (`merge_ns`, and `merge_partial_ns` a partial).
The plan is done when the last worker and the last merge are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..errors import invalid
from ..problem import Problem

#: rows that one CTA can hold; a taller tile is shared by the CTAs of a cluster
CTA_ROWS = 64


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
    #: leaving a partial instead of an output
    partial_ns: float
    #: merging: once a group, and once a partial
    merge_ns: float
    merge_partial_ns: float
    #: CTAs of a worker that divide a tile's blocks
    kv_ways: int = 1

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
        shared = self.kv_ways * self.block_bytes * max(streams, 1.0) / self.card_rate
        matrix = self.block_ns + (self.hot_block_ns - self.block_ns) * busy
        return max(matrix, self.block_bytes / self.cta_rate, shared)

    def tile_times(self, blocks: np.ndarray, split: np.ndarray, step_ns: float) -> np.ndarray:
        """Nanoseconds of each work tile, int64: whole numbers keep assignment reproducible."""
        steps = -(-blocks // self.kv_ways)
        times = self.tile_ns + steps * step_ns + split * self.partial_ns
        return np.rint(times).astype(np.int64)

    def merge_time(self, splits: np.ndarray) -> np.ndarray:
        """Nanoseconds to merge row tiles cut into `splits` pieces; none where there is one."""
        return np.where(splits > 1, self.merge_ns + splits * self.merge_partial_ns, 0.0)


@dataclass(frozen=True)
class KernelCosts:
    """Constants of one kernel family on one card, from which a problem's `CostModel` follows."""

    kernel: str
    source: str
    launch_ns: float
    tile_ns: float
    #: a block of 64 tokens: fixed part, and a part that grows with the rows of a CTA
    block_ns: float
    block_row_ns: float
    #: how much longer that takes on a card under full matrix load
    hot_factor: float
    #: bytes per nanosecond that a CTA takes in, writes or reads as partials, and of the card
    cta_rate: float
    copy_rate: float
    card_rate: float
    partial_ns: float
    merge_ns: float
    #: one exchange inside a cluster that divides the keys, beside its bytes
    cluster_ns: float

    def model(
        self, problem: Problem, tile_rows: int = 64, tile_kv: int = 64, cluster: int = 1
    ) -> CostModel:
        """Constants for tiles of this shape: row halves first, then keys, over the cluster."""
        row_ways = min(cluster, max(1, tile_rows // CTA_ROWS))
        kv_ways = max(1, cluster // row_ways)
        copy = tile_rows * problem.latent_dim * 4 / (self.copy_rate * cluster)
        block = (self.block_ns + self.block_row_ns * tile_rows / row_ways) * tile_kv / 64
        exchange = self.cluster_ns + kv_ways * copy if kv_ways > 1 else 0.0
        return CostModel(
            launch_ns=self.launch_ns,
            tile_ns=self.tile_ns + exchange,
            block_ns=block,
            hot_block_ns=block * self.hot_factor,
            block_bytes=tile_kv * problem.kv_token_bytes,
            cta_rate=self.cta_rate,
            card_rate=self.card_rate,
            partial_ns=self.partial_ns + copy,
            merge_ns=self.merge_ns,
            merge_partial_ns=copy,
            kv_ways=kv_ways,
        )


_PROTOTYPE = "prototypes, one NVIDIA H200, 2026-11-20"
#: query rows on the M side. 2419 clocks a 64 x 64 block, at 1.98 GHz and, under full load, at 1.37;
#: 4.33 TB/s of reads; 0.74 us a launch; 1.7 us from a CTA's start to its first scores; 0.9 us until
#: a peer sees a partial.
Q_M = KernelCosts(
    kernel="cute/q_m",
    source=_PROTOTYPE,
    launch_ns=740.0,
    tile_ns=2400.0,
    block_ns=0.0,
    block_row_ns=2419 / 1.98 / 64,
    hot_factor=1.98 / 1.37,
    cta_rate=90.0,
    copy_rate=150.0,
    card_rate=4330.0,
    partial_ns=300.0,
    merge_ns=1200.0,
    cluster_ns=1000.0,
)
#: KV on the M side, at most 64 rows. 2.5 us a block at 64 rows, 1.2 us at 16; clusters of 8 reduce
#: 16 rows in 1.25 us and launch in 0.84 us. Its matrix unit mostly waits: no hot figure is known.
KV_M = KernelCosts(
    kernel="cute/kv_m",
    source=_PROTOTYPE,
    launch_ns=840.0,
    tile_ns=1900.0,
    block_ns=750.0,
    block_row_ns=27.0,
    hot_factor=1.0,
    cta_rate=90.0,
    copy_rate=150.0,
    card_rate=4330.0,
    partial_ns=300.0,
    merge_ns=1200.0,
    cluster_ns=1000.0,
)


def default_model(
    problem: Problem, tile_rows: int = 64, tile_kv: int = 64, cluster: int = 1
) -> CostModel:
    """An H200's constants: the kernel family with KV on M up to 32 rows, else rows on M."""
    costs = KV_M if tile_rows <= 32 else Q_M
    return costs.model(problem, tile_rows, tile_kv, cluster)


def finish_times(times: np.ndarray, worker_begin: np.ndarray) -> np.ndarray:
    """When each tile ends, its worker having walked those before it; `times` in walking order."""
    total = np.cumsum(times)
    before = np.append(0, total)[worker_begin[:-1]]
    return total - np.repeat(before, np.diff(worker_begin))


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
