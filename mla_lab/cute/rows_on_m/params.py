"""Configuration, operands and work tiles that the kernels with query rows on M share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float8E4M3FN, Float16, Float32, Int32

from ..common.barriers import NamedBarrier

LATENT = 512
HEAD = 576
BLOCK = 64  # KV tokens of a block; query rows of a CTA
#: 64-column boxes of a KV tile
BOXES = HEAD // 64
#: a page outside the tensor map: TMA writes zeros and still counts the bytes
NO_PAGE = 1 << 30
#: records of work tiles in shared memory: of the one in its epilogue, the current and the next one
RECORDS, RECORD_WORDS = 3, 14
#: where the page ids begin in a record
FIRST_PAGE = 10
#: in place of a request's length: its length in memory is beyond its row of the block table, or its
#: query tokens are not all in q. Its one block is masked, and its rows are NaN
OUTSIDE = -1
#: how a token is found where tokens are fetched one by one: by its page, or its slot of a list
PAGED, SPARSE = 1, 2
#: bytes of shared memory that one CTA can have
SHARED_BYTES = 232_448

#: all threads of the warp groups that merge
PV_BARRIER = NamedBarrier(2, 256)

ELEMENTS = {"bf16": BFloat16, "fp16": Float16, "e4m3": Float8E4M3FN}


@dataclass(frozen=True)
class Config:
    """What is compiled in. With `cluster` 2, two CTAs take the halves of 128 rows."""

    dtype: str = "bf16"
    out_dtype: str = "bf16"
    cluster: int = 2
    page_size: int = 64
    pdl: int = 1
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
    #: PAGED or SPARSE: tokens are fetched one by one (`producer_gather`); 0: tiles by TMA
    gather: int = 0
    #: the kernel has swap_ab as well, which takes batches of few blocks (`dual`): 1 for requests of
    #: one query token, 2 with the causal rule
    dual: int = 0

    @property
    def warms_code(self) -> bool:
        """Warps that are done run the merge's code ahead of those that merge."""
        return False

    @property
    def fp8(self) -> bool:
        """The cache is fp8, and the output is accumulated as O^T (`keep_ab_sm90.fp8`)."""
        return False

    @property
    def p_exchange(self) -> bool:
        """The two CTAs of a cluster halve the output's columns instead of its rows."""
        return False

    @property
    def out_element(self) -> type[cutlass.Numeric]:
        return ELEMENTS[self.out_dtype]

    @property
    def box_rows(self) -> int:
        """Rows of a block that lie in one page."""
        return min(self.page_size, BLOCK)

    @property
    def ring_bytes(self) -> int:
        """Bytes of the KV stages; the merge reuses them."""
        raise NotImplementedError


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
    kv_len: Int32  # or `OUTSIDE`


@dataclass(frozen=True)
class Cta:
    """What all roles of one CTA take."""

    cfg: Config
    g: Globals
    s: Any  # views of shared memory
    mma: Any  # tiled MMAs
    plan: Any  # self_schedule.Plan
    rank: Int32  # in the cluster
