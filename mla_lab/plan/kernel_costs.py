"""Constants of our kernel families, from which the cost model of a problem follows.

`data/runtime/kernel_costs.json` holds the constants fitted to a sweep in 16 bits (see
`tune.fitting`). Builds that read a cache of eight bits have a record of their own; a format that it
does not hold is priced with the constants of 16 bits and its own bytes a token.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from ..core.errors import invalid
from ..core.problem import Problem
from ..core.resources import data_dir
from .cost import CostModel
from .ways import GRID, ROWS

#: rows that one CTA can hold; a taller tile is shared by the CTAs of a cluster
CTA_ROWS = 64
RECORD = "runtime/kernel_costs.json"
#: the same for builds that read a cache of eight bits, whose rows name the query and the cache
FORMATS_RECORD = "runtime/kernel_costs_eight_bits.json"
#: what `RECORD` was calibrated with; fp16 takes as long where power allows it
SIXTEEN = ("bf16", "bf16")
#: (kernel, way) of two families that others name
KEEP_AB_ROWS = (ROWS.kernel, ROWS.name)
SWAP_AB_GRID = (GRID.kernel, GRID.name)
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

    @property
    def key(self) -> tuple[str, str]:
        """What these constants are of: kernel and way."""
        return self.kernel, self.way

    def of(self, problem: Problem) -> KernelCosts:
        """These, or those of the way's builds for the problem's formats where they have such."""
        own = recorded_formats().get((problem.q_dtype, problem.kv_format), ())
        return next((costs for costs in own if costs.key == self.key), self)

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


def recorded_of(key: tuple[str, str]) -> KernelCosts:
    """The recorded constants of one (kernel, way). Raises InvalidInput where there are none."""
    found = {costs.key: costs for costs in recorded_costs()}
    if key not in found:
        raise invalid("kernel costs", key, tuple(found))
    return found[key]


@cache
def recorded_costs() -> tuple[KernelCosts, ...]:
    """The families in 16 bits, as `data/runtime/kernel_costs.json` holds them."""
    return tuple(_read(data_dir() / RECORD).get(SIXTEEN, ()))


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
        if set(row) != names:
            raise invalid(str(path), sorted(row), sorted(names))
        found.setdefault((query, cache), []).append(KernelCosts(**row))
    return found


def default_model(
    problem: Problem, tile_rows: int = 64, tile_kv: int = 64, cluster: int = 1
) -> CostModel:
    """The recorded constants: swap_ab up to 32 rows a tile, else keep_ab."""
    family = recorded_of(SWAP_AB_GRID if tile_rows <= 32 else KEEP_AB_ROWS)
    return family.model(problem, tile_rows, tile_kv, cluster)
