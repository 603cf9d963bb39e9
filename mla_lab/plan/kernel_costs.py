"""Constants of our kernel families, from which the cost model of a problem follows.

`data/runtime/kernel_costs.json` holds the constants fitted to a sweep in 16 bits (see
`bench.tune.fitting`), `kernel_costs_eight_bits.json` those of builds over an fp8 cache. A format
without constants is priced with those of 16 bits and its own bytes a token.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from ..core.errors import invalid
from ..core.problem import Problem
from ..core.resources import data_dir
from .cost import CostModel
from .launch_modes import FORMER_NAMES, KEEP_AB_PERSISTENT, SWAP_AB_CLUSTER

#: rows that one CTA can hold; a taller tile is shared by the CTAs of a cluster
CTA_ROWS = 64
RECORD = "runtime/kernel_costs.json"
#: the same for builds over an fp8 cache; its rows name the query and the cache
FORMATS_RECORD = "runtime/kernel_costs_eight_bits.json"
#: what `RECORD` was calibrated with; fp16 takes as long where power allows it
SIXTEEN = ("bf16", "bf16")
Whole = int | np.ndarray


@dataclass(frozen=True)
class KernelCosts:
    """Constants of one kernel in one launch mode (see `launch_modes`) on one card; `model` derives
    the `CostModel` of a problem.
    """

    kernel: str
    source: str
    launch_ns: float
    tile_ns: float
    #: a block of 64 tokens: fixed part, and a part that grows with the rows of a CTA
    block_ns: float
    block_row_ns: float
    #: bytes a nanosecond of partials that one CTA stores or reads
    copy_rate: float
    #: bytes a nanosecond of the card: KV reads, and partials stored or read by all CTAs at once
    card_rate: float
    exchange_rate: float
    partial_ns: float
    merge_ns: float
    #: the separate merge kernel: launch and drain, and bytes a nanosecond over all partials
    merge_kernel_ns: float
    merge_kernel_rate: float
    #: added to a work tile for each CTA of its cluster
    cluster_ns: float
    #: merge: once for each split of a row tile
    merge_split_ns: float = 0.0
    #: part of a step that a work tile of more than one step saves (see `cost`)
    head_start: float = 0.0
    #: delay before a tile's first step, in units of one step of all workers (see `cost`)
    fill: float = 0.0
    #: bytes a nanosecond of partials that a CTA reads from its cluster
    cluster_rate: float = 150.0
    #: time of a step of a two-CTA cluster over that of one CTA
    pair_factor: float = 1.0
    #: ramp-up of the reads, L2 bytes a nanosecond, and exponent of the norm (see `cost`)
    memory_ns: float = 2000.0
    l2_rate: float = 10000.0
    sharpness: float = 4.0
    mode: str = KEEP_AB_PERSISTENT.name

    @property
    def key(self) -> tuple[str, str]:
        """Kernel and launch mode."""
        return self.kernel, self.mode

    def of(self, problem: Problem) -> KernelCosts:
        """Constants for the problem's formats; these where none are recorded for the formats."""
        own = recorded_formats().get((problem.q_dtype, problem.kv_format), ())
        return next((costs for costs in own if costs.key == self.key), self)

    @classmethod
    def from_row(cls, row: Mapping[str, Any], origin: str = "record") -> KernelCosts:
        """Constants as a record has them; sweeps up to 2026-11-22 name the launch mode `way`.

        Raises InvalidInput for other fields than those of this cost model.
        """
        values = dict(row)
        if "way" in values:
            former = values.pop("way")
            values["mode"] = FORMER_NAMES.get(former, former)
        names = {field.name for field in fields(cls)}
        if set(values) != names:
            got = f"constants of another cost model, {sorted(values)}"
            raise invalid(origin, got, sorted(names))
        return cls(**values)

    @classmethod
    def of_ones(cls) -> KernelCosts:
        """All constants 1, for results that do not depend on them."""
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
        """Cost model of tiles of this shape. A cluster splits rows over 64 first, then the KV."""
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
        """Fields of a `CostModel` for one tile shape, or for arrays of shapes."""
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
    """The recorded constants of one (kernel, launch mode). Raises InvalidInput without any."""
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
    """Constants for other formats by (query, cache); empty without the record."""
    path = data_dir() / FORMATS_RECORD
    return {key: tuple(costs) for key, costs in _read(path).items()} if path.is_file() else {}


def _read(path: Path) -> dict[tuple[str, str], list[KernelCosts]]:
    """A record's constants by (query, cache); rows without formats are of `SIXTEEN`."""
    found: dict[tuple[str, str], list[KernelCosts]] = {}
    for row in json.loads(path.read_text(encoding="utf-8"))["costs"]:
        query, _, cache = row.pop("formats", "bf16:bf16").partition(":")
        found.setdefault((query, cache), []).append(KernelCosts.from_row(row, str(path)))
    return found


def default_model(problem: Problem, tile_rows: int = 64, tile_kv: int = 64) -> CostModel:
    """Cost model by the recorded constants: swap_ab up to 32 rows a tile, else keep_ab."""
    family = recorded_of((SWAP_AB_CLUSTER if tile_rows <= 32 else KEEP_AB_PERSISTENT).key)
    return family.model(problem, tile_rows, tile_kv)
