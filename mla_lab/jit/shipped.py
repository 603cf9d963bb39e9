"""The configurations that ship: compiled by `mla-lab compile`, bundled, tested for spills."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from ..core.errors import invalid
from ..plan import launch_modes, xqa
from ..plan.config import KernelConfig
from ..plan.launch_modes import (
    KEEP_AB_PERSISTENT,
    PAGE_SIZES,
    QUERY_HI_LO,
    SIXTEEN_BIT,
    SWAP_AB_LL,
    SWAP_AB_PERSISTENT,
    keep_ab_tiles,
    modes_of,
)
from .arch import check_arch
from .options import check_options
from .source import cuda_kernels, supported_archs

#: (query and cache, out, page size); an fp16 query has a bf16 out unless one is given
FORMATS = (
    *(("bf16", "bf16", page_size) for page_size in PAGE_SIZES),
    ("fp16", "bf16", 64),
    ("fp16", "fp16", 64),
)
EIGHT_BITS = ("e4m3", "bf16", 64)
OTHER_PAGES = (16, 32, 128)
#: 16-bit formats that are not the commonest; of them an fp16 out of a bf16 query has no other build
OTHER_FORMATS = (*FORMATS[4:], ("bf16", "fp16", 64))


def _for_backend(
    kernel: str,
    formats: tuple[str, str, int],
    tile: tuple[int, int],
    mask: str = "none",
    options: tuple[tuple[str, int], ...] = (),
    kv_format: str = "",
) -> KernelConfig:
    """A configuration with tensors in the caller's shapes, as the CuTe backend requests them."""
    dtype, out_dtype, page_size = formats
    rows, cluster = tile
    return KernelConfig(
        kernel,
        dtype,
        kv_format or dtype,
        out_dtype,
        tile_rows=rows,
        cluster=cluster,
        page_size=page_size,
        mask=mask,
        options=(("shaped", 1), *options),
    )


def _extra(mask: str, scales: int) -> tuple[tuple[str, int], ...]:
    """Options of the build that a call with sinks, this mask and these scales uses."""
    if scales:
        return (("scales", 1),)
    return () if mask == "tree" else (("features", 1),)


def _walks(tile: tuple[int, int], page_size: int) -> bool:
    """Whether a walk of eight bits has registers for the tile: several pages of keys want some."""
    return tile[0] < 32 or page_size >= KernelConfig.tile_kv


#: formulas whose last arriver merges, so that a grid may be larger than the card, or all pieces
LAST_MERGES = (("fused_merge", 1), ("grid", 1))
ALL_MERGE = (("fused_merge", 2), ("grid", 1))
#: what sparse calls take beside that
SPARSE = (("features", 1), ("gather", 2))

