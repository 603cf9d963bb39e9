"""Constants of our kernel families, from which the cost model of a problem follows.

`data/kernel_costs.json` holds calibrated ones where a card was at hand (see `calibrate`); until
then the figures of the prototypes below stand in.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from functools import cache

from ..errors import invalid
from ..problem import Problem
from ..resources import data_dir
from .cost import CostModel

#: rows that one CTA can hold; a taller tile is shared by the CTAs of a cluster
CTA_ROWS = 64
RECORD = "kernel_costs.json"


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
    #: bytes per nanosecond that a CTA takes in, and leaves or takes as partials
    cta_rate: float
    copy_rate: float
    #: bytes per nanosecond of the card: read, and left or taken as partials by all CTAs at once
    card_rate: float
    exchange_rate: float
    partial_ns: float
    merge_ns: float
    #: a merge kernel behind this one: its launch and drain, and its rate over all partials
    merge_kernel_ns: float
    merge_kernel_rate: float
    #: one exchange inside a cluster that divides the keys, beside its bytes
    cluster_ns: float

    def model(
        self,
        problem: Problem,
        tile_rows: int = 64,
        tile_kv: int = 64,
        cluster: int = 1,
        fused_merge: bool = True,
    ) -> CostModel:
        """Constants for tiles of this shape: row halves first, then keys, over the cluster."""
        row_ways = min(cluster, max(1, tile_rows // CTA_ROWS))
        kv_ways = max(1, cluster // row_ways)
        partial_bytes = tile_rows * problem.latent_dim * 4
        copy = partial_bytes / (self.copy_rate * cluster)
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
            partial_ns=self.partial_ns,
            copy_ns=copy,
            exchange_ns=partial_bytes / self.exchange_rate,
            merge_ns=self.merge_ns if fused_merge else self.merge_kernel_ns,
            merge_partial_ns=partial_bytes / self.merge_kernel_rate,
            fused_merge=fused_merge,
            kv_ways=kv_ways,
        )


_PROTOTYPE = "prototypes, one NVIDIA H200, 2026-11-20"
#: query rows on the M side. 2419 clocks a 64 x 64 block, at 1.98 GHz and, under full load, at 1.37;
#: 4.33 TB/s of reads; 0.74 us a launch; 1.7 us from a CTA's start to its first scores. 132 CTAs
#: leave 128 KB each in 3.3 us, wait 0.8 and merge in 3.9; half as many take about half of it.
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
    exchange_rate=5500.0,
    partial_ns=300.0,
    merge_ns=1200.0,
    merge_kernel_ns=2500.0,
    merge_kernel_rate=3000.0,
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
    exchange_rate=5500.0,
    partial_ns=300.0,
    merge_ns=1200.0,
    merge_kernel_ns=2500.0,
    merge_kernel_rate=3000.0,
    cluster_ns=1000.0,
)


PROTOTYPES = (KV_M, Q_M)


@cache
def recorded_costs() -> tuple[KernelCosts, ...]:
    """The families as calibrated in `data/`; the prototype's constants where there is no record."""
    path = data_dir() / RECORD
    if not path.is_file():
        return PROTOTYPES
    rows = json.loads(path.read_text(encoding="utf-8"))["costs"]
    names = {field.name for field in fields(KernelCosts)}
    for row in rows:
        if set(row) != names:
            raise invalid(str(path), sorted(row), sorted(names))
    return tuple(KernelCosts(**row) for row in rows)


def default_model(
    problem: Problem, tile_rows: int = 64, tile_kv: int = 64, cluster: int = 1
) -> CostModel:
    """The recorded constants: the family with KV on M up to 32 rows, else that with rows on M."""
    wanted = KV_M.kernel if tile_rows <= 32 else Q_M.kernel
    costs = next((c for c in recorded_costs() if c.kernel == wanted), None)
    return (costs or (KV_M if tile_rows <= 32 else Q_M)).model(problem, tile_rows, tile_kv, cluster)
