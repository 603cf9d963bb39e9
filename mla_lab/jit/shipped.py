"""The configurations that ship: compiled by `mla-lab compile`, bundled, tested for spills."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, TypeAlias

from ..core.errors import invalid
from ..plan import xqa
from ..plan.config import KernelConfig
from ..plan.launch_modes import (
    KEEP_AB_PERSISTENT,
    PAGE_SIZES,
    SWAP_AB_LL,
    SWAP_AB_PERSISTENT,
    LaunchMode,
    keep_ab_tiles,
    modes_of,
)
from .arch import check_arch
from .options import check_options
from .source import cuda_kernels, supported_archs

#: (query rows, CTAs of a cluster)
Tile: TypeAlias = tuple[int, int]
Options: TypeAlias = tuple[tuple[str, int], ...]
#: (query and cache, out, page size)
Format: TypeAlias = tuple[str, str, int]


def _pages(dtype: str, page_sizes: Iterable[int]) -> Iterator[Format]:
    """The formats of a query and a bf16 out in these page sizes."""
    return ((dtype, "bf16", page_size) for page_size in page_sizes)


#: an fp16 query has a bf16 out unless one is given
FP16: tuple[Format, ...] = (("fp16", "bf16", 64), ("fp16", "fp16", 64))
FORMATS = (*_pages("bf16", PAGE_SIZES), *FP16)
COMMONEST = ("bf16", "bf16", 64)
#: e4m3 throughout, out in bf16 or of eight bits
EIGHT_BITS, E4M3_OUT = ("e4m3", "bf16", 64), ("e4m3", "e4m3", 64)
OTHER_PAGES = tuple(size for size in PAGE_SIZES if size != KernelConfig.page_size)
#: 16-bit formats that are not the commonest; of them an fp16 out of a bf16 query has no other build
OTHER_FORMATS = (*FP16, ("bf16", "fp16", 64))


def _builds(
    kernel: str,
    tiles: Iterable[Tile],
    options: Iterable[Options] = ((),),
    formats: Iterable[Format] = (COMMONEST,),
    masks: Iterable[str] = ("none",),
    caches: Iterable[str] = ("",),
) -> Iterator[KernelConfig]:
    """Every combination, with tensors in the caller's shapes, as the CuTe backend requests them.

    A cache of "" has the format of the query.
    """
    for cache, form, tile, mask, more in product(caches, formats, tiles, masks, options):
        dtype, out, page_size = form
        rows, cluster = tile
        yield KernelConfig(
            kernel,
            dtype,
            cache or dtype,
            out,
            tile_rows=rows,
            cluster=cluster,
            page_size=page_size,
            mask=mask,
            options=(("shaped", 1), *more),
        )


keep_ab, swap_ab = (partial(_builds, f"cute/{name}_sm90") for name in ("keep_ab", "swap_ab"))


def _in_modes(
    modes: Iterable[LaunchMode],
    formats: Iterable[Format] = (COMMONEST,),
    masks: Iterable[str] = ("none",),
    caches: Iterable[str] = ("",),
) -> Iterator[KernelConfig]:
    """swap_ab's builds in these launch modes, each for the tiles that it has in a format."""
    for cache, form, mask, mode in product(caches, formats, masks, modes):
        tiles = [t for t in mode.tiles_for(form[0], cache or form[0]) if _fits(mode, t, form)]
        yield from swap_ab(tiles, (mode.options,), (form,), (mask,), (cache,))


def _fits(mode: LaunchMode, tile: Tile, form: Format) -> bool:
    """Whether a walk of eight bits has registers for the tile: several pages of keys want some."""
    return mode is not SWAP_AB_PERSISTENT or tile[0] < 32 or form[2] >= KernelConfig.tile_kv


def _by_tile(configs: Iterable[KernelConfig]) -> list[KernelConfig]:
    """Builds of lower tiles first, else as they come."""
    return sorted(configs, key=lambda config: config.tile_rows)


