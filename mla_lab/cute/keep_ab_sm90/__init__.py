"""Query rows on the M side: 64 rows a CTA, 128 a cluster of two.

    kernel       the launch, for both designs
    straight     the design for 16 bits: roles, barriers, pipelines, timeline (read it first)
    transposed   the design for a cache of eight bits, the same roles over O^T
    work         plan rows, their records in shared memory, how many positions a row sees
    load         Q and KV tiles into the ring, by the first accumulate warp
    attend       S = Q K^T, softmax, P: one warpgroup; masking: what a row must not see
    accumulate   O += P V: two warpgroups; then the end of a work tile
    output       rows of the result from accumulators
    partials     what a split row tile leaves for others; merge, combine: adding that up
    storage      static facts, operands, shared memory

Options off by default, each a build of its own because the attend group has no register to spare:
`features` (sinks), `scales` (in memory), the mask "tree", `skip` (skip-softmax, 64 rows only). They
take `extras` as a tuple at the end of the launch, and with `skip` its factor behind them.
"""

from __future__ import annotations

from cutlass import Float32, Int32, Int64, Uint8, Uint16, cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_fake_tensor

from ...core.errors import unsupported
from ...core.problem import FP8_656_BYTES
from ...plan.config import KernelConfig
from ..registry import CuteEntry
from .fp8.params import SCALE_GROUPS, Transposed
from .kernel import FeatureKeepAB, KeepAB, StampedKeepAB
from .params import DTYPES, EIGHT_DTYPES, HEAD, LATENT, Config

PAGE_SIZES = (16, 32, 64, 128)
#: caches of eight bits, and the queries of sixteen that are split in two terms over them
EIGHT_BITS = ("e4m3", "fp8_656")
SPLIT = (("bf16", "e4m3"), ("bf16", "fp8_656"))
#: weights of fp16 may grow by more than those of e4m3 before the maximum moves
SPLIT_FACTS = {"lazy_log2": 8.0}
#: see `Transposed`
SPLIT_OPTIONS = {"go": 1, "score_parts": 3, "q_boxes": 5}
#: what differs where the CTAs of a pair halve the columns; with features they have no registers to
CROSSED_FACTS, CROSSED_OPTIONS = {"lazy_log2": 6.0, "held": 2}, {"q_boxes": 6}
#: over tokens of 656 bytes a part is a group of columns with a scale
SCALED_FACTS = {"scaled": True, "score_parts": SCALE_GROUPS, "held": 2}
SCALED_OPTIONS = {"go": 2, "early": 4}
#: by CTAs of a cluster: one by itself spills with seven
SCALED_BOXES = {1: 6, 2: 7}


