"""A warpgroup's round for its own tile k, and what it adds of the other's tiles.

    issue S^T(k) | await P(k-1) of the other, issue O^T(k-1) | softmax(k), publish P(k)
    | release stage of k-1 | issue O^T(k), release stage of k

P is published by all 128 threads at an mbarrier: measured 1 to 2 % faster than a named barrier at
which one warpgroup arrives and the other waits.

With `values_first` (two stages) O^T(k-1) and the release of its stage stand before S^T(k): there
S^T(k) would wait for tile k, and the load of k+1 for the stage, one load after another. Tile 1 of
a grid is asked for at the start, so that its scores come first.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warp as warp_ops
from cutlass.cute.nvgpu import warpgroup

from . import online_softmax as sx
from .epilogue import publish_totals
from .mma import issue_scores, issue_values
from .params import GROUPS, LATENT_DIM, TILE_KV, Shape
from .shared_storage import Global, Products, Shared, stamp, value_view, weight_view

#: named barriers of a warpgroup: 2, 3
ONE = 2
#: orders of the products in a round
FIRST, SECOND, SCORES, VALUES = "first", "second", "scores", "values"


@dataclass(frozen=True)
class Registers:
    """What a thread keeps through a work tile, whichever warpgroup's it is."""

    acc_s: cute.Tensor
    acc_o: cute.Tensor
    total: cute.Tensor
    factor: cute.Tensor
    #: e4m3: O^T of one tile
    part: Any = None
    #: two terms: the scores, whose parts are at `acc_s`, and the weights
    rest: Any = None
    #: what one of a tile's weights counts for, by scale groups of this warpgroup; scales of a
    #: thread's two tokens (see `scaled`)
    units: Any = None
    scales: Any = None


@dataclass(frozen=True)
class Fragments:
    """Operands of this warpgroup and its registers."""

    k: cute.Tensor
    q: cute.Tensor
    #: e4m3: one slice of it, in registers
    v: cute.Tensor
    p: cute.Tensor
    #: the way of P to shared memory: 16 bits
    store: Any
    p_out: Any
    #: layout of a slice's accumulators: e4m3
    slice: Any
    acc_s: cute.Tensor
    acc_o: cute.Tensor
    total: cute.Tensor
    factor: cute.Tensor
    part: Any
    rest: Any
    units: Any
    scales: Any
    #: rope of K and of Q
    k_rope: Any = None
    q_rope: Any = None


@dataclass(frozen=True)
class Span:
    """The work record's part that the loop needs."""

    mine: Int32
    token: Int32
    kv_len: Int32
    causal: Int32
    row: Int32
    #: tiles consumed before this work tile
    done: Int32
    #: first row in q and out
    out_row: Int32
    #: rows of the tile that are the request's, where that matters (skip-softmax)
    rows: Any = None


