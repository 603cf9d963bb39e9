"""A consumer warp group's registers and MMA operands, and the issue of both products.

Accumulators of both MMAs have flat index 4 j + 2 h + e: M row 16 warp + lane / 4 + 8 h (a token of
S^T, a latent column of O^T), N column 8 j + 2 (lane % 4) + e (a query row). A thread's rows are
counted by i = 2 j + e.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.cute.nvgpu import warp as warp_ops

from ..common.barriers import NamedBarrier
from .params import BOX, CONSUMER_THREADS, SCALES, TILE_KV, Traits
from .shared_storage import Shared, TiledMmas, p_view, stage_full, v_view

#: bytes along K of one wgmma
K_STEP_BYTES = 32
WARP_GROUPS = (
    NamedBarrier(2, CONSUMER_THREADS // 2),
    NamedBarrier(3, CONSUMER_THREADS // 2),
)


@dataclass(frozen=True)
class Accumulators:
    """What a consumer thread keeps through a work tile, in either warp group."""

    tSrS: cute.Tensor
    tOrO: cute.Tensor
    row_sum: cute.Tensor
    #: factors of the row sums and of O^T for one tile
    rescale: cute.Tensor
    #: e4m3: O^T of one tile
    tile_O: Any = None
    #: hi and lo: the scores, later the weights; `tSrS` holds the column ranges in flight
    scores: Any = None
    #: 656-byte tokens: factors of a tile's PV by scale group; scales of the thread's two tokens
    pv_scale: Any = None
    kv_scale: Any = None


@dataclass(frozen=True)
class WarpGroup(Accumulators):
    """One consumer warp group: this thread's place in it, its accumulators and MMA operands."""

    idx: int = 0
    warp: Any = None
    lane: Any = None
    mma: Any = None
    tSrK: Any = None
    tSrQ: Any = None
    #: e4m3: the shape of one slice of V^T in registers
    tOrV: Any = None
    tOrP: Any = None
    #: 16 bits: the tiled copy of P to shared memory, and its destination
    copy_p: Any = None
    tPsP: Any = None
    #: e4m3: layout of the accumulators of one slice of O^T
    slice_layout: Any = None
    #: 656-byte tokens
    tSrK_rope: Any = None
    tSrQ_rope: Any = None

    def sync(self) -> None:
        """Named barrier of the warp group's threads."""
        WARP_GROUPS[self.idx].sync()


def tiled_mmas(c: Traits) -> TiledMmas:
    """Both MMAs. e4m3 operands are K-major only, so V^T goes through registers there."""
    k_major, v_major, source = OperandMajorMode.K, OperandMajorMode.MN, {}
    shape = (Float32, (1, 1, 1), (TILE_KV, c.mma_n))
    if c.fp8:
        v_major, source = k_major, {"a_source": warpgroup.OperandSource.RMEM}
    make = sm90.make_trivial_tiled_mma
    rope = (Float32, (1, 1, 1), (TILE_KV, c.rows))
    return TiledMmas(
        make(c.dtype, c.dtype, k_major, k_major, *shape),
        make(c.dtype, c.dtype, v_major, k_major, *shape, **source),
        make(c.q_dtype, c.q_dtype, k_major, k_major, *rope) if c.kv_656 else None,
    )


