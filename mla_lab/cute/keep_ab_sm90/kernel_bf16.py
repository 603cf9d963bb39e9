"""The kernel for 16-bit elements: O[rows, columns] += P V, query rows on the M side of both MMAs.
64 rows per CTA, 128 rows per cluster of two.

Roles (384 threads)
    warps 0-3, 4-7   PV warp groups           O[64 x 256] += P V each; warp 0 is the producer warp
                                              as well: Q, then KV tiles of 64 tokens, into a ring
                                              of three stages; option `gather`: all eight warps
                                              fetch tokens into it (`producer_gather`)
    warps 8-11       QK-softmax warp group    S = Q K^T with Q in registers, softmax, P

Shared memory: three KV stages of 73,728 B (Q enters through stage 0, once per work tile), Q's rope
and last k-step. A stage is 8 x 9 swizzle atoms of 8 rows x 64 columns: all rows of a 64-column box
after each other, so that three boxes are one copy and columns land in chunks; or, where a page is
smaller than a tile, eight rows of all boxes after each other (`by_rows`), so that a page is one
copy. P of a tile goes into the rope box of its own stage, which nothing reads after QK. A
wgmma-group is one of the whole warp group (PTX ISA, `wgmma.commit_group`), so that a warp whose
`wait_group` has ended stores behind the reads of all four warps' products, not only of its own
rows'; no barrier of the warp group stands between.

mbarriers                                   arrivals per phase
    kv_pipe.full[stage, chunk]  KV columns  1 + bytes of three 64-column boxes; with `by_rows` all
                                            bytes of a tile count on chunk 0; with `gather` two
                                            chunks, see `producer_gather`
    kv_pipe.empty[stage]        stage free  8 PV warps of each CTA in the cluster
                                            (for Q: the 4 QK-softmax warps, twice); with `gather`
                                            256 PV threads (128 QK-softmax threads, twice)
    p_pipe.full[stage]   P(t) is stored, and QK(t + 1) all but done: 128 QK-softmax threads
    p_pipe.empty[stage]  rescale exponents of t have been read: 256 PV threads
    stats_read           row sums and row maxes have been read: 256 PV threads
Plain words in shared memory are handed over with one arrival per thread, which orders that thread's
write (compute-sanitizer racecheck follows that); a KV stage is released as `release` says.

Named barriers            threads  what it orders
    1 QK_SOFTMAX_BARRIER  128      warps 8-11: QK of the previous work tile, before Q's last k-step
                                   and rope are overwritten; these, before QK of this work tile, and
                                   all reads of Q in stage 0, before KV may land there. With
                                   `skip`: the vote of all rows
    2 PV_BARRIER          256      in `split_merge/keep_ab_*` alone: reads of the ring, before own
                                   strips are stored there; stores of a partial, before its counter
                                   in global memory is raised; the counter's last arrival, before
                                   partials are read; row values of a piece, before the sum of its
                                   item; reads of a record, before warp 0 replaces it,
                                   and that, before it is read; copies and weights, before the sums.
                                   With `gather` a record, before all PV warps read it

Pipelines
    producer -> QK-softmax, PV     kv_pipe: the ring, KV tiles two ahead
    QK-softmax -> PV               p_pipe: P and the exponents that O is rescaled by before PV
    QK-softmax -> PV               stats_read: row sums and maxes, behind a work tile or piece

Timeline of a steady tile (SM clocks; the tensor core needs 1152 for QK and 1024 for PV)
    QK-softmax   | softmax(t)      | issue QK(t + 1)         | softmax(t + 1) ...
    PV           | PV(t - 1)             |        wait       | PV(t) ...
QK goes first on the tensor core; PV of a tile runs under the softmax of the next one.

Timeline of a change of work tiles (t the last KV tile, ' the next work tile)
    producer     | Q' once stage 0 is free, KV' as PV frees their stages
    QK-softmax   | softmax(t) | row sums | Q' to registers | QK'(0) | softmax'(0) ...
    PV           | PV(t - 1)  | PV(t)    | epilogue        | wait   | PV'(0) ...
A batch-invariant call (option pieces) may give a worker all pieces of an item in one work tile
(`plan.fixed_pieces`). Between two of them Q stays, the ring is filled on, and row statistics and O
begin anew: the PV warp groups store the piece, and behind the last one add them all up
(`split_merge/keep_ab_own_pieces`). Other pieces are merged behind the next work tile.

After a worker's last work tile the PV warp groups do the merges, if any. A CTA keeps its own part
of its last partial in the ring. The QK-softmax warp group, which is done earlier, runs the merge's
code ahead of them without a partial, so that it is in the instruction cache by then.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, Int64, Uint8, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

from ..common.barriers import MBarriers
from ..common.pipeline import Pipeline
from ..rows_on_m.params import BLOCK, BOXES, HEAD, RECORD_WORDS, RECORDS, Cta
from ..split_merge.keep_ab_cooperative import merge_all
from .mainloop_pv import mainloop_pv
from .mainloop_qk_softmax import mainloop_qk_softmax
from .params import STAGE, SWIZZLE_ROWS, Config, Mmas, Shared, cache_load, query_load
from .producer_gather import ARRIVALS
from .release import releases

THREADS = 384
#: registers per thread by role, of 168 at the launch
QK_SOFTMAX_REGISTERS, PV_REGISTERS = 184, 160


@cute.jit
def allocate(cfg: cutlass.Constexpr[Config], kv_layout, box_layout, last_layout):
    """Shared memory: with three stages 232,448 B, all that a CTA can have."""
    alloc = cutlass.memory.SmemAllocator()
    element, stages = cfg.element, cfg.stages

    def array(dtype, shape, align, stride=None):
        layout = (
            cute.make_layout(shape) if stride is None else cute.make_layout(shape, stride=stride)
        )
        return alloc.allocate_tensor(dtype, layout, byte_alignment=align)

    def tile(layout):
        return alloc.allocate_tensor(
            element, layout.outer, byte_alignment=1024, swizzle=layout.inner
        )

    full = alloc.allocate_array(Int64, stages * (len(cfg.kv_chunks) + 3) + 1)
    valid = array(Int32, (2, stages), 8) if const_expr(cfg.gather) else None
    records = array(Int32, (RECORD_WORDS, RECORDS), 8)
    rescale = array(Uint8, (BLOCK, stages), 64, (1, BLOCK))
    row_sum, row_max = array(Float32, BLOCK, 64), array(Float32, BLOCK, 64)
    kv, q_rope = tile(kv_layout), tile(box_layout)
    q_last = alloc.allocate_tensor(element, last_layout, byte_alignment=128)
    v_t = cute.make_tensor(
        kv.iterator,
        cute.make_layout(
            ((64, 8), (SWIZZLE_ROWS, BLOCK // SWIZZLE_ROWS), stages),
            stride=((1, cfg.box_stride), (64, cfg.rows_stride), STAGE),
        ),
    )
    empty = full + stages * len(cfg.kv_chunks)
    p_full = empty + stages
    p_empty = p_full + stages
    return Shared(
        kv, v_t, q_rope, q_last, rescale, records, row_sum, row_max,
        Pipeline(MBarriers(full), MBarriers(empty)),
        Pipeline(MBarriers(p_full), MBarriers(p_empty)),
        MBarriers(p_empty + stages),
        valid,
    )  # fmt: skip


@cute.jit
def init_barriers(cfg: cutlass.Constexpr[Config], s: Shared):
    """Arrivals per phase as in the table above."""
    with cute.arch.elect_one():
        for i in cutlass.range_constexpr(cfg.stages * len(cfg.kv_chunks)):
            s.kv_pipe.full.init(i, ARRIVALS[i % 2] if const_expr(cfg.gather) else 1)
        for i in cutlass.range_constexpr(cfg.stages):
            s.kv_pipe.empty.init(i, releases(cfg))
            s.p_pipe.full.init(i, 128)
            s.p_pipe.empty.init(i, 256)
        s.stats_read.init(0, 256)
    cute.arch.mbarrier_init_fence()


@cute.jit
def roles(cta: Cta, warp):
    """The role of each warp, with its registers; then the merges."""
    if warp < 8:
        cute.arch.setmaxregister_decrease(PV_REGISTERS)
        mainloop_pv(cta)
        if const_expr(not (cta.cfg.warms_code or cta.cfg.pieces)):
            merge_all(cta)
    else:
        cute.arch.setmaxregister_increase(QK_SOFTMAX_REGISTERS)
        mainloop_qk_softmax(cta)
        if const_expr(cta.cfg.warms_code):
            cute.arch.setmaxregister_decrease(PV_REGISTERS)
    if const_expr(cta.cfg.warms_code):
        merge_all(cta)


@cute.jit
def operands(cfg: cutlass.Constexpr[Config], q: cute.Tensor, kv: cute.Tensor):
    """MMAs, tensor maps with their views of the query and the cache, layouts for `allocate`."""
    element = cfg.element
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, element)
    plain = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_INTER, element)
    kv_layout = cute.tile_to_shape(atom, (BLOCK, HEAD, cfg.stages), cfg.order)
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
        cute.make_layout((cute.size(q.shape[:-1]), (64, BOXES)), stride=(HEAD, (1, 64))),
    )
    q_boxes = BOXES // cfg.chunks
    q_box = cute.tile_to_shape(atom, (cfg.query_rows, 64 * q_boxes), cfg.order[:2])
    q_tile = (cfg.query_rows, (64, q_boxes))
    maps = cpasync.make_tiled_tma_atom(query_load(), q_view, q_box, q_tile)
    cache = (None, None) if const_expr(cfg.gather) else cache_map(cfg, kv, atom)
    return mma, (*maps, *cache), (kv_layout, box_layout, last_layout)


def cache_map(cfg: Config, kv: cute.Tensor, atom):
    """The tensor map of the cache and its view."""
    eights = (SWIZZLE_ROWS, cfg.page_size // SWIZZLE_ROWS)
    kv_view = cute.make_tensor(
        kv.iterator,
        cute.make_layout(
            (eights if const_expr(cfg.by_rows) else cfg.page_size, (64, BOXES), kv.shape[0]),
            stride=(
                (HEAD, SWIZZLE_ROWS * HEAD) if const_expr(cfg.by_rows) else HEAD,
                (1, 64),
                kv.stride[0],
            ),
        ),
    )
    boxes = cfg.boxes_per_copy
    kv_box = cute.tile_to_shape(atom, (cfg.box_rows, 64 * boxes), cfg.order[:2])
    kv_tile = (cfg.kv_rows, (64, boxes))
    return cpasync.make_tiled_tma_atom(cache_load(cfg), kv_view, kv_box, kv_tile)
