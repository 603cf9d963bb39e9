"""Static facts and shared memory of the e4m3 kernel (see `transposed`)."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32, Int64

from ..storage import BLOCK, HEAD, RECORD_WORDS, RECORDS, Config

#: KV tiles in flight
STAGES = 5
#: bytes of one stage, and of one box of 64 tokens by 64 columns
STAGE = BLOCK * HEAD
BOX = BLOCK * 64
BOXES = HEAD // 64
ROPE_BOX = 8
#: bytes of one k-step, and k-steps of Q K^T
STEP = 32
STEPS = HEAD // STEP
#: column boxes of Q that the attend group holds in registers; the others are read from shared
#: memory: beside the scores of two tiles there are no registers for all
Q_BOXES = 7
Q_STEPS = Q_BOXES * 64 // STEP
#: log2 of the weight of a row's maximum, when that has just moved. What is left to e4m3's greatest
#: is how far scores may rise before it moves again, at the cost of a tile's time: of 8192 Gaussian
#: keys it moves in 4 tiles, with 7 in 29, and few weights are lost below e4m3's least
WEIGHT_LOG2 = 6.0


@dataclass(frozen=True)
class Transposed(Config):
    """What is compiled in; `go` means nothing here."""

    dtype: str = "e4m3"
    #: weights of up to 2**(6 + 2.75) = 430; at 432 they become e4m3's 448, which `attend` looks for
    lazy_log2: float = 2.75

    @property
    def transposed(self) -> bool:
        return True

    @property
    def ring_bytes(self) -> int:
        """KV stages, which a merge uses as its own."""
        return STAGES * STAGE

    @property
    def boxes_per_copy(self) -> int:
        """Column boxes of one TMA instruction; only full-height ones join, and a pair takes turns
        with thirds of a tile."""
        if self.box_rows < BLOCK:
            return 1
        return 3 if self.cluster == 2 else BOXES


@dataclass(frozen=True)
class TransposedShared:
    """Views of shared memory."""

    kv: cute.Tensor  # (64, 576, stage), 64-byte swizzle
    q: cute.Tensor  # (64, 448), 64-byte swizzle: on its way to registers
    q_tail: cute.Tensor  # (64, 128, 2): the last two boxes of the work tile's query, in turn
    factor: cute.Tensor  # fp16 (64, stage): of O before a tile's PV
    records: cute.Tensor  # int32 (14, 3): `Work` and the pages of its first block, by index % 3
    row_sum: cute.Tensor  # fp32 (64)
    row_max: cute.Tensor  # fp32 (64), base-2 units
    scale: cute.Tensor  # fp32 (4), by attend warp: of the scores, base-2 units; if in memory
    full: cute.Pointer  # [stage]
    empty: cute.Pointer  # [stage]
    p_full: cute.Pointer  # [stage]
    seen: cute.Pointer  # [stage]
    free: cute.Pointer
    q_full: cute.Pointer
    q_empty: cute.Pointer


def allocate(cfg: Transposed, kv_layout, q_layout, tail_layout) -> TransposedShared:
    """Shared memory: 229,376 B of tiles, 2 KiB beside them."""
    alloc = cutlass.memory.SmemAllocator()
    bars = alloc.allocate_array(Int64, 4 * STAGES + 3)
    records = alloc.allocate_tensor(
        Int32, cute.make_layout((RECORD_WORDS, RECORDS)), byte_alignment=8
    )
    factor = alloc.allocate_tensor(
        Float16, cute.make_layout((BLOCK, STAGES), stride=(1, BLOCK)), byte_alignment=64
    )
    row_sum = alloc.allocate_tensor(Float32, cute.make_layout(BLOCK), byte_alignment=64)
    row_max = alloc.allocate_tensor(Float32, cute.make_layout(BLOCK), byte_alignment=64)
    scale = alloc.allocate_tensor(Float32, cute.make_layout(4), byte_alignment=16)
    kv, q, q_tail = (
        alloc.allocate_tensor(cfg.element, t.outer, byte_alignment=1024, swizzle=t.inner)
        for t in (kv_layout, q_layout, tail_layout)
    )
    full, empty, p_full, seen, free = (bars + i * STAGES for i in range(5))
    return TransposedShared(
        kv,
        q,
        q_tail,
        factor,
        records,
        row_sum,
        row_max,
        scale,
        full,
        empty,
        p_full,
        seen,
        free,
        free + 1,
        free + 2,
    )


@cute.jit
def next_stage(stage: Int32, phase: Int32):
    """The stage after, and the parity of its barriers then."""
    stage = stage + 1
    if stage == STAGES:
        stage = Int32(0)
        phase = phase ^ 1
    return stage, phase
