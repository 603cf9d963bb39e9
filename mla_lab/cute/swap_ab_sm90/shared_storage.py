"""What the roles share: operands in global memory, shared memory, the work record, the MMAs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.nvgpu import warpgroup

from ..common.barriers import MBarriers
from ..common.pipeline import Pipeline
from ..common.ptx_sm90 import pick, smem_f32
from ..split_merge.swap_ab_fragments import CtaEvent
from .params import (
    BOX,
    CONSUMER_THREADS,
    CONSUMER_WARPS,
    HEAD_DIM,
    SCALES,
    TILE_KV,
    V_BOXES,
    Traits,
)

#: `WorkTile.num_tiles` of the record after the last work tile
END = -1
#: `WorkTile.kv_len` of a request whose rows become NaN, since its length or its query tokens lie
#: outside of the call's tensors: no token lies behind it, so that none is masked
NAN_LENGTH = (1 << 31) - 1
#: words of a worker's plan, one from each lane
PLAN_WORDS = 32


@dataclass(frozen=True)
class Globals:
    """Operands of a launch; shapes and the order of arguments are `arguments`'. None: not compiled
    in."""

    tma_q: cute.CopyAtom
    mQ: cute.Tensor  # TMA coordinates (rows, (64, 9))
    tma_kv: Any
    mKV: Any  # TMA coordinates (page rows, (64, 9), pages)
    mO: Any = None
    mLSE: Any = None  # fp32 [rows] or [0]
    mO_partial: Any = None
    mLSE_partial: Any = None
    counters: Any = None
    block_table: Any = None
    seq_lens: Any = None
    q_begin: Any = None
    #: a plan: int32 [tiles, 8], and a schedule (see `worker_plan.open_plan`)
    tiles: Any = None
    schedule: Any = None
    profile: Any = None
    heads: Any = None
    scale_log2: Any = None
    out_scale: Any = None
    #: grid mode: splits of a request at most, and row tiles
    num_splits: Any = None
    row_tiles: Any = None
    #: query tokens of every request; 0: they differ, see `q_begin`
    q_len: Any = None
    #: else: workers, and what the scheduling rule weighs (`plan.self_schedule.Costs.packed`) below
    #: a gate
    num_workers: Any = None
    costs: Any = None
    #: see `feature_operands`: fp32 [heads], [1], [1], or no element; uint32 [tokens, words]
    sinks: Any = None
    bmm1: Any = None
    bmm2: Any = None
    mask: Any = None
    #: skip-softmax: threshold, to be divided by the request's length
    skip: Any = None
    #: [pages, page size, 576 or 656]; where tokens are gathered, and for prefetches
    cache: Any = None
    #: (atom, coordinates) of ropes and of scales (see `kv_656`)
    tma_656: Any = None


@dataclass(frozen=True)
class WorkTile:
    """What the mainloop reads of a work record; all values are uniform in the CTA."""

    #: KV tiles of this CTA; END after the last work tile
    num_tiles: Int32
    #: their first token
    token: Int32
    #: of the request, or NAN_LENGTH
    kv_len: Int32
    #: tokens that query token 0 sees before itself, kv_len - q_len; sparse: the request
    prefix: Int32
    #: first row in the request, and in q and out
    row: Int32
    out_row: Int32
    #: rows of the tile that the request has; skip-softmax alone reads it here
    rows: Any
    #: KV tiles that this CTA has consumed before this work tile
    tiles_before: Int32
    #: of a batch-invariant call: the query is not needed behind this piece
    ends_item: Any = None

    def q_is_read(self, condition: Any) -> Any:
        """Whether a warp group that reads Q no more in this work tile, or piece, may release it."""
        return condition if self.ends_item is None else condition & self.ends_item


@dataclass(frozen=True)
class Record:
    """What the epilogue and the merges read: words 4 to 11 of the record, as two vectors. (Words 0
    to 3 are `WorkTile`'s first.)"""

    tail: cute.Tensor
    more: cute.Tensor
    num_tiles: Any = None
    #: work tiles of this CTA before
    index: Any = None
    #: rank in the cluster
    rank: Any = None

    #: first row in the request; first row in q and out; rows of the tile that the request has;
    #: CTAs of the cluster that have KV tiles
    row = property(lambda self: self.tail[0])
    out_row = property(lambda self: self.tail[1])
    rows = property(lambda self: self.tail[2])
    active_ctas = property(lambda self: self.tail[3])
    #: index of the partial in the workspace; of the split row tile; its splits; which of them
    partial = property(lambda self: self.more[0])
    group = property(lambda self: self.more[1])
    num_splits = property(lambda self: self.more[2])
    split = property(lambda self: self.more[3])

    def of_piece(self, piece: Int32, num_tiles: Int32, index: Int32) -> Record:
        """The record of a piece of an item that this CTA runs whole: its slot, and pieces before it
        in place of work tiles."""
        more = cute.make_rmem_tensor(4, Int32)
        more.store(self.more.load())
        more[0] = self.partial + piece
        return replace(self, more=more, num_tiles=num_tiles, index=index)

    def without_rows_unless(self, live: Any) -> Record:
        """The record, or one of no rows and no splits."""
        tail, more = cute.make_rmem_tensor(4, Int32), cute.make_rmem_tensor(4, Int32)
        for i in range(4):
            tail[i] = self.tail[i] if i != 2 else pick(live, self.tail[i], Int32(0))
            more[i] = self.more[i] if i != 2 else pick(live, self.more[i], Int32(0))
        return replace(self, tail=tail, more=more)


RECORD_WORDS = 12


@dataclass(frozen=True)
class Shared656:
    """Shared memory of 656-byte tokens (see `kv_656`)."""

    sRope: cute.Tensor  # bf16 (64, 64 or more, stages); P overwrites it
    sQ_rope: cute.Tensor  # (rows, 64), right behind the split columns of Q
    sScale: cute.Tensor  # fp32 [stage][64][4]
    sMaxScale: cute.Tensor  # fp32 [2 warp groups][warp][4]: maximum over a warp's tokens
    sP_scale: cute.Tensor  # fp32 [stage][4]: factor of a tile's PV, per scale group


@dataclass(frozen=True)
class Shared:
    """Shared memory of a CTA; the barriers are those of the package's docstring."""

    sQ: cute.Tensor  # (rows, 576); hi and lo: (2 rows, 576)
    sQ_scale: Any  # fp32 [rows]: power of two of a query row (see `query_hi_lo`)
    sKV: cute.Tensor  # (64, 576, stages); P overwrites the rope box of its stage
    sTileMax: cute.Tensor  # fp32 [2][rows][4]: maximum of a tile's scores, per warp
    # fp32 [warp group][row max (log2), rescale][rows]; e4m3: see `mainloop_fp8`
    sStats: cute.Tensor
    #: fp32 [rows + bound rows][8]: sums of exponentials, then a bound of accumulators, per warp
    sRowSum: cute.Tensor
    peer_stats: cute.Pointer  # fp32 [cluster][row pair][4]: (m, l, m, l) from each CTA
    cta_weights: cute.Pointer  # fp32 [8 warps][cluster][2]
    record: cute.Pointer  # int32 [12]: `WorkTile`'s first words, then `Record`'s
    arrival: cute.Pointer  # int32: position among the CTAs that split a row tile
    kv: Pipeline  # full [stage][barrier], empty [stage]
    q: Pipeline
    peers: Pipeline  # partials of the cluster
    ring_drained: MBarriers
    p_full: MBarriers  # [`stats_idx`]
    stats_full: Any  # [warp group], e4m3
    sums_full: MBarriers
    weights_full: MBarriers
    q_loaded: Any
    q_split: Any
    plan_full: Any
    kept_full: Any  # [work tile % 2], see `mainloop.keep_record`
    peer_partials: cute.Pointer  # fp32 [cluster][fragments][4]
    profile: cute.Pointer  # int64 [`CtaEvent`]
    kv_656: Any
    plan: Any  # int32 [32]: this worker's tiles, see `common.self_schedule`
    skipped: Any  # int32 [`stats_idx`]: 1 where a tile's PV is skipped


@dataclass(frozen=True)
class TiledMmas:
    """S^T = K Q^T (64 tokens x rows) and O^T = V^T P^T (256 columns x rows per warp group)."""

    qk: cute.TiledMma
    pv: cute.TiledMma
    #: bf16 QK of the rope, beside e4m3 (see `kv_656`)
    qk_rope: Any = None


def barrier_table(c: Traits) -> dict[str, tuple[int, int]]:
    """Name -> (mbarriers, arrivals of a phase), in the order of their addresses."""
    half = CONSUMER_THREADS // 2
    table = {
        "kv_full": (c.stages * c.barriers_per_stage, c.full_arrivals),
        "kv_empty": (c.stages, CONSUMER_WARPS * c.multicast),
        "q_full": (1, 1),
        "q_empty": (1, CONSUMER_THREADS),
        "peers_empty": (1, CONSUMER_WARPS * c.cluster),
        "peers_full": (1, 1),
        "ring_drained": (1, CONSUMER_WARPS),
        "p_full": (2, half),
        "sums_full": (1, CONSUMER_THREADS),
        "weights_full": (1, CONSUMER_THREADS),
    }
    if c.fp8:
        table |= {"p_full_fp8": (4, half), "stats_full": (2, c.rows)}
    if c.hi_lo:
        table |= {"q_loaded": (1, CONSUMER_THREADS), "q_split": (1, CONSUMER_THREADS)}
    if c.keeps_plan:
        table["plan_full"] = (1, PLAN_WORDS)
    if c.pieces:
        table["kept_full"] = (2, 1)
    return table


def barriers_init(c: Traits, s: Shared) -> None:
    """Initialise every mbarrier with its arrivals; by one lane."""
    count = {name: arrivals for name, (_, arrivals) in barrier_table(c).items()}
    for i in range(c.stages * c.barriers_per_stage):
        s.kv.full.init(i, count["kv_full"])
    for i in range(c.stages):
        s.kv.empty.init(i, count["kv_empty"])
    s.q.full.init(0, count["q_full"])
    s.q.empty.init(0, count["q_empty"])
    s.peers.empty.init(0, count["peers_empty"])
    s.peers.full.init(0, count["peers_full"])
    s.ring_drained.init(0, count["ring_drained"])
    for wg in range(2):
        s.p_full.init(wg, count["p_full"])
        if c.fp8:
            s.p_full.init(2 + wg, count["p_full"])
            s.stats_full.init(wg, count["stats_full"])
    if c.hi_lo:
        s.q_loaded.init(0, count["q_loaded"])
        s.q_split.init(0, count["q_split"])
    if c.keeps_plan:
        s.plan_full.init(0, count["plan_full"])
    if c.pieces:
        for place in range(2):
            s.kept_full.init(place, count["kept_full"])
    s.sums_full.init(0, count["sums_full"])
    s.weights_full.init(0, count["weights_full"])


def barriers_of(c: Traits, base: cute.Pointer) -> dict[str, Any]:
    """The barrier fields of `Shared`, by `barrier_table`, from address `base` on."""
    table = barrier_table(c)
    # addresses are formed outward from q_full
    first, offset = {}, 0
    for name, (number, _) in table.items():
        first[name], offset = offset, offset + number
    kv_empty = base + first["kv_empty"]
    q_full = kv_empty + c.stages
    p_full = "p_full_fp8" if c.fp8 else "p_full"  # e4m3 has two places of statistics per group
    names = (p_full, *(name for name in table if not name.startswith(("kv", "p_full"))))
    bars = {name: MBarriers(q_full + (first[name] - first["q_full"])) for name in names}
    return {
        "kv": Pipeline(MBarriers(base), MBarriers(kv_empty)),
        "q": Pipeline(bars["q_full"], bars["q_empty"]),
        "peers": Pipeline(bars["peers_full"], bars["peers_empty"]),
        "p_full": bars[p_full],
        **{name: bars[name] for name in ("ring_drained", "sums_full", "weights_full")},
        **{name: bars.get(name) for name in ("stats_full", "q_loaded", "q_split")},
        **{name: bars.get(name) for name in ("plan_full", "kept_full")},
    }


class SmemOverlay:
    """Allocations on shared memory that has another use at other times, from `base` on; the methods
    are those of `SmemAllocator` that `allocate` calls."""

    def __init__(self, base: cute.Pointer) -> None:
        self._base, self._used = base.toint(), 0

    def _take(self, dtype: Any, count: int, align: int) -> cute.Pointer:
        start = -(-self._used // align) * align
        self._used = start + count * dtype.width // 8
        place = self._base + start
        return cute.make_ptr(dtype, place, cute.AddressSpace.smem, assumed_align=align)

    def allocate_array(self, dtype: Any, count: int) -> cute.Pointer:
        """`count` elements."""
        return self._take(dtype, count, dtype.width // 8)

    def allocate_tensor(
        self, dtype: Any, layout: Any, byte_alignment: int, swizzle: Any = None
    ) -> cute.Tensor:
        """A tensor of a static layout."""
        place = self._take(dtype, cute.cosize(layout), byte_alignment)
        if swizzle is not None:
            place = cute.recast_ptr(place, swizzle, dtype)
        return cute.make_tensor(place, layout)


def allocate(
    c: Traits,
    q_layout: cute.ComposedLayout,
    k_layout: cute.ComposedLayout,
    rope: Any,
    memory: Any = None,
) -> Shared:
    """Lay out shared memory, in the order in which `Traits.small_bytes` counts it; on `memory`
    where that is given."""
    memory = memory or cutlass.memory.SmemAllocator()
    n = c.rows
    num_barriers = sum(number for number, _ in barrier_table(c).values())
    base = memory.allocate_array(Int64, num_barriers)
    profile = memory.allocate_array(Int64, len(CtaEvent))
    record = memory.allocate_tensor(Int32, cute.make_layout(16), byte_alignment=16)
    plan = None
    if not c.grid:
        plan = memory.allocate_tensor(Int32, cute.make_layout(PLAN_WORDS), byte_alignment=16)

    def f32(*shape: int) -> cute.Tensor:
        layout = cute.make_ordered_layout(shape, order=tuple(reversed(range(len(shape)))))
        return memory.allocate_tensor(Float32, layout, byte_alignment=128)

    def swizzled(dtype: Any, layout: cute.ComposedLayout) -> cute.Tensor:
        return memory.allocate_tensor(
            dtype, layout.outer, byte_alignment=1024, swizzle=layout.inner
        )

    tile_max, stats, sums = (
        f32(2, n, 4),
        f32(*((4, 3) if c.fp8 else (2, 2)), n),
        f32(n + c.bound_rows, 8),
    )
    peer_stats, cta_weights = f32(c.cluster, c.row_pairs, 4), f32(CONSUMER_WARPS, c.cluster, 2)
    q_scale = f32(n) if c.hi_lo else None
    max_scale, p_scale = (f32(2, 4, SCALES), f32(c.stages, SCALES)) if c.kv_656 else (None, None)
    skipped = cute.recast_tensor(f32(4), Int32) if c.skip else None
    sKV = swizzled(c.dtype, k_layout)
    sQ = swizzled(c.dtype, q_layout)
    kv_656 = None
    if c.kv_656:
        sQ_rope, sRope = swizzled(c.q_dtype, rope[0]), swizzled(c.q_dtype, rope[1])
        scales = f32(c.stages, TILE_KV, SCALES)
        kv_656 = Shared656(sRope, sQ_rope, scales, max_scale, p_scale)
    peer_partials = smem_f32(sKV.iterator, 1024)
    if c.cluster > 1 and not c.partials_on_ring:
        peer_partials = f32(c.peer_partial_bytes // 4).iterator
    return Shared(
        sQ=sQ,
        sQ_scale=q_scale,
        sKV=sKV,
        sTileMax=tile_max,
        sStats=stats,
        sRowSum=sums,
        peer_stats=peer_stats.iterator,
        cta_weights=cta_weights.iterator,
        record=record.iterator,
        arrival=record.iterator + RECORD_WORDS,
        **barriers_of(c, base),
        peer_partials=peer_partials,
        profile=profile,
        kv_656=kv_656,
        plan=plan,
        skipped=skipped,
    )


def stage_full(c: Traits, s: Shared, stage: Any) -> MBarriers:
    """The full barriers of a stage of the KV ring, one per range of columns."""
    return MBarriers(s.kv.full.at(stage * c.barriers_per_stage))


def v_view(s: Shared, c: Traits, wg: int) -> cute.Tensor:
    """V^T of a warp group on the KV tiles' bytes: (256 columns, 64 tokens, stage)."""
    layout = cute.make_layout(
        ((BOX, V_BOXES // 2), TILE_KV, c.stages),
        stride=((1, BOX * TILE_KV), BOX, TILE_KV * HEAD_DIM),
    )
    return cute.make_tensor(s.sKV.iterator + wg * (V_BOXES // 2) * BOX * TILE_KV, layout)


def p_view(s: Shared, c: Traits) -> cute.Tensor:
    """P as (rows, 64 tokens, stage), on the rope box of each stage; of 656-byte tokens as
    (rows, 64 tokens, scale group, stage)."""
    if c.kv_656:
        atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW64, c.dtype)
        place = s.kv_656.sRope.iterator.toint()
        plain = cute.make_ptr(c.dtype, place, cute.AddressSpace.smem, assumed_align=1024)
        layout = cute.make_layout(
            (c.mma_n, TILE_KV, SCALES, c.stages), stride=(BOX, 1, c.mma_n * BOX, c.rope_bytes)
        )
        return cute.make_tensor(cute.recast_ptr(plain, atom.inner, c.dtype), layout)
    layout = cute.make_layout((c.mma_n, TILE_KV, c.stages), stride=(BOX, 1, TILE_KV * HEAD_DIM))
    return cute.make_tensor(s.sKV.iterator + V_BOXES * BOX * TILE_KV, layout)


def stats_idx(c: Traits, wg: Any, tile: Any) -> Any:
    """Place of a warp group's statistics of the CTA's KV tile `tile` in `Shared.sStats`: e4m3 has
    two places per warp group."""
    return 2 * wg + ((tile >> 1) & 1) if c.fp8 else wg


def first_owner(c: Traits, tiles_before: Int32) -> Int32:
    """Warp group that owns the first KV tile of a work tile.

    With two stages the owner is the stage, which follows from the tiles before; else owners
    alternate over all tiles too, but a grid has one work tile.
    """
    return Int32(0) if c.grid and not c.stage_per_group else tiles_before & 1