#: launch modes of swap_ab
MODES, WALK = modes_of("cute/swap_ab_sm90"), (SWAP_AB_PERSISTENT,)
FEW_ROWS = (SWAP_AB_LL, *WALK)
#: tiles of keep_ab, and tiles of so many rows of one CTA
TILES = KEEP_AB_PERSISTENT.tiles
ROWS_16, ROWS_32, ROWS_64 = (((rows, 1),) for rows in (16, 32, 64))
FEATURES, SCALES, SKIP = (("features", 1),), (("scales", 1),), (("skip", 1),)
PAGED, GATHER = (("gather", 1),), (("gather", 2),)
#: formulas whose last CTA merges, so that a grid may be larger than the card, or all pieces
MERGES = tuple((("fused_merge", merge), ("grid", 1)) for merge in (1, 2))
#: what sparse calls take beside that, and pages of any size
SPARSE = tuple((*merge, *FEATURES, *GATHER) for merge in MERGES)
PAGES = tuple((*merge, *PAGED) for merge in MERGES)
#: skip-softmax in persistent walks
SKIP_WALK = ((*SWAP_AB_PERSISTENT.options, *SKIP),)

#: CuTe configurations, kernel by kernel, each registered in cute/registry.py; a CUDA C++ kernel
#: ships at its defaults, and in the commonest builds that the CUDA backend asks for. Rows of
#: data/records/emulated.jsonl have this order
CUTE: tuple[KernelConfig, ...] = (
    KernelConfig("cute/empty"),
    *keep_ab(TILES, formats=FORMATS),
    # for one request: swap_ab inside, which takes short ones; in the commonest format
    *keep_ab(ROWS_64, ((("dual", 1),), (("dual", 2),))),
    # sinks, scales on the device, draft masks: in the commonest format, others when first asked for
    *_by_tile(
        (*keep_ab(TILES, (FEATURES, SCALES)), *keep_ab(TILES, ((), SCALES), masks=("tree",)))
    ),
    *keep_ab(ROWS_64, (SKIP, (*SKIP, *SCALES)), masks=("none", "tree")),
    *_in_modes(MODES, masks=("tree",)),
    # tokens fetched one by one, from pages of any size: sparse calls, and pages of less than 16
    *swap_ab((*ROWS_16, *ROWS_64), SPARSE),
    *swap_ab((*ROWS_16, *ROWS_32), PAGES, masks=("tree",)),
    # and in other formats the taller tiles alone: where nothing can be compiled they also run what
    # no other build of these formats does (see backends/cute/catalogue.py)
    *(
        config
        for form in OTHER_FORMATS
        for tiles, options, mask in ((ROWS_64, SPARSE, "none"), (ROWS_32, PAGES, "tree"))
        for config in swap_ab(tiles, options, (form,), (mask,))
    ),
    # and of eight bits: sparse calls over 656-byte tokens are what serving runs; of the others the
    # taller tile alone
    *swap_ab((*ROWS_16, *ROWS_32), SPARSE, caches=("fp8_656",)),
    *swap_ab(ROWS_32, SPARSE, (EIGHT_BITS, COMMONEST), caches=("e4m3",)),
    # and pages of any size, which also run what no build by page has
    *swap_ab(ROWS_16, PAGES, masks=("tree",), caches=("fp8_656",)),
    *swap_ab(ROWS_32, PAGES, (EIGHT_BITS, E4M3_OUT, COMMONEST), ("tree",), ("e4m3",)),
    # sparse calls with every other result that a call may ask for
    *swap_ab(ROWS_32, SPARSE, (("bf16", "fp16", 64),), caches=("fp8_656", "e4m3")),
    *swap_ab(ROWS_32, SPARSE, (("e4m3", "fp16", 64), E4M3_OUT)),
    # skip-softmax over eight bits
    *swap_ab(ROWS_32, SKIP_WALK, (EIGHT_BITS,), ("tree",)),
    *swap_ab(ROWS_16, SKIP_WALK, masks=("tree",), caches=("e4m3", "fp8_656")),
    # one query token is the causal rule's plainest case: one kernel for both
    *_in_modes(MODES, FORMATS, ("causal",)),
    # and without the rule, which takes up to 2 % of a short call, in the commonest format
    *_in_modes(MODES),
    # a cache of eight bits under a bf16 query, in the commonest page size
    *_in_modes(MODES, masks=("causal",), caches=("e4m3", "fp8_656")),
    # many rows of it; with sinks, draft masks and scales in memory as below
    *keep_ab(
        KEEP_AB_PERSISTENT.hi_lo_tiles,
        formats=_pages("bf16", PAGE_SIZES),
        caches=("e4m3", "fp8_656"),
    ),
    # sparse calls of many heads, tokens fetched as they are stored; over bf16 and over 656-byte
    # tokens with sinks and scales in memory too
    *keep_ab(ROWS_64, (GATHER, (*GATHER, *FEATURES), (*GATHER, *SCALES)), caches=("", "fp8_656")),
    *keep_ab(ROWS_64, (GATHER,), (COMMONEST, EIGHT_BITS), caches=("e4m3",)),
    *keep_ab(ROWS_64, (GATHER,), FP16),
    # and dense calls of many rows with pages of any size, in every format
    *keep_ab(ROWS_64, (PAGED,), (COMMONEST, EIGHT_BITS), caches=("e4m3",)),
    *keep_ab(ROWS_64, (PAGED,), (COMMONEST, *FP16)),
    *keep_ab(ROWS_64, (PAGED,), caches=("fp8_656",)),
    # e4m3 throughout with the query rows on the M side; sinks, draft masks and scales in memory are
    # compiled when first asked for, or left to the builds below
    *_by_tile(keep_ab(KEEP_AB_PERSISTENT.e4m3_tiles, formats=(EIGHT_BITS, E4M3_OUT))),
    *(
        config
        for page in _pages("e4m3", OTHER_PAGES)
        for config in keep_ab(keep_ab_tiles("e4m3", "e4m3", page[2]), formats=(page,))
    ),
    # e4m3 throughout: out in bf16, which callers of FlashInfer's get; with sinks and scales in
    # memory as well; a result of eight bits from what serving runs most
    *_in_modes(MODES, (EIGHT_BITS,), ("causal", "tree")),
    *_in_modes(FEW_ROWS, (E4M3_OUT,), ("causal",)),
    # over pages of other sizes: the launch modes of few rows, and for pages of 32 every one;
    # features beyond a plain call, over any cache of eight bits, run by plans
    *_in_modes(FEW_ROWS, _pages("e4m3", (16,)), ("causal",)),
    *_in_modes(MODES, _pages("e4m3", (32,)), ("causal",)),
    *_in_modes(FEW_ROWS, _pages("e4m3", (128,)), ("causal",)),
    *(
        config
        for cache in ("e4m3", "fp8_656")
        for formats, mask in ((_pages("bf16", OTHER_PAGES), "causal"), ((COMMONEST,), "tree"))
        for config in _in_modes(WALK, formats, (mask,), (cache,))
    ),
    *_by_tile(_in_modes(WALK, (*_pages("e4m3", OTHER_PAGES), E4M3_OUT), ("tree",))),
)