#: CuTe configurations, kernel by kernel, each registered in cute/registry.py; a CUDA C++ kernel
#: ships at its defaults, and in the commonest builds that the CUDA backend asks for
CUTE: tuple[KernelConfig, ...] = (
    KernelConfig("cute/empty"),
    *(
        _for_backend("cute/keep_ab_sm90", formats, tile)
        for formats in FORMATS
        for tile in KEEP_AB_PERSISTENT.tiles
    ),
    # for one request: swap_ab inside, which takes short ones; in the commonest format
    *(
        _for_backend("cute/keep_ab_sm90", FORMATS[2], (64, 1), options=(("dual", dual),))
        for dual in (1, 2)
    ),
    # sinks, scales on the device, draft masks: in the commonest format, others when first asked for
    *(
        _for_backend("cute/keep_ab_sm90", FORMATS[2], tile, mask, _extra(mask, scales))
        for tile in KEEP_AB_PERSISTENT.tiles
        for mask in ("none", "tree")
        for scales in (0, 1)
    ),
    *(
        _for_backend("cute/keep_ab_sm90", FORMATS[2], (64, 1), mask, (("skip", 1), *scales))
        for mask in ("none", "tree")
        for scales in ((), (("scales", 1),))
    ),
    *(
        _for_backend("cute/swap_ab_sm90", FORMATS[2], tile, "tree", mode.options)
        for mode in modes_of("cute/swap_ab_sm90")
        for tile in mode.tiles
    ),
    # tokens fetched one by one, from pages of any size: sparse calls, and pages of less than 16
    *(
        _for_backend("cute/swap_ab_sm90", FORMATS[2], (rows, 1), mask, (*merge, *options))
        for rows, mask, options in (
            (16, "none", SPARSE),
            (64, "none", SPARSE),
            (16, "tree", (("gather", 1),)),
            (32, "tree", (("gather", 1),)),
        )
        for merge in (LAST_MERGES, ALL_MERGE)
    ),
    # and in other formats the taller tiles alone: where nothing can be compiled they also run what
    # no other build of these formats does (see backends/builds.py)
    *(
        _for_backend("cute/swap_ab_sm90", formats, (rows, 1), mask, (*merge, *options))
        for formats in OTHER_FORMATS
        for rows, mask, options in (
            (64, "none", SPARSE),
            (32, "tree", (("gather", 1),)),
        )
        for merge in (LAST_MERGES, ALL_MERGE)
    ),
    # and of eight bits: sparse calls over 656-byte tokens are what serving runs; of the others the
    # taller tile alone
    *(
        _for_backend(
            "cute/swap_ab_sm90", (dtype, "bf16", 64), (rows, 1), "none", (*merge, *SPARSE), cache
        )
        for dtype, cache, rows in (
            ("bf16", "fp8_656", 16),
            ("bf16", "fp8_656", 32),
            ("e4m3", "e4m3", 32),
            ("bf16", "e4m3", 32),
        )
        for merge in (LAST_MERGES, ALL_MERGE)
    ),
    # and pages of any size, which also run what no build by page has
    *(
        _for_backend(
            "cute/swap_ab_sm90",
            (dtype, out, 64),
            (rows, 1),
            "tree",
            (*merge, ("gather", 1)),
            cache,
        )
        for dtype, cache, out, rows in (
            ("bf16", "fp8_656", "bf16", 16),
            ("e4m3", "e4m3", "bf16", 32),
            ("e4m3", "e4m3", "e4m3", 32),
            ("bf16", "e4m3", "bf16", 32),
        )
        for merge in (LAST_MERGES, ALL_MERGE)
    ),
    # sparse calls with every other result that a call may ask for
    *(
        _for_backend(
            "cute/swap_ab_sm90", (dtype, out, 64), (32, 1), "none", (*merge, *SPARSE), cache
        )
        for dtype, cache, outs in (
            ("bf16", "fp8_656", ("fp16",)),
            ("bf16", "e4m3", ("fp16",)),
            ("e4m3", "e4m3", ("fp16", "e4m3")),
        )
        for out in outs
        for merge in (LAST_MERGES, ALL_MERGE)
    ),
    # skip-softmax over eight bits
    *(
        _for_backend(
            "cute/swap_ab_sm90",
            (dtype, "bf16", 64),
            (rows, 1),
            "tree",
            (*SWAP_AB_PERSISTENT.options, ("skip", 1)),
            cache,
        )
        for dtype, cache, rows in (
            ("e4m3", "e4m3", 32),
            ("bf16", "e4m3", 16),
            ("bf16", "fp8_656", 16),
        )
    ),
    # one query token is the causal rule's plainest case: one kernel for both
    *(
        _for_backend("cute/swap_ab_sm90", formats, tile, "causal", mode.options)
        for formats in FORMATS
        for mode in modes_of("cute/swap_ab_sm90")
        for tile in mode.tiles
    ),
    # and without the rule, which takes up to 2 % of a short call, in the commonest format
    *(
        _for_backend("cute/swap_ab_sm90", FORMATS[2], tile, "none", mode.options)
        for mode in modes_of("cute/swap_ab_sm90")
        for tile in mode.tiles
    ),
    # a cache of eight bits under a bf16 query, in the commonest page size
    *(
        _for_backend("cute/swap_ab_sm90", FORMATS[2], tile, "causal", mode.options, kv_format)
        for (dtype, kv_format), operands in launch_modes.FORMATS.items()
        if operands == QUERY_HI_LO and dtype == "bf16"
        for mode in modes_of("cute/swap_ab_sm90")
        for tile in mode.tiles_for(dtype, kv_format)
    ),
    # many rows of it; with sinks, draft masks and scales in memory as below
    *(
        _for_backend("cute/keep_ab_sm90", FORMATS[2], tile, kv_format=kv_format)
        for kv_format in ("e4m3", "fp8_656")
        for tile in KEEP_AB_PERSISTENT.hi_lo_tiles
    ),
    # sparse calls of many heads over eight bits, tokens fetched as they are stored; over 656-byte
    # tokens with sinks and scales in memory too
    *(
        _for_backend(
            "cute/keep_ab_sm90", FORMATS[2], (64, 1), "none", (*SPARSE[1:], *extra), "fp8_656"
        )
        for extra in ((), (("features", 1),), (("scales", 1),))
    ),
    *(
        _for_backend("cute/keep_ab_sm90", formats, (64, 1), "none", SPARSE[1:], "e4m3")
        for formats in (FORMATS[2], EIGHT_BITS)
    ),
    # e4m3 throughout with the query rows on the M side; sinks, draft masks and scales in memory are
    # compiled when first asked for, or left to the builds below
    *(
        _for_backend("cute/keep_ab_sm90", formats, tile)
        for tile in KEEP_AB_PERSISTENT.e4m3_tiles
        for formats in (EIGHT_BITS, ("e4m3", "e4m3", 64))
    ),
    *(
        _for_backend("cute/keep_ab_sm90", ("e4m3", "bf16", page_size), tile)
        for page_size in OTHER_PAGES
        for tile in KEEP_AB_PERSISTENT.e4m3_tiles
        if tile in keep_ab_tiles("e4m3", "e4m3", page_size)
    ),
    # e4m3 throughout: out in bf16, which callers of FlashInfer's get; with sinks and scales in
    # memory as well; a result of eight bits from what serving runs most
    *(
        _for_backend("cute/swap_ab_sm90", EIGHT_BITS, tile, mask, mode.options)
        for mask in ("causal", "tree")
        for mode in modes_of("cute/swap_ab_sm90")
        for tile in mode.e4m3_tiles
    ),
    *(
        _for_backend("cute/swap_ab_sm90", ("e4m3", "e4m3", 64), tile, "causal", mode.options)
        for mode in (SWAP_AB_LL, SWAP_AB_PERSISTENT)
        for tile in mode.e4m3_tiles
    ),
    # over pages of other sizes: the launch modes of few rows, and for pages of 32 every one;
    # features beyond a plain call, over any cache of eight bits, run by plans
    *(
        _for_backend("cute/swap_ab_sm90", ("e4m3", "bf16", page_size), tile, "causal", mode.options)
        for page_size in OTHER_PAGES
        for mode in (
            modes_of("cute/swap_ab_sm90") if page_size == 32 else (SWAP_AB_LL, SWAP_AB_PERSISTENT)
        )
        for tile in mode.e4m3_tiles
        if mode is not SWAP_AB_PERSISTENT or _walks(tile, page_size)
    ),
    *(
        _for_backend(
            "cute/swap_ab_sm90",
            (dtype, out, page),
            tile,
            mask,
            SWAP_AB_PERSISTENT.options,
            kv_format,
        )
        for (dtype, kv_format), operands in launch_modes.FORMATS.items()
        if operands != SIXTEEN_BIT and dtype != "fp16"
        for tile in SWAP_AB_PERSISTENT.tiles_for(dtype, kv_format)
        for mask, out, page in (
            *(("tree" if dtype == "e4m3" else "causal", "bf16", p) for p in OTHER_PAGES),
            ("tree", dtype, 64),
        )
        if _walks(tile, page)
    ),
)


