"""Static configuration, operands and shared-memory views of the keep_ab kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import cpasync

from ..common.barriers import MBarriers, NamedBarrier
from ..common.pipeline import Pipeline
from ..rows_on_m.params import BLOCK, BOXES, ELEMENTS, HEAD
from ..rows_on_m.params import Config as SharedConfig

#: the box of a KV tile that holds the 64 rope columns
ROPE_BOX = 8
#: boxes that complete one full barrier together: three full barriers per stage, or two where tokens
#: are fetched one by one
KV_CHUNKS = ((0, 3), (3, 6), (6, 9))
FETCHED_CHUNKS = ((0, 4), (4, 9))
#: elements of one stage and of one 64 x 64 box
STAGE = BLOCK * HEAD
BOX = BLOCK * 64
#: rows of a swizzle atom
SWIZZLE_ROWS = 8
#: k-steps of Q that the QK-softmax warp group holds in registers; k-step 31 and the rope are read
#: from shared memory: with 32 the warp group needs more than its 184 registers
Q_STEPS_IN_REGISTERS = 31
#: value of `rescale_log2` of a tile whose PV is skipped
SKIPPED = 255

#: see the table in `kernel_bf16`
QK_SOFTMAX_BARRIER = NamedBarrier(1, 128)


@dataclass(frozen=True)
class Config(SharedConfig):
    """What is compiled in. With `cluster` 2, two CTAs take the halves of 128 rows and share KV."""

    #: KV stages
    stages: int = 3
    #: rescale O only when a row max grew by more than 2**this; the factor is a power of two
    rescale_log2: float = 8.0
    #: k-steps of the next tile's QK that may be unfinished when PV of a tile starts
    qk_steps_pending: int = 8

    @property
    def fetches_tokens(self) -> bool:
        """Tokens are fetched one by one: pages of any size, no tensor map of the cache."""
        return self.gather != 0

    @property
    def kv_chunks(self) -> tuple[tuple[int, int], ...]:
        """Boxes that complete one full barrier together, in the order of QK's k-steps."""
        return FETCHED_CHUNKS if self.gather else KV_CHUNKS

    @property
    def element(self) -> type[cutlass.Numeric]:
        """KV element type; may differ from the query's."""
        return ELEMENTS[self.dtype]

    @property
    def q_element(self) -> type[cutlass.Numeric]:
        return self.element

    @property
    def stage_elements(self) -> int:
        return STAGE

    @property
    def ring_bytes(self) -> int:
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
    def from_zeros(self) -> bool:
        """O is zeroed ahead of a work tile, whose first PV adds to it: with `skip` there may be no
        such PV; otherwise what O held lives until then, for which merges between work tiles and
        some softmaxes have no registers."""
        return bool(self.skip or self.pieces or self.tree) or self.cluster == 2

    @property
    def warms_code(self) -> bool:
        """The QK-softmax warp group runs the merge's code ahead of the PV warp groups, which have
        no more registers than it by then (see `keep_ab_cooperative`). With draft masks the softmax
        would keep 8 B on the stack for it."""
        return not (self.pieces or self.tree)

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
    kv_pipe: Pipeline  # full[stage * len(kv_chunks) + chunk], empty[stage]
    p_pipe: Pipeline  # full: P and rescale exponents; empty: the exponents have been read
    stats_read: MBarriers  # row sums and row maxes have been read
    valid: Any = None  # gather: int32 (2, stage): bit t of word h says that token 32 h + t is there


@dataclass(frozen=True)
class Mmas:
    """Tiled MMAs: 64 x 64 scores, 64 x 256 of the output."""

    qk: cute.TiledMma  # Q from shared memory
    qk_rs: cute.TiledMma  # Q from registers
    pv: cute.TiledMma
    rope: Any = None  # of a bf16 rope beside fp8 columns


def query_load() -> Any:
    """The TMA instruction for query rows."""
    return cpasync.CopyBulkTensorTileG2SOp()


def cache_load(cfg: Config) -> Any:
    """The TMA instruction for KV tiles: in a cluster of two each copy reaches both CTAs."""
    if cfg.cluster == 2:
        return cpasync.CopyBulkTensorTileG2SMulticastOp()
    return cpasync.CopyBulkTensorTileG2SOp()
