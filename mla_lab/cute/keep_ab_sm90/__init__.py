"""Query rows on the M side of both MMAs: 64 rows per CTA, 128 rows per cluster of two.

    kernel                the launch, for both variants
    kernel_bf16           16-bit elements: roles, barriers, pipelines, timeline (read it first)
    fp8                   an 8-bit cache: the same roles, with O^T as accumulator
    tile_scheduler        the worker's tiles, from the schedule into shared memory
    producer              Q and KV tiles into the ring, by warp 0
    producer_gather       tokens fetched one by one in place of tiles, by all PV warps
    release               of a stage, by the warps that have read it
    token_fetch           where a token lies, and its copies; of `fp8.producer_gather` too
    mainloop_qk_softmax   S = Q K^T, softmax, P: one warp group
    mainloop_pv           O += P V: two warp groups; then the epilogue
    params                static configuration, shared memory
    dual                  swap_ab in the same kernel, for one short request
    ../rows_on_m          operands, records of work tiles, masks, stores, profile events
    ../split_merge        keep_ab_*: partials of split row tiles and their cooperative merge

Options off by default, each a build of its own because the QK-softmax warp group has no register to
spare: `features` (sinks), `scales` (in memory), the mask "tree", `skip` (skip-softmax, 64 rows
only). Their operands come as one tuple before the stream; with `skip` its factor is the last one.
The option `stages` changes the number of KV stages; with `gather` tokens are fetched one by one; a
`dual` build takes one request, a short one by swap_ab; one with `pieces` takes batch-invariant
calls (`plan.fixed_pieces`).
"""

from __future__ import annotations

from dataclasses import replace

from ...core.errors import unsupported
from ...plan.config import KernelConfig
from ..common.launch_arguments import LaunchForm, exported
from ..registry import CuteEntry
from ..rows_on_m.params import ELEMENTS, PAGED, SHARED_BYTES, SPARSE
from ..rows_on_m.profile import CTA_EVENTS
from .dual import CAUSAL, ONE_TOKEN
from .fp8.params import Fp8Config, fp8_facts
from .kernel import KeepAB
from .params import Config

PAGE_SIZES = (16, 32, 64, 128)
#: of 16 bits
DTYPES = ("bf16", "fp16")
#: 8-bit caches, and (query, cache) formats that differ: the query is split into two terms
FP8_CACHES = ("e4m3", "fp8_656")
HI_LO = (("bf16", "e4m3"), ("bf16", "fp8_656"))
#: no format's KV stages are so small that this many fit
MOST_STAGES = 16


def check(config: KernelConfig) -> None:
    """Raises Unsupported for what this family does not compile."""
    if config.q_dtype not in ELEMENTS:
        raise unsupported("q_dtype", config.q_dtype, tuple(ELEMENTS))
    if config.kv_format != config.q_dtype and (config.q_dtype, config.kv_format) not in HI_LO:
        taken = f"that of the query, {config.q_dtype}; {HI_LO}"
        raise unsupported("kv_format", config.kv_format, taken)
    outs = ELEMENTS if config.q_dtype == "e4m3" else DTYPES
    if config.out_dtype not in outs:
        raise unsupported("out_dtype", config.out_dtype, tuple(outs))
    tile = (config.tile_rows, config.cluster)
    if tile not in ((64, 1), (128, 2)):
        raise unsupported("tile_rows, cluster", tile, "(64, 1) or (128, 2)")
    if config.option("skip") and config.cluster == 2:
        raise unsupported("cluster", "2 with skip", "1: with 2 there are no registers for it")
    if config.option("gather"):
        check_gathered(config)
    if config.page_size not in PAGE_SIZES:
        raise unsupported("page_size", config.page_size, PAGE_SIZES)
    if config.kv_format in FP8_CACHES and config.option("skip"):
        raise unsupported("kv_format", f"{config.kv_format} with skip", tuple(DTYPES))
    if config.option("dual"):
        check_dual(config)
    if config.option("pieces"):
        check_pieces(config)


