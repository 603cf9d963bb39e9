"""The kernel for an 8-bit cache: O^T[columns, rows] += V^T P^T, query rows on the M side of QK.
64 rows per CTA, 128 rows per cluster of two.

Roles (512 threads)
    warps 0-3, 4-7   PV warp groups           O^T[256 columns x 64 rows] each, += V^T P^T
    warps 8-11       QK-softmax warp group    S = Q K^T with most of Q in registers, softmax, P
    warp 12          producer warp            records of work tiles, Q, KV tiles of 64 tokens
    warp 13          `kv_656`: scale warp; `p_exchange_2cta`: exchange warp
    warps 12, 14     option `gather`: tokens one by one, instead of tiles (`producer_gather`)

Operands (all K-major, as e4m3 must be; boxes of 64 bytes, swizzled)
    S[rows, tokens]      A  Q: 56 registers, 2 of 9 boxes   B  K as it lies, [token][64 columns]
    O^T[columns, rows]   A  V^T: ldmatrix.trans + prmt      B  P, [row][64 tokens], in K's rope box

Shared memory: five KV stages of 36,864 B, Q on its way to registers, twice its last two boxes.

mbarriers               arrivals per phase
    kv_pipe.full        KV landed              1 + bytes; `gather`: 66, see there
    kv_pipe.empty       stage free             8 PV warps of each CTA in the cluster; `gather`: 256
                                               PV threads
    p_pipe.full         P(t) and its rescale factors stored: 128 QK-softmax threads
    p_pipe.empty        rescale factors of t have been read: 256 PV threads
    stats_read          row sums and row maxes have been read: 256 PV threads
    q_pipe              full: Q landed; empty: Q is in registers, 4 QK-softmax warps
Named barriers: PV_BARRIER, in the merge, as in `kernel_bf16`, and in `promotion`; with `gather`
RECORD_BARRIER, at which the second of the two producer warps waits for a work tile's record.

Timeline of a steady tile (SM clocks; the tensor core needs 576 for QK and 512 for PV; an H200 takes
1440 to 1500, of which PV takes 1340: its steps wait for their turn)
    QK-softmax   | QK(t + 1) by steps among the weights of t | P(t) stored, row sums | QK's rest
    PV           | PV(t - 1)                                 | wait                  | PV(t) ...
A warp group that issues a step for which the tensor core has no room stalls: issuing all 18 steps
of QK at once took the QK-softmax warp group 870 clocks without any weights. Barriers of the next
tile are tested under the MMAs before it, because the result takes 100 clocks. The scores of two
tiles are held, alternating. Plans, work tiles, partials and merges are those of `kernel`.

Precision. A weight is at most 430 of e4m3's 448; that of a row max that has just moved is 64, or
256 behind an attention sink (`start_at_sink`), and weights below 2**-10 round to zero. The tensor
core accumulates O^T with fewer bits than fp32: for 8192 Gaussian keys in one work tile the error is
1.03 times that of torch with weights rounded alike; for 65536 keys it was 2.5 times (H200,
2026-11-20) before O^T was promoted to fp32 every 8192 keys (`promotion`). An MMA of its own for
each tile, added in fp32, gives 1.01 and 1.09, but takes the registers of the second scores: 141 us
where this took 134, and takes 121 by now (64 requests of 8192 tokens, H200, 2026-11-29).

A bf16 query over the same cache (`query_hi_lo`)
    S[rows, tokens]      A  Q as two terms of e4m3, 5 of 9 boxes of the first in registers, 6 with
                            `p_exchange`, the rest in shared memory
    O^T[columns, rows]   A  V^T converted to fp16 in registers   B  P of fp16 (`v_fp8_to_fp16`)
Both MMAs take twice the time, 1152 and 1024 clocks, as those of 16 bits do. The query passes
through two of the ring's four stages, once per work tile:
    kv_pipe.empty        then 4 QK-softmax warps, twice, of each CTA; `gather`: 128 threads, twice
    p_pipe               turns only where a stage holds a KV tile
    q_pipe.empty         128 QK-softmax threads, twice per work tile: no MMA reads Q, Q is written
                         with `kv_656` the scale warp too, which has seen Q land
    p_written, p_pipe    see `p_exchange_2cta`
Timeline of a steady tile of one CTA (about 2800 clocks on an H200, 2026-11-21)
    QK-softmax   | QK(t + 1), part 0; softmax(t) under it | other parts; P(t) committed in between
    PV           | PV(t - 1)                                                        | PV(t) ...
and with `p_exchange`, where the CTAs halve the columns instead of the rows: about 2520 clocks
    QK-softmax   | QK(t + 1), part 0; softmax(t) under it | P(t) committed, other parts
    PV           | PV(t - 1)                          | wait     | PV(t) ...
Alone, 16 steps of 64 x 64 x 16 per warp group with V^T through registers take 1480 clocks where
the tensor core needs 1024; steps of 64 x 128 x 16 take 1030. The QK-softmax warp group bounds the
rest: three MMA groups to wait for, and issue slots shared with the PV warp groups. At 128 requests
of 8192 tokens without a pause the cluster kernel took 321 mJ and 474 us, the 16-bit kernel 320 to
327 mJ and 468 us, both at the card's 700 W (H200, 2026-11-21, NVML's counter, with tiles of 2590
clocks; `data/notes/kernel_attempts.jsonl`).
"""

