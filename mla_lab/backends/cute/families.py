"""What the kernel families of the CuTe backend can do, known without importing cutlass.

Their own modules check a configuration again when it is compiled; a call is refused here, before
anything is compiled.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...call.form import Features
from ...core.dims import LATENT_DIM, ROPE_DIM
from ...core.errors import unsupported
from ...core.gpu import Gpu
from ...core.problem import Problem
from ...jit.source import supported_archs
from ...plan.config import KernelConfig
from ...plan.kernel_costs import KernelCosts, recorded_costs
from ...plan.launch_modes import (
    KEEP_AB_PERSISTENT,
    PAGE_SIZES,
    SWAP_AB_LL,
    SWAP_AB_LL_M8,
    SWAP_AB_PERSISTENT,
    LaunchMode,
)
from ...plan.tile import Plan
from ..cuda.ops import MAX_BATCH
from .feature_args import with_features


@dataclass(frozen=True)
class Family:
    """One kernel family; lists are of what it compiles."""

    kernel: str
    page_sizes: tuple[int, ...] = PAGE_SIZES
    tile_kv: int = KernelConfig.tile_kv

    @property
    def archs(self) -> tuple[str, ...]:
        """Architectures that it is written for."""
        return supported_archs(self.kernel)


FAMILIES = {kernel: Family(kernel) for kernel in ("cute/keep_ab_sm90", "cute/swap_ab_sm90")}
#: see `blackwell`; not among the families that are priced and chosen from
SM100 = Family("cute/mla_sm100")


def arch_of(config: KernelConfig) -> str:
    """The first architecture that the kernel is written for."""
    return supported_archs(config.kernel)[0]


def size_reason(problem: Problem) -> str | None:
    """What no family has of dims and requests, or None."""
    dims = (problem.latent_dim, problem.rope_dim)
    if dims != (LATENT_DIM, ROPE_DIM):
        return f"latent and rope dims {dims}; its kernels have {(LATENT_DIM, ROPE_DIM)}"
    if problem.batch > MAX_BATCH:
        return f"a batch of {problem.batch}; its kernels take up to {MAX_BATCH}"
    return None


def costs() -> tuple[KernelCosts, ...]:
    """Constants of the families that this backend runs."""
    return tuple(cost for cost in recorded_costs() if cost.kernel in FAMILIES)


def config_for_plan(plan: Plan) -> KernelConfig | None:
    """The kernel for a plan that names none: the first with work tiles of as many rows, by formula
    where the plan may be one.
    """
    grid = plan.schedule == "grid"
    formats = (plan.problem.q_dtype, plan.problem.kv_format)
    for mode in (
        *((SWAP_AB_LL, SWAP_AB_LL_M8) if grid else (SWAP_AB_PERSISTENT,)),
        SWAP_AB_LL,
        SWAP_AB_LL_M8,
        KEEP_AB_PERSISTENT,
    ):
        for tile in mode.tiles_for(*formats):
            if tile[0] == plan.tile_rows:
                return config_for(mode, tile)
    return None


def tiles_of(problem: Problem) -> list[str]:
    """Work tiles of plans that a kernel of these formats reads, or takes as a formula."""
    found = (
        mode.tiles_for(problem.q_dtype, problem.kv_format)
        for mode in (SWAP_AB_PERSISTENT, SWAP_AB_LL, SWAP_AB_LL_M8, KEEP_AB_PERSISTENT)
    )
    rows = sorted({tile[0] for tiles in found for tile in tiles})
    return [f"{count} x {KernelConfig.tile_kv}" for count in rows]


def config_for(mode: LaunchMode, tile: tuple[int, int]) -> KernelConfig:
    """The kernel that is compiled for `mode` and (tile rows, cluster)."""
    rows, cluster = tile
    # one query token is the causal rule's plainest case: with KV on M one kernel has both
    mask = "none" if mode is KEEP_AB_PERSISTENT else "causal"
    return KernelConfig(
        mode.kernel, tile_rows=rows, cluster=cluster, mask=mask, options=mode.options
    )


def check_resident(config: KernelConfig, num_workers: int, gpu: Gpu) -> None:
    """Raises Unsupported for a grid of more workers than the card runs at once."""
    pair = config.option("pair", 1)
    most = gpu.workers(config.cluster * pair) * pair
    if num_workers > most:
        name = f"{config.tile_rows} rows x {config.cluster} CTAs"
        got = f"{num_workers} workers of {name}, whose merge waits for all of them"
        raise unsupported("plan", got, f"up to {most} on this card")


def complete(
    config: KernelConfig, problem: Problem, pdl: bool | None, features: Features
) -> KernelConfig:
    """`config` for this call's formats and features, with the caller's tensors as they are
    ("shaped").

    pdl False takes programmatic dependent launch out; the kernels have it otherwise.
    """
    config = with_features(
        replace(
            config,
            q_dtype=problem.q_dtype,
            kv_format=problem.kv_format,
            out_dtype=problem.out_dtype,
        ),
        features,
    )
    options = dict(config.options) | {"shaped": 1}
    if pdl is False:
        options["pdl"] = 0
    return replace(
        config,
        # tokens that are fetched one by one may lie in pages of any size
        page_size=KernelConfig.page_size if config.option("gather") else problem.page_size,
        options=tuple(options.items()),
    )
