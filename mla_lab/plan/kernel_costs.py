"""Constants of our kernel families, from which the cost model of a problem follows.

`data/kernel_costs.json` holds those of a sweep where one was made (see `calibrate`); without it
the figures below stand in.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from functools import cache

from ..errors import invalid
from ..problem import Problem
from ..resources import data_dir
from .cost import CostModel
from .ways import DEEP, EIGHT, FORMATS, GRID, MAIL, PAIR, ROWS, WALK

#: rows that one CTA can hold; a taller tile is shared by the CTAs of a cluster
CTA_ROWS = 64
RECORD = "kernel_costs.json"


@dataclass(frozen=True)
class KernelCosts:
    """Constants of one kernel on one card, launched one way (see `ways`), from which a problem's
    `CostModel` follows.
    """

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
    #: one exchange inside a cluster that divides the keys, beside its bytes: for each CTA
    cluster_ns: float
    #: merging: once for each split of a row tile
    merge_split_ns: float = 0.0
    #: of a step, saved by a work tile that has more than one (see `cost`)
    head_start: float = 0.0
    #: of the card's time for one step of all workers, before a tile's first (see `cost`)
    fill: float = 0.0
    #: bytes per nanosecond of the partials that a CTA takes in from its cluster
    cluster_rate: float = 150.0
    way: str = ROWS.name

    @property
    def key(self) -> tuple[str, str]:
        """What these constants are of: kernel and way."""
        return self.kernel, self.way

    def of(self, problem: Problem) -> KernelCosts:
        """These, or those of the way's builds for the problem's formats where it has such."""
        eight = FORMATS.get((problem.q_dtype, problem.kv_format)) == EIGHT
        return EIGHT_BITS.get(self.way, self) if eight else self

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
        exchange = self.cluster_ns * kv_ways + partial_bytes / self.cluster_rate
        exchange = exchange if kv_ways > 1 else 0.0
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
            merge_split_ns=self.merge_split_ns,
            head_start=self.head_start,
            fill=self.fill,
        )


#: fitted to launches inside CUDA graphs whose inputs rotate through memory; cool card to hot one
_MEASURED = "one NVIDIA H200, 2026-11-20: median error 3 %"
#: query rows on the M side: 22 launches of heads 64 and 128, batch 1 to 128. The time of a block
#: rises by 1.3 as the card warms up; each split adds 0.13 us to a merge, its lse being one more to
#: walk.
Q_M = KernelCosts(
    kernel="cute/q_m",
    source=_MEASURED,
    launch_ns=740.0,
    tile_ns=5890.0,
    block_ns=0.0,
    block_row_ns=20.6,
    hot_factor=1.29,
    cta_rate=90.0,
    copy_rate=150.0,
    card_rate=4220.0,
    exchange_rate=5500.0,
    partial_ns=130.0,
    merge_ns=780.0,
    merge_kernel_ns=2500.0,
    merge_kernel_rate=3000.0,
    cluster_ns=60.0,
    merge_split_ns=130.0,
    head_start=0.33,
)
#: KV on the M side, by formula: 71 launches of heads 16 to 128, batch 1 to 16. Two stages of KV a
#: CTA are a round trip of memory for every two blocks; its matrix unit mostly waits: no hot figure.
KV_M = KernelCosts(
    kernel="cute/kv_m",
    source=_MEASURED,
    launch_ns=840.0,
    tile_ns=480.0,
    block_ns=1845.0,
    block_row_ns=17.0,
    hot_factor=1.0,
    cta_rate=90.0,
    copy_rate=95.0,
    card_rate=3920.0,
    exchange_rate=4470.0,
    partial_ns=690.0,
    merge_ns=1400.0,
    merge_kernel_ns=2500.0,
    merge_kernel_rate=3000.0,
    cluster_ns=45.0,
    merge_split_ns=0.6,
    head_start=0.42,
    fill=0.83,
    cluster_rate=28.0,
    way=GRID.name,
)
#: without a flag, a fence or a division before them, partials are there 0.9 us earlier
_MAIL = replace(KV_M, way=MAIL.name, block_ns=1400.0, partial_ns=600.0, merge_ns=900.0)
_DEEP = replace(_MAIL, way=DEEP.name)
#: two row tiles a read of L2
_PAIR = replace(_MAIL, way=PAIR.name, tile_ns=700.0, block_ns=1250.0)
#: a plan's words come first
_WALK = replace(KV_M, way=WALK.name, tile_ns=900.0, block_ns=1400.0)


MEASURED = (KV_M, _MAIL, _DEEP, _PAIR, _WALK, Q_M)

#: e4m3 throughout, by way: what a block takes follows from its rows, not from memory's round trip
_EIGHT = "one NVIDIA H200, 2026-11-20: mail at 16 and 32 rows 23 launches, median error 2 %"
_EIGHT_MAIL = replace(
    _MAIL,
    source=_EIGHT,
    tile_ns=1266.0,
    block_ns=559.0,
    block_row_ns=12.9,
    cta_rate=200.0,
    card_rate=4276.0,
    copy_rate=110.0,
    partial_ns=1477.0,
    merge_ns=1152.0,
    exchange_rate=3980.0,
    head_start=0.02,
    fill=0.01,
)
EIGHT_BITS = {
    costs.way: costs
    for costs in (
        _EIGHT_MAIL,
        replace(KV_M, source=_EIGHT, tile_ns=1793.0, block_ns=603.0, card_rate=4300.0),
        replace(_EIGHT_MAIL, way=WALK.name, tile_ns=1700.0),
    )
}


@cache
def recorded_costs() -> tuple[KernelCosts, ...]:
    """The families as calibrated in `data/`; the figures above where there is no record."""
    path = data_dir() / RECORD
    if not path.is_file():
        return MEASURED
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