def registers(c: Shape, mma: Products) -> Registers:
    """Accumulators and statistics, made once."""
    part, rest, scores = None, None, mma.s.partition_shape_C((TILE_KV, c.width))
    if c.eight and c.promote:
        part = cute.make_rmem_tensor(c.parts_apart * c.width // 2, Float32)
    if c.terms > 1:
        rest = cute.make_rmem_tensor(c.rows // 2, Float32)
        scores = c.score_sets * c.width // 2
    units, scales = None, None
    if c.scaled:
        rest = cute.make_rmem_tensor(mma.rope.partition_shape_C((TILE_KV, c.rows)), Float32)
        units = cute.make_rmem_tensor(2, Float32)
        scales = cute.make_rmem_tensor(2 * GROUPS, Float32)
    return Registers(
        acc_s=cute.make_rmem_tensor(scores, Float32),
        acc_o=cute.make_rmem_tensor(
            mma.o.partition_shape_C((256, c.rows)) if c.terms == 1 else 2 * c.rows, Float32
        ),
        total=cute.make_rmem_tensor(c.rows // 4, Float32),
        factor=cute.make_rmem_tensor(c.rows // 4, Float32),
        part=part,
        rest=rest,
        units=units,
        scales=scales,
    )


def fragments(
    c: Shape, wg: int, s: Shared, mma: Products, thread: Int32, r: Registers
) -> Fragments:
    """Descriptors of a warpgroup's operands, beside its registers."""
    slice_s, slice_o = mma.s.get_slice(0), mma.o.get_slice(0)
    p = weight_view(s, c)
    shared = {name: getattr(r, name) for name in r.__dataclass_fields__}
    if c.scaled:
        slice_r = mma.rope.get_slice(0)
        shared["k_rope"] = mma.rope.make_fragment_A(slice_r.partition_A(s.scaled.rope))
        shared["q_rope"] = mma.rope.make_fragment_B(slice_r.partition_B(s.scaled.q_rope))
    if c.eight:
        return Fragments(
            k=mma.s.make_fragment_A(slice_s.partition_A(s.k)),
            q=mma.s.make_fragment_B(slice_s.partition_B(s.q)),
            v=cute.make_rmem_tensor(mma.o.partition_shape_A((TILE_KV, TILE_KV)), c.dtype),
            p=mma.o.make_fragment_B(slice_o.partition_B(p)),
            store=None,
            p_out=None,
            slice=cute.make_layout(mma.o.partition_shape_C((TILE_KV, c.width))),
            **shared,
        )
    count = 2 if c.rows == 8 else 4
    atom = cute.make_copy_atom(warp_ops.StMatrix8x8x16bOp(True, count), c.dtype)
    store = cute.make_tiled_copy_C(atom, mma.s).get_slice(thread)
    return Fragments(
        k=mma.s.make_fragment_A(slice_s.partition_A(s.k)),
        q=mma.s.make_fragment_B(slice_s.partition_B(s.q)),
        v=mma.o.make_fragment_A(slice_o.partition_A(value_view(s, c, wg))),
        p=mma.o.make_fragment_B(slice_o.partition_B(p)),
        store=store,
        p_out=store.partition_D(cute.make_tensor(p.iterator, cute.select(p.layout, [1, 0, 2]))),
        slice=None,
        **shared,
    )


@cute.jit
def release(c: cutlass.Constexpr[Shape], s: Shared, stage: Int32):
    """One arrival a warp, at each CTA that loads into this stage: it is read no more."""
    if const_expr(c.pair > 1):
        cute.arch.sync_warp()
        lane = cute.arch.lane_idx()
        if lane < c.pair:
            cute.arch.mbarrier_arrive(s.empty + stage, lane)
    else:
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(s.empty + stage)


@cute.jit
def clear_tail(c: cutlass.Constexpr[Shape], s: Shared, stage: Int32, left: Int32, thread: Int32):
    """Zero the value rows of tokens past the end: an unread slot may hold NaN, and 0 x NaN is NaN.

    Whole rows of the values' boxes, 128 or 64 bytes, so the swizzle does not matter.
    """
    words = c.box * c.bytes // 4
    chunks, boxes = words // 4, LATENT_DIM // c.box
    rows = 128 // (boxes * chunks)
    zero = cute.make_rmem_tensor(4, Int32)
    zero.fill(0)
    base = cute.make_ptr(Int32, s.k.iterator.toint(), cute.AddressSpace.smem, assumed_align=1024)
    base = base + stage * (c.k_bytes // 4)
    box, chunk = thread // (chunks * rows), thread % chunks
    for row in cutlass.range(left + thread // chunks % rows, TILE_KV, rows, unroll=1):
        word = (box * TILE_KV + row) * words + chunk * 4
        cute.autovec_copy(zero, cute.make_tensor((base + word).align(16), cute.make_layout(4)))


@cute.jit
def take(
    c: cutlass.Constexpr[Shape], wg: cutlass.Constexpr[int], s: Shared, mma: Products,
    f: Fragments, lane: Int32, stage: Int32, at: Int32,
):  # fmt: skip
    """Issue O^T of the other warpgroup's tile, `at` in the walk, once its P is there."""
    cute.arch.mbarrier_wait(s.p_ready + (1 - wg), (at >> 1) & 1)
    sx.read_factors(c, s, 1 - wg, f.factor, lane)
    sx.scale_totals(f.total, f.factor)
    sx.rescale(f.acc_o, f.factor, c.rows)
    warpgroup.fence()
    issue_values(mma.o.op, f.acc_o, f.v, f.p, stage)


@cute.jit
def own_tile(
    c: cutlass.Constexpr[Shape], wg: cutlass.Constexpr[int], order: cutlass.Constexpr[str],
    g: Global, s: Shared, mma: Products, f: Fragments, w: Span, k: Int32,
    warp: Int32, lane: Int32,
):  # fmt: skip
    """One round of the module's docstring; `order`: FIRST (the work tile has no tile k-1), SECOND
    (tile k was asked for at the start), SCORES or VALUES, whichever of the products comes first."""
    thread = warp * 32 + lane
    at = w.done + k
    stage = wg if const_expr(c.static_stage) else at % c.stages
    before = 1 - wg if const_expr(c.static_stage) else (at + c.stages - 1) % c.stages
    tile_token = w.token + k * TILE_KV
    phase = (at // c.stages) & 1
    slots = sx.ask_slots(c, g, tile_token, w)
    if const_expr(order == VALUES):
        # with two stages tile k is still on its way here, and k+1 waits for the stage of k-1
        take(c, wg, s, mma, f, lane, before, at - 1)
        warpgroup.wait_group(0)
        release(c, s, before)
    token = 16 * warp + lane // 4
    warpgroup.fence()
    issue_scores(c, s, mma.s.op, f.acc_s, f.k, f.q, stage, phase)
    if const_expr(order in (FIRST, VALUES)):
        warpgroup.wait_group(0)
    else:
        take(c, wg, s, mma, f, lane, before, at - 1)
        warpgroup.wait_group(1)
    if const_expr(order == SECOND):
        if w.mine > 2:
            # tile 2 waits for this stage
            warpgroup.wait_group(0)
            release(c, s, before)
    if const_expr(order == FIRST):
        stamp(c, s, 2)
    if k + 2 >= w.mine:
        cute.arch.mbarrier_arrive(s.q_empty)
    sx.mask_scores(c, g, f.acc_s, tile_token, w, token, lane)
    sx.mask_slots(c, f.acc_s, slots)
    sx.softmax(c, wg, order == FIRST, g, s, f.acc_s, f.total, f.factor, warp, lane)
    p = cute.make_rmem_tensor_like(f.acc_s, c.dtype)
    p.store(f.acc_s.load().to(c.dtype))
    cute.copy(f.store, f.store.retile(p), f.p_out[None, None, None, stage])
    if const_expr(not c.gather):
        if tile_token + TILE_KV > w.kv_len:
            clear_tail(c, s, stage, w.kv_len - tile_token, thread)
    cute.arch.fence_view_async_shared()
    cute.arch.mbarrier_arrive(s.p_ready + wg)
    cute.arch.barrier(barrier_id=ONE + wg, number_of_threads=128)
    if const_expr(order != FIRST):
        if const_expr(order != VALUES):
            warpgroup.wait_group(0)
        if const_expr(order == SCORES):
            release(c, s, before)
        sx.rescale(f.acc_o, f.factor, c.rows)
    warpgroup.fence()
    issue_values(mma.o.op, f.acc_o, f.v, f.p, stage)
    if k + 1 == w.mine:
        publish_totals(c, wg, s, f.total, warp, lane)
    warpgroup.wait_group(0)
    release(c, s, stage)
