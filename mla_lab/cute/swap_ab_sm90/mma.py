"""A consumer warp group's registers and MMA operands, and the issue of both products.

Accumulators of both MMAs have flat index 4 j + 2 h + e: M row 16 warp + lane / 4 + 8 h (a token of
S^T, a latent column of O^T), N column 8 j + 2 (lane % 4) + e (a query row). A thread's rows are
counted by i = 2 j + e.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import cutlass.utils.hopper_helpers as sm90
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup
from cutlass.cute.nvgpu import warp as warp_ops

from ..common.barriers import NamedBarrier
from .params import CONSUMER_THREADS, SCALES, TILE_KV, Traits
from .shared_storage import Shared, TiledMmas, p_view, stage_full, v_view

#: bytes along K of one wgmma
K_STEP_BYTES = 32
#: named barrier of the first warp group's threads; that of the second one follows
WARP_GROUPS = 2


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
    """One consumer warp group: this thread's place in it, its accumulators, and copies. Both run
    the same code, which is fetched once."""

    idx: Any = 0
    warp: Any = None
    lane: Any = None
    mma: Any = None
    #: e4m3: the shape of one slice of V^T in registers
    tOrV: Any = None
    #: 16 bits: the tiled copy of P to shared memory, and its destination
    copy_p: Any = None
    tPsP: Any = None
    #: e4m3: layout of the accumulators of one slice of O^T
    slice_layout: Any = None

    def sync(self) -> None:
        """Named barrier of the warp group's threads."""
        NamedBarrier(WARP_GROUPS + self.idx, CONSUMER_THREADS // 2).sync()


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
    c: Traits, idx: Any, s: Shared, mma: TiledMmas, acc: Accumulators, thread: Int32, warp: Int32,
    lane: Int32,
) -> WarpGroup:  # fmt: skip
    """Copies of warp group `idx`, beside its accumulators; `thread` of its 128."""
    own: dict[str, Any] = {}
    if c.fp8:
        own["tOrV"] = cute.make_rmem_tensor(mma.pv.partition_shape_A((TILE_KV, TILE_KV)), c.dtype)
        own["slice_layout"] = cute.make_layout(mma.pv.partition_shape_C((TILE_KV, c.mma_n)))
    else:
        matrices = warp_ops.StMatrix8x8x16bOp(True, 2 if c.rows == 8 else 4)
        atom = cute.make_copy_atom(matrices, c.dtype)
        own["copy_p"] = cute.make_tiled_copy_C(atom, mma.qk).get_slice(thread)
        sP = p_view(s, c)
        sP_t = cute.make_tensor(sP.iterator, cute.select(sP.layout, [1, 0, 2]))
        own["tPsP"] = own["copy_p"].partition_D(sP_t)
    return WarpGroup(**vars(acc), idx=idx, warp=warp, lane=lane, mma=mma, **own)


def uniform(view: cute.Tensor, row: int) -> cute.Tensor:
    """A view of shared memory with its address in a uniform register; its swizzle is of `row`
    bytes, 64 or 128. Descriptors behind it are made by the uniform datapath, an addition each; from
    an address in a general register each takes six instructions more."""
    dtype = view.element_type
    place = cute.arch.make_warp_uniform(Int32(view.iterator.toint()))
    at = cute.make_ptr(dtype, place, cute.AddressSpace.smem, assumed_align=8 * row)
    swizzle = cute.make_swizzle(2 if row == 64 else 3, 4, 3)
    return cute.make_tensor(cute.recast_ptr(at, swizzle, dtype), view.layout)


def operands(mma: cute.TiledMma, a: cute.Tensor, b: cute.Tensor, row: int) -> tuple[Any, Any]:
    """Descriptors of both operands in shared memory, by k-step; see `uniform`."""
    thread = mma.get_slice(0)
    first = mma.make_fragment_A(thread.partition_A(uniform(a, row)))
    return first, mma.make_fragment_B(thread.partition_B(uniform(b, row)))


@cute.jit
def issue_qk(
    c: cutlass.Constexpr[Traits], s: Shared, wg: WarpGroup, stage: Any, phase: Any
):  # fmt: skip
    """S^T of one tile, column range by column range as they arrive; one commit group. The caller
    fences."""
    atom = cute.make_mma_atom(wg.mma.qk.op)
    atom.set(warpgroup.Field.ACCUMULATE, False)
    width = c.boxes_per_barrier * c.box
    for n in cutlass.range(c.barriers_per_stage, unroll=1):
        stage_full(c, s, stage).wait(n, phase)
        if const_expr(c.gathered):
            cute.arch.fence_view_async_shared()
        sK = cute.local_tile(s.sKV, (TILE_KV, width), (0, n, stage))
        sQ = cute.local_tile(s.sQ, (c.mma_n, width), (0, n))
        tSrK, tSrQ = operands(wg.mma.qk, sK, sQ, c.box * c.bytes)
        for k in cutlass.range_constexpr(width * c.bytes // K_STEP_BYTES):
            cute.gemm(atom, wg.tSrS, tSrK[None, None, k], tSrQ[None, None, k], wg.tSrS)
            atom.set(warpgroup.Field.ACCUMULATE, True)
    warpgroup.commit_group()


def issue_pv(c: Traits, s: Shared, wg: WarpGroup, stage: Any) -> None:
    """16 bits: O^T += V^T P^T of one tile for this warp group's 256 columns; one commit group."""
    warpgroup.fence()
    atom = cute.make_mma_atom(wg.mma.pv.op)
    atom.set(warpgroup.Field.ACCUMULATE, True)
    sV, sP = (view[None, None, stage] for view in (v_view(s, c, wg.idx), p_view(s, c)))
    tOrV, tOrP = operands(wg.mma.pv, sV, sP, c.box * c.bytes)
    for k in range(TILE_KV * 2 // K_STEP_BYTES):
        cute.gemm(atom, wg.tOrO, tOrV[None, None, k], tOrP[None, None, k], wg.tOrO)
    warpgroup.commit_group()
