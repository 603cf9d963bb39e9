"""The kernel for 656-byte tokens widened to bf16 once per cluster: O[rows, columns] += P V.

64 query rows per CTA, rows on the M side of both MMAs, 128 rows per cluster of two. Four roles of
128 threads each:

    warps 0-7     PV warp groups          O[64 x 256] += P V each; epilogue and merge
    warps 8-11    QK-softmax warp group   S = Q K^T, both from shared memory; softmax; P
    warps 12-15   producer warp group     records, Q by TMA; tokens widened into a ring of 2 stages

Every CTA of a cluster has the whole tile of 64 widened tokens, of which it has fetched and widened
one half and received the other (`producer`). One copy serves QK as K and PV as V. P goes into the
rope box of its own stage, which nothing reads after QK.

mbarriers                              arrivals per phase
    kv_pipe.full[stage]   rows stored   128 producer threads, 36,864 bytes from the other CTA
    kv_pipe.empty[stage]  stage free    8 PV warps of each CTA in the cluster: a CTA must not push
                                        before the other's stage is free
    p_pipe.full[stage]    P stored      128 QK-softmax threads
    p_pipe.empty[stage]   rescale exponents have been read: 256 PV threads
    stats_read            row sums and maxes have been read: 256 PV threads
    q_pipe.full, .empty   the query: 1 + 73,728 bytes; 4 QK-softmax warps

Counts for one tile of 64 tokens and 64 rows in a cluster of two, per SM:

    tensor pipe      QK 36 x 32 = 1,152 clocks, PV 16 x 64 = 1,024; together 2,176
    shared memory    QK reads 36 x (2,048 + 2,048) B, PV 16 x (4,096 + 2,048) B, widened rows are
                     written once, 73,728 B, P 8,192 B: 327,680 B, at 128 B a clock 2,560 clocks
    between CTAs     36,864 B each way
    from L2          32 tokens x 656 B = 20,992 B per CTA: 41,984 B for 128 rows
    widening         384 instructions a thread and 36 stores; compiled, the producer's loop has 650
                     instructions a tile, of one warp per scheduler

So shared memory is the expected bottleneck, 18 % ahead of the tensor pipe: A from shared memory
makes QK read 128 B a clock. Q in registers, as the bf16 kernel has it, would take 124 registers a
thread that the producer warp group now has. PV is issued 64 x 128 at a time, since ptxas bounds the
registers of one instruction by those at the launch, 128; that is 16,384 B of P more.

Alone, for 64 requests of 2,048 tokens and 128 heads, products take 69 us, widening 48, the exchange
42, widening and exchange together 90, all 92.7 (H200, 2026-11-23,
`data/notes/kernel_attempts.jsonl`): four warps issue both, and a stage is filled, multiplied and
freed before it is filled again. `studies.widening` times the parts.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup

from ..params import BLOCK, BOXES, HEAD, Cta, Mmas, query_load
from .mainloops import mainloop_pv, mainloop_qk_softmax, with_plan
from .params import PRODUCERS, WidenedConfig, WidenedShared, allocate
from .producer import producer

__all__ = ["THREADS", "allocate", "init_barriers", "operands", "roles"]

THREADS = 512
#: registers per thread, of 128 at the launch, by CTAs of a cluster: of the PV warp groups, and of
#: the two others, whose producer holds more table entries where it widens a whole tile
REGISTERS = {1: (160, 96), 2: (160, 96)}


def registers(cfg: WidenedConfig) -> tuple[int, int]:
    """Of a PV thread, and of the others."""
    pv = cfg.pv_registers
    return (pv, 256 - pv) if pv else REGISTERS[cfg.cluster]


@cute.jit
def init_barriers(cfg: cutlass.Constexpr[WidenedConfig], s: WidenedShared):
    """Arrivals per phase as in the table above."""
    with cute.arch.elect_one():
        for i in cutlass.range_constexpr(cfg.stages):
            s.kv_pipe.full.init(i, PRODUCERS)
            for part in cutlass.range_constexpr(cfg.parts_of_stage):
                s.kv_pipe.empty.init(i * cfg.parts_of_stage + part, 8 * cfg.cluster)
            s.p_pipe.full.init(i, 128)
            s.p_pipe.empty.init(i, 256)
        s.stats_read.init(0, 256)
        s.q_pipe.full.init(0, 1)
        s.q_pipe.empty.init(0, 4)
    cute.arch.mbarrier_init_fence()


@cute.jit
def roles(cta: Cta, warp):
    """The role of each warp, with its registers."""
    pv, others = registers(cta.cfg)
    if warp < 8:
        cute.arch.setmaxregister_increase(pv)
        mainloop_pv(with_plan(cta))
    else:
        cute.arch.setmaxregister_decrease(others)
        if warp < 12:
            mainloop_qk_softmax(with_plan(cta))
        else:
            producer(with_plan(cta))


@cute.jit
def operands(cfg: cutlass.Constexpr[WidenedConfig], q: cute.Tensor, kv: cute.Tensor):
    """MMAs, the query's tensor map and view, layouts for `allocate`."""
    element = cfg.element
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, element)
    kv_layout = cute.tile_to_shape(atom, (BLOCK, HEAD, cfg.stages), (0, 1, 2))
    q_layout = cute.tile_to_shape(atom, (BLOCK, HEAD), (0, 1))
    k_major, mn_major = OperandMajorMode.K, OperandMajorMode.MN
    registers, smem = warpgroup.OperandSource.RMEM, warpgroup.OperandSource.SMEM

    def make(major, n, source):
        return sm90.make_trivial_tiled_mma(
            element, element, k_major, major, Float32, (1, 1, 1), (64, n), a_source=source
        )

    mma = Mmas(
        make(k_major, BLOCK, smem), make(k_major, BLOCK, registers), make(mn_major, 128, smem)
    )
    columns = (64, BOXES)
    q_view = cute.make_tensor(
        q.iterator, cute.make_layout((cute.size(q.shape[:-1]), columns), stride=(HEAD, (1, 64)))
    )
    tma_q, q_coords = cpasync.make_tiled_tma_atom(query_load(), q_view, q_layout, (BLOCK, columns))
    return mma, (tma_q, q_coords, None, None), (kv_layout, q_layout)
