"""The mainloop of 16-bit operands: a warp group's round for its own KV tile k.

    issue QK(k) | consumer_wait P(k-1) of the other warp group, issue PV(k-1) | softmax(k),
    publish P(k) | release the stage of k-1 | issue PV(k), release the stage of k

P is published by all 128 threads at an mbarrier: 1 to 2 % faster than a named barrier at which one
warp group arrives and the other waits (H200, 2026-11-20, data/notes/kernel_attempts.jsonl).

With `pv_first` (two stages) PV(k-1) and the release of its stage stand before QK(k): behind it the
load of tile k + 1 would wait for QK(k), which waits for the load of tile k. Tile 1 of a grid is
loaded at the start, so there QK comes first.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from ..common.barriers import MBarriers
from ..common.pipeline import PipelineState
from ..split_merge.swap_ab_fragments import CtaEvent, profile_event
from . import online_softmax as sx
from .epilogue import publish_row_sums
from .mma import WarpGroup, issue_pv, issue_qk
from .params import LATENT_DIM, TILE_KV, Traits
from .shared_storage import Globals, Shared, WorkTile

#: a round's place: no tile k-1; tile 1 of a grid, loaded at the start; QK or PV first
FIRST, SECOND, QK_FIRST, PV_FIRST = "first", "second", "qk first", "pv first"


@cute.jit
def release_stage(c: cutlass.Constexpr[Traits], s: Shared, stage: Int32):
    """consumer_release by one lane per warp, at each CTA that loads into this stage."""
    if const_expr(c.fp8):  # whose lanes have read V themselves, by ldmatrix
        cute.arch.sync_warp()
    if const_expr(c.multicast > 1):
        lane = cute.arch.lane_idx()
        if lane < c.multicast:
            s.kv.consumer_release(stage, lane)
    else:
        with cute.arch.elect_one():
            s.kv.consumer_release(stage)


@cute.jit
def zero_tail(c: cutlass.Constexpr[Traits], s: Shared, stage: Int32, left: Int32, thread: Int32):
    """Zero the V rows from token `left` of the tile on: an unread slot may hold NaN, and 0 x NaN
    is NaN. Whole rows of a box, 128 or 64 bytes, so the swizzle does not matter."""
    words = c.box * c.bytes // 4
    chunks, boxes = words // 4, LATENT_DIM // c.box
    rows = 128 // (boxes * chunks)
    zero = cute.make_rmem_tensor(4, Int32)
    zero.fill(0)
    base = cute.make_ptr(Int32, s.sKV.iterator.toint(), cute.AddressSpace.smem, assumed_align=1024)
    base = base + stage * (c.k_bytes // 4)
    box, chunk = thread // (chunks * rows), thread % chunks
    for row in cutlass.range(left + thread // chunks % rows, TILE_KV, rows, unroll=1):
        word = (box * TILE_KV + row) * words + chunk * 4
        cute.autovec_copy(zero, cute.make_tensor((base + word).align(16), cute.make_layout(4)))


@cute.jit
def publish_p(
    c: cutlass.Constexpr[Traits], s: Shared, wg: WarpGroup, w: WorkTile, tile_token: Int32,
    thread: Int32, stage: Int32, stats: Int32,
):  # fmt: skip
    """After P's stores: make P, the statistics and the zeroed tail visible to both warp groups."""
    if const_expr(not c.gathered):
        if tile_token + TILE_KV > w.kv_len:
            zero_tail(c, s, stage, w.kv_len - tile_token, thread)
    cute.arch.fence_view_async_shared()
    s.p_full.arrive(stats)
    wg.sync()


@cute.jit
def pv_of_other(
    c: cutlass.Constexpr[Traits], s: Shared, wg: WarpGroup, stage: Int32, tile: Int32
):  # fmt: skip
    """Issue PV of the other warp group's tile, number `tile` of the CTA, once its P is there."""
    p_full = MBarriers(s.p_full.at(1 - wg.idx))
    p_full.wait(0, (tile >> 1) & 1)
    sx.load_rescale(c, s, wg, 1 - wg.idx)
    sx.rescale_sums(wg)
    sx.rescale_o(c, wg)
    issue_pv(c, s, wg, stage)


@cute.jit
def own_tile(
    c: cutlass.Constexpr[Traits], order: cutlass.Constexpr[str], g: Globals, s: Shared,
    wg: WarpGroup, w: WorkTile, k: Int32,
):  # fmt: skip
    """One round of the module's docstring; `order`: FIRST, SECOND, QK_FIRST or PV_FIRST."""
    thread = wg.warp * 32 + wg.lane
    tile = w.tiles_before + k
    stage = wg.idx if const_expr(c.stage_per_group) else tile % c.stages
    before = 1 - wg.idx if const_expr(c.stage_per_group) else (tile + c.stages - 1) % c.stages
    tile_token = w.token + k * TILE_KV
    phase = PipelineState.of_count(tile, c.stages).phase
    slot_bits = sx.load_slot_bits(c, g, tile_token, w)
    if const_expr(order == PV_FIRST):
        pv_of_other(c, s, wg, before, tile - 1)
        warpgroup.wait_group(0)
        release_stage(c, s, before)
    token = 16 * wg.warp + wg.lane // 4
    warpgroup.fence()
    issue_qk(c, s, wg, stage, phase)
    if const_expr(order in (FIRST, PV_FIRST)):
        warpgroup.wait_group(0)
    else:
        pv_of_other(c, s, wg, before, tile - 1)
        warpgroup.wait_group(1)
    if const_expr(order == SECOND):
        if w.num_tiles > 2:
            # the load of tile 2 waits for this stage
            warpgroup.wait_group(0)
            release_stage(c, s, before)
    if const_expr(order == FIRST):
        profile_event(c, s, CtaEvent.FIRST_QK_DONE)
    if w.q_is_read(k + 2 >= w.num_tiles):
        s.q.consumer_release(0)
    sx.apply_mask(c, g, wg.tSrS, w, tile_token, slot_bits, token, wg.lane)
    sx.online_softmax_step(c, order == FIRST, g, s, wg)
    tSrP = cute.make_rmem_tensor_like(wg.tSrS, c.dtype)
    tSrP.store(wg.tSrS.load().to(c.dtype))
    cute.copy(wg.copy_p, wg.copy_p.retile(tSrP), wg.tPsP[None, None, None, stage])
    publish_p(c, s, wg, w, tile_token, thread, stage, wg.idx)
    if const_expr(order != FIRST):
        if const_expr(order != PV_FIRST):
            warpgroup.wait_group(0)
        if const_expr(order == QK_FIRST):
            release_stage(c, s, before)
        sx.rescale_o(c, wg)
    issue_pv(c, s, wg, stage)
    if k + 1 == w.num_tiles:
        publish_row_sums(c, s, wg)
    warpgroup.wait_group(0)
    release_stage(c, s, stage)


@cute.jit
def finish_other(
    c: cutlass.Constexpr[Traits], s: Shared, wg: WarpGroup, w: WorkTile, tile: Int32
):  # fmt: skip
    """PV of the last tile, which is the other warp group's, and the row sums."""
    stage = 1 - wg.idx if const_expr(c.stage_per_group) else tile % c.stages
    pv_of_other(c, s, wg, stage, tile)
    publish_row_sums(c, s, wg)
    warpgroup.wait_group(0)
    release_stage(c, s, stage)
