"""The accumulate role: O^T += V^T P^T for 256 columns, and a work tile's end.

V^T comes out of shared memory through registers (see swap_ab's `fp8`), by steps of 64 columns, a
slice, and 32 tokens. The registers of a step are free once its product is done.

    flat index of O^T: 32 * slice + 4 * row8 + 2 * h + e       crossed: 64 * slice
    column   64 * slice + 16 * warp + 2 * (lane / 4) + h       row   8 * row8 + 2 * (lane % 4) + e

In a pair that is crossed (see `pair`) a group has 128 columns of all 128 rows.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float16, Float32, Int32, const_expr
from cutlass.cute.nvgpu import warpgroup

from ...common.feature_operands import with_scales
from ...common.fp8 import load_step
from ...common.ptx_sm90 import fresh_thread, load2, pack2
from ...split_merge.keep_ab_cooperative import arrive, merge
from ...split_merge.keep_ab_partials import REGION, words_at
from ..epilogue_store import store_pair, store_row_lse
from ..mainloop_qk_softmax import release, select
from ..params import BLOCK, LATENT, LN2, Globals, Mmas, Work
from ..tile_scheduler import Plan, load_plan, may_be_split, read_work, stamp, stamp_round
from . import kv_656 as groups
from . import v_fp8_to_fp16 as widen
from .p_exchange_2cta import slot_of
from .params import BOX, Q_STAGES, ROPE_BOX, STEP, Transposed, TransposedShared, next_stage

#: 64-column slices of a group that has 64 rows
SLICES = 4
#: steps whose operand A is held
HELD = 3
#: log2 of what fp16 partials are multiplied by: no result passes 448, the greatest V
PARTIAL_LOG2 = 7


#: two factors of 1
NOTHING = 0x3C003C00


def two_factors(cfg: Transposed, s: TransposedShared, slot, row):
    """Factors of rows `row` and `row + 1`, an even one, as they lie."""
    at = Int32(s.factor.iterator.toint()) + (slot * cfg.width + row) * 2
    return cute.make_ptr(Int32, at, cute.AddressSpace.smem, assumed_align=4).load()


def halves(word):
    """Two fp16 of a word as fp32."""
    return cute.arch.inline_ptx(
        "{ .reg .b16 a, b; mov.b32 {a, b}, {$r0}; cvt.f32.f16 {$w0}, a; cvt.f32.f16 {$w1}, b; }",
        write_only_types=[Float32, Float32],
        read_only_args=[word],
    )


@cute.jit
def fade(cfg: cutlass.Constexpr[Transposed], s: TransposedShared, acc: cute.Tensor, slot):
    """O^T times its rows' factors, where a maximum has moved."""
    quad = fresh_thread() & 3
    for j in cutlass.range_constexpr(cfg.width // 8):
        f = halves(two_factors(cfg, s, slot, 8 * j + 2 * quad))
        for x in cutlass.range_constexpr(4 * cfg.slices):
            at = cfg.width // 2 * (x // 4) + 4 * j + x % 4
            acc[at] = acc[at] * f[x % 2]


def first_slice(cfg: Transposed, rank):
    """Of eight slices of columns, the first of this accumulate group."""
    group = fresh_thread() >> 7
    return ((rank * 2 if cfg.crossed else 0) + group) * cfg.slices


def values_at(cfg: Transposed, s: TransposedShared, rank):
    """Where a lane's row of V^T lies in stage 0: token `lane` of 32, of the warp's 16 columns of a
    slice."""
    tid = fresh_thread()
    chunk = ((tid >> 5) & 3) ^ ((tid >> 1) & 3)
    half = first_slice(cfg, rank) * BOX
    return Int32(s.kv.iterator.toint()) + half + (tid & 31) * 64 + (chunk << 4)


def weights_of(cfg: Transposed, s: TransposedShared, mma: Mmas):
    """Operand B."""
    if cfg.split:
        return widen.weights_of(cfg, s, mma)
    p_box = cute.local_tile(s.kv, (64, 64), (0, ROPE_BOX, None))
    return mma.pv.make_fragment_B(mma.pv.get_slice(0).partition_B(p_box))


def operands_a(cfg: Transposed, mma: Mmas):
    """Registers for operand A of as many steps as are held."""
    if cfg.split:
        return widen.operands_a(cfg, mma)
    shape = mma.pv.partition_shape_A((64, 32))
    return [cute.make_rmem_tensor(shape, cfg.element) for _ in range(HELD)]


@cute.jit
def pass_over(cfg: cutlass.Constexpr[Transposed], stage: Int32):
    """The stage after those that a query passes through."""
    stage = stage + Q_STAGES
    if stage >= cfg.stages:
        stage = stage - cfg.stages
    return stage


@cute.jit
def add_tile(
    cfg: cutlass.Constexpr[Transposed], s: TransposedShared, mma: Mmas, acc, v, r_p, values, stage,
    slot, after,
):  # fmt: skip
    """O^T, times its rows' factors, + V^T P^T of one tile; whether P is there `after` it."""
    row = 2 * (fresh_thread() & 31)
    moved = two_factors(cfg, s, slot, row) != NOTHING
    if const_expr(cfg.crossed):
        moved = moved | (two_factors(cfg, s, slot, row + BLOCK) != NOTHING)
    if cute.arch.vote_any_sync(moved):
        fade(cfg, s, acc, slot)
    base = values + stage * cfg.stage_bytes
    if const_expr(cfg.split):
        widen.add_wide(cfg, s, mma, acc, v, r_p, base, stage, slot)
    else:
        add_steps(mma, acc, v, r_p, base, stage)
    there = weights_there(cfg, s, *after)
    warpgroup.wait_group(0)
    return there


@cute.jit
def await_weights(cfg: cutlass.Constexpr[Transposed], s: TransposedShared, slot, turn):
    """Until P and factors of a tile are there."""
    if const_expr(cfg.crossed):
        cute.arch.mbarrier_wait(s.p_own + slot, turn)
    cute.arch.mbarrier_wait(s.p_full + slot, turn)


def weights_there(cfg: Transposed, s: TransposedShared, slot, turn):
    """Whether they are, asked early."""
    there = cute.arch.mbarrier_test_wait(s.p_full + slot, turn)
    if cfg.crossed:
        there = there & cute.arch.mbarrier_test_wait(s.p_own + slot, turn)
    return there


def add_steps(mma: Mmas, acc, v, r_p, base, stage):
    """O^T += V^T P^T of one tile, by steps of 64 columns and 32 tokens; operand A of `HELD` steps
    is held."""
    shape = cute.make_layout(mma.pv.partition_shape_C((64, 64)))
    atom = cute.make_mma_atom(mma.pv.op)
    atom.set(warpgroup.Field.ACCUMULATE, True)
    for i in range(2 * SLICES):
        m, k, a = i // 2, i % 2, v[i % HELD]
        if i >= HELD:
            warpgroup.wait_group(HELD - 1)
        load_step(base, m * BOX + k * STEP * 64, cute.recast_tensor(a, Int32), 0)
        product = cute.make_tensor(acc.iterator + 32 * m, shape)
        warpgroup.fence()
        cute.gemm(atom, product, a[None, None, 0], r_p[None, None, k, stage], product)
        warpgroup.commit_group()


def inverses(s: TransposedShared, j):
    """One over the sums of a thread's two rows of 8; where there is none, 0. Read when they are
    needed: sixteen are registers too many."""
    sums = load2(s.row_sum.iterator + (8 * j + 2 * (fresh_thread() & 3)))
    return [select(x > 0.0, cute.arch.rcp_approx(x), Float32(0.0)) for x in (sums[0], sums[1])]


def place(cfg: Transposed, acc_slice, i, e):
    """Of a thread's slice the two columns of row 2 (lane % 4) + e of 16, and of the row 8 on."""
    x = cfg.width // 2 * acc_slice + 8 * i + e
    return x, x + 2, x + 4, x + 6


@cute.jit
def store_strips(
    cfg: cutlass.Constexpr[Transposed], g: Globals, s: TransposedShared, acc, work: Work, rank, lse,
    index,
):  # fmt: skip
    """A partial as `partials` has it: four lanes of a row hold its 8-column unit."""
    tid = fresh_thread()
    w, lane = (tid >> 5) & 3, tid & 31
    begin = first_slice(cfg, rank)
    slot = work.slot * cfg.cluster + rank
    region = g.partial_out.iterator + slot * REGION
    up, down = Float32(2.0**PARTIAL_LOG2), Float32(2.0**-PARTIAL_LOG2)
    if const_expr(cfg.scaled):
        up, down = groups.partial_scales(s, index, PARTIAL_LOG2)
    base = region
    for i16 in cutlass.range_constexpr(cfg.width // 16):
        i = i16 % 4
        if const_expr(cfg.crossed and i == 0):
            base = g.partial_out.iterator + (work.slot * cfg.cluster + i16 // 4) * REGION
        inverse = [inverses(s, 2 * i16), inverses(s, 2 * i16 + 1)]
        for e in cutlass.range_constexpr(2):
            f0, f1 = inverse[0][e], inverse[1][e]
            to_lane = (2 * (lane & 3) + e) * 4 + ((lane >> 2) & 3)
            for m in cutlass.range_constexpr(cfg.slices):
                a = [acc[x] for x in place(cfg, m, i16, e)]
                a = [a[0] * f0, a[1] * f0, a[2] * f1, a[3] * f1]
                if const_expr(cfg.partials == 16):
                    strip = 32 * i + 4 * (begin + m) + w
                    v = cute.make_rmem_tensor(2, Int32)
                    v[0], v[1] = (
                        pack2(a[2 * n] * up, a[2 * n + 1] * up, Float16) for n in range(2)
                    )
                    dst = base + (strip * 128 + to_lane * 4 + (lane >> 4) * 2)
                    cute.autovec_copy(cute.recast_tensor(v, Float32), words_at(dst, 2))
                else:
                    unit = 64 * i + 8 * (begin + m) + 2 * w + (lane >> 4)
                    v = cute.make_rmem_tensor(4, Float32)
                    for n in cutlass.range_constexpr(4):
                        v[n] = a[n]
                    cute.autovec_copy(v, words_at(base + (unit * 128 + to_lane * 4), 4))
    if tid < BLOCK:
        # row values of 16 rows: r, r + 8 side by side
        at = tid // 16 * 16 + 2 * (tid & 7) + ((tid >> 3) & 1)
        if const_expr(cfg.partials == 16):
            words = region + (REGION // 2 + tid // 16 * 32 + at)
            words.store(lse)
            for half in cutlass.range_constexpr(2):
                (words + 16 * (1 + half)).store(down)
        else:
            (g.partial_lse.iterator + (slot * BLOCK + at)).store(lse)


@cute.jit
def store_partial(
    cfg: cutlass.Constexpr[Transposed], g: Globals, s: TransposedShared, acc, work: Work, rank, lse
):
    """A partial row by row, for the merge kernel."""
    tid = fresh_thread()
    column = first_slice(cfg, rank) * 64 + 16 * ((tid >> 5) & 3) + 2 * ((tid & 31) >> 2)
    row = work.slot * (BLOCK * cfg.cluster) + 2 * (tid & 3)
    if const_expr(not cfg.crossed):
        row = row + rank * BLOCK
    at = g.partial_out.iterator + (row * LATENT + column)
    for j in cutlass.range_constexpr(cfg.width // 8):
        inverse = inverses(s, j)
        for e in cutlass.range_constexpr(2):
            for m in cutlass.range_constexpr(cfg.slices):
                x = cfg.width // 2 * m + 4 * j + e
                v = cute.make_rmem_tensor(2, Float32)
                v[0], v[1] = acc[x] * inverse[e], acc[x + 2] * inverse[e]
                cute.autovec_copy(v, words_at(at + ((8 * j + e) * LATENT + 64 * m), 2))
    if tid < BLOCK:
        g.partial_lse[work.slot, rank * BLOCK + tid] = lse


@cute.jit
def store_result(
    cfg: cutlass.Constexpr[Transposed], g: Globals, s: TransposedShared, acc, work: Work, rank, lse
):
    """Rows of the result, in full 32-byte sectors where its elements have 16 bits."""
    tid = fresh_thread()
    column = first_slice(cfg, rank) * 64 + 16 * ((tid >> 5) & 3) + 2 * ((tid & 31) >> 2)
    out_scale = with_scales(cfg, g).out_scale
    # rows count from this CTA's first
    first = 2 * (tid & 3)
    if const_expr(cfg.crossed):
        first = first - rank * BLOCK
    for j in cutlass.range_constexpr(cfg.width // 8):
        inverse = inverses(s, j)
        for e in cutlass.range_constexpr(2):
            f = inverse[e] * out_scale
            row = 8 * j + first + e
            for m in cutlass.range_constexpr(cfg.slices):
                x = cfg.width // 2 * m + 4 * j + e
                store_pair(cfg, g, work, row, column + 64 * m, acc[x] * f, acc[x + 2] * f)
    if tid < BLOCK:
        store_row_lse(cfg, g, work, tid, lse)


@cute.jit
def tell(cfg: cutlass.Constexpr[Transposed], barrier: cute.Pointer, rank):
    """All threads arrive, and where a pair shares columns, a word for each warp at the other's."""
    cute.arch.mbarrier_arrive(barrier)
    if const_expr(cfg.crossed):
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(barrier, 1 - rank)


@cute.jit
def finish(
    cfg: cutlass.Constexpr[Transposed],
    g: Globals,
    s: TransposedShared,
    acc: cute.Tensor,
    index,
    rank,
):
    """Normalise; write the result, or the partial."""
    tid = fresh_thread()  # held through the loop, it and what follows would cost registers
    work = read_work(g, s, index)
    row = tid & (BLOCK - 1)
    if const_expr(cfg.crossed):
        row = row + rank * BLOCK
    lse = s.row_max[row]  # with features as the attend group has made it
    if const_expr(not cfg.features):
        lse = (lse + cute.math.log2(s.row_sum[row], fastmath=True)) * Float32(LN2)
    if work.slot >= 0:
        if const_expr(cfg.fused_merge):
            store_strips(cfg, g, s, acc, work, rank, lse, index)
            arrive(cfg, g, work, rank)
        else:
            store_partial(cfg, g, s, acc, work, rank, lse)
    else:
        store_result(cfg, g, s, acc, work, rank, lse)
    tell(cfg, s.free, rank)


@cute.jit
def accumulate(
    cfg: cutlass.Constexpr[Transposed], g: Globals, s: TransposedShared, mma: Mmas, plan: Plan, rank
):
    """Per work tile: V^T P^T tile by tile as P is announced."""
    r_p = weights_of(cfg, s, mma)
    acc = cute.make_rmem_tensor(cfg.width // 2 * cfg.slices, Float32)
    v = operands_a(cfg, mma)
    first, last = plan.first, plan.last
    values = values_at(cfg, s, rank)
    tell(cfg, s.free, rank)
    stage, phase = Int32(0), Int32(0)
    for index in cutlass.range(first, last, unroll=1):
        if const_expr(cfg.split):
            stage = pass_over(cfg, stage)
        acc.fill(0.0)
        left, opened = Int32(1), Boolean(False)
        there = Boolean(False)
        while left > 0:
            left = cute.arch.make_warp_uniform(left)
            stage = cute.arch.make_warp_uniform(stage)
            turn = (phase >> stage) & 1 if const_expr(cfg.split) else phase
            slot = stage
            if const_expr(cfg.crossed):
                slot, turn = slot_of(phase)
            if not there:
                await_weights(cfg, s, slot, turn)
            if not opened:
                work = read_work(g, s, index)
                left = cute.arch.make_warp_uniform(work.end - work.begin)
                opened = Boolean(True)
            stamp_round(cfg, g, left, 5)
            if const_expr(cfg.crossed):
                after = slot_of(phase + 1)
            elif const_expr(cfg.split):
                further = stage + 1 if stage + 1 < cfg.stages else Int32(0)
                after = further, (phase >> further) & 1
            else:
                after = next_stage(stage, phase)
            there = add_tile(cfg, s, mma, acc, v, r_p, values, stage, slot, after)
            stamp_round(cfg, g, left, 6)
            stamp_round(cfg, g, left, 7)
            tell(cfg, s.seen + slot, rank)
            cute.arch.sync_warp()
            release(cfg, s, stage, cute.arch.lane_idx())
            left = left - 1
            if const_expr(cfg.crossed):
                phase = phase + 1  # tiles so far
                stage = stage + 1 if stage + 1 < cfg.stages else Int32(0)
            elif const_expr(cfg.split):
                phase = phase ^ (1 << stage)
                stage = stage + 1 if stage + 1 < cfg.stages else Int32(0)
            else:
                stage, phase = next_stage(stage, phase)
        stamp(cfg, g, 3)
        finish(cfg, g, s, acc, index, rank)
        stamp(cfg, g, 4)
    if const_expr(cfg.fused_merge):
        # again: held through the loop it would cost a register
        plan = load_plan(cfg, s)
        for index in cutlass.range(plan.first, plan.last, unroll=1):
            if may_be_split(plan, index):
                merge(cfg, g, s, index, plan, rank, False)
    stamp(cfg, g, 6)
