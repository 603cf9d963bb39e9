"""Static configuration and shared memory of the fp8 kernel.

A stage of the ring, 64 tokens down, in boxes of 64 columns, each dense and swizzled by itself:

    e4m3        | V 0 | V 1 | ... | V 7 | rope |          nine boxes of 64 x 64 B; K is all nine
    after QK    |    unchanged          |  P   |          16-bit P takes `sP_rest` as well; with
                                                          `p_exchange` P has its own stages
    656 bytes   | V 0 | V 1 | ... | V 7 |   rope, bf16   | scales |     8 KB and 1 KB at the end
    after QK    |    unchanged          |  P, all of it  | scales |

    box: row t = token t, 64 B in four chunks of 16 B; chunk c lies at c ^ ((t >> 1) & 3)

    as B of S      K[token][column], K-major: the rows of a box are N, its columns two k-steps
    as A of O^T    V^T[column][token]: 8 x 8 matrices of 16-bit words by ldmatrix.trans, whose bytes
                   prmt puts in order (`mainloop_pv`, `v_fp8_to_fp16`)
    P as B of O^T  P[row][token], K-major

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

from ....plan.config import KernelConfig
from ...common.barriers import MBarriers
from ...common.kv_656 import SCALE_GROUPS
from ...common.pipeline import Pipeline
from ...rows_on_m.params import BLOCK, BOXES, RECORD_WORDS, RECORDS, SPARSE
from ..params import BOX, ROPE_BOX, Config

#: stages that a bf16 query passes through, once per work tile, and its boxes: 64 rows by 32
#: columns, one k-step, each as large as a box of the cache
Q_STAGES, Q_ARRIVAL_BOXES = 2, 18
#: stages of P where each CTA of a cluster has all 128 rows of it, and bytes of one: two boxes
P_STAGES, P_STAGE = 2, 2 * BLOCK * BLOCK * 2
#: 656-byte tokens: bytes of a tile's bf16 rope and of its scales
ROPE, SCALES = BLOCK * 64 * 2, BLOCK * 4 * 4
#: columns of one k-step of Q K^T
STEP = 32
#: the warps that fetch tokens one by one
GATHER_WARPS = (12, 14)
#: log2 of the weight of a row max that has just moved. The distance to e4m3's greatest is how far
#: scores may rise before it moves again, at the cost of a tile's time: of 8192 Gaussian keys it
#: moves in 4 tiles, with 7 in 29, and few weights fall below e4m3's least
WEIGHT_LOG2 = 6.0


@dataclass(frozen=True)
class Fp8Config(Config):
    """What is compiled in for an fp8 cache."""

    dtype: str = "e4m3"
    stages: int = 5
    #: weights of up to 2**(6 + 2.75) = 430; from 432 on they round to e4m3's greatest, 448, by
    #: which the mainloop detects that a row max must move
    rescale_log2: float = 2.75
    #: 64-column boxes of Q that the QK-softmax warp group holds in registers; the others are read
    #: from shared memory, because the scores of two tiles take the registers
    q_boxes: int = 7
    #: k-steps of V^T whose operand A is held in registers
    v_steps_held: int = 3
    #: column parts of Q K^T that are added in fp32 (`query_hi_lo`), and how many of the next tile's
    #: are done when P is committed
    qk_parts: int = 3
    qk_parts_before_p: int = 1
    #: tokens of 656 bytes (`kv_656`)
    kv_656: bool = False

    @property
    def fp8(self) -> bool:
        return True

    @property
    def warms_code(self) -> bool:
        """As with 16 bits, where the QK-softmax warp group has registers enough for the merge."""
        return super().warms_code and (not self.query_hi_lo or self.kv_656)

    @property
    def element(self) -> type[cutlass.Numeric]:
        """KV element type; may differ from the query's."""
        return Float8E4M3FN

    @property
    def q_element(self) -> type[cutlass.Numeric]:
        return BFloat16 if self.query_hi_lo else Float8E4M3FN

    @property
    def query_hi_lo(self) -> bool:
        """The query is bf16 and enters QK as a sum of two e4m3 numbers."""
        return self.dtype != "e4m3"

    @property
    def promotes(self) -> bool:
        """Long work tiles are added up in fp32 (`promotion`): products of e4m3 throughout."""
        return not self.query_hi_lo

    @property
    def p_exchange(self) -> bool:
        """The CTAs of a cluster halve O's columns and exchange P (`p_exchange_2cta`)."""
        return self.cluster == 2 and self.query_hi_lo and not (self.kv_656 or self.features)

    @property
    def optimistic(self) -> bool:
        """fp16 weights are computed before it is known whether a row max moves (`p_fp16`)."""
        return self.p_exchange or (self.query_hi_lo and self.gather == SPARSE)

    @property
    def weight_log2(self) -> float:
        """log2 of the weight of a row max that has just moved. Those of few keys begin lower, where
        one bit tells that a row max moves: fp16 has none below 2^-19 of the greatest."""
        few_keys = self.query_hi_lo and self.gather == SPARSE
        return 1.0 - self.rescale_log2 if few_keys else WEIGHT_LOG2

    @property
    def rows(self) -> int:
        """Rows of the output (columns of O^T) in a CTA."""
        return BLOCK * 2 if self.p_exchange else BLOCK

    @property
    def slices(self) -> int:
        """64-column slices of the output of one PV warp group."""
        return 2 if self.p_exchange else 4

    @property
    def p_stages(self) -> int:
        """Stages of P, of its rescale factors and of their barriers."""
        return P_STAGES if self.p_exchange else self.stages

    @property
    def boxes(self) -> int:
        """64-column boxes of e4m3."""
        return ROPE_BOX if self.kv_656 else BOXES

    @property
    def steps(self) -> int:
        """K-steps of all boxes of e4m3."""
        return self.boxes * 64 // STEP

    @property
    def q_steps(self) -> int:
        """K-steps of the boxes of Q in registers."""
        return self.q_boxes * 64 // STEP

    @property
    def stage_bytes(self) -> int:
        return ROPE_BOX * BOX + ROPE + SCALES if self.kv_656 else BOXES * BOX

    @property
    def stage_elements(self) -> int:
        return self.stage_bytes

    @property
    def shared_bytes(self) -> int:
        """The ring, Q and P by boxes of 4,096 B, and 2 or 8 KiB of barriers and row values."""
        rest = self.boxes - self.q_boxes
        boxes = self.q_boxes + 2 * rest
        if self.query_hi_lo:
            p_boxes = P_STAGES * P_STAGE // BOX if self.p_exchange else self.stages
            boxes = self.boxes + max(rest, 1) + (ROPE // BOX if self.kv_656 else p_boxes)
        return self.ring_bytes + boxes * BOX + (8192 if self.kv_656 else 2048)

    @property
    def q_readers(self) -> int:
        """Arrivals of q_pipe.empty in a phase: warps of an e4m3 query, else threads."""
        if not self.query_hi_lo:
            return 4
        return 128 + (32 if self.kv_656 else 0)

    @property
    def by_rows(self) -> bool:
        return False

    def word_of_piece(self, piece: Any) -> Any:
        return piece * 4

    @property
    def boxes_per_copy(self) -> int:
        """Column boxes of one TMA instruction; only full-height ones join, and a cluster of two
        alternates over thirds of a tile."""
        if self.box_rows < BLOCK:
            return 1
        if self.kv_656:
            return self.boxes // self.cluster
        return 3 if self.cluster == 2 else BOXES


def fp8_facts(config: KernelConfig, features: bool) -> dict[str, Any]:
    """The fields of `Fp8Config` that depend on the formats of query and cache."""
    if config.q_dtype == "e4m3":
        return {}
    # fp16 weights may grow further than e4m3 ones before the row max moves
    facts: dict[str, Any] = {"stages": 4, "rescale_log2": 8.0, "q_boxes": 5}
    if config.option("gather") == SPARSE:
        facts["rescale_log2"] = 6.0
    if config.kv_format == "fp8_656":
        # with seven boxes of Q in registers a single CTA spills
        return facts | {
            "kv_656": True,
            "q_boxes": {1: 6, 2: 7}[config.cluster],
            "v_steps_held": 2,
            "qk_parts": SCALE_GROUPS,
            "qk_parts_before_p": 2,
        }
    if config.cluster == 2 and not features:
        # where the sum of 16 weights reaches 2**14 (`p_fp16`), one of them is at least 2**10
        return facts | {"rescale_log2": 4.0, "q_boxes": 6, "v_steps_held": 2}
    return facts


@dataclass(frozen=True)
class Fp8Shared:
    """Views of shared memory; tiles with a 64-byte swizzle. None: not in this variant."""

    sKV: cute.Tensor  # (64, 576, stage)
    sQ: Any  # e4m3 query: (64, 448), on its way to registers
    sQ_tail: cute.Tensor  # (64, 128, 2): last boxes of the query, alternating; hi_lo: 1
    sQ_low: Any  # hi_lo: (64, 576), second terms
    sP_rest: Any  # 16-bit P of tokens 32 to 63: (64, 64, stage); the other half is in the rope box
    sP: Any  # p_exchange: fp16 (128, 64, P stage), rows of both CTAs
    sRescale: cute.Tensor  # fp16 (64, stage): factor of O before a tile's PV; p_exchange: (128, 2)
    records: cute.Tensor  # int32 (14, 3): `Work` and the pages of its first tile, by index % 3
    sRowSum: cute.Tensor  # fp32 (64); p_exchange: (128)
    sRowMax: cute.Tensor  # the same, base-2 units
    sScale: Any  # fp32 (4), by QK-softmax warp: scale of the scores, if it is in memory
    kv_pipe: Pipeline
    p_pipe: Pipeline  # empty: rescale factors (p_exchange: and P) have been read
    p_written: MBarriers  # [P stage], p_exchange: this CTA's rows of P are stored
    stats_read: MBarriers  # row sums and row maxes have been read
    q_pipe: Pipeline  # hi_lo: full is unused, empty orders the threads that read and write Q
    kv_656: Any = None  # Kv656Shared
    plan: Any = None  # int32 [32]: the worker's tiles, see `common.self_schedule`
    sPromoted: Any = None  # e4m3 query: fp32 (64), see `promotion`
    valid: Any = None  # gather: int32 (2, stage): bit t of word h says that token 32 h + t is there


@dataclass(frozen=True)
class Kv656Shared:
    """Further views for tokens of 656 bytes."""

    sK_rope: cute.Tensor  # bf16 (64, 64, stage), 128-byte swizzle; P later
    sQ_rope: cute.Tensor  # bf16 (64, 64), 128-byte swizzle
    #: fp32 [stage][64][4] as loaded, stage_bytes apart; then [group][16 tokens][quad lane][4]
    scales: cute.Pointer
    v_factors: cute.Pointer  # fp16 [stage][group][16 tokens][quad lane][4], two per word
    units: cute.Pointer  # fp32 [stage]
    max_exponents: cute.Pointer  # int32 [3]: of a work tile's greatest unit, by index % 3
    ready: MBarriers  # [stage]: those three are written, 32 threads


def rope_box(rows: int) -> Any:
    """Layout of the ropes of `rows` tokens."""
    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW128, BFloat16)
    return cute.tile_to_shape(atom, (rows, 64), (0, 1))