def static_facts(config: KernelConfig) -> Config:
    """Check what this family compiles, and pick what it reads."""
    eight = config.kv_format in EIGHT_BITS
    if config.q_dtype not in EIGHT_DTYPES:
        raise unsupported("q_dtype", config.q_dtype, tuple(EIGHT_DTYPES))
    if config.kv_format != config.q_dtype and (config.q_dtype, config.kv_format) not in SPLIT:
        taken = f"that of the query, {config.q_dtype}; {SPLIT}"
        raise unsupported("kv_format", config.kv_format, taken)
    outs = EIGHT_DTYPES if config.q_dtype == "e4m3" else DTYPES
    if config.out_dtype not in outs:
        raise unsupported("out_dtype", config.out_dtype, tuple(outs))
    if (config.tile_rows, config.cluster) not in ((64, 1), (128, 2)):
        raise unsupported(
            "tile_rows, cluster", (config.tile_rows, config.cluster), "(64, 1) or (128, 2)"
        )
    if config.option("skip") and config.cluster == 2:
        raise unsupported("cluster", "2 with skip", "1: a pair has no registers left for it")
    if config.page_size not in PAGE_SIZES:
        raise unsupported("page_size", config.page_size, PAGE_SIZES)
    tree = config.mask == "tree"
    if eight and config.option("skip"):
        raise unsupported("kv_format", f"{config.kv_format} with skip", tuple(DTYPES))
    kind = Transposed if eight else Config
    features = tree or any(config.option(o) for o in ("features", "scales", "skip"))
    own = {"go": config.option("go", kind.go)}
    if eight and config.q_dtype != config.kv_format:
        options, facts = SPLIT_OPTIONS, SPLIT_FACTS
        if config.kv_format == "e4m3" and config.cluster == 2 and not features:
            if config.option("go", -1) >= 0:
                raise unsupported("options", "go with a pair that halves columns", "none of it")
            options, facts = options | CROSSED_OPTIONS, facts | CROSSED_FACTS
        own = facts | {name: config.option(name, n) for name, n in options.items()}
    if config.kv_format == "fp8_656":
        own |= SCALED_FACTS
        options = SCALED_OPTIONS | {"q_boxes": SCALED_BOXES[config.cluster]}
        own |= {name: config.option(name, n) for name, n in options.items()}
    facts = kind(
        dtype=config.q_dtype,
        out_dtype=config.out_dtype,
        cluster=config.cluster,
        page_size=config.page_size,
        pdl=config.option("pdl", 1),
        lse=config.option("lse", 1),
        fused_merge=config.option("fused_merge", 1),
        partials=config.option("partials", 16),
        stamps=config.option("stamps"),
        features=int(features),
        scales=config.option("scales"),
        tree=int(tree),
        skip=config.option("skip"),
        **own,
    )
    if facts.stamps and facts.features:
        raise unsupported("options", "stamps with features", "one of them")
    return facts


def entry(config: KernelConfig) -> CuteEntry:
    """Arguments in the order of `KeepAB.__call__`; all counts are symbols.

    Query and out come as rows [rows, 576], or with the option `shaped` as callers have them,
    [batch, q_len, heads, 576], with lse [tokens, heads]: a view costs the host a microsecond.
    """
    facts = static_facts(config)

    def dense(dtype, shape, align=16):  # type: ignore[no-untyped-def]
        order = tuple(range(len(shape) - 1, -1, -1))
        return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=align)

    def counts(number):  # type: ignore[no-untyped-def]
        return tuple(cute.sym_int() for _ in range(number))

    shaped = config.option("shaped")
    pages, slots, slots2, counters, batch, width, ends, tiles, workers = counts(9)
    stored, width_kv = facts.element, HEAD
    if config.kv_format == "fp8_656":
        stored, width_kv = Uint8, FP8_656_BYTES
    cache = make_fake_tensor(
        stored,
        (pages, facts.page_size, width_kv),
        stride=(cute.sym_int64(divisibility=128 // stored.width), width_kv, 1),
        assumed_align=16,
    )
    table = make_fake_tensor(Int32, (batch, width), stride=(cute.sym_int(), 1), assumed_align=4)
    extras = [dense(Float32, counts(1), 4) for _ in range(3)]
    if facts.tree:
        extras.append(dense(Uint16, counts(3 if shaped else 2), 4))
    if facts.skip:
        extras.append(Float32(1.0))
    args = (
        dense(facts.q_element, (*counts(3 if shaped else 1), HEAD)),
        cache,
        dense(facts.out_element, (*counts(3 if shaped else 1), LATENT)),
        dense(Float32, counts(2 if shaped else 1), 4),
        dense(Float32, (slots, config.tile_rows, LATENT)),
        dense(Float32, (slots2, config.tile_rows)),
        dense(Int32, (counters,), 4),
        table,
        dense(Int32, (cute.sym_int(),), 4),
        dense(Int32, (ends,), 4),
        dense(Int32, (tiles, 8)),
        dense(Int32, (workers,), 4),
        *((dense(Int64, (cute.sym_int(), 8)),) if facts.stamps else ()),
        Int32(1),
        Float32(1.0),
        Float32(1.0),
        *(Int32(1) for _ in range(3)),
        *((tuple(extras),) if facts.features else ()),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )
    launch = StampedKeepAB if facts.stamps else KeepAB
    if facts.features:
        launch = FeatureKeepAB
    return CuteEntry(launch(facts), args, "keep_ab")
