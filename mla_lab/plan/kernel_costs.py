"""Constants of our kernel families, from which the cost model of a problem follows.

`data/runtime/kernel_costs.json` holds those of a sweep where one was made (see `calibrate`);
without it the figures below stand in. What builds for a cache of eight bits take is in a record of
its own; formats that it does not hold are priced as 16 bits are, by their bytes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from ..core.errors import invalid
from ..core.problem import Problem
from ..core.resources import data_dir
from .correction import FEATURES, PLACE, Correction
from .cost import CostModel
from .ways import DEEP, GRID, MAIL, PAIR, ROWS, WALK

#: rows that one CTA can hold; a taller tile is shared by the CTAs of a cluster
CTA_ROWS = 64
RECORD = "runtime/kernel_costs.json"
#: the same for builds that read a cache of eight bits, whose rows name the query and the cache
FORMATS_RECORD = "runtime/kernel_costs_eight_bits.json"
#: what `RECORD` was calibrated with; fp16 takes as long where power allows it
SIXTEEN = ("bf16", "bf16")
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
    l2_rate: float = 10000.0
    sharpness: float = 4.0
    way: str = ROWS.name
    #: what was learnt beside them (see `correction`), by (tile rows, cluster)
    corrections: tuple[tuple[int, int, Correction], ...] = ()

    @property
    def key(self) -> tuple[str, str]:
        """What these constants are of: kernel and way."""
        return self.kernel, self.way

    def of(self, problem: Problem) -> KernelCosts:
        """These, or those of the way's builds for the problem's formats where they have such."""
        own = recorded_formats().get((problem.q_dtype, problem.kv_format), ())
        return next((costs for costs in own if costs.key == self.key), self)

    def factor(self, tile_rows: int, cluster: int, measures: np.ndarray) -> np.ndarray:
        """What times of a tile are multiplied by; 1 where no launch taught any better."""
        for rows, ctas, correction in self.corrections:
            if (rows, ctas) == (tile_rows, cluster):
                return correction.factor(measures)
        return np.ones(measures.shape[:-1])

    def constants_alone(self) -> dict[str, Any]:
        """The fields but for what was learnt beside them: by these plans are cut."""
        return {name: value for name, value in vars(self).items() if name != "corrections"}

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
            "l2_rate": self.l2_rate,
            "sharpness": self.sharpness,
        }


#: fitted to launches inside CUDA graphs whose inputs rotate through memory
_MEASURED = "one NVIDIA H200, 2026-11-20: median error 4 %"
#: query rows on the M side
Q_M = KernelCosts(
    kernel="cute/keep_ab_sm90",
    source=_MEASURED,
    launch_ns=740.0,
    tile_ns=3970.0,
    block_ns=0.00168,
    block_row_ns=21.3,
    copy_rate=225.0,
    card_rate=4260.0,
    exchange_rate=27600.0,
    partial_ns=359.0,
    merge_ns=2930.0,
    merge_kernel_ns=3270.0,
    merge_kernel_rate=1420.0,
    cluster_ns=221.0,
    merge_split_ns=17.5,
    head_start=0.0289,
    fill=0.00208,
    cluster_rate=156.0,
    pair_factor=1.11,
    memory_ns=2600.0,
    l2_rate=38600.0,
    sharpness=2.82,
)
#: KV on the M side, by formula. Two stages of KV a CTA are a round trip of memory for every two
#: blocks; its matrix unit mostly waits.
KV_M = KernelCosts(
    kernel="cute/swap_ab_sm90",
    source=_MEASURED,
    launch_ns=840.0,
    tile_ns=2130.0,
    block_ns=1210.0,
    block_row_ns=7.07,
    copy_rate=41.1,
    card_rate=3710.0,
    exchange_rate=1200.0,
    partial_ns=1430.0,
    merge_ns=1310.0,
    merge_kernel_ns=987.0,
    merge_kernel_rate=5140.0,
    cluster_ns=12.3,
    merge_split_ns=16.2,
    head_start=0.013,
    fill=0.372,
    cluster_rate=29.1,
    pair_factor=1.0,
    memory_ns=3350.0,
    l2_rate=7040.0,
    sharpness=4.57,
    way=GRID.name,
)
#: without a flag, a fence or a division before them, partials are there earlier
_MAIL = replace(
    KV_M,
    tile_ns=233.0,
    block_ns=853.0,
    block_row_ns=23.2,
    copy_rate=26.6,
    card_rate=4300.0,
    exchange_rate=3470.0,
    partial_ns=234.0,
    merge_ns=2100.0,
    merge_kernel_ns=3070.0,
    merge_kernel_rate=1680.0,
    cluster_ns=23.1,
    merge_split_ns=0.0906,
    head_start=0.172,
    fill=0.627,
    cluster_rate=17.1,
    pair_factor=2.05,
    memory_ns=1860.0,
    l2_rate=6740.0,
    sharpness=2.99,
    way=MAIL.name,
)
#: a third KV tile in flight
_DEEP = replace(
    _MAIL,
    tile_ns=1100.0,
    block_ns=973.0,
    block_row_ns=11.1,
    copy_rate=44.2,
    card_rate=4040.0,
    exchange_rate=10500.0,
    partial_ns=778.0,
    merge_ns=2470.0,
    merge_kernel_ns=3670.0,
    merge_kernel_rate=9350.0,
    cluster_ns=74.7,
    merge_split_ns=0.0725,
    head_start=0.001,
    fill=0.72,
    cluster_rate=20.6,
    pair_factor=2.78,
    memory_ns=2340.0,
    l2_rate=17600.0,
    sharpness=4.46,
    way=DEEP.name,
)
#: two row tiles a read of L2
_PAIR = replace(
    _MAIL,
    tile_ns=2100.0,
    block_ns=538.0,
    block_row_ns=45.5,
    copy_rate=34.8,
    card_rate=4730.0,
    exchange_rate=6010.0,
    partial_ns=516.0,
    merge_ns=1030.0,
    merge_kernel_ns=2140.0,
    merge_kernel_rate=4340.0,
    cluster_ns=32.5,
    merge_split_ns=0.0638,
    head_start=0.0156,
    fill=0.488,
    cluster_rate=16.4,
    pair_factor=0.951,
    memory_ns=2440.0,
    l2_rate=17000.0,
    sharpness=3.04,
    way=PAIR.name,
)
#: a plan's words come first
_WALK = replace(
    KV_M,
    tile_ns=888.0,
    block_ns=384.0,
    block_row_ns=60.5,
    copy_rate=1320.0,
    card_rate=4290.0,
    exchange_rate=12000.0,
    partial_ns=3000.0,
    merge_ns=1630.0,
    merge_kernel_ns=1550.0,
    merge_kernel_rate=3970.0,
    cluster_ns=57.6,
    merge_split_ns=0.353,
    head_start=0.001,
    fill=1.76,
    cluster_rate=31.1,
    pair_factor=1.24,
    memory_ns=2580.0,
    l2_rate=14400.0,
    sharpness=4.03,
    way=WALK.name,
)


MEASURED = (KV_M, _MAIL, _DEEP, _PAIR, _WALK, Q_M)


@cache
def recorded_costs() -> tuple[KernelCosts, ...]:
    """The families as calibrated in `data/`; the figures above where there is no record."""
    path = data_dir() / RECORD
    return tuple(_read(path).get(SIXTEEN, ())) if path.is_file() else MEASURED


@cache
def recorded_formats() -> dict[tuple[str, str], tuple[KernelCosts, ...]]:
    """Constants of builds for other formats, by (query, cache); none where there is no record."""
    path = data_dir() / FORMATS_RECORD
    return {key: tuple(costs) for key, costs in _read(path).items()} if path.is_file() else {}


def _read(path: Path) -> dict[tuple[str, str], list[KernelCosts]]:
    """A record's constants by the query and the cache that it names; `SIXTEEN` where it does not.

    Raises InvalidInput for a row of other names than the fields here.
    """
    names = {field.name for field in fields(KernelCosts)}
    found: dict[tuple[str, str], list[KernelCosts]] = {}
    for row in json.loads(path.read_text(encoding="utf-8"))["costs"]:
        query, _, cache = row.pop("formats", "bf16:bf16").partition(":")
        if set(row) | {"corrections"} != names:
            raise invalid(str(path), sorted(row), sorted(names))
        costs = KernelCosts(**{**row, "corrections": _corrections(path, row)})
        found.setdefault((query, cache), []).append(costs)
    return found


def _corrections(path: Path, row: dict[str, Any]) -> tuple[tuple[int, int, Correction], ...]:
    """From a row's {"64x1": {"weights": {feature: weight}, "bumps": [[place ..., height]]}}."""
    found = []
    for tile, learnt in row.get("corrections", {}).items():
        weights, bumps = learnt.get("weights", {}), learnt.get("bumps", [])
        if tuple(weights) != FEATURES or any(len(bump) != len(PLACE) + 1 for bump in bumps):
            wanted = f"weights of {FEATURES}, bumps of {PLACE} and a height"
            raise invalid(f"{path}, corrections of {tile}", learnt, wanted)
        rows, _, cluster = tile.partition("x")
        correction = Correction(tuple(weights.values()), tuple(map(tuple, bumps)))
        found.append((int(rows), int(cluster), correction))
    return tuple(found)


def default_model(
    problem: Problem, tile_rows: int = 64, tile_kv: int = 64, cluster: int = 1
) -> CostModel:
    """The recorded constants: the family with KV on M up to 32 rows, else that with rows on M."""
    wanted = KV_M.kernel if tile_rows <= 32 else Q_M.kernel
    costs = next((c for c in recorded_costs() if c.kernel == wanted), None)
    return (costs or (KV_M if tile_rows <= 32 else Q_M)).model(problem, tile_rows, tile_kv, cluster)