def _ships_in_pieces(config: KernelConfig) -> bool:
    """Whether a twin of a build ships whose CTAs find fixed pieces: persistent, of 16 bits or of
    eight in the commonest page size, with the mask code, which batch-invariant calls always have.
    """
    if config.kernel == "cute/keep_ab_sm90":
        others = {"dual", "fused_merge", "gather"} & {name for name, _ in config.options}
        return config.kv_format in ("bf16", "fp16") and config.cluster == 1 and not others
    persistent = set(SWAP_AB_PERSISTENT.options) <= set(config.options)
    plain = persistent and not config.option("grid") and config.mask != "none"
    sixteen_bit = config.kv_format in ("bf16", "fp16")
    return plain and (sixteen_bit or config.page_size == KernelConfig.page_size)


#: for batch-invariant calls
PIECES: tuple[KernelConfig, ...] = tuple(
    replace(config, options=(*config.options, ("pieces", 1)))
    for config in CUTE
    if _ships_in_pieces(config)
)
CUTE = (*CUTE, *PIECES)

#: of the SM100 kernel, which ships no builds, a plain one of each format
SM100: tuple[KernelConfig, ...] = tuple(
    _for_backend("cute/mla_sm100", (dtype, out, 64), (128, 2), kv_format=kv_format)
    for dtype, kv_format, out in (
        ("bf16", "bf16", "bf16"),
        ("fp16", "fp16", "fp16"),
        ("e4m3", "e4m3", "bf16"),
        ("bf16", "e4m3", "bf16"),
    )
)


