"""The design for elements of 16 bits: O[rows, columns] += P V, with the query rows on the M side of
both products. 64 rows a CTA, 128 rows a cluster of two.

Roles (384 threads)
    warps 0-3, 4-7   accumulate   O[64 x 256] each, += P V; warp 0 also loads: Q, then KV tiles
                                  of 64 tokens, into a ring of three stages
    warps 8-11       attend       S = Q K^T with Q in registers, softmax, P

Shared memory: three KV stages of 73,728 B (Q enters through stage 0, once a work tile), Q's rope
and last k-step. A stage is 8 x 9 swizzle atoms of 8 rows by 64 columns: all rows of a 64-column
box after each other, so that three boxes are one copy and columns land in groups; or, where a page
is less than a tile, eight rows of all boxes after each other ("by rows"), so that a page is one
copy. P of a tile goes into the rope box of its own stage, which is dead after QK.

Barriers                                   arrivals
    full[stage, group]  KV columns landed   1 + bytes of three 64-column boxes; by rows all bytes
                                            of a tile count on the first, and the others just turn
    empty[stage]        stage may be filled 8 PV warps of each CTA in the cluster
                                            (for Q: 4 attend warps, twice)
    p_full[stage]       P(t) in place and QK(t + 1) all but done: 128 attend threads
    seen[stage]         drop(t) has been read: 256 accumulate threads
    free                row sums and maxima have been read: 256 accumulate threads
Who hands over plain words through shared memory arrives thread by thread, so that each write is
ordered by its own thread's arrival (and a race checker knows it); who only counts arrives once a
warp. Named barriers: 1 the attend group, around the move of Q's last k-step and rope; 2 both
accumulate groups, in the merge. Global counters, one a split row tile: `merge`.

Pipelines
    load -> attend, accumulate     `full`, `empty`: the ring, a KV tile two rounds ahead
    attend -> accumulate           `p_full`, `seen`: P, and how often O is halved before it
    attend -> accumulate           `free`: sums and maxima of a work tile, once at its end

Timeline of a steady tile (SM clocks; the matrix unit needs 1152 for QK and 1024 for PV)
    attend       | softmax(t)      | issue QK(t + 1)         | softmax(t + 1) ...
    accumulate   | PV(t - 1)             |        wait       | PV(t) ...
QK has the matrix unit first; PV of a tile runs under the softmax of the next.

Timeline of a change of work tiles (t the last KV tile, ' the next work tile)
    load         | Q' once stage 0 is free, KV' once PV frees theirs
    attend       | softmax(t) | sums out | Q' to registers | QK'(0) | softmax'(0) ...
    accumulate   | PV(t - 1)       | PV(t) | divide, store     | wait    | PV'(0) ...
After a worker's last work tile: the merges, if any (`merge`), by the accumulate groups. What a
CTA merges of its own last partial never leaves its ring.

Rows are packed (token * heads + head); causal is bottom-right. Partials of a split row tile are
merged in split order, fp32, by all who split it, a share each (see `merge`).
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, Int64, Uint8, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

from .mainloop_pv import accumulate
from .mainloop_qk_softmax import attend
from .params import (
    BLOCK,
    EIGHT_ROWS,
    GROUPS,
    HEAD,
    RECORD_WORDS,
    RECORDS,
    STAGE,
    STAGES,
    Config,
    Globals,
    Mmas,
    Shared,
    cache_load,
    query_load,
)
from .tile_scheduler import Plan

THREADS = 384
#: registers a thread by role, out of 168 a thread at the launch
ATTEND_REGISTERS, ACCUMULATE_REGISTERS = 184, 160


@cute.jit
def allocate(cfg: cutlass.Constexpr[Config], kv_layout, box_layout, last_layout):
    """Shared memory: 232,448 B, to the last one."""
    alloc = cutlass.memory.SmemAllocator()
    element = cfg.element
    # barriers and row values fit into the 1,024 B that the tiles leave
    bars = alloc.allocate_array(Int64, STAGES * (len(GROUPS) + 3) + 1)
    records = alloc.allocate_tensor(
        Int32, cute.make_layout((RECORD_WORDS, RECORDS)), byte_alignment=8
    )
    drop = alloc.allocate_tensor(
        Uint8, cute.make_layout((BLOCK, STAGES), stride=(1, BLOCK)), byte_alignment=64
    )
    row_sum = alloc.allocate_tensor(Float32, cute.make_layout(BLOCK), byte_alignment=64)
    row_max = alloc.allocate_tensor(Float32, cute.make_layout(BLOCK), byte_alignment=64)
    kv = alloc.allocate_tensor(
        element, kv_layout.outer, byte_alignment=1024, swizzle=kv_layout.inner
    )
    q_rope = alloc.allocate_tensor(
        element, box_layout.outer, byte_alignment=1024, swizzle=box_layout.inner
    )
    q_last = alloc.allocate_tensor(element, last_layout, byte_alignment=128)
    values = cute.make_tensor(
        kv.iterator,
        cute.make_layout(
            ((64, 8), (EIGHT_ROWS, BLOCK // EIGHT_ROWS), STAGES),
            stride=((1, cfg.box_stride), (64, cfg.rows_stride), STAGE),
        ),
    )
    empty = bars + STAGES * len(GROUPS)
    p_full = empty + STAGES
    seen = p_full + STAGES
    return Shared(
        kv, values, q_rope, q_last, drop, records, row_sum, row_max,
        bars, empty, p_full, seen, seen + STAGES,
    )  # fmt: skip


@cute.jit
def init_barriers(cfg: cutlass.Constexpr[Config], s: Shared):
    """Arrive counts as in the table above."""
    with cute.arch.elect_one():
        for i in cutlass.range_constexpr(STAGES * len(GROUPS)):
            cute.arch.mbarrier_init(s.full + i, 1)
        for i in cutlass.range_constexpr(STAGES):
            cute.arch.mbarrier_init(s.empty + i, 8 * cfg.cluster)
            cute.arch.mbarrier_init(s.p_full + i, 128)
            cute.arch.mbarrier_init(s.seen + i, 256)
        cute.arch.mbarrier_init(s.free, 256)
    cute.arch.mbarrier_init_fence()


@cute.jit
def roles(cfg: cutlass.Constexpr[Config], g: Globals, s: Shared, mma: Mmas, plan: Plan, rank, warp):
    """What each warp does, with its share of the registers."""
    if warp < 8:
        cute.arch.setmaxregister_decrease(ACCUMULATE_REGISTERS)
        accumulate(cfg, g, s, mma, plan, rank)
    else:
        cute.arch.setmaxregister_increase(ATTEND_REGISTERS)
        attend(cfg, g, s, mma, plan, rank)


@cute.jit
def operands(cfg: cutlass.Constexpr[Config], q: cute.Tensor, kv: cute.Tensor):
    """Products, tensor maps with their views of the query and the cache, and the layouts that
    `allocate` takes."""
    element = cfg.element
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, element)
    plain = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_INTER, element)
    kv_layout = cute.tile_to_shape(atom, (BLOCK, HEAD, STAGES), cfg.order)
    box_layout = cute.tile_to_shape(atom, (BLOCK, 64), (0, 1))
    last_layout = cute.tile_to_shape(plain, (BLOCK, 16), (0, 1)).outer
    k_major, mn_major = OperandMajorMode.K, OperandMajorMode.MN
    registers, smem = warpgroup.OperandSource.RMEM, warpgroup.OperandSource.SMEM

    def make(major, n, source):
        return sm90.make_trivial_tiled_mma(
            element, element, k_major, major, Float32, (1, 1, 1), (64, n), a_source=source
        )

    mma = Mmas(
        make(k_major, BLOCK, smem), make(k_major, BLOCK, registers), make(mn_major, 256, smem)
    )
    q_view = cute.make_tensor(
        q.iterator,
        cute.make_layout((cute.size(q.shape[:-1]), (64, 9)), stride=(HEAD, (1, 64))),
    )
    eights = (EIGHT_ROWS, cfg.page_size // EIGHT_ROWS)
    kv_view = cute.make_tensor(
        kv.iterator,
        cute.make_layout(
            (eights if const_expr(cfg.by_rows) else cfg.page_size, (64, 9), kv.shape[0]),
            stride=(
                (HEAD, EIGHT_ROWS * HEAD) if const_expr(cfg.by_rows) else HEAD,
                (1, 64),
                kv.stride[0],
            ),
        ),
    )
    q_boxes, boxes = 9 // cfg.pieces, cfg.boxes_per_copy
    q_box = cute.tile_to_shape(atom, (cfg.query_rows, 64 * q_boxes), cfg.order[:2])
    kv_box = cute.tile_to_shape(atom, (cfg.box_rows, 64 * boxes), cfg.order[:2])
    q_tile, kv_tile = (cfg.query_rows, (64, q_boxes)), (cfg.kv_rows, (64, boxes))
    tma_q, q_coords = cpasync.make_tiled_tma_atom(query_load(), q_view, q_box, q_tile)
    tma_kv, kv_coords = cpasync.make_tiled_tma_atom(cache_load(cfg), kv_view, kv_box, kv_tile)
    return mma, (tma_q, q_coords, tma_kv, kv_coords), (kv_layout, box_layout, last_layout)
