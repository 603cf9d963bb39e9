"""The attend role: S = Q K^T and its softmax, one warpgroup, Q in registers.

Flat index of an accumulator of 64 rows: 4 * col8 + 2 * half + parity, where the thread owns rows
16 * warp + lane / 4 + 8 * half and columns 8 * col8 + 2 * (lane % 4) + parity.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32, const_expr
from cutlass.cute.nvgpu import warp, warpgroup

from ..extras import scale_now, with_sink
from ..hopper import fresh_block, fresh_thread, shift_pair
from .storage import (
    BLOCK,
    FLOOR,
    GROUPS,
    K_STEPS_IN_REGISTERS,
    LATENT,
    LN2,
    SKIPPED,
    STAGE,
    Config,
    Globals,
    Mmas,
    Shared,
    Work,
)
from .work import read_work, visible

ATTEND_BARRIER = 1
#: the accumulate groups have read the row sums of the previous work tile
STATS_BARRIER = 3


def quad(op, value):
    """Reduce over the four lanes that share a row."""
    value = op(value, cute.arch.shuffle_sync_bfly(value, offset=1))
    return op(value, cute.arch.shuffle_sync_bfly(value, offset=2))


def add(a, b):
    """For `quad`."""
    return a + b


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
def mask(acc: cute.Tensor, left0, left1, lane):
    """-inf at columns that a row must not see; `left` counts the visible ones of this tile."""
    for j in cutlass.range_constexpr(cute.size(acc) // 4):
        for e in cutlass.range_constexpr(2):
            col = 8 * j + 2 * (lane % 4) + e
            acc[4 * j + e] = acc[4 * j + e] if col < left0 else -Float32.inf
            acc[4 * j + 2 + e] = acc[4 * j + 2 + e] if col < left1 else -Float32.inf


@cute.jit
def draft_word(g: Globals, draft, word):
    """32 bits of a draft token's mask: all set before the first column, none past the last."""
    bits = Uint32(0)
    if word < 0:
        bits = Uint32(0xFFFFFFFF)
    if (word >= 0) & (word < g.mask.shape[1]):
        bits = Uint32(g.mask[cutlass.min(draft, g.mask.shape[0] - 1), word])
    return bits