def allocate_656(
    cfg: Fp8Config, alloc: Any, ready: cute.Pointer
) -> tuple[cute.Tensor, Kv656Shared]:
    """The ring of 656-byte tokens and what belongs to it."""
    stages, step = cfg.stages, cfg.stage_bytes
    ring = alloc.allocate_tensor(cfg.element, cute.make_layout(cfg.ring_bytes), byte_alignment=1024)

    def stage_view(offset: int, box: Any, element: Any) -> cute.Tensor:
        stride = step * 8 // element.width
        return cute.make_tensor(
            cute.recast_ptr(ring.iterator + offset, box.inner, element),
            cute.append(box.outer, cute.make_layout(stages, stride=stride)),
        )

    def array(element: Any, count: int) -> cute.Pointer:
        return alloc.allocate_tensor(element, cute.make_layout(count), byte_alignment=128).iterator

    atom = warpgroup.make_smem_layout_atom(warpgroup.SmemLayoutAtomKind.K_SW64, cfg.element)
    kv = stage_view(0, cute.tile_to_shape(atom, (BLOCK, 64 * cfg.boxes), (0, 1)), cfg.element)
    box = rope_box(BLOCK)
    rope = stage_view(ROPE_BOX * BOX, box, BFloat16)
    q_rope = alloc.allocate_tensor(BFloat16, box.outer, byte_alignment=1024, swizzle=box.inner)
    scales = cute.recast_ptr(ring.iterator + (ROPE_BOX * BOX + ROPE), dtype=Float32)
    return kv, Kv656Shared(
        rope,
        q_rope,
        scales,
        array(Int32, stages * BLOCK * SCALE_GROUPS // 2),
        array(Float32, stages),
        array(Int32, RECORDS),
        MBarriers(ready),
    )


def allocate(cfg: Fp8Config, *layouts) -> Fp8Shared:
    """Shared memory: 229,376 B of tiles, with a bf16 query 208,896 unless P is exchanged; beside
    them 2 KiB, with 656-byte tokens 8 KiB. `layouts` as `operands` makes them."""
    alloc = cutlass.memory.SmemAllocator()
    stages = cfg.stages

    def array(dtype: Any, layout: Any, align: int) -> cute.Tensor:
        return alloc.allocate_tensor(dtype, layout, byte_alignment=align)

    def tile(layout: Any, element: Any = cfg.element) -> cute.Tensor:
        return alloc.allocate_tensor(
            element, layout.outer, byte_alignment=1024, swizzle=layout.inner
        )

    full = alloc.allocate_array(Int64, 5 * stages + 3)
    empty, p_full, p_empty, stats = (full + i * stages for i in range(1, 5))
    last = full + 4 * stages + 3
    records = array(Int32, cute.make_layout((RECORD_WORDS, RECORDS)), 8)
    plan = array(Int32, cute.make_layout(32), 8)
    factors = cute.make_layout((cfg.rows, cfg.p_stages), stride=(1, cfg.rows))
    rescale = array(Float16, factors, 64)
    row_sum, row_max = (array(Float32, cute.make_layout(cfg.rows), 64) for _ in range(2))
    # features alone have scales in memory; with P exchanged there are none, nor 16 B to spare
    scale = None if const_expr(cfg.p_exchange) else array(Float32, cute.make_layout(4), 16)
    promoted = array(Float32, cute.make_layout(BLOCK), 64) if const_expr(cfg.promotes) else None
    q = q_low = p_rest = p = kv_656 = None
    if const_expr(cfg.kv_656):
        kv, kv_656 = allocate_656(cfg, alloc, last)
        q_tail, q_low = (tile(layout) for layout in layouts[1:])
    elif const_expr(cfg.p_exchange):
        p = tile(layouts[-1], Float16)
        kv, q_tail, q_low = (tile(layout) for layout in layouts[:-1])
    elif const_expr(cfg.query_hi_lo):
        kv, q_tail, q_low, p_rest = (tile(layout) for layout in layouts)
    else:
        kv, q, q_tail = (tile(layout) for layout in layouts)
    return Fp8Shared(
        kv, q, q_tail, q_low, p_rest, p, rescale, records, row_sum, row_max, scale,
        Pipeline(MBarriers(full), MBarriers(empty)),
        Pipeline(MBarriers(p_full), MBarriers(p_empty)),
        MBarriers(last),
        MBarriers(stats),
        Pipeline(MBarriers(stats + 1), MBarriers(stats + 2)),
        kv_656,
        plan,
        promoted,
        array(Int32, cute.make_layout((2, stages)), 8) if cfg.gather else None,
    )  # fmt: skip
