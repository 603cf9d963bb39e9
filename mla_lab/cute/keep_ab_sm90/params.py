"""Static facts and the value groups that the roles of the keep_ab kernel share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float8E4M3FN, Float16, Float32, Int32
from cutlass.cute.nvgpu import cpasync

LATENT = 512
HEAD = 576
BLOCK = 64  # KV tokens of a tile, query rows of a CTA
STAGES = 3
#: 64-column boxes of a KV tile that become visible together: three barriers a stage
GROUPS = ((0, 3), (3, 6), (6, 9))
ROPE_BOX = 8
#: elements of one stage and of one 64 x 64 box
STAGE = BLOCK * HEAD
BOX = BLOCK * 64
#: rows of a swizzle atom
EIGHT_ROWS = 8
#: k-steps of Q that the attend group holds in registers; number 31 and the rope are read from
#: shared memory: with 32 the group needs more than its 184 registers
K_STEPS_IN_REGISTERS = 31
EVICT_FIRST = 0x12F0000000000000
#: a page that no tensor map holds: TMA fills zeros and still counts the bytes
NO_PAGE = 1 << 30
#: start of a running maximum; finite, so that a row without keys never computes inf - inf
FLOOR = -1.0e30
LN2 = 0.6931471805599453
#: records of work tiles in shared memory: the one being finished, the current one, the next
RECORDS, RECORD_WORDS = 3, 14
#: where a record's words of pages begin
FIRST_PAGE = 10
#: in place of a number of halvings: this tile adds nothing to any row
SKIPPED = 255

DTYPES = {"bf16": BFloat16, "fp16": Float16}
#: and with a query and a cache of eight bits (see `transposed`)
EIGHT_DTYPES = {**DTYPES, "e4m3": Float8E4M3FN}


@dataclass(frozen=True)
class Config:
    """What is compiled in. `cluster` 2: two CTAs take the halves of 128 rows and share KV."""

    dtype: str = "bf16"
    out_dtype: str = "bf16"
    cluster: int = 2
    page_size: int = 64
    pdl: int = 1
    #: rescale O only when a row maximum grew by more than 2**this; the factor is a power of two
    lazy_log2: float = 8.0
    #: k-steps of the next QK that may be pending when PV of a tile may start
    go: int = 8
    #: write the log-sum-exp of each row; a launch with an lse of no element writes none
    lse: int = 1
    #: all who split a row tile merge a share of it each; 0: partials are left, row-major, to the
    #: merge kernel
    fused_merge: int = 1
    #: bits of an element of a partial, where the merge is fused
    partials: int = 16
    #: note the times of `work.MOMENTS`
    stamps: int = 0
    #: sinks come with the launch (see `extras`)
    features: int = 0
    #: scales in memory too: asked for anew in each tile, which costs more than a number does
    scales: int = 0
    #: a packed mask says which draft tokens a row sees
    tree: int = 0
    #: leave out P V of tiles that no row has a share of worth mentioning in (see `attend.weigh`)
    skip: int = 0

    @property
    def transposed(self) -> bool:
        """Whether the output is accumulated as O^T (see `transposed`)."""
        return False

    @property
    def element(self) -> type[cutlass.Numeric]:
        return EIGHT_DTYPES[self.dtype]

    @property
    def q_element(self) -> type[cutlass.Numeric]:
        return self.element

    @property
    def out_element(self) -> type[cutlass.Numeric]:
        return EIGHT_DTYPES[self.out_dtype]

    @property
    def crossed(self) -> bool:
        """Whether the CTAs of a pair halve the output's columns, and not its rows."""
        return False

    @property
    def box_rows(self) -> int:
        return min(self.page_size, BLOCK)

    @property
    def ring_bytes(self) -> int:
        """KV stages, which a merge uses as its own."""
        return STAGES * STAGE * 2

    @property
    def query_rows(self) -> int:
        """Rows of the query that one TMA instruction loads: they may begin and end anywhere."""
        return EIGHT_ROWS if self.by_rows else BLOCK

    @property
    def kv_rows(self) -> Any:
        """`box_rows` as a shape."""
        return (EIGHT_ROWS, self.box_rows // EIGHT_ROWS) if self.by_rows else self.box_rows

    @property
    def by_rows(self) -> bool:
        """Whether eight rows of all boxes lie together in a stage, so that a page of 16 is one
        piece of it: 4 copies a tile in place of 36. Else all rows of a box do, so that columns can
        land in groups, which is 1 % faster already with pages of 32. What a copy writes is dense.
        """
        return self.page_size < 32

    @property
    def pieces(self) -> int:
        """Column groups of a stage that are copied, each by one instruction where it is dense."""
        return 1 if self.by_rows else len(GROUPS)

    @property
    def boxes_per_copy(self) -> int:
        """64-column boxes of one TMA instruction for KV; a query's are those of a piece."""
        return 9 // self.pieces if self.by_rows or self.box_rows == BLOCK else 1

    @property
    def box_stride(self) -> int:
        """Elements from a 64-column box of a stage to the next."""
        return EIGHT_ROWS * 64 if self.by_rows else BOX

    @property
    def rows_stride(self) -> int:
        """Elements from eight rows of a stage to the next eight."""
        return EIGHT_ROWS * (HEAD if self.by_rows else 64)

    @property
    def order(self) -> tuple[int, int, int]:
        """Which of rows, columns, stages come first where atoms of 8 x 64 fill the ring."""
        return (1, 0, 2) if self.by_rows else (0, 1, 2)


@dataclass(frozen=True)
class Globals:
    """What a launch gets, in global memory."""

    tma_q: cute.CopyAtom
    q: cute.Tensor  # (rows, (64, 9)) coordinates
    tma_kv: cute.CopyAtom
    kv: cute.Tensor  # (page rows, (64, 9), pages) coordinates
    out: cute.Tensor  # [rows, 512]
    lse: cute.Tensor  # fp32 [rows] or [0]
    partial_out: cute.Tensor  # fp32 [slots, tile_rows, 512]
    partial_lse: cute.Tensor  # fp32 [slots, tile_rows]
    counters: cute.Tensor  # int32 [n]
    block_table: cute.Tensor  # int32 [batch, width]
    seq_lens: cute.Tensor  # int32 [batch]
    q_begin: cute.Tensor  # int32 [batch + 1]
    tiles: cute.Tensor  # int32 [n, 8]
    worker_begin: cute.Tensor  # int32 [workers + 1]
    heads: Int32
    scale_log2: Float32
    out_scale: Float32
    num_workers: Int32
    q_len: Int32  # query tokens of every request, 0: they differ
    costs: Int32  # what the scheduling rule weighs, see `plan.self_schedule.Costs.packed`
    stamps: cute.Tensor  # int64 [CTAs, 8], stamped builds; else any tensor
    #: see `extras`: fp32 [heads], [1], [1], or no element; uint32 [tokens, words]
    sinks: Any = None
    bmm1: Any = None
    bmm2: Any = None
    mask: Any = None
    #: skip-softmax's factor, to be divided by the request's length
    skip: Any = None
    #: TMA views of ropes and scales, two each (see `transposed.groups`)
    more: Any = None


@dataclass(frozen=True)
class Shared:
    """Views of shared memory."""

    kv: cute.Tensor  # (64, 576, stage), 128-byte swizzle
    values: cute.Tensor  # (512, 64, stage): the first 512 columns of the same bytes, transposed
    q_rope: cute.Tensor  # (64, 64), 128-byte swizzle
    q_last: cute.Tensor  # (64, 16): k-step 31 of Q, no swizzle
    drop: cute.Tensor  # uint8 (64, 3): O is rescaled by 2**-drop before a tile's PV
    records: cute.Tensor  # int32 (14, 3): `Work` and the pages of its first block, by index % 3
    row_sum: cute.Tensor  # fp32 (64)
    row_max: cute.Tensor  # fp32 (64), base-2 units
    full: cute.Pointer  # [stage * 3 + group]
    empty: cute.Pointer  # [stage]
    p_full: cute.Pointer  # [stage]
    seen: cute.Pointer  # [stage]
    free: cute.Pointer


@dataclass(frozen=True)
class Mmas:
    """Tiled products: 64 x 64 scores, 64 x 256 of the output."""

    qk: cute.TiledMma  # Q from shared memory
    qk_rs: cute.TiledMma  # Q from registers
    pv: cute.TiledMma
    rope: Any = None  # of sixteen bits, beside those of eight


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


def query_load() -> Any:
    """The TMA instruction for a query's rows."""
    return cpasync.CopyBulkTensorTileG2SOp()


def cache_load(cfg: Config) -> Any:
    """The TMA instruction for KV tiles: in a pair each reaches both CTAs."""
    if cfg.cluster == 2:
        return cpasync.CopyBulkTensorTileG2SMulticastOp()
    return cpasync.CopyBulkTensorTileG2SOp()
