"""Traits: the static facts of one compiled kernel, from a KernelConfig and derived from it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any

import cutlass

from ...core.dims import FP8_656_BYTES, LATENT_DIM, ROPE_DIM
from ...core.errors import unsupported
from ...plan.config import KernelConfig
from ..split_merge import SplitMerge
from ..split_merge.swap_ab_fragments import CONSUMER_THREADS as CONSUMER_THREADS
from ..split_merge.swap_ab_fragments import fragments_per_row_pair

TILE_KV = 64
HEAD_DIM = LATENT_DIM + ROPE_DIM
#: columns of one swizzle box, boxes of a KV tile, boxes of V (the rest is rope)
BOX = 64
BOXES = HEAD_DIM // BOX
V_BOXES = LATENT_DIM // BOX
#: 64-column slices of a warp group's half of O^T
O_SLICES = V_BOXES // 2
#: 656-byte tokens: columns of one scale, scales of a token, bytes of a tile's ropes and scales
SCALE_COLS = 128
SCALES = LATENT_DIM // SCALE_COLS
ROPE_BYTES, SCALE_BYTES = TILE_KV * ROPE_DIM * 2, TILE_KV * SCALES * 4
CONSUMER_WARPS = CONSUMER_THREADS // 32
#: shared memory of a CTA on SM90
SMEM_BYTES = 232_448

TILE_ROWS = (8, 16, 32, 64)
CLUSTERS = (1, 2, 4, 8, 16)
PAGES = (16, 32, 64, 128)
DTYPES: dict[str, Any] = {
    "bf16": cutlass.BFloat16,
    "fp16": cutlass.Float16,
    "e4m3": cutlass.Float8E4M3FN,
}
#: options of a KernelConfig; "shaped" changes the host's arguments alone
OPTIONS = {
    "features", "fused_merge", "gather", "grid", "pair", "pdl", "pieces", "shaped", "skip",
    "stamps",
}  # fmt: skip
#: by option fused_merge
MERGES = {
    1: SplitMerge.LAST_CTA,
    2: SplitMerge.COOPERATIVE,
    3: SplitMerge.LL,
}
#: 8-bit caches of a bf16 query (see `query_hi_lo`) and the bytes of a token
TOKEN_BYTES = {"e4m3": HEAD_DIM, "fp8_656": FP8_656_BYTES}


class KvLoad(IntEnum):
    """How the producer fetches a KV tile (option gather)."""

    #: TMA boxes of whole pages
    TMA = 0
    #: token by token with cp.async, from pages of any size
    GATHER_PAGED = 1
    #: token by token, each from the slot that a sparse call names
    GATHER_SPARSE = 2


@dataclass(frozen=True)
class Traits:
    """Static facts of one kernel. A worker is `cluster` CTAs, its work tile `rows` query rows."""

    rows: int
    cluster: int
    page: int
    #: element type of both MMAs' operands
    dtype: Any
    #: element type of the query in global memory
    q_dtype: Any
    out_dtype: Any
    causal: bool
    split_merge: SplitMerge
    #: programmatic dependent launch
    pdl: bool
    #: write the timestamps of `CtaEvent`
    profile: bool
    #: work follows from block indices and `num_splits`; no plan is in memory
    grid: bool
    #: CTAs of a cluster that take neighbouring row tiles and share each KV tile by TMA multicast
    multicast: int
    #: sinks and scales in memory come with the launch (see `feature_operands`)
    features: bool
    #: a packed mask marks the draft tokens that a row sees; without an element: the causal rule
    tree: bool
    kv_load: KvLoad
    #: 656-byte tokens: a scale per 128 columns, a bf16 rope (see `kv_656`)
    kv_656: bool
    #: skip-softmax: PV of tiles with negligible weights is skipped (see `mainloop_fp8`)
    skip: bool
    #: work follows from the rule of batch invariance, and each tile's merge behind the next tile
    pieces: bool = False
    #: grid mode in a launch of one dimension: row tiles first, then splits, then requests
    linear: bool = False

    @property
    def waits(self) -> bool:
        """All CTAs that split a row tile merge a slice of it each, and wait for the others."""
        return self.split_merge in (SplitMerge.COOPERATIVE, SplitMerge.LL)

    @property
    def warms_code(self) -> bool:
        """The producer warp, which has as many registers as a consumer warp, runs the merge's code
        ahead of the consumers (see `merge_slice`). Not with 8 rows, where nothing was gained."""
        alone = self.cluster == 1 and not (self.producer_group or self.pieces)
        return self.waits and alone and self.rows > 8

    @property
    def keeps_plan(self) -> bool:
        """The worker's plan is read again, from shared memory, when its row tiles are merged."""
        walks = not (self.grid or self.pieces)
        return walks and self.split_merge == SplitMerge.COOPERATIVE

    @cached_property
    def gathered(self) -> bool:
        """KV tokens are fetched one by one."""
        return self.kv_load != KvLoad.TMA

    @cached_property
    def fp8(self) -> bool:
        """The MMAs' operands are e4m3 (see `fp8_operands`)."""
        return self.dtype is cutlass.Float8E4M3FN

    @cached_property
    def hi_lo(self) -> bool:
        """A query element, and a weight, is the sum of two e4m3 numbers (see `query_hi_lo`)."""
        return self.q_dtype is not self.dtype

    @cached_property
    def mma_n(self) -> int:
        """N of both MMAs: the query rows, twice with hi and lo."""
        return self.rows * (1 + self.hi_lo)

    @cached_property
    def bytes(self) -> int:
        """Bytes of an element of Q and of the KV tile in shared memory."""
        return 1 if self.fp8 else 2

    @cached_property
    def o_row_cols(self) -> int:
        """Latent columns from one accumulator row of O^T to the next (see `fp8_operands`)."""
        return 2 if self.fp8 else 1

    @cached_property
    def o_half_cols(self) -> int:
        """Latent columns from accumulator row g of O^T to row g + 8."""
        return 1 if self.fp8 else 8

    @cached_property
    def qk_parts(self) -> int:
        """Column ranges whose scores are added up in fp32: two k-steps each with hi and lo."""
        return (8 if self.kv_656 else 9) if self.hi_lo else 1

    @cached_property
    def qk_parts_in_flight(self) -> int:
        """Column ranges whose MMAs run together, each with accumulators of its own."""
        return min(self.qk_parts, 4 if self.mma_n < 64 else 2)

    @cached_property
    def o_slices_in_flight(self) -> int:
        """fp8: slices of one tile's O^T whose MMAs run together, with registers of their own."""
        return O_SLICES if self.mma_n < 64 else 1

    @cached_property
    def promote_after_tile(self) -> bool:
        """fp8: a tile's O^T is added to the accumulators after its last MMA, not slice by slice."""
        return self.o_slices_in_flight == O_SLICES and not self.skip

    @cached_property
    def columns(self) -> int:
        """Columns of a KV tile; without the rope where that has another element type."""
        return LATENT_DIM if self.kv_656 else HEAD_DIM

    @cached_property
    def box(self) -> int:
        """Columns of a swizzle box of the KV tile: one scale's, where tokens have scales."""
        return SCALE_COLS if self.kv_656 else BOX

    @cached_property
    def boxes_per_barrier(self) -> int:
        """Boxes that arrive at one full barrier."""
        if self.kv_656:
            return SCALES
        # these builds have no register to spare for several waits per tile
        one_wait = self.rows == (32 if self.hi_lo else 64)
        return BOXES if self.gathered or (self.fp8 and one_wait) else 3

    @cached_property
    def barriers_per_stage(self) -> int:
        """Full barriers of a KV stage."""
        return self.columns // self.box // self.boxes_per_barrier

    @cached_property
    def full_barrier_bytes(self) -> int:
        """Bytes expected by one full barrier of the KV ring."""
        dense = TILE_KV * self.boxes_per_barrier * self.box * self.bytes
        return dense + ROPE_BYTES + SCALE_BYTES if self.kv_656 else dense

    @cached_property
    def q_bytes(self) -> int:
        """Bytes of Q in shared memory, the same before and after the split into hi and lo."""
        return self.mma_n * HEAD_DIM * self.bytes

    @cached_property
    def k_bytes(self) -> int:
        """Bytes of a KV tile's columns."""
        return TILE_KV * self.columns * self.bytes

    @cached_property
    def rope_bytes(self) -> int:
        """656-byte tokens: bytes of a stage's ropes, which P of four scale groups overwrites."""
        return max(ROPE_BYTES, SCALES * TILE_KV * self.mma_n) if self.kv_656 else 0

    @cached_property
    def stage_bytes(self) -> int:
        """Bytes of a stage of the KV ring."""
        return self.k_bytes + (self.rope_bytes + SCALE_BYTES if self.kv_656 else 0)

    @cached_property
    def peer_partial_bytes(self) -> int:
        """fp32 partials that the CTAs of a cluster push to one of them."""
        return self.rows * LATENT_DIM * 4 if self.cluster > 1 else 0

    @cached_property
    def partials_on_ring(self) -> bool:
        """The peers' partials overwrite the KV ring: two stages leave no other room."""
        room = SMEM_BYTES - self.small_bytes - self.q_bytes - 2 * self.stage_bytes
        return self.peer_partial_bytes > room

    @cached_property
    def small_bytes(self) -> int:
        """Upper bound, in bytes, of all that precedes the KV ring in shared memory."""
        stages, more = (6, 6 + 2 * self.hi_lo) if self.fp8 else (3, 0)
        barriers = 8 * (stages * (BOXES // self.boxes_per_barrier + 1) + 9 + more) + 144
        barriers += 0 if self.grid else 128 + 16
        stats = (48 if self.fp8 else 16) * self.rows
        q_scale = 4 * self.rows if self.hi_lo else 0
        extra = (128, 128) if self.kv_656 else (16,) if self.skip else ()
        peers = (16 * self.cluster * self.row_pairs, 64 * self.cluster)
        sums = 32 * (self.rows + self.bound_rows)
        pieces = (barriers, 32 * self.rows, stats, sums, q_scale, *extra, *peers)
        return -(-sum(-(-piece // 128) * 128 for piece in pieces) // 1024) * 1024

    @cached_property
    def stages(self) -> int:
        """Stages of the KV ring, 64 tokens each: as many as fit."""
        used = self.small_bytes + self.q_bytes
        used += 0 if self.partials_on_ring else self.peer_partial_bytes
        return (SMEM_BYTES - used) // self.stage_bytes

    @cached_property
    def producer_group(self) -> bool:
        """Whether the producer is a whole warp group: where tokens are gathered, and from N 32 on,
        where a consumer needs more than 168 registers, which only a warp group can hand over."""
        return self.mma_n >= 32 or self.gathered

    @cached_property
    def threads(self) -> int:
        """Threads of a CTA: two consumer warp groups and the producer."""
        return CONSUMER_THREADS + (128 if self.producer_group else 32)

    @cached_property
    def scales(self) -> bool:
        """Scales may come in memory (read by `feature_operands`)."""
        return self.features

    @cached_property
    def registers(self) -> tuple[int, int]:
        """Registers of a producer and a consumer thread beside a producer warp group: together
        at most the 384 x 168 of the launch."""
        of_e4m3 = self.fp8 and not self.hi_lo
        if self.mma_n < 64 and (self.hi_lo or self.pieces or (self.gathered and not of_e4m3)):
            return 56, 224
        if self.gathered and self.mma_n >= 64:
            merges = self.split_merge == SplitMerge.COOPERATIVE
            return (40, 232) if self.kv_656 and merges else (24, 240)
        return (24, 240) if of_e4m3 and (self.rows == 64 or self.grid) else (40, 232)

    @cached_property
    def one_code(self) -> bool:
        """Whether both consumer warp groups run the same code, which is fetched once. Where tokens
        of 16 bits or by hi and lo are gathered, the constants of a code for each spare a register.
        """
        return not self.gathered or (self.fp8 and not self.hi_lo)

    @cached_property
    def one_round(self) -> bool:
        """Whether first and later tiles share one copy of a round, so that a step, whose other
        kernels evict it, fetches it once. Over 16 bits its branches took one request of 1,024 to
        8,192 keys 3 to 4 % more time (H200, 2026-11-27, `data/notes/kernel_attempts.jsonl`); for
        32 rows of hi and lo, gathered, there is no register for them.
        """
        tall = self.gathered and self.hi_lo and not self.kv_656 and self.rows == 32
        return self.fp8 and not tall

    @cached_property
    def bound_rows(self) -> int:
        """Rows of a bound beside the row sums: in the LL merge, for fp16 to hold accumulators."""
        return 1 if self.split_merge == SplitMerge.LL else 0

    @cached_property
    def merge_batch(self) -> int:
        """Partials of a fragment that a thread has in flight in a merge of many splits."""
        if self.split_merge == SplitMerge.LL:
            # as many as a thread has, where splits are a power of two
            return self.fragments // CONSUMER_THREADS
        if self.tree:
            return 8 if self.page < TILE_KV else 10
        return 10 if self.page < TILE_KV else 12

    @cached_property
    def full_arrivals(self) -> int:
        """Arrivals per phase of a full barrier of the KV ring, beside its bytes."""
        return 128 if self.gathered else 1

    @cached_property
    def stage_per_group(self) -> bool:
        """With two stages a warp group owns the tiles of one: its MMA descriptors are constants."""
        return self.stages == 2

    @cached_property
    def pv_first(self) -> bool:
        """A round begins with PV of the other warp group's tile: with two stages a stage must be
        free before its other tile can arrive (see `mainloop_bf16`)."""
        return self.stage_per_group and not self.fp8

    @cached_property
    def cooperative_launch(self) -> bool:
        """All CTAs must run at once, since a merge waits for the others. Not for 64 rows of e4m3:
        workers of whole requests wait for nobody, and may be more than fit."""
        tall = self.fp8 and self.rows == 64 and not self.hi_lo
        return self.waits and (self.gathered or not tall)

    @cached_property
    def box_rows(self) -> int:
        """Tokens of one TMA box."""
        return min(self.page, TILE_KV)

    @cached_property
    def boxes_per_copy(self) -> int:
        """Boxes of one TMA instruction; several are dense in shared memory only at 64 rows."""
        dense = self.box_rows == TILE_KV and self.multicast == 1
        return self.boxes_per_barrier if dense else 1

    @cached_property
    def row_pairs(self) -> int:
        """Row pairs that one CTA of the cluster reduces."""
        return max(1, self.rows // 2 // self.cluster)

    @cached_property
    def column_parts(self) -> int:
        """CTAs that share a row pair, each with a contiguous range of the latent columns."""
        return max(1, self.cluster // (self.rows // 2))

    @cached_property
    def fragment_values(self) -> int:
        """Values of a 16-byte fragment of a partial: fp16 in the LL merge, else fp32."""
        return 8 if self.split_merge == SplitMerge.LL else 4

    @cached_property
    def fragments(self) -> int:
        """Fragments of one partial that one CTA reduces."""
        return self.row_pairs * fragments_per_row_pair(self) // self.column_parts


def traits_of(config: KernelConfig) -> Traits:
    """Traits of `config`; `Unsupported` names the first field or option that this family lacks."""
    kv_load = config.option("gather")
    for name, allowed in (
        ("tile_rows", TILE_ROWS),
        ("cluster", CLUSTERS),
        ("page_size", (config.page_size,) if kv_load else PAGES),
        ("q_dtype", tuple(DTYPES)),
        ("out_dtype", tuple(d for d in DTYPES if d != "e4m3" or config.q_dtype == d)),
        ("kv_format", (config.q_dtype, *(TOKEN_BYTES if config.q_dtype == "bf16" else ()))),
        ("tile_kv", (TILE_KV,)),
        ("mask", ("none", "causal", "tree")),
    ):
        if getattr(config, name) not in allowed:
            raise unsupported(name, repr(getattr(config, name)), allowed)
    _check_options(config)
    hi_lo = config.kv_format != config.q_dtype
    return Traits(
        rows=config.tile_rows,
        cluster=config.cluster,
        page=config.page_size,
        dtype=DTYPES["e4m3" if hi_lo else config.q_dtype],
        q_dtype=DTYPES[config.q_dtype],
        out_dtype=DTYPES[config.out_dtype],
        causal=config.mask == "causal",
        split_merge=MERGES[config.option("fused_merge", 1)],
        pdl=bool(config.option("pdl", 1)),
        profile=bool(config.option("stamps")),
        grid=bool(config.option("grid")),
        multicast=config.option("pair", 1),
        features=bool(config.option("features")) or config.mask == "tree",
        tree=config.mask == "tree",
        kv_load=KvLoad(kv_load),
        kv_656=config.kv_format == "fp8_656",
        skip=bool(config.option("skip")),
        pieces=bool(config.option("pieces")),
    )


def _check_options(config: KernelConfig) -> None:
    """Refuse options, and combinations of them, that have no kernel or no registers for one."""
    for name, value in config.options:
        values = {"fused_merge": MERGES, "gather": list(KvLoad)}.get(name)
        if name not in OPTIONS or (values and value not in values):
            raise unsupported("options", f"{name} {value}", sorted(OPTIONS))
    rows, gather, formats = config.tile_rows, config.option("gather"), config.kv_format
    number, pair = config.option("fused_merge", 1), config.option("pair", 1)
    merge = MERGES[number]
    one_cta_grid = config.cluster == 1 and config.option("grid")
    if merge == SplitMerge.LL and not one_cta_grid:
        got = f"fused_merge 3 with cluster {config.cluster}"
        raise unsupported("options", got, "fused_merge 3 in grid mode with cluster 1")
    if pair > 1 and not (one_cta_grid and merge in (SplitMerge.COOPERATIVE, SplitMerge.LL)):
        got = f"pair {pair} with cluster {config.cluster}, fused_merge {number}"
        raise unsupported("options", got, "pair in grid mode with cluster 1, fused_merge 2 or 3")
    plain = one_cta_grid and pair == 1 and merge != SplitMerge.LL
    if gather and not (plain and (config.mask == "none" or gather == KvLoad.GATHER_PAGED)):
        got = f"gather {gather} with cluster {config.cluster}, pair {pair}, mask {config.mask}"
        raise unsupported("options", got, "gather in grid mode with cluster 1; 2 without a mask")
    most_rows = TILE_ROWS[-1]
    if formats in TOKEN_BYTES:
        # taller tiles of gathered e4m3 would spill accumulators, of 656 bytes the mask's state
        most_rows = 16 if (formats, gather) == ("fp8_656", KvLoad.GATHER_PAGED) else 32
    if gather and rows > most_rows:
        got = f"{rows} with gather {gather} of {formats}"
        raise unsupported("tile_rows", got, f"up to {most_rows}, as registers go")
    if formats != config.q_dtype and (pair > 1 or rows > 32):
        got = f"{rows} rows, pair {pair} with {formats}"
        raise unsupported("kv_format", got, "up to 32 rows, without pair")
    skips = formats in TOKEN_BYTES and rows <= 32 and config.mask == "tree" and not gather
    if config.option("skip") and not skips:
        got = f"skip with {formats}, {rows} rows, mask {config.mask}"
        supported = "skip over eight bits, up to 32 rows, mask tree, by page"
        raise unsupported("options", got, supported)
    walks = merge == SplitMerge.COOPERATIVE and config.cluster == 1 and not config.option("grid")
    if config.option("pieces") and not walks:
        got = f"pieces with cluster {config.cluster}, fused_merge {number}"
        raise unsupported("options", got, "pieces with cluster 1, fused_merge 2, not in grid mode")
    if (config.option("features") or config.mask == "tree") and config.option("stamps"):
        raise unsupported("options", "stamps with features or a tree mask", "one of them")