def _ships_in_pieces(config: KernelConfig) -> bool:
    """Whether a twin of a build ships whose CTAs find fixed pieces: persistent, of 16 bits or of
    eight in the commonest page size, with the mask code, which batch-invariant calls always have.
    """
    if config.kernel == "cute/keep_ab_sm90":
        others = {"dual", "gather"} & {name for name, _ in config.options}
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

#: of decode context parallel: a rank's mask; of outs in each dtype the merge, and with an exchange
RANKS: tuple[KernelConfig, ...] = (
    KernelConfig("cute/rank_mask"),
    *(
        KernelConfig(kernel, out_dtype=dtype)
        for kernel in ("cute/rank_merge", "cute/rank_exchange")
        for dtype in ("bf16", "fp16")
    ),
)

#: of the SM100 kernel, which ships no builds, a plain one of each format
SM100: tuple[KernelConfig, ...] = (
    *_builds("cute/mla_sm100", ((128, 2),), formats=(COMMONEST, ("fp16", "fp16", 64), EIGHT_BITS)),
    *_builds("cute/mla_sm100", ((128, 2),), caches=("e4m3",)),
)


def shipped(arch: str = "sm_90a") -> list[KernelConfig]:
    """Every shipped configuration that is written for `arch`."""
    check_arch(arch)
    cuda = dict.fromkeys([*(KernelConfig(name) for name in cuda_kernels()), *xqa.common(arch)])
    configs = [*CUTE, *RANKS, *cuda]
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
        if settings:
            raise invalid("--set", ", ".join(settings), "with --kernel, whose build it changes")
        return shipped(arch)
    for kernel in kernels:
        supported_archs(kernel)  # refuses the name of no kernel
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
        if name == "kernel":
            raise invalid("--set", setting, "--kernel, for another kernel")
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