def check_dual(config: KernelConfig) -> None:
    """Raises Unsupported for what is not compiled beside swap_ab in one kernel."""
    if config.option("dual") not in (ONE_TOKEN, CAUSAL):
        raise unsupported("dual", config.option("dual"), (ONE_TOKEN, CAUSAL))
    others = [n for n, v in config.options if v and n not in ("dual", "shaped", "pdl")]
    whole = config.cluster == 1 and config.mask != "tree"
    if config.q_dtype not in DTYPES or config.kv_format != config.q_dtype or others or not whole:
        got = config.name()
        raise unsupported("options", got, "dual with 16 bits, 64 rows")


def check_pieces(config: KernelConfig) -> None:
    """Raises Unsupported for what is not compiled by the rule of batch invariance."""
    sixteen_bit = config.q_dtype in DTYPES and config.kv_format == config.q_dtype
    if not sixteen_bit or config.cluster != 1:
        raise unsupported("options", config.name(), "pieces with 16 bits, 64 rows")


def check_gathered(config: KernelConfig) -> None:
    """Raises Unsupported for what is not compiled where tokens are fetched one by one."""
    if config.option("gather") not in (PAGED, SPARSE):
        raise unsupported("gather", config.option("gather"), (PAGED, SPARSE))
    if config.cluster == 2:
        raise unsupported("cluster", "2 with gather", "1: each CTA fetches its own tokens")
    others = [name for name in ("dual", "pieces", "skip", "stamps") if config.option(name)]
    if config.page_size != KernelConfig.page_size:
        got = f"{config.page_size} with gather"
        raise unsupported("page_size", got, f"{KernelConfig.page_size}: it takes pages of any size")
    if config.mask == "tree" or others:
        got = f"mask {config.mask!r}, {config.options} with gather"
        raise unsupported("options", got, "features, scales, stages")


def static_facts(config: KernelConfig) -> Config:
    """What is compiled in for `config`; raises Unsupported."""
    check(config)
    tree = config.mask == "tree"
    features = tree or any(config.option(o) for o in ("features", "scales", "skip"))
    own: dict[str, int] = {}
    kind = Config
    if config.kv_format in FP8_CACHES:
        kind, own = Fp8Config, fp8_facts(config, features)
    if config.option("stages"):
        own["stages"] = config.option("stages")
    facts = kind(
        dtype=config.q_dtype,
        out_dtype=config.out_dtype,
        cluster=config.cluster,
        page_size=config.page_size,
        pdl=config.option("pdl", 1),
        profile=config.option("stamps"),
        features=int(features),
        scales=config.option("scales"),
        tree=int(tree),
        skip=config.option("skip"),
        dual=config.option("dual"),
        gather=config.option("gather"),
        pieces=config.option("pieces"),
        **own,
    )
    if facts.profile and facts.features:
        raise unsupported("options", "stamps with features", "one of them")
    check_stages(facts)
    return facts


def check_stages(facts: Config) -> None:
    """Raises Unsupported for fewer than two KV stages, and for more than shared memory holds."""
    sizes = {n: replace(facts, stages=n).shared_bytes for n in range(2, MOST_STAGES)}
    fitting = [n for n, size in sizes.items() if size <= SHARED_BYTES]
    if facts.stages not in fitting:
        got = f"{facts.stages}, which take {facts.shared_bytes} B of shared memory"
        limit = f"{SHARED_BYTES} B a CTA, and QK of a tile runs beside PV of the one before"
        raise unsupported("stages", got, f"{fitting[0]} to {fitting[-1]}: {limit}")


def form_of(config: KernelConfig, facts: Config) -> LaunchForm:
    """What the arguments of a launch depend on."""
    return LaunchForm(
        q=facts.q_element,
        kv=facts.element,
        out=facts.out_element,
        tile_rows=config.tile_rows,
        page_size=None if facts.fetches_tokens else facts.page_size,
        shaped=bool(config.option("shaped")),
        stats=config.tile_rows,
        stats_align=16,
        kv_656=config.kv_format == "fp8_656",
        dual=bool(facts.dual),
        events=len(CTA_EVENTS) if facts.profile else 0,
        features=bool(facts.features),
        tree=bool(facts.tree),
        skip=bool(facts.skip),
    )


def entry(config: KernelConfig) -> CuteEntry:
    """The launch of `config` and its fake arguments."""
    facts = static_facts(config)
    args = form_of(config, facts).arguments()
    launch = exported("keep_ab", KeepAB(facts).launch, tuple(args))
    return CuteEntry(launch, tuple(args.values()), "keep_ab")
