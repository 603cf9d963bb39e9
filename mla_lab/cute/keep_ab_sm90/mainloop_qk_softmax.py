"""The attend role: S = Q K^T and its softmax, one warpgroup, Q in registers.

Flat index of an accumulator of 64 rows: 4 * col8 + 2 * half + parity, where the thread owns rows
16 * warp + lane / 4 + 8 * half and columns 8 * col8 + 2 * (lane % 4) + parity.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint8, const_expr
from cutlass.cute.nvgpu import warp, warpgroup

from ..common.feature_operands import scale_now, with_sink
from ..common.ptx_sm90 import add, fresh_thread
from .mask import hide, open_positions, own_row
from .params import (
    BLOCK,
    FLOOR,
    GROUPS,
    K_STEPS_IN_REGISTERS,
    LATENT,
    LN2,
    ROPE_BOX,
    SKIPPED,
    STAGE,
    Config,
    Globals,
    Mmas,
    Shared,
    Work,
)
from .tile_scheduler import Plan, read_work, stamp_round

ATTEND_BARRIER = 1
#: bits of `phases`: one a stage for `full` from 0 on, for `seen` from SEEN on, one for `free`
SEEN, FREE = 4, 8


def quad(op, value):
    """Reduce over the four lanes that share a row."""
    value = op(value, cute.arch.shuffle_sync_bfly(value, offset=1))
    return op(value, cute.arch.shuffle_sync_bfly(value, offset=2))


@cute.jit
def select(condition, a, b):
    """A where the condition holds, else b, without a branch on the device."""
    result = b
    if condition:
        result = a
    return result


@cute.jit
def release(cfg: cutlass.Constexpr[Config], s: Shared, stage, lane):
    """One arrival a warp on the stage's empty barrier, of both CTAs in a pair."""
    if const_expr(cfg.cluster == 1):
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(s.empty + stage)
    else:
        if lane < 2:
            cute.arch.mbarrier_arrive(s.empty + stage, lane)


