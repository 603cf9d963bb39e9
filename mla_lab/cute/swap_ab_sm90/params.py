"""Static facts of one kernel: what KernelConfig says, and what follows from it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import cutlass

from ...core.errors import unsupported
from ...core.problem import FP8_656_BYTES, LATENT_DIM, ROPE_DIM
from ...plan.config import KernelConfig

TILE_KV = 64
HEAD_DIM = LATENT_DIM + ROPE_DIM
#: columns of one 128-byte swizzle box, boxes of a token tile, boxes that are also values
BOX = 64
BOXES = HEAD_DIM // BOX
VALUE_BOXES = LATENT_DIM // BOX
#: parts of their scores, of two k-steps each
SCORE_PARTS = {"e4m3": 9, "fp8_656": 8}
#: 64-column slices of a warpgroup's half of O^T
SLICES = VALUE_BOXES // 2
#: tokens of 656 bytes: columns of one scale, and their groups
SCALE_GROUP = 128
GROUPS = LATENT_DIM // SCALE_GROUP
#: their ropes and scales, a tile
ROPE_BYTES, SCALE_BYTES = TILE_KV * ROPE_DIM * 2, TILE_KV * GROUPS * 4
CONSUMER_WARPS = 8
CONSUMERS = CONSUMER_WARPS * 32
#: shared memory of a CTA on SM90
SMEM_BYTES = 232_448
#: splits that a shared merge takes: one a worker, and no card has more SMs
MAX_SPLITS = 160

TILE_ROWS = (8, 16, 32, 64)
CLUSTERS = (1, 2, 4, 8, 16)
PAGES = (16, 32, 64, 128)
DTYPES: dict[str, Any] = {
    "bf16": cutlass.BFloat16,
    "fp16": cutlass.Float16,
    "e4m3": cutlass.Float8E4M3FN,
}
#: stored bytes of a token of eight bits under a bf16 query (see `split`)
SPLIT_BYTES = {"e4m3": HEAD_DIM, "fp8_656": FP8_656_BYTES}


@dataclass(frozen=True)
class Shape:
    """One compiled kernel. `rows` query rows of a work tile, `cluster` CTAs of a worker."""

    rows: int
    cluster: int
    page: int
    #: operands of the products
    dtype: Any
    #: the query, as it is stored
    q_dtype: Any
    out_dtype: Any
    causal: bool
    lse: bool
    #: 0: a kernel of its own, 1: the last arriver, 2: all who split the row tile, a share each,
    #: 3: the same without counters, partials zero between launches (see `mail`)
    fused_merge: int
    #: L2 prefetch this many tiles beyond the ring (0: none)
    prefetch: int
    pdl: bool
    stamps: bool
    #: a line of KV leaves L2 before others do: it is read once
    evict: bool
    ring: int
    #: column boxes of one full barrier
    group: int
    #: work follows from block indices and `num_splits`, without a plan in memory
    grid: bool
    cooperative: bool
    #: O^T of the other warpgroup's tile before the own scores
    early_values: bool
    #: CTAs of a cluster that take neighbouring row tiles and share every KV tile by multicast
    pair: int
    #: sinks, and scales in memory, come with the launch (see `extras`)
    features: bool
    #: a packed mask says which draft tokens a row sees; one without an element: the causal rule
    tree: bool
    #: tokens are fetched one by one: 1 by pages of any size, 2 by the slots of a sparse call
    gather: int
    #: e4m3: each tile's O^T in registers of its own, added in fp32 (see `fp8`)
    promote: bool
    #: two terms: scores are added up in so many parts of the columns, for the same reason
    score_parts: int
    #: tokens of 656 bytes: scales of their own, rope of sixteen bits (see `scaled`)
    scaled: bool
    #: skip-softmax: tiles whose weights are all too small are left out (see `late`)
    skip: bool

    @cached_property
    def boxed(self) -> bool:
        """Tokens arrive as the products read them, by TMA boxes."""
        return not self.gather

    @cached_property
    def eight(self) -> bool:
        """Operands are e4m3 (see `fp8`)."""
        return self.dtype is cutlass.Float8E4M3FN

    @cached_property
    def terms(self) -> int:
        """e4m3 numbers that add up to one of the query or of the weights (see `split`)."""
        return 1 if self.q_dtype is self.dtype else 2

    @cached_property
    def width(self) -> int:
        """Columns of both products: a row for each term of each query row."""
        return self.rows * self.terms

    @cached_property
    def bytes(self) -> int:
        """Of an element of Q and of the K tile."""
        return 1 if self.eight else 2

    @cached_property
    def step(self) -> int:
        """Columns from one accumulator row of V^T P^T to the next (see `fp8`)."""
        return 2 if self.eight else 1

    @cached_property
    def second(self) -> int:
        """Columns from the first to the second of a unit: from accumulator row g to g + 8."""
        return 1 if self.eight else 8

    @cached_property
    def score_sets(self) -> int:
        """Parts of the scores on their way together, each with accumulators of its own."""
        return min(self.score_parts, 4 if self.width < 64 else 2)

    @cached_property
    def lands_late(self) -> bool:
        """e4m3: a tile's O^T is added when all of it is there, or was never apart from the rest.
        One that may be left out is added where it was asked for."""
        return (self.parts_apart == SLICES and not self.skip) or not self.promote

    @cached_property
    def parts_apart(self) -> int:
        """e4m3: 64-column slices of a tile's O^T that have registers of their own."""
        return SLICES if self.width < 64 else 1

    @cached_property
    def columns(self) -> int:
        """Of a K tile: without the rope, where that has other elements."""
        return LATENT_DIM if self.scaled else HEAD_DIM

    @cached_property
    def box(self) -> int:
        """Columns of a swizzled box of a K tile: whole scale groups, where tokens have such."""
        return SCALE_GROUP if self.scaled else BOX

    @cached_property
    def groups(self) -> int:
        """Full barriers of a stage."""
        return self.columns // self.box // self.group

    @cached_property
    def group_bytes(self) -> int:
        """That arrive at one of them."""
        dense = TILE_KV * self.group * self.box * self.bytes
        return dense + ROPE_BYTES + SCALE_BYTES if self.scaled else dense

    @cached_property
    def q_bytes(self) -> int:
        """In shared memory, as it arrives or split: alike."""
        return self.width * HEAD_DIM * self.bytes

    @cached_property
    def k_bytes(self) -> int:
        """Of a K tile."""
        return TILE_KV * self.columns * self.bytes

    @cached_property
    def rope_bytes(self) -> int:
        """Of a rope's place of its own, which the weights of four groups take later (`scaled`)."""
        return max(ROPE_BYTES, GROUPS * TILE_KV * self.width) if self.scaled else 0

    @cached_property
    def tile_bytes(self) -> int:
        """Of a stage."""
        return self.k_bytes + (self.rope_bytes + SCALE_BYTES if self.scaled else 0)

    @cached_property
    def exchange_bytes(self) -> int:
        """fp32 partials that a CTA receives: its share of the rows from every CTA."""
        return self.rows * LATENT_DIM * 4 if self.cluster > 1 else 0

    @cached_property
    def aliased(self) -> bool:
        """The partials arrive on the ring's bytes, because two stages leave no other room."""
        room = SMEM_BYTES - self.small_bytes - self.q_bytes - 2 * self.tile_bytes
        return self.exchange_bytes > room

    @cached_property
    def small_bytes(self) -> int:
        """Barriers, record, stamps; tile maxima, (m, f), sums per warp; peers' (m, l), weights."""
        stages, more = (6, 6 + 2 * (self.terms - 1)) if self.eight else (3, 0)
        barriers = 8 * (stages * (BOXES // self.group + 1) + 9 + more) + 144
        barriers += 0 if self.grid else 128
        peak = (48 if self.eight else 16) * self.rows
        unit = 4 * self.rows if self.terms > 1 else 0
        scales = (128, 128) if self.scaled else (16,) if self.skip else ()
        sums = (32 * self.rows, unit, *scales, 16 * self.cluster * self.pairs)
        pieces = (32 * self.rows, peak, *sums)
        rounded = sum(-(-piece // 128) * 128 for piece in (barriers, *pieces, 64 * self.cluster))
        return -(-rounded // 1024) * 1024

    @cached_property
    def stages(self) -> int:
        """64-token stages of the KV ring."""
        used = self.small_bytes + self.q_bytes
        used += 0 if self.aliased else self.exchange_bytes
        fit = (SMEM_BYTES - used) // self.tile_bytes
        return min(fit, self.ring) if self.ring else fit

    @cached_property
    def threads(self) -> int:
        """Two consumer warpgroups and a producer warp, or a producer warpgroup (`wide`)."""
        return CONSUMERS + (128 if self.wide else 32)

    @cached_property
    def wide(self) -> bool:
        """From 32 columns on consumers need more than the 168 registers that 288 threads may have
        (ptxas counts whole warpgroups), so a producer warpgroup hands its own over. One that
        gathers is a warpgroup anyway."""
        return self.width >= 32 or not self.boxed

    @cached_property
    def scales(self) -> bool:
        """Scales may come in memory."""
        return self.features

    @cached_property
    def registers(self) -> tuple[int, int]:
        """Of a producer's and of a consumer's thread, in a wide kernel: what 384 threads have at
        the launch, 168 each, since none can be had beyond that."""
        if self.gather:
            return (56, 224) if self.width < 64 else (24, 240)
        if self.terms > 1:
            return (56, 224) if self.width < 64 else (40, 232)
        return (24, 240) if self.eight and self.rows == 64 else (40, 232)

    @cached_property
    def producers(self) -> int:
        """Arrivals that a full barrier counts beside its bytes."""
        return 1 if self.boxed else 128

    @cached_property
    def static_stage(self) -> bool:
        """With two stages a warpgroup owns the tiles of one of them: descriptors are constants."""
        return self.stages == 2

    @cached_property
    def values_first(self) -> bool:
        """With two stages a stage must be free before its other tile is here (see `consume`)."""
        return self.early_values and self.static_stage and not self.eight

    @cached_property
    def box_rows(self) -> int:
        """Tokens of one TMA box."""
        return min(self.page, TILE_KV)

    @cached_property
    def box_cols(self) -> int:
        """64-column boxes of one TMA instruction: dense in smem only at 64 rows."""
        return self.group if self.box_rows == TILE_KV and self.pair == 1 else 1

    @cached_property
    def pairs(self) -> int:
        """Row pairs that one CTA of the cluster reduces."""
        return max(1, self.rows // 2 // self.cluster)

    @cached_property
    def parts(self) -> int:
        """CTAs that share a row pair, each a contiguous range of the latent columns."""
        return max(1, self.cluster // (self.rows // 2))

    @cached_property
    def units(self) -> int:
        """16-byte units (2 columns x 2 rows) of one source in one CTA's share."""
        return self.pairs * 256 // self.parts


def share_units(units: Any, splits: Any) -> Any:
    """Units that each of `splits` merges: a multiple of 8, so that lane pairs stay whole."""
    return ((units + splits - 1) // splits + 7) // 8 * 8


def _most_gathered(kv_format: str, gather: int) -> int:
    """Rows for which there are registers where tokens are gathered: beyond, accumulators of e4m3
    would lie in local memory, and of 656 bytes with a mask what a round keeps."""
    if kv_format not in SPLIT_BYTES:
        return TILE_ROWS[-1]
    return 16 if (kv_format, gather) == ("fp8_656", 1) else 32


def shape_of(config: KernelConfig) -> Shape:
    """What `config` asks for; `Unsupported` names the first field that this family lacks."""
    gather = config.option("gather")
    for name, allowed in (
        ("tile_rows", TILE_ROWS),
        ("cluster", CLUSTERS),
        ("page_size", (config.page_size,) if gather else PAGES),
        ("q_dtype", tuple(DTYPES)),
        ("out_dtype", tuple(d for d in DTYPES if d != "e4m3" or config.q_dtype == d)),
        ("kv_format", (config.q_dtype, *(SPLIT_BYTES if config.q_dtype == "bf16" else ()))),
        ("tile_kv", (TILE_KV,)),
        ("mask", ("none", "causal", "tree")),
    ):
        if getattr(config, name) not in allowed:
            raise unsupported(name, repr(getattr(config, name)), allowed)
    merge = config.option("fused_merge", 1)
    if merge == 3 and (config.cluster > 1 or not config.option("grid", 0)):
        got = f"fused_merge 3 with cluster {config.cluster}"
        raise unsupported("options", got, "fused_merge 3 in grid mode with cluster 1")
    pair = config.option("pair", 1)
    if pair > 1 and (config.cluster > 1 or not config.option("grid", 0) or merge not in (2, 3)):
        got = f"pair {pair} with cluster {config.cluster}, fused_merge {merge}"
        raise unsupported("options", got, "pair in grid mode with cluster 1, fused_merge 2 or 3")
    plain = (config.cluster, pair, merge < 3, config.option("grid", 0)) == (1, 1, True, 1)
    if gather and not (plain and (config.mask == "none" or gather == 1)):
        got = f"gather {gather} with cluster {config.cluster}, pair {pair}, mask {config.mask}"
        raise unsupported("options", got, "gather in grid mode with cluster 1; 2 without a mask")
    most = _most_gathered(config.kv_format, gather)
    if gather and config.tile_rows > most:
        got = f"{config.tile_rows} with gather {gather} of {config.kv_format}"
        raise unsupported("tile_rows", got, f"up to {most}, as registers go")
    split, scaled = config.kv_format != config.q_dtype, config.kv_format == "fp8_656"
    if split and (pair > 1 or config.tile_rows > 32 or not config.option("promote", 1)):
        got = f"{config.tile_rows} rows, pair {pair} with {config.kv_format}"
        raise unsupported("kv_format", got, "up to 32 rows, without pair, promoted")
    # without a register to spare, one wait a tile; and workers of whole requests, which wait for
    # nobody, may be more than run at once (see `plan.ways.in_waves`)
    tall = config.q_dtype == "e4m3" and config.tile_rows == 64
    whole = BOXES if tall or (split and config.tile_rows == 32) else 3
    features = bool(config.option("features")) or config.mask == "tree"
    skip = bool(config.option("skip"))
    skips = config.q_dtype == "e4m3" and config.tile_rows <= 32 and config.mask == "tree"
    if skip and not (skips and config.option("promote", 1) and not gather):
        got = f"skip with {config.q_dtype}, {config.tile_rows} rows, mask {config.mask}"
        raise unsupported("options", got, "skip of e4m3, up to 32 rows, mask tree, by page")
    if features and config.option("stamps"):
        raise unsupported("options", "stamps with features or a tree mask", "one of them")
    return Shape(
        rows=config.tile_rows,
        cluster=config.cluster,
        page=config.page_size,
        dtype=DTYPES["e4m3" if split else config.q_dtype],
        q_dtype=DTYPES[config.q_dtype],
        out_dtype=DTYPES[config.out_dtype],
        causal=config.mask == "causal",
        lse=bool(config.option("lse", 1)),
        fused_merge=merge,
        prefetch=config.option("prefetch", 0),
        pdl=bool(config.option("pdl", 1)),
        stamps=bool(config.option("stamps", 0)),
        evict=bool(config.option("evict", 1)),
        ring=config.option("ring", 0),
        group=GROUPS if scaled else BOXES if gather else config.option("group", whole),
        grid=bool(config.option("grid", 0)),
        cooperative=bool(config.option("cooperative", merge >= 2 and (gather or not tall))),
        early_values=bool(config.option("values_first", 1)),
        pair=pair,
        features=features,
        tree=config.mask == "tree",
        gather=gather,
        promote=bool(config.option("promote", 1)),
        score_parts=config.option("score_parts", SCORE_PARTS[config.kv_format]) if split else 1,
        scaled=scaled,
        skip=skip,
    )