@cute.jit
def mask_tree(g: Globals, acc: cute.Tensor, left, drafts):
    """-inf at columns that a row must not see: from column `left` of this tile on, the words of
    the row's draft token tell. The thread's two rows are those of tokens `drafts` >> 4 and, with
    what its last four bits add, of row + 8."""
    first = 2 * (fresh_thread() % 4) - left
    for h in cutlass.range_constexpr(2):
        draft = (drafts >> 4) + ((drafts & 15) if const_expr(h == 1) else 0)
        words = [draft_word(g, draft, (first >> 5) + i) for i in range(3)]
        window = [shift_pair(words[i], words[i + 1], first) for i in range(2)]
        for j in cutlass.range_constexpr(cute.size(acc) // 4):
            for e in cutlass.range_constexpr(2):
                bit = window[j // 4] & Uint32(1 << (8 * (j % 4) + e))
                x = 4 * j + 2 * h + e
                acc[x] = acc[x] if bit != Uint32(0) else -Float32.inf


@cute.jit
def hide(cfg: cutlass.Constexpr[Config], g: Globals, acc: cute.Tensor, left0, left1, lane):
    """-inf at columns that the thread's rows must not see; see `limits`."""
    if left0 < BLOCK:
        if const_expr(cfg.tree):
            mask_tree(g, acc, left0, left1)
        else:
            mask(acc, left0, left1, lane)


@cute.jit
def limits(cfg: cutlass.Constexpr[Config], g: Globals, work: Work, row):
    """Positions that the thread's two rows see from `begin` on, the first the smaller. With a
    packed mask: positions before the draft, and the rows' draft tokens (see `mask_tree`)."""
    left0 = visible(g, work, row) - work.begin * BLOCK
    left1 = visible(g, work, row + 8) - work.begin * BLOCK
    if const_expr(cfg.tree):
        left0 = work.kv_len - work.q_len - work.begin * BLOCK
        token = (work.global_row + row) // g.heads
        left1 = token * 16 + ((work.global_row + row + 8) // g.heads - token)
    return left0, left1


@cute.jit
def clear_values(s: Shared, stage, first, thread):
    """Zero the V rows of a tile from row `first` on: an unread slot may hold NaN, and 0 x NaN is
    NaN in the matrix unit. Rows are 128 B inside a box; the swizzle permutes within a row."""
    zero = cute.make_rmem_tensor(4, Int32)
    zero.fill(0)
    base = cute.make_ptr(Int32, s.kv.iterator.toint(), cute.AddressSpace.smem, assumed_align=16)
    for i in cutlass.range(first * 8 + thread, BLOCK * 8, 128, unroll=1):
        for box in cutlass.range_constexpr(LATENT // 64):
            at = (base + (stage * STAGE + box * BLOCK * 64) // 2 + i * 4).align(16)
            cute.autovec_copy(zero, cute.make_tensor(at, cute.make_layout(4)))


def store_p(address, offset, p):
    """P into the stage's rope box, 16 columns a step, each lane at its own swizzled row."""
    words = cute.recast_tensor(p, Int32)
    for j in range(4):
        cute.arch.inline_ptx(
            "stmatrix.sync.aligned.m8n8.x4.shared.b16 [{$r0}], { {$r1}, {$r2}, {$r3}, {$r4} };",
            read_only_args=[
                (address ^ Int32(j << 5)) + offset,
                *(words[4 * j + i] for i in range(4)),
            ],
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


def tile_top(acc, h):
    """Greatest score of the thread's row h in this tile, unscaled."""
    mx = acc[2 * h]
    for j in range(cute.size(acc) // 4):
        for e in range(2):
            if j + e > 0:
                mx = cute.arch.fmax(mx, acc[4 * j + 2 * h + e])
    return quad(cute.arch.fmax, mx)


def softmax(cfg, scale, acc, p, row_max, row_sum, tops=None):
    """acc <- probabilities against a maximum that moves rarely; returns the two rescale factors.

    A row keeps its old maximum until the new one is more than 2**lazy_log2 above it, so most
    tiles rescale nothing. The first is taken as it is, so that the greatest P of few keys is 1,
    without rounding; it moves by whole steps of 2, and factors are powers of two, exact in 16
    bits and in the row sum.
    """
    factors = []
    count = cute.size(acc) // 4
    for h in range(2):
        mx = tops[h] if tops else tile_top(acc, h) * scale
        rise = mx - row_max[h]
        keep = rise <= Float32(cfg.lazy_log2)
        risen = select(row_max[h] == Float32(FLOOR), mx, row_max[h] + cute.math.ceil(rise))
        f = select(keep, Float32(1.0), cute.math.exp2(row_max[h] - risen, fastmath=True))
        f = f.to(cfg.element).to(Float32)
        now = select(keep, row_max[h], risen)
        row_max[h] = now
        even = Float32(0)
        odd = Float32(0)
        for j in range(count):
            i = 4 * j + 2 * h
            acc[i] = cute.math.exp2(acc[i] * scale - now, fastmath=True)
            acc[i + 1] = cute.math.exp2(acc[i + 1] * scale - now, fastmath=True)
            even = even + acc[i]
            odd = odd + acc[i + 1]
        row_sum[h] = row_sum[h] * f + (even + odd)
        factors.append(f)
    for i in range(cute.size(p)):
        p[i] = acc[i].to(cfg.element)
    return factors


@cute.jit
def all_agree(yes):
    """Whether all threads of the attend group say yes; they wait for each other."""
    return cute.arch.inline_ptx(
        "{ .reg .pred p, q; setp.ne.s32 p, {$r0}, 0; "
        "barrier.cta.red.and.pred q, {$r1}, 128, p; selp.s32 {$w0}, 1, 0, q; }",
        write_only_types=[Int32],
        read_only_args=[select(yes, Int32(1), Int32(0)), Int32(ATTEND_BARRIER)],
    )


@cute.jit
def weigh(
    cfg: cutlass.Constexpr[Config], g: Globals, acc, p, row_max, row_sum, tops, least, address, at
):
    """`softmax` and P into the stage at `at`; returns the rescale factors.

    With the option skip: `SKIPPED` and no P, where no row has a score of at least its greatest so
    far plus `least` (log2 units). `tops` holds those, as they are; `row_max` moves by steps.
    """
    f0, f1 = Float32(SKIPPED), Float32(SKIPPED)
    if const_expr(not cfg.skip):
        f0, f1 = softmax(cfg, scale_now(cfg, g), acc, p, row_max, row_sum)
        store_p(address, at, p)
    else:
        scale = scale_now(cfg, g)
        mx = [tile_top(acc, h) * scale for h in range(2)]
        low = (mx[0] < tops[0] + least) & (mx[1] < tops[1] + least)
        if all_agree(low) == 0:
            for h in cutlass.range_constexpr(2):
                tops[h] = cute.arch.fmax(tops[h], mx[h])
            f0, f1 = softmax(cfg, scale, acc, p, row_max, row_sum, mx)
            store_p(address, at, p)
    return f0, f1


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
def publish_pair(t: cute.Tensor, row, lane, a, b):
    """Write one value a row: by the first lane of the quad."""
    if lane % 4 == 0:
        t[row] = a.to(t.element_type)
        t[row + 8] = b.to(t.element_type)


@cute.jit
def publish_factors(cfg: cutlass.Constexpr[Config], t: cute.Tensor, row, lane, f):
    """Factors of the thread's rows. Where registers are short, from fresh numbers."""
    if const_expr(cfg.short):
        lane = fresh_thread() % 32
        row = 16 * (fresh_thread() % 128 // 32) + lane // 4
    publish_pair(t, row, lane, f[0], f[1])


@cute.jit
def publish_sums(
    cfg: cutlass.Constexpr[Config], g: Globals, s: Shared, row_max, row_sum, row, lane, index
):
    """Sum and maximum of the thread's rows; with features what the epilogue has no registers to
    make of them: the sum with the sink where the row tile is whole, and the natural lse."""
    sums = [quad(add, row_sum[0]), quad(add, row_sum[1])]
    tops = [row_max[0], row_max[1]]
    if const_expr(cfg.features):
        rank = fresh_block() % cfg.cluster
        first = (g.tiles[index, 1] * cfg.cluster + rank) * BLOCK + row
        whole = g.tiles[index, 6] < 0
        for h in cutlass.range_constexpr(2):
            lse = (tops[h] + cute.math.log2(sums[h], fastmath=True)) * Float32(LN2)
            sink = with_sink(cfg, g, sums[h], tops[h], first + 8 * h)
            sums[h] = select(whole, sink, sums[h])
            tops[h] = lse
    publish_pair(s.row_sum, row, lane, sums[0], sums[1])
    publish_pair(s.row_max, row, lane, tops[0], tops[1])


@cute.jit
def announce(s: Shared, stage):
    """P of a tile is in place: one arrival a warp."""
    cute.arch.sync_warp()
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive(s.p_full + stage)


@cute.jit
def attend(cfg: cutlass.Constexpr[Config], g: Globals, s: Shared, mma: Mmas, worker, rank):
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
    rope_box = cute.local_tile(s.kv, (64, 64), (0, 8, None))
    latent_box = cute.local_tile(s.kv, (64, LATENT), (0, 0, None))
    ld = cute.make_tiled_copy_A(
        cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), element), mma.qk_rs
    ).get_slice(thread)
    st = cute.make_tiled_copy_C(
        cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), element), mma.qk
    ).get_slice(thread)
    q_latent_src = ld.partition_S(latent_box)
    q_rope_src = ld.partition_S(rope_box)
    q_rope_dst = st.partition_D(s.q_rope)
    p_address = (
        Int32(s.kv.iterator.toint())
        + 8 * BLOCK * 64 * 2
        + (16 * w + (lane & 15)) * 128
        + (((lane >> 4) ^ (lane & 7)) << 4)
    )
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
    for index in cutlass.range(g.worker_begin[worker], g.worker_begin[worker + 1], unroll=1):
        work = read_work(cfg, g, index, rank)
        count = work.end - work.begin
        for group in cutlass.range_constexpr(len(GROUPS)):
            cute.arch.mbarrier_wait(s.full + group, phases & 1)
        phases = phases ^ 1
        r_q_dst = ld.retile(r_q)
        for k in cutlass.range_constexpr(K_STEPS_IN_REGISTERS):
            cute.copy(ld, q_latent_src[None, None, k, 0], r_q_dst[None, None, k])
        # the previous tile's QK has finished in every warp before its Q is overwritten
        cute.arch.barrier(barrier_id=ATTEND_BARRIER, number_of_threads=128)
        cute.copy(ld, q_latent_src[None, None, 31, 0], ld.retile(p)[None, None, 0])
        store_q_last(s, p)
        cute.copy(ld, q_rope_src[None, None, None, 0], ld.retile(p))
        cute.copy(st, st.retile(p), q_rope_dst)
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=ATTEND_BARRIER, number_of_threads=128)
        for _ in cutlass.range_constexpr(2):  # stands in for the eight PV warps
            release(cfg, s, 0, lane)
        least = open_rows(cfg, g, work, row, row_max, row_sum, tops)
        left0, left1 = limits(cfg, g, work, row)
        issue_qk(s, mma, frags, acc, 1, (phases >> 1) & 1, 0)
        phases = phases ^ 2
        warpgroup.wait_group(0)
        for triple in cutlass.range((count + 1) // 3, unroll=1):
            for j in cutlass.range_constexpr(3):
                stage, ahead = (1 + j) % 3, (2 + j) % 3
                if 3 * triple + j < count - 1:
                    hide(cfg, g, acc, left0, left1, lane)
                    at = stage * STAGE * 2
                    f = weigh(cfg, g, acc, p, row_max, row_sum, tops, least, p_address, at)
                    publish_factors(cfg, s.factor[None, stage], row, lane, f)
                    cute.arch.fence_view_async_shared()
                    issue_qk(s, mma, frags, acc, ahead, (phases >> ahead) & 1, cfg.go)
                    phases = phases ^ (1 << ahead)
                    warpgroup.wait_group(1)
                    announce(s, stage)
                    warpgroup.wait_group(0)
                    left0 = left0 - BLOCK
                    if const_expr(not cfg.tree):
                        left1 = left1 - BLOCK
        stage = count % 3
        hide(cfg, g, acc, left0, left1, lane)
        at = stage * (STAGE * 2)
        f = weigh(cfg, g, acc, p, row_max, row_sum, tops, least, p_address, at)
        tail = work.kv_len - (work.end - 1) * BLOCK
        if tail < BLOCK:
            clear_values(s, stage, cutlass.max(tail, Int32(0)), thread)
        publish_pair(s.factor[None, stage], row, lane, f[0], f[1])
        if index > g.worker_begin[worker]:  # read again: a register less through the loop
            cute.arch.barrier(barrier_id=STATS_BARRIER, number_of_threads=384)
        publish_sums(cfg, g, s, row_max, row_sum, row, lane, index)
        cute.arch.fence_view_async_shared()
        announce(s, stage)