@cute.jit
def clear_values(cfg: cutlass.Constexpr[Config], s: Shared, stage, first, thread):
    """Zero the V rows of a tile from row `first` on: an unread slot may hold NaN, and 0 x NaN is
    NaN in the matrix unit. Rows are 128 B inside a box; the swizzle permutes within a row."""
    zero = cute.make_rmem_tensor(4, Int32)
    zero.fill(0)
    base = cute.make_ptr(Int32, s.kv.iterator.toint(), cute.AddressSpace.smem, assumed_align=16)
    for i in cutlass.range(first * 8 + thread, BLOCK * 8, 128, unroll=1):
        piece = i // 64 * (cfg.rows_stride // 2) + i % 64 * 4
        for box in cutlass.range_constexpr(LATENT // 64):
            at = (base + (stage * STAGE + box * cfg.box_stride) // 2 + piece).align(16)
            cute.autovec_copy(zero, cute.make_tensor(at, cute.make_layout(4)))


def p_address(cfg, s):
    """Where a lane stores P's first 16 columns, in the rope box of stage 0."""
    tid = fresh_thread()
    return (
        Int32(s.kv.iterator.toint())
        + (ROPE_BOX * cfg.box_stride * 2)
        + (((tid >> 4) & 6) + ((tid >> 3) & 1)) * (cfg.rows_stride * 2)
        + ((tid & 7) << 7)
        + ((((tid >> 4) & 1) ^ (tid & 7)) << 4)
    )


def store_p(address, offset, p):
    """P into the stage's rope box, 16 columns a step, each lane at its own swizzled row.

    The swizzle is added where it is used: four addresses held in registers would be three more.
    """
    words = cute.recast_tensor(p, Int32)
    for j in range(4):
        cute.arch.inline_ptx(
            "{ .reg .b32 at; xor.b32 at, {$r0}, " + str(j << 5) + "; add.u32 at, at, {$r1};"
            "stmatrix.sync.aligned.m8n8.x4.shared.b16 [at], { {$r2}, {$r3}, {$r4}, {$r5} }; }",
            read_only_args=[address, Int32(offset), *(words[4 * j + i] for i in range(4))],
        )


def store_q_last(s, p):
    """K-step 31 of Q, unswizzled: 8 x 8 matrices of 128 B, rows first."""
    tid = fresh_thread()
    matrix = 2 * (tid % 128 // 32) + ((tid >> 3) & 1) + 8 * ((tid >> 4) & 1)
    address = Int32(s.q_last.iterator.toint()) + matrix * 128 + (tid & 7) * 16
    words = cute.recast_tensor(p, Int32)
    cute.arch.inline_ptx(
        "stmatrix.sync.aligned.m8n8.x4.shared.b16 [{$r0}], { {$r1}, {$r2}, {$r3}, {$r4} };",
        read_only_args=[address, *(words[i] for i in range(4))],
    )


def issue_qk(s, mma, frags, acc, stage, phase, pending):
    """All 36 k-steps of a tile; the last `pending` of them form a group of their own."""
    r_q, r_last, r_rope, r_k = frags
    rs = cute.make_mma_atom(mma.qk_rs.op)
    rs.set(warpgroup.Field.ACCUMULATE, False)
    ss = cute.make_mma_atom(mma.qk.op)
    ss.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.fence()
    for group, (first, last) in enumerate(GROUPS):
        cute.arch.mbarrier_wait(s.full + stage * len(GROUPS) + group, phase)
        for k in range(4 * first, 4 * last):
            if pending and k == 36 - pending:
                warpgroup.commit_group()
            if k < K_STEPS_IN_REGISTERS:
                cute.gemm(rs, acc, r_q[None, None, k], r_k[None, None, k, stage], acc)
                rs.set(warpgroup.Field.ACCUMULATE, True)
            elif k < 32:
                cute.gemm(ss, acc, r_last[None, None, 0], r_k[None, None, k, stage], acc)
            else:
                cute.gemm(ss, acc, r_rope[None, None, k - 32], r_k[None, None, k, stage], acc)
    warpgroup.commit_group()


def power(drop):
    """2**-drop, exact; 0 where fp32 has no normal number for it."""
    bits = cute.make_rmem_tensor(1, Int32)
    bits[0] = cutlass.max(127 - drop, Int32(0)) << 23
    return cute.recast_tensor(bits, Float32)[0]


@cute.jit
def publish_pair(t: cute.Tensor, row, lane, a, b):
    """Write one value a row: by the first lane of the quad."""
    if lane % 4 == 0:
        t[row] = a.to(t.element_type)
        t[row + 8] = b.to(t.element_type)


def row_top(acc, h):
    """Greatest score of one of the thread's two rows, among its own columns."""
    top = acc[2 * h]
    for i in range(1, cute.size(acc) // 2):
        top = cute.arch.fmax(top, acc[4 * (i // 2) + 2 * h + i % 2])
    return top


@cute.jit
def raise_maxima(
    cfg: cutlass.Constexpr[Config],
    scale: Float32,
    acc: cute.Tensor,
    row_max: cute.Tensor,
    row_sum: cute.Tensor,
    drop: cute.Tensor,
    row: Int32,
    lane: Int32,
):
    """New maxima for rows with a score too far above the old one, and how often O halves; rare.

    The first maximum is taken as it is, so that the greatest P of few keys is 1, without
    rounding; later it moves by whole steps of 2, so that factors are powers of two, exact.
    """
    for h in cutlass.range_constexpr(2):
        mx = quad(cute.arch.fmax, row_top(acc, h)) * scale
        rise = mx - row_max[h]
        steps = Float32(0.0)
        if rise > Float32(cfg.lazy_log2):
            steps = cute.math.ceil(rise)
            row_max[h] = select(row_max[h] == Float32(FLOOR), mx, row_max[h] + steps)
        halvings = Int32(cute.arch.fmin(steps, Float32(SKIPPED - 1)))
        row_sum[h] = row_sum[h] * power(halvings)
        if lane % 4 == 0:
            drop[row + 8 * h] = halvings.to(Uint8)


@cute.jit
def softmax(
    cfg: cutlass.Constexpr[Config],
    scale: Float32,
    acc: cute.Tensor,
    p: cute.Tensor,
    row_max: cute.Tensor,
    row_sum: cute.Tensor,
    drop: cute.Tensor,
):
    """p <- probabilities against a maximum that moves rarely; `drop`: halvings of O before PV.

    A row keeps its old maximum until a score is more than 2**lazy_log2 above it. That most tiles
    have none is seen by a vote, without the rows' maxima.
    """
    over = cute.arch.fmax(
        row_top(acc, 0) * scale - row_max[0], row_top(acc, 1) * scale - row_max[1]
    )
    tid = fresh_thread()  # these registers are free until here
    lane, row = tid & 31, own_row(tid)
    if cute.arch.vote_any_sync(over > Float32(cfg.lazy_log2)):
        raise_maxima(cfg, scale, acc, row_max, row_sum, drop, row, lane)
    else:
        publish_pair(drop, row, lane, Int32(0), Int32(0))
    count = cute.size(acc) // 4
    for h in cutlass.range_constexpr(2):
        total = Float32(0)
        for j in cutlass.range_constexpr(count):
            i = 4 * j + 2 * h
            acc[i] = cute.math.exp2(acc[i] * scale - row_max[h], fastmath=True)
            acc[i + 1] = cute.math.exp2(acc[i + 1] * scale - row_max[h], fastmath=True)
            total = total + (acc[i] + acc[i + 1])
        row_sum[h] = row_sum[h] + total
    for i in cutlass.range_constexpr(cute.size(p)):
        p[i] = acc[i].to(cfg.element)


@cute.jit
def all_agree(yes):
    """Whether all threads of the group say yes. (A barrier for parts of warps makes it spill.)"""
    said = select(cute.arch.vote_all_sync(yes), Int32(1), Int32(0))
    return cute.arch.inline_ptx(
        "{ .reg .pred p, q; setp.ne.s32 p, {$r0}, 0; "
        "bar.red.and.pred q, {$r1}, 128, p; selp.s32 {$w0}, 1, 0, q; }",
        write_only_types=[Int32],
        read_only_args=[said, Int32(ATTEND_BARRIER)],
    )


@cute.jit
def weigh(
    cfg: cutlass.Constexpr[Config],
    g: Globals,
    acc,
    p,
    row_max,
    row_sum,
    tops,
    least,
    drop,
    p_at,
    offset,
):
    """`softmax`, and P into the stage at `offset`.

    With the option skip: `SKIPPED` and no P, where no row has a score of at least its greatest so
    far plus `least` (log2 units). `tops` holds those, as they are; `row_max` moves by steps.
    """
    scale = scale_now(cfg, g)
    if const_expr(not cfg.skip):
        softmax(cfg, scale, acc, p, row_max, row_sum, drop)
        store_p(p_at, offset, p)
    else:
        mx = [quad(cute.arch.fmax, row_top(acc, h)) * scale for h in range(2)]
        low = (mx[0] < tops[0] + least) & (mx[1] < tops[1] + least)
        if all_agree(low) == 0:
            for h in cutlass.range_constexpr(2):
                tops[h] = cute.arch.fmax(tops[h], mx[h])
            softmax(cfg, scale, acc, p, row_max, row_sum, drop)
            store_p(p_at, offset, p)
        else:
            tid = fresh_thread()
            publish_pair(drop, own_row(tid), tid & 31, Int32(SKIPPED), Int32(SKIPPED))


@cute.jit
def open_rows(cfg: cutlass.Constexpr[Config], g: Globals, work: Work, row, row_max, row_sum, tops):
    """Nothing seen yet. Returns what `weigh` calls `least`; rows past the request's last never
    object to a skip."""
    row_max.fill(FLOOR)
    row_sum.fill(0.0)
    least = Float32(0.0)
    if const_expr(cfg.skip):
        least = cute.math.log2(g.skip / work.kv_len.to(Float32), fastmath=True)
        for h in cutlass.range_constexpr(2):
            there = work.first_row + row + 8 * h < work.num_rows
            tops[h] = select(there, Float32(FLOOR), Float32(-FLOOR))
    return least


@cute.jit
def publish_sums(
    cfg: cutlass.Constexpr[Config], g: Globals, s: Shared, work: Work, row_max, row_sum, row, lane
):
    """Sum and maximum of the thread's rows; with features what the epilogue has no registers to
    make of them: the sum with the sink where the row tile is whole, and the natural lse."""
    sums = [quad(add, row_sum[0]), quad(add, row_sum[1])]
    tops = [row_max[0], row_max[1]]
    if const_expr(cfg.features):
        for h in cutlass.range_constexpr(2):
            lse = (tops[h] + cute.math.log2(sums[h], fastmath=True)) * Float32(LN2)
            sink = with_sink(cfg, g, sums[h], tops[h], work.first_row + row + 8 * h)
            sums[h] = select(work.slot < 0, sink, sums[h])
            tops[h] = lse
    publish_pair(s.row_sum, row, lane, sums[0], sums[1])
    publish_pair(s.row_max, row, lane, tops[0], tops[1])


def await_drop(s, stage, phases):
    """Until the drop of the tile before in this stage has been read by all who need it.

    `phases` has just been flipped for the stage's load. Stages 1 and 2 hold nothing but KV, so
    the two barriers turn together; stage 0 has a bit of its own, since queries pass through it.
    """
    if stage:
        cute.arch.mbarrier_wait(s.seen + stage, (phases >> stage) & 1)
        return phases
    phases = phases ^ (1 << SEEN)
    cute.arch.mbarrier_wait(s.seen, (phases >> SEEN) & 1)
    return phases


@cute.jit
def announce(s: Shared, stage):
    """P of a tile is in place."""
    cute.arch.mbarrier_arrive(s.p_full + stage)


@cute.jit
def take_q(
    cfg: cutlass.Constexpr[Config], s: Shared, mma: Mmas, r_q: cute.Tensor, spare: cute.Tensor
):
    """Q from stage 0 to registers; the last latent k-step and the rope to their own place."""
    thread = fresh_thread() % 128
    ld = cute.make_tiled_copy_A(
        cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), cfg.element), mma.qk_rs
    ).get_slice(thread)
    st = cute.make_tiled_copy_C(
        cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), cfg.element), mma.qk
    ).get_slice(thread)
    latent = ld.partition_S(cute.local_tile(s.kv, (64, LATENT), (0, 0, None)))
    rope = ld.partition_S(cute.local_tile(s.kv, (64, 64), (0, 8, None)))
    r_q_dst = ld.retile(r_q)
    for k in cutlass.range_constexpr(K_STEPS_IN_REGISTERS):
        cute.copy(ld, latent[None, None, k, 0], r_q_dst[None, None, k])
    # the previous tile's QK has finished in every warp before its Q is overwritten
    cute.arch.barrier(barrier_id=ATTEND_BARRIER, number_of_threads=128)
    cute.copy(ld, latent[None, None, 31, 0], ld.retile(spare)[None, None, 0])
    store_q_last(s, spare)
    cute.copy(ld, rope[None, None, None, 0], ld.retile(spare))
    cute.copy(st, st.retile(spare), st.partition_D(s.q_rope))
    cute.arch.fence_view_async_shared()
    cute.arch.barrier(barrier_id=ATTEND_BARRIER, number_of_threads=128)


@cute.jit
def attend(cfg: cutlass.Constexpr[Config], g: Globals, s: Shared, mma: Mmas, plan: Plan, rank):
    """Per work tile: Q to registers, then softmax(t), P(t) out, QK(t + 1) issued, go for PV(t)."""
    tid, _, _ = cute.arch.thread_idx()
    thread = tid % 128
    lane = cute.arch.lane_idx()
    w = cute.arch.make_warp_uniform(thread // 32)
    row = 16 * w + lane // 4
    element = cfg.element

    r_k = mma.qk.make_fragment_B(mma.qk.get_slice(0).partition_B(s.kv))
    r_rope = mma.qk.make_fragment_A(mma.qk.get_slice(0).partition_A(s.q_rope))
    r_last = mma.qk.make_fragment_A(mma.qk.get_slice(0).partition_A(s.q_last))
    p_at = p_address(cfg, s)
    r_q = cute.make_rmem_tensor(
        mma.qk_rs.partition_shape_A((64, 16 * K_STEPS_IN_REGISTERS)), element
    )
    p = cute.make_rmem_tensor(mma.qk_rs.partition_shape_A((64, 64)), element)
    acc = cute.make_rmem_tensor(mma.qk.partition_shape_C((64, 64)), Float32)
    row_max = cute.make_rmem_tensor(2, Float32)
    row_sum = cute.make_rmem_tensor(2, Float32)
    tops = cute.make_rmem_tensor(2, Float32) if const_expr(cfg.skip) else row_max
    frags = (r_q, r_last, r_rope, r_k)
    phases = Int32(0)
    for index in cutlass.range(plan.first, plan.last, unroll=1):
        for group in cutlass.range_constexpr(len(GROUPS)):
            cute.arch.mbarrier_wait(s.full + group, phases & 1)
        phases = phases ^ 1
        work = read_work(g, s, index)
        take_q(cfg, s, mma, r_q, p)
        for _ in cutlass.range_constexpr(2):  # stands in for the eight PV warps
            release(cfg, s, 0, lane)
        least = open_rows(cfg, g, work, row, row_max, row_sum, tops)
        beyond = cute.arch.make_warp_uniform(open_positions(cfg, g, work, 16 * w))
        blocks = cute.arch.make_warp_uniform(work.end - work.begin)
        issue_qk(s, mma, frags, acc, 1, (phases >> 1) & 1, 0)
        phases = phases ^ 2
        phases = await_drop(s, 1, phases)
        warpgroup.wait_group(0)
        stamp_round(cfg, g, blocks, 3)
        while blocks > 1:
            for j in cutlass.range_constexpr(3):
                stage, ahead = (1 + j) % 3, (2 + j) % 3
                if blocks > 1:
                    hide(cfg, g, s, acc, index, beyond, blocks)
                    drop, offset = s.drop[None, stage], stage * (STAGE * 2)
                    weigh(cfg, g, acc, p, row_max, row_sum, tops, least, drop, p_at, offset)
                    cute.arch.fence_view_async_shared()
                    stamp_round(cfg, g, blocks, 4)
                    stamp_round(cfg, g, blocks - 1, 2)
                    issue_qk(s, mma, frags, acc, ahead, (phases >> ahead) & 1, cfg.go)
                    phases = phases ^ (1 << ahead)
                    phases = await_drop(s, ahead, phases)
                    warpgroup.wait_group(1)
                    announce(s, stage)
                    warpgroup.wait_group(0)
                    blocks = blocks - 1
                    stamp_round(cfg, g, blocks, 3)
        # again: held through the loop they would cost registers
        work = read_work(g, s, index)
        stage = (work.end - work.begin) % 3
        hide(cfg, g, s, acc, index, beyond, Int32(1))
        drop, offset = s.drop[None, stage], stage * (STAGE * 2)
        weigh(cfg, g, acc, p, row_max, row_sum, tops, least, drop, p_at, offset)
        stamp_round(cfg, g, Int32(1), 4)
        thread = fresh_thread() & 127
        lane, row = thread & 31, own_row(thread)
        tail = work.kv_len - (work.end - 1) * BLOCK
        if tail < BLOCK:
            clear_values(cfg, s, stage, cutlass.max(tail, Int32(0)), thread)
        cute.arch.mbarrier_wait(s.free, (phases >> FREE) & 1)
        phases = phases ^ (1 << FREE)
        publish_sums(cfg, g, s, work, row_max, row_sum, row, lane)
        cute.arch.fence_view_async_shared()
        announce(s, stage)
