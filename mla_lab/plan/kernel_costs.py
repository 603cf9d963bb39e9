"""Constants of our kernel families, from which the cost model of a problem follows.

`data/kernel_costs.json` holds those of a sweep where one was made (see `calibrate`); without it
the figures below stand in.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

import numpy as np

from ..errors import invalid
from ..problem import Problem
from ..resources import data_dir
from .cost import CostModel
from .ways import DEEP, GRID, MAIL, PAIR, ROWS, WALK

#: rows that one CTA can hold; a taller tile is shared by the CTAs of a cluster
CTA_ROWS = 64
RECORD = "kernel_costs.json"
Whole = int | np.ndarray


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
    #: bytes per nanosecond that a CTA leaves or takes as partials
    copy_rate: float
    #: bytes per nanosecond of the card: read, and left or taken as partials by all CTAs at once
    card_rate: float
    exchange_rate: float
    partial_ns: float
    merge_ns: float
    #: a merge kernel behind this one: its launch and drain, and its rate over all partials
    merge_kernel_ns: float
    merge_kernel_rate: float
    #: a work tile of a cluster: for each CTA
    cluster_ns: float
    #: merging: once for each split of a row tile
    merge_split_ns: float = 0.0
    #: of a step, saved by a work tile that has more than one (see `cost`)
    head_start: float = 0.0
    #: of the card's time for one step of all workers, before a tile's first (see `cost`)
    fill: float = 0.0
    #: bytes per nanosecond of the partials that a CTA takes in from its cluster
    cluster_rate: float = 150.0
    #: how much longer a step takes two CTAs that share it than one
    pair_factor: float = 1.0
    #: before reads run at the card's rate, and the norm of chain and memory (see `cost`)
    memory_ns: float = 2000.0
    sharpness: float = 4.0
    way: str = ROWS.name

    @property
    def key(self) -> tuple[str, str]:
        """What these constants are of: kernel and way."""
        return self.kernel, self.way

    @classmethod
    def of_ones(cls) -> KernelCosts:
        """All constants 1: for what does not depend on them."""
        numbers: dict[str, Any] = {f.name: 1.0 for f in fields(cls) if f.type == "float"}
        return cls(kernel="", source="", **numbers)

    def model(
        self,
        problem: Problem,
        tile_rows: int = 64,
        tile_kv: int = 64,
        cluster: int = 1,
        fused_merge: bool = True,
    ) -> CostModel:
        """Constants for tiles of this shape: row halves first, then keys, over the cluster."""
        found = self.constants(
            tile_rows=tile_rows,
            tile_kv=tile_kv,
            cluster=cluster,
            fused_merge=fused_merge,
            latent_dim=problem.latent_dim,
            token_bytes=problem.kv_token_bytes,
        )
        plain = {name: np.asarray(value).item() for name, value in found.items()}
        return CostModel(**plain)

    def constants(
        self,
        *,
        tile_rows: Whole,
        tile_kv: int,
        cluster: Whole,
        fused_merge: Whole,
        latent_dim: Whole,
        token_bytes: Whole,
    ) -> dict[str, Any]:
        """The fields of a `CostModel`, of one shape or of arrays of them."""
        row_ways = np.minimum(cluster, np.maximum(1, np.asarray(tile_rows) // CTA_ROWS))
        kv_ways = np.maximum(1, np.asarray(cluster) // row_ways)
        partial_bytes = np.asarray(tile_rows) * latent_dim * 4
        block = (
            (self.block_ns + self.block_row_ns * np.asarray(tile_rows) / row_ways) * tile_kv / 64
        )
        exchange = np.where(kv_ways > 1, partial_bytes / self.cluster_rate, 0.0)
        exchange = exchange + np.where(np.asarray(cluster) > 1, self.cluster_ns * cluster, 0.0)
        return {
            "launch_ns": self.launch_ns,
            "tile_ns": self.tile_ns + exchange,
            "block_ns": np.where(row_ways > 1, self.pair_factor, 1.0) * block,
            "block_bytes": tile_kv * np.asarray(token_bytes),
            "card_rate": self.card_rate,
            "partial_ns": self.partial_ns,
            "copy_ns": partial_bytes / (self.copy_rate * np.asarray(cluster)),
            "exchange_ns": partial_bytes / self.exchange_rate,
            "merge_ns": np.where(fused_merge, self.merge_ns, self.merge_kernel_ns),
            "merge_partial_ns": partial_bytes / self.merge_kernel_rate,
            "fused_merge": fused_merge,
            "kv_ways": kv_ways,
            "merge_split_ns": self.merge_split_ns,
            "head_start": self.head_start,
            "fill": self.fill,
            "memory_ns": self.memory_ns,
            "sharpness": self.sharpness,
        }


#: fitted to launches inside CUDA graphs whose inputs rotate through memory
_MEASURED = "one NVIDIA H200, 2026-11-20: median error 4 %"
#: query rows on the M side
Q_M = KernelCosts(
    kernel="cute/q_m",
    source=_MEASURED,
    launch_ns=740.0,
    tile_ns=6650.0,
    block_ns=0.002,
    block_row_ns=16.4,
    copy_rate=604.0,
    card_rate=4920.0,
    exchange_rate=77100.0,
    partial_ns=339.0,
    merge_ns=1610.0,
    merge_kernel_ns=1870.0,
    merge_kernel_rate=1760.0,
    cluster_ns=160.0,
    merge_split_ns=11.6,
    head_start=0.0788,
    fill=0.00187,
    cluster_rate=173.0,
    pair_factor=1.1,
    memory_ns=1090.0,
    sharpness=1.61,
)
#: KV on the M side, by formula. Two stages of KV a CTA are a round trip of memory for every two
#: blocks; its matrix unit mostly waits.
KV_M = KernelCosts(
    kernel="cute/kv_m",
    source=_MEASURED,
    launch_ns=840.0,
    tile_ns=2430.0,
    block_ns=1180.0,
    block_row_ns=7.78,
    copy_rate=50.6,
    card_rate=4840.0,
    exchange_rate=1010.0,
    partial_ns=1770.0,
    merge_ns=1460.0,
    merge_kernel_ns=1550.0,
    merge_kernel_rate=3690.0,
    cluster_ns=16.0,
    merge_split_ns=9.02,
    head_start=0.0162,
    fill=0.78,
    cluster_rate=35.3,
    pair_factor=1.26,
    memory_ns=2700.0,
    sharpness=4.36,
    way=GRID.name,
)
#: without a flag, a fence or a division before them, partials are there earlier
_MAIL = replace(
    KV_M,
    way=MAIL.name,
    tile_ns=487.0,
    block_ns=987.0,
    block_row_ns=19.2,
    copy_rate=27.1,
    card_rate=4060.0,
    exchange_rate=5910.0,
    partial_ns=441.0,
    merge_ns=1800.0,
    merge_kernel_ns=3140.0,
    merge_kernel_rate=2480.0,
    cluster_ns=20.0,
    merge_split_ns=0.0842,
    head_start=0.165,
    fill=0.422,
    cluster_rate=19.0,
    memory_ns=1940.0,
    sharpness=2.86,
)
#: a third KV tile in flight
_DEEP = replace(
    _MAIL,
    way=DEEP.name,
    tile_ns=980.0,
    block_ns=921.0,
    block_row_ns=14.5,
    copy_rate=51.9,
    card_rate=3990.0,
    exchange_rate=13500.0,
    partial_ns=749.0,
    merge_ns=2790.0,
    merge_kernel_rate=8590.0,
    cluster_ns=52.4,
    merge_split_ns=0.0642,
    head_start=0.00243,
    fill=0.357,
    cluster_rate=17.9,
    memory_ns=2540.0,
    sharpness=4.15,
)
#: two row tiles a read of L2
_PAIR = replace(
    _MAIL,
    way=PAIR.name,
    tile_ns=2670.0,
    block_ns=505.0,
    block_row_ns=39.6,
    copy_rate=35.3,
    card_rate=3890.0,
    exchange_rate=5960.0,
    partial_ns=498.0,
    merge_ns=808.0,
    merge_kernel_ns=2310.0,
    merge_kernel_rate=3390.0,
    cluster_ns=35.0,
    merge_split_ns=0.117,
    head_start=0.0345,
    fill=0.283,
    cluster_rate=16.4,
    memory_ns=1920.0,
    sharpness=3.96,
)
#: a plan's words come first
_WALK = replace(
    KV_M,
    way=WALK.name,
    tile_ns=1700.0,
    block_ns=449.0,
    block_row_ns=55.5,
    copy_rate=1750.0,
    card_rate=4510.0,
    exchange_rate=7440.0,
    partial_ns=2000.0,
    merge_ns=1600.0,
    merge_kernel_ns=1630.0,
    merge_kernel_rate=4230.0,
    cluster_ns=49.3,
    merge_split_ns=0.289,
    head_start=0.001,
    fill=1.71,
    cluster_rate=17.7,
    memory_ns=2030.0,
    sharpness=3.38,
)


MEASURED = (KV_M, _MAIL, _DEEP, _PAIR, _WALK, Q_M)


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