from __future__ import annotations

from dataclasses import replace

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float16, Float32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

from ...common.kv_656 import rope_and_scale_tma
from ...common.ptx_sm90 import fresh_thread
from ...rows_on_m.params import BLOCK, BOXES, HEAD, PAGED, Cta
from ...split_merge.keep_ab_cooperative import merge_all
from ..params import Mmas, cache_load, query_load
from ..release import releases
from ..tile_scheduler import load_plan
from . import kv_656
from .mainloop_pv import mainloop_pv
from .mainloop_qk_softmax import mainloop_qk_softmax
from .p_exchange_2cta import exchange_warp
from .params import GATHER_WARPS, Fp8Config, Fp8Shared, allocate
from .producer import producer
from .producer_gather import producer_gather
from .query_hi_lo import mainloop_qk_softmax_hi_lo

__all__ = ["THREADS", "allocate", "init_barriers", "operands", "roles"]

THREADS = 512


def role_registers(cfg: Fp8Config) -> tuple[int, int, int]:
    """Registers per thread of the producer, the QK-softmax and the two PV warp groups: 512 in all.
    fp16 V^T takes more of PV; fetched tokens more of the producer. With 160 for PV over an e4m3
    query, or 656-byte tokens in pages of any size, ptxas serializes all MMAs of the kernel
    (`xray.serializes`)."""
    if cfg.query_hi_lo and not (cfg.kv_656 or cfg.p_exchange):
        return (32, 128, 176) if cfg.gather else (24, 136, 176)
    return (32, 144, 168) if cfg.kv_656 and cfg.gather == PAGED else (24, 152, 168)


@cute.jit
def init_barriers(cfg: cutlass.Constexpr[Fp8Config], s: Fp8Shared):
    """Arrivals per phase as in the tables above and in `p_exchange_2cta`."""
    exchange = cfg.p_exchange
    readers = 256 + (8 if exchange else 0)
    with cute.arch.elect_one():
        for i in cutlass.range_constexpr(cfg.stages):
            s.kv_pipe.full.init(i, 33 * len(GATHER_WARPS) if const_expr(cfg.gather) else 1)
            s.kv_pipe.empty.init(i, releases(cfg))
            s.p_pipe.full.init(i, 1 if const_expr(exchange) else 128)
            if const_expr(exchange and i < cfg.p_stages):
                s.p_written.init(i, 128)
            s.p_pipe.empty.init(i, readers)
            if const_expr(cfg.kv_656):
                s.kv_656.ready.init(i, 32)
        s.stats_read.init(0, readers)
        s.q_pipe.full.init(0, 1)
        s.q_pipe.empty.init(0, cfg.q_readers)
    cute.arch.mbarrier_init_fence()


@cute.jit
def roles(cta: Cta, warp):
    """The role of each warp, with its registers; then the merges, which the QK-softmax warp group,
    done before the others, runs ahead of them (`warms_code`). They end the kernel's code: of more
    than 128 KiB the end is slow (`jit.code_size`)."""
    producer, qk_softmax, pv = role_registers(cta.cfg)
    if warp >= 12:
        cute.arch.setmaxregister_decrease(producer)
        producer_warps(cta, warp)
    else:
        if warp >= 8:
            cute.arch.setmaxregister_increase(qk_softmax)
            if const_expr(cta.cfg.query_hi_lo):
                mainloop_qk_softmax_hi_lo(cta)
            else:
                mainloop_qk_softmax(cta)
        else:
            cute.arch.setmaxregister_increase(pv)
            mainloop_pv(cta)
            if const_expr(cta.cfg.warms_code):
                cute.arch.setmaxregister_decrease(qk_softmax)
            else:
                merge_tiles(cta)
        if const_expr(cta.cfg.warms_code):
            merge_tiles(cta)


