"""What the kernel families of the CuTe backend can do, known without importing cutlass.

Their own modules check a configuration again when it is compiled; a call is refused here, before
anything is compiled.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..errors import unsupported
from ..gpu import Gpu
from ..plan.choose import GRID_OPTIONS, TILES
from ..plan.config import KernelConfig
from ..plan.kernel_costs import KernelCosts, recorded_costs
from ..problem import Problem


@dataclass(frozen=True)
class Family:
    """One kernel family; lists are of what it compiles."""

    kernel: str
    archs: tuple[str, ...]
    dtypes: tuple[str, ...]
    page_sizes: tuple[int, ...]
    #: (tile rows, CTAs of a cluster)
    tiles: tuple[tuple[int, int], ...]
    tile_kv: int
    #: its merge waits for other CTAs, so that all of a launch must be running at once
    waits: bool
    #: it follows a formula (see `plan.formula`) in place of a plan's words
    grid: bool = False


Q_M = Family(
    kernel="cute/q_m",
    archs=("sm_90a",),
    dtypes=("bf16", "fp16"),
    page_sizes=(16, 32, 64, 128),
    tiles=TILES["cute/q_m"],
    tile_kv=64,
    waits=True,
)
KV_M = Family(
    kernel="cute/kv_m",
    archs=("sm_90a",),
    dtypes=("bf16", "fp16"),
    page_sizes=(16, 32, 64, 128),
    tiles=TILES["cute/kv_m"],
    tile_kv=64,
    waits=True,
    grid=True,
)
FAMILIES = {family.kernel: family for family in (Q_M, KV_M)}


def costs() -> tuple[KernelCosts, ...]:
    """Constants of the families that this backend runs."""
    return tuple(cost for cost in recorded_costs() if cost.kernel in FAMILIES)


def family_of(tile_rows: int) -> Family | None:
    """The family whose work tiles have as many rows."""
    for family in FAMILIES.values():
        if any(rows == tile_rows for rows, _ in family.tiles):
            return family
    return None


def config_for_tiles(tile_rows: int) -> KernelConfig | None:
    """The kernel for a plan that names none: the first with work tiles of as many rows."""
    family = family_of(tile_rows)
    if family is None:
        return None
    return config_for_tile(next(tile for tile in family.tiles if tile[0] == tile_rows))


def config_for_tile(tile: tuple[int, int]) -> KernelConfig:
    """The kernel that is compiled for (tile rows, cluster)."""
    family = next(family for family in FAMILIES.values() if tile in family.tiles)
    rows, cluster = tile
    config = KernelConfig(family.kernel, tile_rows=rows, cluster=cluster)
    # one query token is the causal rule's plainest case: a formula's kernel always has it
    return replace(config, mask="causal", options=GRID_OPTIONS) if family.grid else config


def check_resident(config: KernelConfig, num_workers: int, gpu: Gpu) -> None:
    """Raises Unsupported for a grid of more workers than the card runs at once."""
    most = gpu.workers(config.cluster)
    if num_workers > most:
        name = f"{config.tile_rows} rows x {config.cluster} CTAs"
        got = f"{num_workers} workers of {name}, whose merge waits for all of them"
        raise unsupported("plan", got, f"up to {most} on this card")


def resident(config: KernelConfig, num_workers: int, sms: int) -> KernelConfig:
    """`config` for a launch of so many workers: where they cannot all run at once and the merge
    would wait for one that has not begun, the merge kernel does it.
    """
    if not FAMILIES[config.kernel].waits or num_workers * config.cluster <= sms:
        return config
    options = dict(config.options) | {"fused_merge": 0}
    return replace(config, options=tuple(options.items()))


def complete(config: KernelConfig, problem: Problem, pdl: bool | None) -> KernelConfig:
    """`config` for this call's formats, with the caller's tensors as they are ("shaped").

    pdl False takes programmatic dependent launch out; the kernels have it otherwise.
    """
    options = dict(config.options) | {"shaped": 1}
    if pdl is False:
        options["pdl"] = 0
    return replace(
        config,
        q_dtype=problem.q_dtype,
        kv_format=problem.kv_format,
        out_dtype=problem.out_dtype,
        page_size=problem.page_size,
        options=tuple(options.items()),
    )