def accumulators(c: Traits, mma: TiledMmas) -> Accumulators:
    """Registers of a consumer thread, made once."""
    tile_O = scores = pv_scale = kv_scale = None
    s_shape = mma.qk.partition_shape_C((TILE_KV, c.mma_n))
    o_shape = 2 * c.rows if c.hi_lo else mma.pv.partition_shape_C((256, c.rows))
    if c.fp8:
        tile_O = cute.make_rmem_tensor(c.o_slices_in_flight * c.mma_n // 2, Float32)
    if c.hi_lo:
        scores = cute.make_rmem_tensor(c.rows // 2, Float32)
        s_shape = c.qk_parts_in_flight * c.mma_n // 2
    if c.kv_656:
        scores = cute.make_rmem_tensor(mma.qk_rope.partition_shape_C((TILE_KV, c.rows)), Float32)
        pv_scale = cute.make_rmem_tensor(2, Float32)
        kv_scale = cute.make_rmem_tensor(2 * SCALES, Float32)
    return Accumulators(
        tSrS=cute.make_rmem_tensor(s_shape, Float32),
        tOrO=cute.make_rmem_tensor(o_shape, Float32),
        row_sum=cute.make_rmem_tensor(c.rows // 4, Float32),
        rescale=cute.make_rmem_tensor(c.rows // 4, Float32),
        tile_O=tile_O,
        scores=scores,
        pv_scale=pv_scale,
        kv_scale=kv_scale,
    )


def warp_group(
    c: Traits, idx: int, s: Shared, mma: TiledMmas, acc: Accumulators, thread: Int32, warp: Int32,
    lane: Int32,
) -> WarpGroup:  # fmt: skip
    """Operand descriptors of warp group `idx`, beside its accumulators; `thread` of its 128."""
    qk, pv = mma.qk.get_slice(0), mma.pv.get_slice(0)
    sP = p_view(s, c)
    own: dict[str, Any] = {}
    if c.kv_656:
        rope = mma.qk_rope.get_slice(0)
        own["tSrK_rope"] = mma.qk_rope.make_fragment_A(rope.partition_A(s.kv_656.sRope))
        own["tSrQ_rope"] = mma.qk_rope.make_fragment_B(rope.partition_B(s.kv_656.sQ_rope))
    if not c.fp8:
        matrices = warp_ops.StMatrix8x8x16bOp(True, 2 if c.rows == 8 else 4)
        atom = cute.make_copy_atom(matrices, c.dtype)
        own["copy_p"] = cute.make_tiled_copy_C(atom, mma.qk).get_slice(thread)
    own["tSrK"] = mma.qk.make_fragment_A(qk.partition_A(s.sKV))
    own["tSrQ"] = mma.qk.make_fragment_B(qk.partition_B(s.sQ))
    if c.fp8:
        own["tOrV"] = cute.make_rmem_tensor(mma.pv.partition_shape_A((TILE_KV, TILE_KV)), c.dtype)
    else:
        own["tOrV"] = mma.pv.make_fragment_A(pv.partition_A(v_view(s, c, idx)))
    own["tOrP"] = mma.pv.make_fragment_B(pv.partition_B(sP))
    if c.fp8:
        own["slice_layout"] = cute.make_layout(mma.pv.partition_shape_C((TILE_KV, c.mma_n)))
    else:
        sP_t = cute.make_tensor(sP.iterator, cute.select(sP.layout, [1, 0, 2]))
        own["tPsP"] = own["copy_p"].partition_D(sP_t)
    return WarpGroup(**vars(acc), idx=idx, warp=warp, lane=lane, mma=mma, **own)


def issue_qk(c: Traits, s: Shared, wg: WarpGroup, stage: Any, phase: Any) -> None:
    """S^T of one tile, column range by column range as they arrive; one commit group. The caller
    fences."""
    atom = cute.make_mma_atom(wg.mma.qk.op)
    atom.set(warpgroup.Field.ACCUMULATE, False)
    steps = c.boxes_per_barrier * BOX * c.bytes // K_STEP_BYTES
    for n in range(c.barriers_per_stage):
        stage_full(c, s, stage).wait(n, phase)
        if c.gathered:
            cute.arch.fence_view_async_shared()
        for k in range(n * steps, (n + 1) * steps):
            a, b = wg.tSrK[None, None, k, stage], wg.tSrQ[None, None, k]
            cute.gemm(atom, wg.tSrS, a, b, wg.tSrS)
            atom.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()


def issue_pv(wg: WarpGroup, stage: Any) -> None:
    """16 bits: O^T += V^T P^T of one tile for this warp group's 256 columns; one commit group."""
    warpgroup.fence()
    atom = cute.make_mma_atom(wg.mma.pv.op)
    atom.set(warpgroup.Field.ACCUMULATE, True)
    for k in range(TILE_KV * 2 // K_STEP_BYTES):
        a, b = wg.tOrV[None, None, k, stage], wg.tOrP[None, None, k, stage]
        cute.gemm(atom, wg.tOrO, a, b, wg.tOrO)
    warpgroup.commit_group()
