"""Static facts and shared memory of the design for a cache of eight bits (see `transposed`).

A stage of the ring, 64 tokens down, in boxes of 64 columns, each dense and swizzled by itself:

    e4m3        | V 0 | V 1 | ... | V 7 | rope |          nine boxes of 64 x 64 B; K is all nine
    after QK    |    as it was          |  P   |          and p_second, where P has sixteen bits;
                                                          a pair has P elsewhere then (see `pair`)
    656 bytes   | V 0 | V 1 | ... | V 7 |   rope, bf16   | scales |     8 KB and 1 KB at the end
    after QK    |    as it was          |  P, all of it  | scales |

    box: row t = token t, 64 B in four chunks of 16 B; chunk c lies at c ^ ((t >> 1) & 3)

    read as B of S      K[token][column], K-major: rows of a box are N, its columns a k-step and two
    read as A of O^T    V^T[column][token]: 8 x 8 matrices of 16-bit words by ldmatrix.trans, whose
                        bytes prmt puts in order (see `accumulate`, `widen`)
    P read as B of O^T  P[row][token], K-major

Operand A of S, a k-step of 32 columns of e4m3, in a thread's four registers (lane = 4 g + q):

                columns 4q .. 4q + 3    columns 16 + 4q .. 16 + 4q + 3
    row g            word 0                      word 2
    row g + 8        word 1                      word 3
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float8E4M3FN, Float16, Float32, Int32, Int64, const_expr
from cutlass.cute.nvgpu import warpgroup

from ..params import BLOCK, HEAD, RECORD_WORDS, RECORDS, Config

#: KV tiles in flight; a query in two terms leaves room for one less
STAGES = 5
#: stages that a query of sixteen bits passes through, once a work tile, and its boxes: 64 rows by
#: 32 columns, one k-step, each as large as a box of the cache
Q_STAGES, Q_ARRIVAL_BOXES = 2, 18
#: bytes of one stage, and of one box of 64 tokens by 64 columns
STAGE = BLOCK * HEAD
BOX = BLOCK * 64
BOXES = HEAD // 64
ROPE_BOX = 8
#: places of P, where each CTA of a pair has all rows of it, and bytes of one: two boxes of 128 rows
P_SLOTS, SLOT = 2, 2 * BLOCK * BLOCK * 2
#: tokens of 656 bytes: bytes of a tile's rope, which are bf16, and of its scales, four a token
ROPE, SCALES, SCALE_GROUPS = BLOCK * 64 * 2, BLOCK * 4 * 4, 4
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
    """What is compiled in."""

    dtype: str = "e4m3"
    #: weights of up to 2**(6 + 2.75) = 430; at 432 they become e4m3's 448, which `attend` looks for
    lazy_log2: float = 2.75
    #: column parts of Q K^T, added to each other in fp32; of a query in two terms
    score_parts: int = 3
    #: parts of the next tile's scores that are there before P V of a tile may start; split only
    go: int = 1
    #: k-steps of V^T of sixteen bits whose operand A is held
    held: int = 3
    #: tokens of 656 bytes (see `groups`)
    scaled: bool = False
    #: quarters of a tile's scales that are read before the product that they are for has ended
    early: int = 0

    @property
    def element(self) -> type[cutlass.Numeric]:
        """Of the cache, whatever the query is."""
        return Float8E4M3FN

    @property
    def q_element(self) -> type[cutlass.Numeric]:
        return BFloat16 if self.split else Float8E4M3FN

    @property
    def split(self) -> bool:
        """Whether Q goes in as a sum of two e4m3 numbers (see `terms`)."""
        return self.dtype != "e4m3"

    @property
    def crossed(self) -> bool:
        """See `pair`."""
        return self.cluster == 2 and self.split and not (self.scaled or self.features)

    @property
    def weight_log2(self) -> float:
        """Of the weight of a maximum that has just moved. In a pair none may pass 2."""
        return 1.0 - self.lazy_log2 if self.crossed else WEIGHT_LOG2

    @property
    def width(self) -> int:
        """Rows of O^T in a CTA."""
        return BLOCK * 2 if self.crossed else BLOCK

    @property
    def slices(self) -> int:
        """Of 64 columns, of an accumulate group."""
        return 2 if self.crossed else 4

    @property
    def slots(self) -> int:
        """Places of P, factors and their barriers."""
        return P_SLOTS if self.crossed else self.stages

    @property
    def stages(self) -> int:
        return STAGES - 1 if self.split else STAGES

    @property
    def boxes(self) -> int:
        """Of 64 columns of e4m3."""
        return ROPE_BOX if self.scaled else BOXES

    @property
    def steps(self) -> int:
        """K-steps of those."""
        return self.boxes * 64 // STEP

    @property
    def stage_bytes(self) -> int:
        return ROPE_BOX * BOX + ROPE + SCALES if self.scaled else STAGE

    #: column boxes of Q in registers
    q_boxes: int = Q_BOXES

    @property
    def q_steps(self) -> int:
        """K-steps of those."""
        return self.q_boxes * 64 // STEP

    @property
    def transposed(self) -> bool:
        return True

    @property
    def ring_bytes(self) -> int:
        """KV stages, which a merge uses as its own."""
        return self.stages * self.stage_bytes

    @property
    def boxes_per_copy(self) -> int:
        """Column boxes of one TMA instruction; only full-height ones join, and a pair takes turns
        with thirds of a tile."""
        if self.box_rows < BLOCK:
            return 1
        if self.scaled:
            return self.boxes // self.cluster
        return 3 if self.cluster == 2 else BOXES


@dataclass(frozen=True)
class TransposedShared:
    """Views of shared memory; tiles with a 64-byte swizzle. A query of e4m3 has `q`, one that is
    split `q_low` and `p_second`."""

    kv: cute.Tensor  # (64, 576, stage)
    q: Any  # (64, 448): on its way to registers
    q_tail: cute.Tensor  # (64, 128, 2): the last boxes of the work tile's query, in turn; split: 1
    q_low: Any  # (64, 576)
    p_second: Any  # (64, 64, stage): P of tokens 32 to 63; that of the others lies on the rope
    p: Any  # crossed: fp16 (128, 64, slot), rows of both CTAs (see `pair`)
    factor: cute.Tensor  # fp16 (64, stage): of O before a tile's PV; crossed: (128, slot)
    records: cute.Tensor  # int32 (14, 3): `Work` and the pages of its first block, by index % 3
    row_sum: cute.Tensor  # fp32 (64); crossed: (128)
    row_max: cute.Tensor  # the same, base-2 units
    scale: cute.Tensor  # fp32 (4), by attend warp: of the scores, base-2 units; if in memory
    full: cute.Pointer  # [stage]
    empty: cute.Pointer  # [stage]
    p_full: cute.Pointer  # [stage]
    seen: cute.Pointer  # [stage]
    p_own: cute.Pointer  # [slot], crossed
    free: cute.Pointer
    q_full: cute.Pointer  # split: unused, the query passes through the ring
    q_empty: cute.Pointer  # split: `q_split`, 128 attend threads: they all have read or written Q
    more: Any = None  # `groups.More`
    plan: Any = None  # int32 [32]: this worker's tiles, see `common.self_schedule`


@dataclass(frozen=True)
class More:
    """What tokens of 656 bytes take beside that (see `groups`)."""

    rope: cute.Tensor  # bf16 (64, 64, stage), 128-byte swizzle; P later
    q_rope: cute.Tensor  # bf16 (64, 64), 128-byte swizzle
    #: fp32 [stage][64][4] as they come, stage_bytes apart; then [group][16 tokens][quad lane][4]
    scales: cute.Pointer
    for_values: cute.Pointer  # fp16 [stage][group][16 tokens][quad lane][4], two a word
    units: cute.Pointer  # fp32 [stage]
    tops: cute.Pointer  # int32 [3]: exponent of a work tile's greatest unit, by index % 3
    ready: cute.Pointer  # [stage]: those three are there, 32 threads


def rope_box(rows: int) -> Any:
    """Layout of the ropes of `rows` tokens."""
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, BFloat16)
    return cute.tile_to_shape(atom, (rows, 64), (0, 1))


def allocate_groups(cfg: Transposed, alloc: Any, ready: cute.Pointer) -> tuple[cute.Tensor, More]:
    """The ring and what belongs to it, of tokens of 656 bytes."""
    stages, step = cfg.stages, cfg.stage_bytes
    ring = alloc.allocate_tensor(cfg.element, cute.make_layout(cfg.ring_bytes), byte_alignment=1024)
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW64, cfg.element)
    box = cute.tile_to_shape(atom, (BLOCK, 64 * cfg.boxes), (0, 1))
    kv = cute.make_tensor(
        cute.recast_ptr(ring.iterator, box.inner, cfg.element),
        cute.append(box.outer, cute.make_layout(stages, stride=step)),
    )
    box = rope_box(BLOCK)
    rope = cute.make_tensor(
        cute.recast_ptr(ring.iterator + ROPE_BOX * BOX, box.inner, BFloat16),
        cute.append(box.outer, cute.make_layout(stages, stride=step // 2)),
    )
    q_rope = alloc.allocate_tensor(BFloat16, box.outer, byte_alignment=1024, swizzle=box.inner)

    def array(element: Any, count: int) -> cute.Pointer:
        return alloc.allocate_tensor(element, cute.make_layout(count), byte_alignment=128).iterator

    scales = cute.recast_ptr(ring.iterator + (ROPE_BOX * BOX + ROPE), dtype=Float32)
    places = stages * BLOCK * SCALE_GROUPS
    more = More(
        rope,
        q_rope,
        scales,
        array(Int32, places // 2),
        array(Float32, stages),
        array(Int32, RECORDS),
        ready,
    )
    return kv, more


def allocate(cfg: Transposed, *layouts) -> TransposedShared:
    """Shared memory: 229,376 B of tiles, with a query in two terms 208,896 unless crossed; 2 KiB
    beside them, of tokens of 656 bytes 8 KiB. `layouts` as `operands` makes them, in the order of
    the fields."""
    alloc = cutlass.memory.SmemAllocator()
    stages = cfg.stages
    bars = alloc.allocate_array(Int64, 5 * stages + 3)
    records = alloc.allocate_tensor(
        Int32, cute.make_layout((RECORD_WORDS, RECORDS)), byte_alignment=8
    )
    plan = alloc.allocate_tensor(Int32, cute.make_layout(32), byte_alignment=8)
    factor = alloc.allocate_tensor(
        Float16,
        cute.make_layout((cfg.width, cfg.slots), stride=(1, cfg.width)),
        byte_alignment=64,
    )
    row_sum = alloc.allocate_tensor(Float32, cute.make_layout(cfg.width), byte_alignment=64)
    row_max = alloc.allocate_tensor(Float32, cute.make_layout(cfg.width), byte_alignment=64)
    scale = alloc.allocate_tensor(Float32, cute.make_layout(4), byte_alignment=16)
    more = None
    if const_expr(cfg.scaled):
        kv, more = allocate_groups(cfg, alloc, bars + 4 * stages + 3)
        tiles = [kv]
        layouts = layouts[1:]
    else:
        tiles = []
    p = None
    if const_expr(cfg.crossed):
        of_p = layouts[-1]
        p = alloc.allocate_tensor(Float16, of_p.outer, byte_alignment=1024, swizzle=of_p.inner)
        layouts = layouts[:-1]
    tiles += [
        alloc.allocate_tensor(cfg.element, t.outer, byte_alignment=1024, swizzle=t.inner)
        for t in layouts
    ]
    if const_expr(cfg.scaled or cfg.crossed):
        tiles.append(None)
    split = (tiles[0], None, *tiles[1:])
    kv, q, tail, q_low, p_second = split if cfg.split else (*tiles, None, None)
    full, empty, p_full, seen, free = (bars + i * stages for i in range(5))
    return TransposedShared(
        kv,
        q,
        tail,
        q_low,
        p_second,
        p,
        factor,
        records,
        row_sum,
        row_max,
        scale,
        full,
        empty,
        p_full,
        seen,
        bars + 4 * stages + 3,
        free,
        free + 1,
        free + 2,
        more,
        plan,
    )


@cute.jit
def next_stage(stage: Int32, phase: Int32, stages: cutlass.Constexpr[int] = STAGES):
    """The stage after, and the parity of its barriers then."""
    stage = stage + 1
    if stage == stages:
        stage = Int32(0)
        phase = phase ^ 1
    return stage, phase
