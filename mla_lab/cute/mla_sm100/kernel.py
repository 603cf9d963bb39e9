"""The kernel: 128 query rows of a pair of CTAs, 64 each, over tiles of 128 KV tokens.

Roles (256 threads, at most 255 registers each)
    warps 0-3   softmax warp group  S from tensor memory, softmax, P; O rescaled; epilogue
    warp 4      MMA                 in the leader it issues both products, in the second CTA it
                                    passes arrivals on
    warp 5      producer            records, Q, K, V by TMA
    all eight   the merge of split row tiles, after the worker's last tile

Tensor memory (128 lanes; 64 rows, their columns in halves: lanes 0-63 and 64-127)
    columns 0-63, 64-127   S of even and odd tiles: 128 tokens
    columns 128-383        O: 512 columns, 0-255 in lanes 0-63, 256-511 in lanes 64-127

mbarriers                          arrivals per phase; one more in the leader: the second CTA's
    q_pipe.full        Q           1 + bytes; of a query of two terms 1 thread
    k_pipe.full[chunk] K columns   1 + bytes of three 64-column boxes of 64 tokens
    v_pipe.full[chunk] V tokens    1 + bytes of four 64-column boxes of 32 tokens
                       and without another:
    *.empty            slot free   1: the commit behind the last product that reads it
    s_full[buffer]     S           1: the commit behind QK
    p_full             P stored, O rescaled, S read: 8 softmax warps of the pair, in the leader
    o_full             PV of a tile, and all before it: 1, its commit
    work_full[i % 3]   record of a work tile: 1, the producer
Commits arrive in both CTAs. A record, S and P need no empty barrier: P of a tile is stored behind
o_full of the tile before it, and S(t + 2), record(i + 3) follow p_full of what they overwrite.

Named barriers            threads  what it orders
    1 SOFTMAX_BARRIER     128      the vote on row maxes; values exchanged between the threads of a
                                   row; stores of a partial before it is counted
    2 PV_BARRIER          256      all records before they are read for the merge; in the merge, see
                                   `split_merge.keep_ab_cooperative`

Timeline of a steady tile (clocks of the tensor core on paper: QK 1,152, PV 1,024 with 16 bits)
    MMA       | QK(t + 1)         | PV(t)           | QK(t + 2) ...
    softmax   | softmax(t)  | wait                  | softmax(t + 1) ...
    producer  | V(t) behind PV(t - 1)  | K(t + 2) behind QK(t + 1), chunk by chunk
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import cpasync, tcgen05

from ..common.barriers import MBarriers
from ..common.launch_arguments import operand_fields
from ..common.pipeline import Pipeline
from ..common.ptx_sm100 import fence_after, fence_before
from ..common.worker_plan import may_be_split, open_plan, plan_of
from ..rows_on_m.params import BOXES, HEAD, LATENT, PV_BARRIER, RECORD_WORDS, RECORDS
from ..rows_on_m.work_records import batch_of
from ..split_merge.keep_ab_cooperative import merge
from .mma import mma_warp
from .params import (
    ATOM_ROWS,
    BOX_COLUMNS,
    K_BOXES,
    K_CHUNKS,
    K_ELEMENTS,
    MMA_WARP,
    PRODUCER_WARP,
    ROWS,
    SOFTMAX_THREADS,
    SOFTMAX_WARPS,
    THREADS,
    TMEM_COLUMNS,
    V_BOXES,
    V_CHUNKS,
    V_ELEMENTS,
    Config,
    Cta,
    Operands,
    Shared,
)
from .producer import producer
from .softmax import softmax


def swizzle_atom(cfg: Config, element):
    """Layout atom of 8 rows x 64 columns."""
    kinds = tcgen05.SmemLayoutAtomKind
    kind = kinds.K_SW128 if cfg.span == 128 else kinds.K_SW64
    return tcgen05.make_smem_layout_atom(kind, element)


@cute.jit
def allocate(cfg: cutlass.Constexpr[Config]):
    """Shared memory: 231,424 B with 16 bits, of 232,448 B that a CTA can have."""
    alloc = cutlass.memory.SmemAllocator()
    swizzle = swizzle_atom(cfg, cfg.element).inner

    def array(dtype, shape, align):
        return alloc.allocate_tensor(dtype, cute.make_layout(shape), byte_alignment=align)

    def tile(elements):
        layout = cute.make_layout(elements)
        return alloc.allocate_tensor(cfg.element, layout, byte_alignment=1024, swizzle=swizzle)

    barriers = MBarriers(alloc.allocate_array(Int64, 2 * (1 + K_CHUNKS + V_CHUNKS) + 4 + RECORDS))
    records, plan = array(Int32, (RECORD_WORDS, RECORDS), 8), array(Int32, 32, 8)
    words, q_scale = array(Float32, SOFTMAX_THREADS, 8), array(Float32, ROWS, 8)
    tmem = array(Int32, 1, 8)
    q = tile(cfg.terms * cfg.q_elements)
    kv = tile(K_ELEMENTS + V_ELEMENTS)
    p = tile(cfg.terms * cfg.p_elements)

    def pipe(at, slots):
        return Pipeline(barriers.offset(at), barriers.offset(at + slots))

    k_at, v_at = 2, 2 + 2 * K_CHUNKS
    s_at = v_at + 2 * V_CHUNKS
    return Shared(
        q, kv, p, words, q_scale, records, plan, tmem,
        pipe(0, 1), pipe(k_at, K_CHUNKS), pipe(v_at, V_CHUNKS),
        barriers.offset(s_at), barriers.offset(s_at + 2), barriers.offset(s_at + 3),
        barriers.offset(s_at + 4),
    )  # fmt: skip


@cute.jit
def init_barriers(s: Shared, rank):
    """Arrivals per phase as in the table above."""
    with cute.arch.elect_one():
        for pipe, slots in ((s.q_pipe, 1), (s.k_pipe, K_CHUNKS), (s.v_pipe, V_CHUNKS)):
            for i in cutlass.range_constexpr(slots):
                pipe.full.init(i, 2 - rank)
                pipe.empty.init(i, 1)
        for i in cutlass.range_constexpr(2):
            s.s_full.init(i, 1)
        s.p_full.init(0, 2 * SOFTMAX_WARPS)
        s.o_full.init(0, 1)
        for i in cutlass.range_constexpr(RECORDS):
            s.work_full.init(i, 1)
    cute.arch.mbarrier_init_fence()


@cute.jit
def roles(cta: Cta, warp):
    """The role of each warp, then the merge by all of them."""
    if warp < SOFTMAX_WARPS:
        softmax(cta)
    elif warp == MMA_WARP:
        mma_warp(cta)
    elif warp == PRODUCER_WARP:
        producer(cta)
    first, last = cta.plan.first, cta.plan.last
    PV_BARRIER.sync()  # a warp without a role must not read records before they are written
    for back in cutlass.range(first + 1, last + 1, unroll=1):
        if may_be_split(cta.plan, first + last - back):
            merge(cta, first + last - back)


@cute.kernel
def decode_kernel(cfg: cutlass.Constexpr[Config], g: Operands):
    """One CTA: shared and tensor memory, barriers, the plan, then its roles."""
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    block, _, _ = cute.arch.block_idx()
    rank = block % cfg.cluster
    s = allocate(cfg)
    if warp == 0:
        init_barriers(s, rank)
    if warp == 1:
        if const_expr(cfg.pdl):
            cute.arch.griddepcontrol_wait()
        words = open_plan(batch_of(cfg, g), g.tiles, g.schedule, block, cfg.cluster)
        s.plan[cute.arch.lane_idx()] = words
    if warp == MMA_WARP:
        cute.arch.alloc_tmem(TMEM_COLUMNS, s.tmem.iterator, is_two_cta=True)
        cute.arch.relinquish_tmem_alloc_permit(is_two_cta=True)
    fence_before()
    cute.arch.cluster_arrive_relaxed()
    cute.arch.cluster_wait()
    cute.arch.sync_threads()
    fence_after()
    if const_expr(cfg.pdl):
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
    plan = plan_of(s.plan[cute.arch.lane_idx()])
    roles(Cta(cfg, g, s, plan, rank, s.tmem[0]), warp)
    # a CTA must not exit while the other arrives on its barriers, nor free what is in use
    fence_before()
    cute.arch.cluster_arrive_relaxed()
    cute.arch.cluster_wait()
    fence_after()
    if warp == MMA_WARP:
        pointer = cute.arch.retrieve_tmem_ptr(Float32, 16, s.tmem.iterator)
        cute.arch.dealloc_tmem(pointer, TMEM_COLUMNS, is_two_cta=True)


@cute.jit
def tensor_maps(cfg: cutlass.Constexpr[Config], q: cute.Tensor, kv: cute.Tensor):
    """TMA atoms with their coordinates: Q, K and V of the cache."""
    load = cpasync.CopyBulkTensorTileG2SOp()
    atom = swizzle_atom(cfg, cfg.element)
    eights = (ATOM_ROWS, cfg.page_size // ATOM_ROWS)

    def cache(boxes):
        shape = (eights, (BOX_COLUMNS, boxes), kv.shape[0])
        stride = ((HEAD, ATOM_ROWS * HEAD), (1, BOX_COLUMNS), kv.stride[0])
        return cute.make_tensor(kv.iterator, cute.make_layout(shape, stride=stride))

    def cache_map(boxes, rows, wide):
        box = cute.tile_to_shape(atom, (rows, BOX_COLUMNS * wide), (1, 0))
        tiler = ((ATOM_ROWS, rows // ATOM_ROWS), (BOX_COLUMNS, wide))
        return cpasync.make_tiled_tma_atom(load, cache(boxes), box, tiler)

    k_map = cache_map(BOXES, cfg.box_rows, K_BOXES)
    v_map = cache_map(LATENT // BOX_COLUMNS, cfg.v_rows, V_BOXES)
    if const_expr(cfg.terms == 2):
        return (None, None), k_map, v_map
    layout = cute.make_layout(
        (cute.size(q.shape[:-1]), (BOX_COLUMNS, BOXES)), stride=(HEAD, (1, BOX_COLUMNS))
    )
    q_box = cute.tile_to_shape(atom, (ROWS, BOX_COLUMNS * K_BOXES), (0, 1))
    q_tile = (ROWS, (BOX_COLUMNS, K_BOXES))
    view = cute.make_tensor(q.iterator, layout)
    return cpasync.make_tiled_tma_atom(load, view, q_box, q_tile), k_map, v_map


class MlaSm100:
    """Host entry: tensor maps and the launch. `compile` it with fake tensors."""

    def __init__(self, cfg: Config):
        self.cfg = cfg

    @cute.jit
    def launch(self, q: cute.Tensor, kv: cute.Tensor, stream: Any, args: dict):
        """Query, out and lse may have any shape whose rows lie in memory in order."""
        cfg = self.cfg
        args["profile"] = args["schedule"]
        q_map, k_map, v_map = tensor_maps(cfg, q, kv)
        fields = operand_fields(args, tree=cfg.tree, skip=cfg.skip)
        g = Operands(*q_map, *k_map, **fields, cache=kv, tma_v=v_map[0], mV=v_map[1], query=q)
        decode_kernel(cfg, g).launch(
            grid=(g.num_workers * cfg.cluster, 1, 1),
            block=(THREADS, 1, 1),
            cluster=(2, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=bool(cfg.pdl),
            cooperative=True,
        )
