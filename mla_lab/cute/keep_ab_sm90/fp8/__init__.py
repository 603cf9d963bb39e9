"""The design for a cache of eight bits: O^T[columns, rows] += V^T P^T, with the query rows on the M
side of the scores alone. 64 rows a CTA, 128 rows a cluster of two.

Roles (512 threads)
    warps 0-3, 4-7   accumulate   O^T[256 columns x 64 rows] each, += V^T P^T
    warps 8-11       attend       S = Q K^T with most of Q in registers, softmax, P
    warp 12          load         records of work tiles, Q, KV tiles of 64 tokens
    warp 13          what has to be done beside that (see `groups`, `pair`)

Operands (all K-major, as e4m3 must be; boxes of 64 bytes, swizzled)
    S[rows, tokens]      A  Q: 56 registers, 2 of 9 boxes   B  K as it lies, [token][64 columns]
    O^T[columns, rows]   A  V^T: ldmatrix.trans + prmt      B  P, [row][64 tokens], on K's rope box

Shared memory: five KV stages of 36,864 B, Q on its way to registers, twice its last two boxes.

Barriers                                   arrivals
    full[stage]     KV landed              1 + bytes
    empty[stage]    stage may be filled    8 accumulate warps of each CTA in the cluster
    p_full[stage]   P(t), factors in place 128 attend threads
    seen[stage]     V, factors are read    256 accumulate threads; attend waits for the next tile
    free            row sums and maxima have been read: 256 accumulate threads
    q_full, q_empty Q landed; Q is in registers, 4 attend warps
Named barriers: 2 both accumulate groups, in the merge.

Timeline of a steady tile (SM clocks; the matrix unit needs 576 for QK and 512 for PV; an H200 takes
1440 to 1500, of which PV takes 1340: its steps wait for their turn)
    attend       | QK(t + 1) by parts among the weights of t | P(t) out, its sums | the rest of QK
    accumulate   | PV(t - 1)                                 | wait               | PV(t) ...
Whoever issues a step that the matrix unit has no room for stands still: all 18 of QK at once took
the attend group 870 clocks in which it made no weights.
Whether a tile's keys or weights are there is asked under the products before it: an answer takes
100 clocks. Scores of two tiles are held in turn. Plans, work tiles, partials and merges are those
of `kernel`.

Precision. A weight is at most 430 of e4m3's 448. The matrix unit adds to O^T itself, with fewer
bits than fp32: of 8192 Gaussian keys in one work tile the error is 1.03 times that of torch with
weights rounded alike, of 65536 keys 2.5 times (H200, 2026-11-20). A product of its own for each
tile, added in fp32, leaves 1.01 and 1.09, and takes the registers of the second scores: 141 us
where this took 134, which takes 125 by now (64 requests of 8192 tokens).

A bf16 query over the same cache (`split`: a value of the design)
    S[rows, tokens]      A  Q as two terms of e4m3 (see `terms`), 5 of 9 boxes of the first in
                            registers, 6 in a pair, the rest in shared memory
    O^T[columns, rows]   A  V^T widened to fp16 in registers   B  P of fp16 (see `widen`)
Both products take twice the time, 1152 and 1024 clocks, as those of 16 bits do. The query passes
through two of the ring's four stages, once a work tile:
    empty[stage]    then 4 attend warps, twice, of each CTA
    p_full, seen    turn where a stage holds keys alone
    q_empty         128 attend threads, twice a work tile: no product reads Q, Q is written
    p_own, p_full   a pair's: see `pair`
Timeline of a steady tile of one CTA (an H200 took about 2800 clocks when that was last measured)
    attend       | QK(t + 1), first part; softmax(t) under it | other parts; P(t) announced between
    accumulate   | PV(t - 1)                                                        | PV(t) ...
and of a pair, which halves the columns and not the rows: about 2520 clocks
    attend       | QK(t + 1), first part; softmax(t) under it | P(t) announced, other parts
    accumulate   | PV(t - 1)                          | wait     | PV(t) ...
Alone, 16 steps of 64 x 64 x 16 a group with V^T by way of registers take 1480 clocks where the unit
needs 1024, steps of 64 x 128 x 16 take 1030. What is left is the attend group's: three ends of
products to wait for, and issue that stands in one line with the accumulate groups'. More would
not be worth its while: for 128 requests of 8192 tokens, without a pause, the pair took 321 mJ and
474 us, the 16-bit kernel 320 to 327 mJ and 468 us, both at the card's 700 W (H200, 2026-11-21; by
NVML's counter, with rounds of 2590 clocks, see `data/notes/kernel_attempts.jsonl`).
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float16, Float32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

from ..params import BLOCK, HEAD, Globals, Mmas, cache_load, query_load
from ..tile_scheduler import Plan
from . import kv_656 as groups
from .mainloop_pv import accumulate
from .mainloop_qk_softmax import attend
from .p_exchange_2cta import carry
from .params import BOXES, Transposed, TransposedShared, allocate
from .producer import load
from .query_hi_lo import attend_split

__all__ = ["THREADS", "allocate", "init_barriers", "operands", "roles"]

THREADS = 512
#: registers a thread by role, out of 128 a thread at the launch
ATTEND_REGISTERS, ACCUMULATE_REGISTERS, LOAD_REGISTERS = 152, 168, 24
#: the same for a query that is split, whose V^T takes more
SPLIT_ATTEND_REGISTERS, SPLIT_ACCUMULATE_REGISTERS = 136, 176
#: and where the scores' parts have scales, or a pair halves the columns
SCALED_ATTEND_REGISTERS, SCALED_ACCUMULATE_REGISTERS = 152, 168


@cute.jit
def init_barriers(cfg: cutlass.Constexpr[Transposed], s: TransposedShared):
    """Arrive counts as in the table above."""
    with cute.arch.elect_one():
        for i in cutlass.range_constexpr(cfg.stages):
            cute.arch.mbarrier_init(s.full + i, 1)
            cute.arch.mbarrier_init(s.empty + i, 8 * cfg.cluster)
            cute.arch.mbarrier_init(s.p_full + i, 1 if const_expr(cfg.crossed) else 128)
            if const_expr(cfg.crossed and i < cfg.slots):
                cute.arch.mbarrier_init(s.p_own + i, 128)
            # in a pair with a warp's word from each of the other's
            cute.arch.mbarrier_init(s.seen + i, 256 + (8 if const_expr(cfg.crossed) else 0))
            if const_expr(cfg.scaled):
                cute.arch.mbarrier_init(s.more.ready + i, 32)
        cute.arch.mbarrier_init(s.free, 256 + (8 if const_expr(cfg.crossed) else 0))
        cute.arch.mbarrier_init(s.q_full, 1)
        # of a query that is split, what all of the group have read or written
        cute.arch.mbarrier_init(s.q_empty, 128 if const_expr(cfg.split) else 4)
    cute.arch.mbarrier_init_fence()


@cute.jit
def roles(
    cfg: cutlass.Constexpr[Transposed], g: Globals, s: TransposedShared, mma: Mmas, plan: Plan,
    rank, warp,
):  # fmt: skip
    """What each warp does, with its share of the registers."""
    if warp < 8:
        count = SPLIT_ACCUMULATE_REGISTERS if const_expr(cfg.split) else ACCUMULATE_REGISTERS
        if const_expr(cfg.scaled or cfg.crossed):
            count = SCALED_ACCUMULATE_REGISTERS
        cute.arch.setmaxregister_increase(count)
        accumulate(cfg, g, s, mma, plan, rank)
    elif warp < 12:
        if const_expr(cfg.split):
            cute.arch.setmaxregister_increase(
                SCALED_ATTEND_REGISTERS
                if const_expr(cfg.scaled or cfg.crossed)
                else SPLIT_ATTEND_REGISTERS
            )
            attend_split(cfg, g, s, mma, plan, rank)
        else:
            cute.arch.setmaxregister_increase(ATTEND_REGISTERS)
            attend(cfg, g, s, mma, plan, rank)
    else:
        cute.arch.setmaxregister_decrease(LOAD_REGISTERS)
        if warp == 12:
            load(cfg, g, s, plan, rank)
        if const_expr(cfg.crossed):
            if warp == 13:
                carry(cfg, g, s, plan)
        if const_expr(cfg.scaled):
            if warp == 13:
                groups.spread_scales(cfg, g, s, plan)


def product(cfg: Transposed):
    """V^T P^T of a slice, V^T in registers."""
    element = Float16 if cfg.split else cfg.element
    major, source = OperandMajorMode.K, warpgroup.OperandSource.RMEM
    return sm90.make_trivial_tiled_mma(
        element, element, major, major, Float32, (1, 1, 1), (BLOCK, cfg.width), a_source=source
    )


@cute.jit
def operands(cfg: cutlass.Constexpr[Transposed], q: cute.Tensor, kv: cute.Tensor):
    """Products, tensor maps with their views of the query and the cache, and the layouts that
    `allocate` takes."""
    element = cfg.element
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW64, element)

    def boxes_of(count: int, *copies: int):  # type: ignore[no-untyped-def]
        modes = tuple(range(2 + len(copies)))
        return cute.tile_to_shape(atom, (BLOCK, 64 * count, *copies), modes)

    rest = cfg.boxes - cfg.q_boxes
    layouts = (
        (
            boxes_of(cfg.boxes, cfg.stages),
            boxes_of(max(rest, 1), 1),
            boxes_of(cfg.boxes),
            boxes_of(1, cfg.stages),
        )
        if const_expr(cfg.split)
        else (boxes_of(BOXES, cfg.stages), boxes_of(cfg.q_boxes), boxes_of(rest, 2))
    )
    major = OperandMajorMode.K
    smem, registers = (
        sm90.make_trivial_tiled_mma(
            element, element, major, major, Float32, (1, 1, 1), (BLOCK, BLOCK), a_source=source
        )
        for source in (warpgroup.OperandSource.SMEM, warpgroup.OperandSource.RMEM)
    )
    # a box of the query is 64 bytes wide, as one of the cache: of 16 bits one k-step
    width = 64 * 8 // cfg.q_element.width
    q_atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW64, cfg.q_element)
    q_view = cute.make_tensor(
        q.iterator,
        cute.make_layout(
            (cute.size(q.shape[:-1]), (width, HEAD // width)), stride=(HEAD, (1, width))
        ),
    )
    columns = (64, cfg.boxes)
    kv_view = cute.make_tensor(
        cute.recast_ptr(kv.iterator, dtype=element),
        cute.make_layout(
            (cfg.page_size, columns, kv.shape[0]), stride=(kv.shape[2], (1, 64), kv.stride[0])
        ),
    )
    q_box = cute.tile_to_shape(q_atom, (BLOCK, width), (0, 1))
    tma_q, q_coords = cpasync.make_tiled_tma_atom(query_load(), q_view, q_box, (BLOCK, (width, 1)))
    rows, boxes = cfg.box_rows, cfg.boxes_per_copy
    tma_kv, kv_coords = cpasync.make_tiled_tma_atom(
        cache_load(cfg),
        kv_view,
        cute.tile_to_shape(atom, (rows, 64 * boxes), (0, 1)),
        (rows, (64, boxes)),
    )
    maps = tma_q, q_coords, tma_kv, kv_coords
    values, rope = product(cfg), None
    if const_expr(cfg.crossed):
        p_atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW64, Float16)
        of_p = cute.tile_to_shape(p_atom, (cfg.width, BLOCK, cfg.slots), (0, 1, 2))
        layouts = (*layouts[:3], of_p)
    if const_expr(cfg.scaled):
        maps, rope = (*maps, *groups.make_views(cfg, kv)), groups.rope_product()
        layouts = layouts[:3]
    return Mmas(smem, registers, values, rope), maps, layouts
