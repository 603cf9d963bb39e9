"""What the roles share: operands in global memory, shared memory, the two matrix products."""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warpgroup

from ..common.ptx_sm90 import smem_f32
from .params import BOX, CONSUMER_WARPS, GROUPS, HEAD_DIM, TILE_KV, VALUE_BOXES, Shape

#: words of the work record that the producer leaves for the consumers
MINE, TOKEN, KV_LEN, CAUSAL, ROW, OUT_ROW, ROWS, ACTIVE = range(8)
SLOT, GROUP, NUM_SPLITS, SPLIT = range(8, 12)
#: `MINE` of the record after the last work tile
END = -1
#: times of a stamped build: start, set up, first QK, loop done, sent, reduced, tile end, exit,
#: first KV asked for, all partials of the row tile there
STAMPS = 10


@dataclass(frozen=True)
class Global:
    """Operands of a launch (shapes in the kernel's docstring)."""

    tma_q: cute.CopyAtom
    gq: cute.Tensor
    tma_k: cute.CopyAtom
    gk: cute.Tensor
    out: cute.Tensor
    lse: cute.Tensor
    partial_out: cute.Tensor
    partial_lse: cute.Tensor
    counters: cute.Tensor
    block_table: cute.Tensor
    seq_lens: cute.Tensor
    q_begin: cute.Tensor
    tiles: cute.Tensor
    worker_begin: cute.Tensor
    stamps: cute.Tensor
    heads: Int32
    scale_log2: Float32
    out_scale: Float32
    #: grid mode: pieces of a request at most, and row tiles
    num_splits: Any = None
    row_tiles: Any = None
    #: query tokens of every request; 0: they differ, see `q_begin`
    q_len: Any = None
    #: else: workers, and what the scheduling rule weighs (`plan.self_schedule.Costs.packed`) below
    #: a gate; in grid mode `costs` is the gate alone
    num_workers: Any = None
    costs: Any = None
    #: see `extras`: fp32 [heads], [1], [1], or no element; uint32 [tokens, words]
    sinks: Any = None
    bmm1: Any = None
    bmm2: Any = None
    mask: Any = None
    #: skip-softmax's factor, to be divided by the request's length
    skip: Any = None
    #: [pages, page size, 576 or 656], where tokens are gathered
    kv: Any = None
    #: TMA views of ropes and scales, two each (see `scaled`)
    more: Any = None


@dataclass(frozen=True)
class Scaled:
    """What tokens of 656 bytes take beside that (see `scaled`)."""

    rope: cute.Tensor  # bf16 (64, 64 or more, stages); P lies on it
    q_rope: cute.Tensor  # (rows, 64), right behind the split columns of Q
    scales: cute.Tensor  # fp32 [stage][64][4]
    tops: cute.Tensor  # fp32 [2 warpgroups][warp][4]: a tile's greatest scales
    units: cute.Tensor  # fp32 [`statistics`][4]: what one of a tile's weights counts for


@dataclass(frozen=True)
class Shared:
    """Shared memory of a CTA. Barriers and what they count stand in the kernel's docstring."""

    q: cute.Tensor  # (rows, 576); two terms: (2 rows, 576), see `split`
    unit: Any  # fp32 [rows]: what one of a query row's e4m3 numbers counts for (two terms)
    k: cute.Tensor  # (64, 576, stages); P lies on the rope box of its own stage
    top: cute.Tensor  # fp32 [2][rows][4]: tile maximum per warp of a warpgroup
    # fp32 [warpgroup][2][rows]: running maximum (log2), factor of the last tile; e4m3: see `late`
    peak: cute.Tensor
    sums: cute.Tensor  # fp32 [rows][8]: exponentials' sum per warp
    peer: cute.Pointer  # fp32 [cluster][pairs][4]: (m, l, m, l) of a row pair, from each CTA
    weights: cute.Pointer  # fp32 [8 warps][cluster][2]
    work: cute.Pointer  # int32 [12]
    flag: cute.Pointer  # int32
    full: cute.Pointer  # [stage][group]
    empty: cute.Pointer  # [stage]
    q_full: cute.Pointer
    q_empty: cute.Pointer
    free: cute.Pointer  # peers may send
    sent: cute.Pointer  # their partials are here
    drained: cute.Pointer  # and read
    p_ready: cute.Pointer  # [`statistics`]: P, maximum and factor of a tile
    summed: cute.Pointer  # each warp's sums of a work tile
    weighed: cute.Pointer  # the weights of a merge
    partials: cute.Pointer  # fp32 [cluster][units][4]
    stamps: cute.Pointer  # int64 [STAMPS]
    m_ready: cute.Pointer  # [warpgroup]: maxima of its last tile (e4m3)
    q_read: cute.Pointer  # a query as it arrived (two terms)
    q_split: cute.Pointer  # and its terms are there
    scaled: Any
    plan: Any  # int32 [32]: this worker's tiles, see `common.self_schedule`
    skipped: Any  # int32 [`statistics`]: 1 where a tile is left out (skip-softmax)


@dataclass(frozen=True)
class Products:
    """S^T = K Q^T (64 tokens x rows) and O^T = V^T P^T (256 columns x rows a warpgroup)."""

    s: cute.TiledMma
    o: cute.TiledMma
    #: of sixteen bits, beside e4m3 (see `scaled`)
    rope: Any = None