@cute.jit
def merge_tiles(cta: Cta):
    """`merge_all` with the plan read again: held through the mainloop, it would cost a register."""
    plan = load_plan(cta.cfg, cta.s, fresh_thread() & 31)
    merge_all(replace(cta, plan=plan))


@cute.jit
def producer_warps(cta: Cta, warp):
    """The roles of the fourth warp group."""
    cfg = cta.cfg
    if const_expr(cfg.gather):
        if (warp == GATHER_WARPS[0]) | (warp == GATHER_WARPS[1]):
            producer_gather(cta, warp)
    else:
        if warp == 12:
            producer(cta)
    if const_expr(cfg.p_exchange):
        if warp == 13:
            exchange_warp(cta)
    if const_expr(cfg.kv_656):
        if warp == 13:
            kv_656.scale_warp(cta)


def pv_mma(cfg: Fp8Config):
    """V^T P^T of a slice, V^T in registers."""
    element = Float16 if cfg.query_hi_lo else cfg.element
    major, source = OperandMajorMode.K, warpgroup.OperandSource.RMEM
    return sm90.make_trivial_tiled_mma(
        element, element, major, major, Float32, (1, 1, 1), (BLOCK, cfg.rows), a_source=source
    )


def cache_map(cfg: Fp8Config, kv: cute.Tensor, atom):
    """The tensor map of the cache's values and its view; none where tokens are fetched one by
    one."""
    if cfg.gather:
        return None, None
    rows, boxes = cfg.box_rows, cfg.boxes_per_copy
    view = cute.make_tensor(
        cute.recast_ptr(kv.iterator, dtype=cfg.element),
        cute.make_layout(
            (cfg.page_size, (64, cfg.boxes), kv.shape[0]),
            stride=(kv.shape[2], (1, 64), kv.stride[0]),
        ),
    )
    return cpasync.make_tiled_tma_atom(
        cache_load(cfg),
        view,
        cute.tile_to_shape(atom, (rows, 64 * boxes), (0, 1)),
        (rows, (64, boxes)),
    )


@cute.jit
def operands(cfg: cutlass.Constexpr[Fp8Config], q: cute.Tensor, kv: cute.Tensor):
    """MMAs, tensor maps with their views of the query and the cache, layouts for `allocate`."""
    element = cfg.element
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW64, element)

    def boxes_of(count: int, *copies: int):
        modes = tuple(range(2 + len(copies)))
        return cute.tile_to_shape(atom, (BLOCK, 64 * count, *copies), modes)

    rest = cfg.boxes - cfg.q_boxes
    layouts = (boxes_of(BOXES, cfg.stages), boxes_of(cfg.q_boxes), boxes_of(rest, 2))
    if const_expr(cfg.query_hi_lo):
        layouts = (
            boxes_of(cfg.boxes, cfg.stages),
            boxes_of(max(rest, 1), 1),
            boxes_of(cfg.boxes),
            boxes_of(1, cfg.stages),
        )
    major = OperandMajorMode.K
    smem, registers = (
        sm90.make_trivial_tiled_mma(
            element, element, major, major, Float32, (1, 1, 1), (BLOCK, BLOCK), a_source=source
        )
        for source in (warpgroup.OperandSource.SMEM, warpgroup.OperandSource.RMEM)
    )
    # a box of the query is 64 bytes wide, as one of the cache: in bf16 one k-step
    width = 64 * 8 // cfg.q_element.width
    q_atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW64, cfg.q_element)
    q_view = cute.make_tensor(
        q.iterator,
        cute.make_layout(
            (cute.size(q.shape[:-1]), (width, HEAD // width)), stride=(HEAD, (1, width))
        ),
    )
    q_box = cute.tile_to_shape(q_atom, (BLOCK, width), (0, 1))
    tma_q, q_coords = cpasync.make_tiled_tma_atom(query_load(), q_view, q_box, (BLOCK, (width, 1)))
    maps = tma_q, q_coords, *cache_map(cfg, kv, atom)
    pv, rope = pv_mma(cfg), None
    if const_expr(cfg.p_exchange):
        p_atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW64, Float16)
        p_layout = cute.tile_to_shape(p_atom, (cfg.rows, BLOCK, cfg.p_stages), (0, 1, 2))
        layouts = (*layouts[:3], p_layout)
    if const_expr(cfg.kv_656):
        views = ()
        if const_expr(not cfg.gather):
            views = rope_and_scale_tma(cache_load(cfg), kv, cfg.page_size, cfg.box_rows)
        maps, rope = (*maps, *views), kv_656.rope_mma()
        layouts = layouts[:3]
    return Mmas(smem, registers, pv, rope), maps, layouts
