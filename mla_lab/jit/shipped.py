"""The configurations that ship: compiled by `mla-lab compile`, bundled, tested for spills."""

from __future__ import annotations

from typing import Any

from ..errors import invalid
from ..plan.config import KernelConfig
from .arch import check_arch
from .source import cuda_kernels, supported_archs

#: what `plan.choose` may ask for: dtypes, masks, (tile rows, cluster) of each family; page 64
DTYPES = ("bf16", "fp16")
MASKS = ("none", "causal")
KV_M_TILES = tuple((rows, cluster) for rows in (8, 16, 32) for cluster in (1, 2, 4, 8))
Q_M_TILES = ((64, 1), (128, 2))


#: cute/q_m: (query and cache, out, page size); an fp16 query has a bf16 out unless one is given
Q_M_FORMATS = (
    *(("bf16", "bf16", page_size) for page_size in (16, 32, 64, 128)),
    ("fp16", "bf16", 64),
    ("fp16", "fp16", 64),
)


def _q_m(formats: tuple[str, str, int], tile: tuple[int, int], **options: int) -> KernelConfig:
    """As the CuTe backend asks for it: tensors in the caller's shapes."""
    dtype, out_dtype, page_size = formats
    rows, cluster = tile
    return KernelConfig(
        "cute/q_m",
        dtype,
        dtype,
        out_dtype,
        tile_rows=rows,
        cluster=cluster,
        page_size=page_size,
        options=(("shaped", 1), *options.items()),
    )


def _dense(kernel: str, dtype: str, tile: tuple[int, int], mask: str) -> KernelConfig:
    """A dense cache, query and output of one dtype."""
    rows, cluster = tile
    return KernelConfig(kernel, dtype, dtype, dtype, tile_rows=rows, cluster=cluster, mask=mask)


#: CuTe configurations, kernel by kernel, each registered in cute/registry.py; every CUDA C++
#: kernel ships once, at its defaults
CUTE: tuple[KernelConfig, ...] = (
    KernelConfig("cute/empty"),
    *(_q_m(formats, tile) for formats in Q_M_FORMATS for tile in Q_M_TILES),
    # for plans of more workers than run at once, whose partials the merge kernel merges
    *(_q_m(("bf16", "bf16", 64), tile, fused_merge=0) for tile in Q_M_TILES),
    *(
        _dense("cute/kv_m", dtype, tile, mask)
        for dtype in DTYPES
        for tile in KV_M_TILES
        for mask in MASKS
    ),
)


def shipped(arch: str = "sm_90a") -> list[KernelConfig]:
    """Every shipped configuration that is written for `arch`."""
    check_arch(arch)
    configs = [*CUTE, *(KernelConfig(name) for name in cuda_kernels())]
    return [c for c in configs if arch in supported_archs(c.kernel)]


def select(
    kernels: list[str] | None, settings: list[str], arch: str = "sm_90a"
) -> list[KernelConfig]:
    """What the command line asks for.

    No kernel: all shipped ones. A kernel without settings: its shipped configurations, or its
    defaults if it ships none. With settings ("field=value"): exactly that configuration.
    """
    if not kernels:
        return shipped(arch)
    if settings:
        return [_with_settings(kernel, settings) for kernel in kernels]
    known = shipped(arch)
    return [
        config
        for kernel in kernels
        for config in [c for c in known if c.kernel == kernel] or [KernelConfig(kernel)]
    ]


def _with_settings(kernel: str, settings: list[str]) -> KernelConfig:
    defaults = KernelConfig(kernel).as_dict()
    values: dict[str, Any] = {}
    options = []
    for setting in settings:
        name, _, value = setting.partition("=")
        number = value.lstrip("-").isdigit() and name.isidentifier()
        if isinstance(defaults.get(name), str) and value:
            values[name] = value
        elif isinstance(defaults.get(name), int) and number:
            values[name] = int(value)
        elif number and name not in defaults:
            options.append((name, int(value)))
        else:
            raise invalid("--set", setting, f"{tuple(defaults)[1:-1]}, or OPTION=whole number")
    return KernelConfig(kernel, **values, options=tuple(options))