def shipped(arch: str = "sm_90a") -> list[KernelConfig]:
    """Every shipped configuration that is written for `arch`."""
    check_arch(arch)
    cuda = dict.fromkeys([*(KernelConfig(name) for name in cuda_kernels()), *xqa.common(arch)])
    configs = [*CUTE, *cuda]
    return [c for c in configs if arch in supported_archs(c.kernel)]


def sample(
    arch: str = "sm_90a", *, each_format: bool = False, first: Iterable[KernelConfig] = ()
) -> list[KernelConfig]:
    """Shipped configurations that stand for all: of each kernel, each format of query and cache and
    every value of every other field and option is in one of them; with `each_format` every value in
    each format. Values that `first` has are taken from there.
    """
    builds = shipped(arch)
    options = {name for config in builds for name, _ in config.options}

    def values(config: KernelConfig) -> set[tuple[object, ...]]:
        formats = (config.q_dtype, config.kv_format)
        base = (config.kernel, *(formats if each_format else ()))
        given = dict(config.options)
        fields = {**config.as_dict(), **{name: given.get(name) for name in options}}
        fields["formats"] = formats
        return {(*base, name, str(value)) for name, value in fields.items() if name != "options"}

    wanted = set().union(*map(values, builds))
    kept: list[KernelConfig] = []
    for pool in (list(first), builds):
        while new := max((len(values(config) & wanted) for config in pool), default=0):
            kept.append(next(c for c in pool if len(values(c) & wanted) == new))
            wanted -= values(kept[-1])
    for config in kept[::-1]:  # what the others have too is left out
        if values(config) <= set().union(*(values(c) for c in kept if c != config)):
            kept.remove(config)
    return kept


def select(
    kernels: list[str] | None, settings: list[str], arch: str = "sm_90a"
) -> list[KernelConfig]:
    """Configurations that the options of the command line name.

    No kernel: all shipped ones. A kernel without settings: its shipped configurations, or if it
    ships none its plain builds, or its defaults. With settings ("field=value"): exactly that
    configuration.
    """
    if not kernels:
        return shipped(arch)
    if settings:
        return [with_settings(kernel, settings) for kernel in kernels]
    known = [*shipped(arch), *SM100]
    return [
        config
        for kernel in kernels
        for config in [c for c in known if c.kernel == kernel] or [KernelConfig(kernel)]
    ]


def with_settings(kernel: str, settings: list[str]) -> KernelConfig:
    """The configuration of `kernel` with "field=value" and "option=number" set, of equal names the
    last, the rest at its default. Raises InvalidInput for other texts and unknown options.
    """
    defaults = KernelConfig(kernel).as_dict()
    values: dict[str, Any] = {}
    options: dict[str, int] = {}
    for setting in settings:
        name, _, value = setting.partition("=")
        number = value.lstrip("-").isdigit() and name.isidentifier()
        if isinstance(defaults.get(name), str) and value:
            values[name] = value
        elif isinstance(defaults.get(name), int) and number:
            values[name] = int(value)
        elif number and name not in defaults:
            options[name] = int(value)
        else:
            raise invalid("--set", setting, f"{tuple(defaults)[1:-1]}, or OPTION=whole number")
    config = KernelConfig(kernel, **values, options=tuple(options.items()))
    check_options(config)
    return config
