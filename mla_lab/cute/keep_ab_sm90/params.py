"""Static configuration, operands and shared-memory views of the keep_ab kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float8E4M3FN, Float16, Float32, Int32
from cutlass.cute.nvgpu import cpasync

from ..common.barriers import MBarriers, NamedBarrier
from ..common.pipeline import Pipeline
from ..split_merge import SplitMerge

LATENT = 512
HEAD = 576
BLOCK = 64  # KV tokens of a tile; query rows of a CTA
#: 64-column boxes of a KV tile, and the box that holds the 64 rope columns
BOXES, ROPE_BOX = HEAD // 64, 8
#: boxes that complete one full barrier together: three full barriers per stage
KV_CHUNKS = ((0, 3), (3, 6), (6, 9))
#: elements of one stage and of one 64 x 64 box
STAGE = BLOCK * HEAD
BOX = BLOCK * 64
#: rows of a swizzle atom
SWIZZLE_ROWS = 8
#: k-steps of Q that the QK-softmax warp group holds in registers; k-step 31 and the rope are read
#: from shared memory: with 32 the warp group needs more than its 184 registers
Q_STEPS_IN_REGISTERS = 31
#: a page outside the tensor map: TMA writes zeros and still counts the bytes
NO_PAGE = 1 << 30
#: records of work tiles in shared memory: of the one in its epilogue, the current and the next one
RECORDS, RECORD_WORDS = 3, 14
#: where the page ids begin in a record
FIRST_PAGE = 10
#: value of `rescale_log2` of a tile whose PV is skipped
SKIPPED = 255
#: bytes of shared memory that one CTA can have
SHARED_BYTES = 232_448

#: see the table in `kernel_bf16`
QK_SOFTMAX_BARRIER, PV_BARRIER = NamedBarrier(1, 128), NamedBarrier(2, 256)

DTYPES = {"bf16": BFloat16, "fp16": Float16}
#: element types of queries over an fp8 cache
FP8_DTYPES = {**DTYPES, "e4m3": Float8E4M3FN}


@dataclass(frozen=True)
class Config:
    """What is compiled in. With `cluster` 2, two CTAs take the halves of 128 rows and share KV."""

    dtype: str = "bf16"
    out_dtype: str = "bf16"
    cluster: int = 2
    page_size: int = 64
    pdl: int = 1
    split_merge: SplitMerge = SplitMerge.COOPERATIVE
    #: write profile events: 1 of each CTA (`CTA_EVENTS`), 2 of CTA 0's KV tiles (`TILE_EVENTS`) too
    profile: int = 0
    #: sinks come with the launch
    features: int = 0
    #: scales come in memory; read again in each tile, which costs more than a scalar operand
    scales: int = 0
    #: a packed mask says which draft tokens a row sees
    tree: int = 0
    #: skip PV of tiles whose weights are negligible in all rows (`online_softmax_step`)
    skip: int = 0
    #: work follows from the rule of batch invariance, and each tile's merge behind the next tile
    pieces: int = 0
    #: KV stages
    stages: int = 3
    #: the kernel has swap_ab as well, which takes batches of few blocks (`dual`): 1 for requests of
    #: one query token, 2 with the causal rule
    dual: int = 0
    #: rescale O only when a row max grew by more than 2**this; the factor is a power of two
    rescale_log2: float = 8.0
    #: k-steps of the next tile's QK that may be unfinished when PV of a tile starts
    qk_steps_pending: int = 8

    @property
    def fp8(self) -> bool:
        """The cache is fp8, and the output is accumulated as O^T (folder `fp8`)."""
        return False

    @property
    def fetches_tokens(self) -> bool:
        """Tokens are fetched one by one: pages of any size, no tensor map of the cache."""
        return False

    @property
    def element(self) -> type[cutlass.Numeric]:
        """KV element type; may differ from the query's."""
        return FP8_DTYPES[self.dtype]

    @property
    def q_element(self) -> type[cutlass.Numeric]:
        return self.element

    @property
    def out_element(self) -> type[cutlass.Numeric]:
        return FP8_DTYPES[self.out_dtype]

    @property
    def cooperative(self) -> bool:
        """Partials are merged in this launch, by all CTAs that split a row tile."""
        return self.split_merge is SplitMerge.COOPERATIVE

    @property
    def p_exchange(self) -> bool:
        """The two CTAs of a cluster halve the output's columns instead of its rows."""
        return False

    @property
    def box_rows(self) -> int:
        return min(self.page_size, BLOCK)

    @property
    def stage_elements(self) -> int:
        return STAGE

    @property
    def ring_bytes(self) -> int:
        """Bytes of the KV stages; the merge reuses them."""
        return self.stages * self.stage_elements * self.element.width // 8

    @property
    def shared_bytes(self) -> int:
        """KV stages, Q's rope and last k-step, 1,024 B of barriers and row values."""
        return self.ring_bytes + (BOX + BLOCK * 16) * 2 + 1024

    @property
    def by_rows(self) -> bool:
        """A stage holds eight rows of all boxes after each other, so that a page of 16 tokens is
        one dense copy: 4 TMA instructions per tile instead of 36. Otherwise all rows of a box
        follow each other and columns land in chunks, which is 1 % faster from pages of 32 on (H200,
        2026-11-20, `data/notes/kernel_attempts.jsonl`).
        """
        return self.page_size < 32

    @property
    def chunks(self) -> int:
        """Column chunks that are copied on their own, by one instruction each where dense."""
        return 1 if self.by_rows else len(KV_CHUNKS)

    @property
    def query_rows(self) -> int:
        """Rows of the query per TMA instruction: row tiles begin and end anywhere."""
        return SWIZZLE_ROWS if self.by_rows else BLOCK

    @property
    def kv_rows(self) -> Any:
        """`box_rows` as a shape."""
        rows = self.box_rows
        return (SWIZZLE_ROWS, rows // SWIZZLE_ROWS) if self.by_rows else rows

    @property
    def boxes_per_copy(self) -> int:
        """64-column boxes of one TMA instruction for KV."""
        return BOXES // self.chunks if self.by_rows or self.box_rows == BLOCK else 1

    @property
    def box_stride(self) -> int:
        """Elements from a 64-column box of a stage to the next."""
        return SWIZZLE_ROWS * 64 if self.by_rows else BOX

    @property
    def rows_stride(self) -> int:
        """Elements from eight rows of a stage to the next eight."""
        return SWIZZLE_ROWS * (HEAD if self.by_rows else 64)

    @property
    def order(self) -> tuple[int, int, int]:
        """Which of rows, columns, stages come first where atoms of 8 x 64 fill the ring."""
        return (1, 0, 2) if self.by_rows else (0, 1, 2)

    def word_of_piece(self, piece: Any) -> Any:
        """Offset in 4-byte words of 16-byte piece `piece` of a box, counted row by row."""
        return piece // 64 * (self.rows_stride // 2) + piece % 64 * 4


@dataclass(frozen=True)
class Globals:
    """Operands of a launch, in global memory."""

    tma_q: cute.CopyAtom
    mQ: cute.Tensor  # (rows, (64, 9)) coordinates
    tma_kv: cute.CopyAtom
    mKV: cute.Tensor  # (page rows, (64, 9), pages) coordinates
    mO: cute.Tensor  # [rows, 512]
    mLSE: cute.Tensor  # fp32 [rows] or [0]
    mO_partial: cute.Tensor  # fp32 [slots, tile_rows, 512]
    mLSE_partial: cute.Tensor  # fp32 [slots, tile_rows]
    counters: cute.Tensor  # int32 [n]
    block_table: cute.Tensor  # int32 [batch, width]
    seq_lens: cute.Tensor  # int32 [batch]
    q_begin: cute.Tensor  # int32 [batch + 1]
    tiles: cute.Tensor  # int32 [n, 8]
    schedule: cute.Tensor  # int32, see `worker_plan.open_plan`
    heads: Int32
    scale_log2: Float32
    out_scale: Float32
    num_workers: Int32
    q_len: Int32  # query tokens of every request; 0: they differ, see `q_begin`
    costs: Int32  # weights of the scheduling rule, see `plan.self_schedule.Costs.packed`
    profile: cute.Tensor  # int64 [CTAs, 8] in a profiled build; otherwise unused
    #: option features: fp32 [heads], [1], [1], each may have 0 elements; uint32 [tokens, words]
    sinks: Any = None
    bmm1: Any = None
    bmm2: Any = None
    mask: Any = None
    #: skip-softmax's factor, divided by the request's KV length
    skip: Any = None
    #: TMA atoms and views of ropes and scales of 656-byte tokens (`fp8.kv_656`)
    tma_656: Any = None
    #: [pages, page size, 576 or 656]
    cache: Any = None


@dataclass(frozen=True)
class Shared:
    """Views of shared memory."""

    sKV: cute.Tensor  # (64, 576, stage), 128-byte swizzle
    sVt: cute.Tensor  # (512, 64, stage): the first 512 columns of the same bytes, transposed
    sQ_rope: cute.Tensor  # (64, 64), 128-byte swizzle
    sQ_last: cute.Tensor  # (64, 16): k-step 31 of Q, no swizzle
    sRescale: cute.Tensor  # uint8 (64, stage): O is multiplied by 2**-this before a tile's PV
    records: cute.Tensor  # int32 (14, 3): `Work` and the pages of its first tile, by index % 3
    sRowSum: cute.Tensor  # fp32 (64)
    sRowMax: cute.Tensor  # fp32 (64), base-2 units
    kv_pipe: Pipeline  # full[stage * 3 + chunk], empty[stage]
    p_pipe: Pipeline  # full: P and rescale exponents; empty: the exponents have been read
    stats_read: MBarriers  # row sums and row maxes have been read


@dataclass(frozen=True)
class Mmas:
    """Tiled MMAs: 64 x 64 scores, 64 x 256 of the output."""

    qk: cute.TiledMma  # Q from shared memory
    qk_rs: cute.TiledMma  # Q from registers
    pv: cute.TiledMma
    rope: Any = None  # of a bf16 rope beside fp8 columns


@dataclass(frozen=True)
class Work:
    """One work tile, unpacked."""

    request: Int32
    first_row: Int32  # of this CTA, in the request's packed rows
    begin: Int32
    end: Int32
    split_idx: Int32
    num_splits: Int32
    slot: Int32
    group: Int32
    num_rows: Int32  # rows of the request
    global_row: Int32  # of this CTA in q and out
    q_len: Int32
    kv_len: Int32


@dataclass(frozen=True)
class Cta:
    """What all roles of one CTA take."""

    cfg: Config
    g: Globals
    s: Any  # Shared or Fp8Shared
    mma: Mmas
    plan: Any  # tile_scheduler.Plan
    rank: Int32  # in the cluster


def query_load() -> Any:
    """The TMA instruction for query rows."""
    return cpasync.CopyBulkTensorTileG2SOp()


def cache_load(cfg: Config) -> Any:
    """The TMA instruction for KV tiles: in a cluster of two each copy reaches both CTAs."""
    if cfg.cluster == 2:
        return cpasync.CopyBulkTensorTileG2SMulticastOp()
    return cpasync.CopyBulkTensorTileG2SOp()