def allocate(
    c: Shape, q_layout: cute.ComposedLayout, k_layout: cute.ComposedLayout, rope: Any
) -> Shared:
    """Lay out shared memory; the sizes are `Shape`'s."""
    memory = cutlass.memory.SmemAllocator()
    n = c.rows
    apart = 6 * c.eight + 2 * (c.terms - 1)
    bars = memory.allocate_array(Int64, c.stages * (c.groups + 1) + 9 + apart)
    stamps = memory.allocate_array(Int64, STAMPS)
    work = memory.allocate_tensor(Int32, cute.make_layout(16), byte_alignment=16)
    plan = None
    if const_expr(not c.grid):
        plan = memory.allocate_tensor(Int32, cute.make_layout(32), byte_alignment=16)

    def f32(*shape: int) -> cute.Tensor:
        layout = cute.make_ordered_layout(shape, order=tuple(reversed(range(len(shape)))))
        return memory.allocate_tensor(Float32, layout, byte_alignment=128)

    top, peak, sums = f32(2, n, 4), f32(*((4, 3) if c.eight else (2, 2)), n), f32(n, 8)
    peer, weights = f32(c.cluster, c.pairs, 4), f32(CONSUMER_WARPS, c.cluster, 2)
    unit = f32(n) if c.terms > 1 else None
    tops, units = (f32(2, 4, GROUPS), f32(4, GROUPS)) if c.scaled else (None, None)
    skipped = cute.recast_tensor(f32(4), Int32) if c.skip else None
    k = memory.allocate_tensor(c.dtype, k_layout.outer, byte_alignment=1024, swizzle=k_layout.inner)
    q = memory.allocate_tensor(c.dtype, q_layout.outer, byte_alignment=1024, swizzle=q_layout.inner)
    scaled = None
    if const_expr(c.scaled):
        q_rope, ring = rope
        scaled = Scaled(
            q_rope=memory.allocate_tensor(
                c.q_dtype, q_rope.outer, byte_alignment=1024, swizzle=q_rope.inner
            ),
            rope=memory.allocate_tensor(
                c.q_dtype, ring.outer, byte_alignment=1024, swizzle=ring.inner
            ),
            scales=f32(c.stages, TILE_KV, GROUPS),
            tops=tops,
            units=units,
        )
    partials = smem_f32(k.iterator, 1024)
    if const_expr(c.cluster > 1 and not c.aliased):
        partials = f32(c.exchange_bytes // 4).iterator
    full = bars
    empty = full + c.stages * c.groups
    tail = empty + c.stages
    p_ready = tail + (9 if c.eight else 5)
    return Shared(
        q, unit, k, top, peak, sums, peer.iterator, weights.iterator,
        work.iterator, work.iterator + 12, full, empty,
        tail, tail + 1, tail + 2, tail + 3, tail + 4, p_ready, tail + 7, tail + 8,
        partials, stamps, tail + 13, tail + 15, tail + 16, scaled, plan, skipped,
    )  # fmt: skip


def value_view(s: Shared, c: Shape, wg: int) -> cute.Tensor:
    """V^T of a warpgroup on the K tiles' bytes: (256 columns, 64 tokens, stage)."""
    half = VALUE_BOXES // 2
    layout = cute.make_layout(
        ((BOX, half), TILE_KV, c.stages),
        stride=((1, BOX * TILE_KV), BOX, TILE_KV * HEAD_DIM),
    )
    return cute.make_tensor(s.k.iterator + wg * half * BOX * TILE_KV, layout)


def weight_view(s: Shared, c: Shape) -> cute.Tensor:
    """P as (rows, 64 tokens, stage), on the rope box of each stage; of four groups (`scaled`) as
    (rows, 64 tokens, group, stage)."""
    if c.scaled:
        narrow = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW64, c.dtype)
        place = s.scaled.rope.iterator.toint()
        plain = cute.make_ptr(c.dtype, place, cute.AddressSpace.smem, assumed_align=1024)
        layout = cute.make_layout(
            (c.width, TILE_KV, GROUPS, c.stages), stride=(BOX, 1, c.width * BOX, c.rope_bytes)
        )
        return cute.make_tensor(cute.recast_ptr(plain, narrow.inner, c.dtype), layout)
    layout = cute.make_layout((c.width, TILE_KV, c.stages), stride=(BOX, 1, TILE_KV * HEAD_DIM))
    return cute.make_tensor(s.k.iterator + VALUE_BOXES * BOX * TILE_KV, layout)


def statistics(c: Shape, wg: Any, at: Any) -> Any:
    """Where a warpgroup leaves maxima and factors of tile `at` of the walk."""
    return 2 * wg + ((at >> 1) & 1) if c.eight else wg


def first_owner(c: Shape, done: Int32) -> Int32:
    """Warpgroup that owns the first tile of a work tile, `done` tiles into the walk.

    Tile `done + k` lies in stage (done + k) % stages; with two stages the owner is the stage. A
    grid has one work tile.
    """
    return Int32(0) if c.grid and not c.static_stage else done & 1


@cute.jit
def stamp(c: cutlass.Constexpr[Shape], s: Shared, index: cutlass.Constexpr[int]) -> None:
    """Note the global timer (first consumer thread, stamped builds only)."""
    if const_expr(c.stamps):
        tid, _, _ = cute.arch.thread_idx()
        if tid == 0:
            cute.arch.store(s.stamps + index, Int64(cute.arch.globaltimer()))
