"""Static configuration, operands and shared-memory views of the SM100 kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float8E4M3FN, Float16, Int32

from ..common.barriers import MBarriers, NamedBarrier
from ..common.pipeline import Pipeline
from ..keep_ab_sm90.params import BOXES, HEAD, LATENT, RECORD_WORDS, RECORDS, SHARED_BYTES, Globals
from ..split_merge import SplitMerge

__all__ = ["BOXES", "HEAD", "LATENT", "RECORDS", "RECORD_WORDS", "SHARED_BYTES"]

#: query rows of a CTA, KV tokens of a block of the plan; K of a tile is one block in each CTA
ROWS = BLOCK = 64
#: KV tokens of a tile
TILE = 2 * BLOCK
#: rows of a swizzle atom, columns of a box
ATOM_ROWS, BOX_COLUMNS = 8, 64
#: elements of one atom
ATOM = ATOM_ROWS * BOX_COLUMNS
#: parts of K by columns and of V by tokens, each with its barriers
K_CHUNKS, V_CHUNKS = 3, 4
K_BOXES, V_TOKENS = BOXES // K_CHUNKS, TILE // V_CHUNKS
#: boxes of V in a CTA: 256 of the 512 latent columns
V_BOXES, V_COLUMNS = 4, 256
K_ELEMENTS, V_ELEMENTS = BLOCK * HEAD, TILE * V_COLUMNS
#: tokens that lie in one page, whatever its size
PAGE_GRAIN = 16
#: page id outside the tensor map: TMA writes zeros and still counts the bytes
NO_PAGE = 1 << 30
#: columns of tensor memory: two of S, 64 each, then O; the allocation is a power of two
S_COLUMNS, O_COLUMN, TMEM_COLUMNS = 64, 128, 512

#: warps 0-3 are the softmax warp group, then one warp a role; all of them merge
SOFTMAX_WARPS, MMA_WARP, PRODUCER_WARP = 4, 4, 5
THREADS, SOFTMAX_THREADS = 256, 128
#: see the table in `kernel`; barrier 2, of all threads, is the merge's
SOFTMAX_BARRIER = NamedBarrier(1, SOFTMAX_THREADS)

ELEMENTS = {"bf16": BFloat16, "fp16": Float16, "e4m3": Float8E4M3FN}


@dataclass(frozen=True)
class Config:
    """What is compiled in; names are those of `keep_ab_sm90.params.Config`."""

    dtype: str = "bf16"
    kv_format: str = "bf16"
    out_dtype: str = "bf16"
    page_size: int = 64
    pdl: int = 1
    split_merge: SplitMerge = SplitMerge.COOPERATIVE
    features: int = 0
    scales: int = 0
    tree: int = 0
    #: not in this family
    profile: int = 0
    skip: int = 0

    @property
    def cluster(self) -> int:
        """CTAs that halve a row tile of 128 rows."""
        return 2

    @property
    def fp8(self) -> bool:
        """Of the merge: its warps have registers to spare."""
        return False

    @property
    def p_exchange(self) -> bool:
        return False

    @property
    def cooperative(self) -> bool:
        """Partials are merged in this launch, by all CTAs that split a row tile."""
        return self.split_merge is SplitMerge.COOPERATIVE

    @property
    def element(self) -> type[cutlass.Numeric]:
        """Element type of the cache and of the MMAs."""
        return ELEMENTS[self.kv_format]

    @property
    def q_element(self) -> type[cutlass.Numeric]:
        return ELEMENTS[self.dtype]

    @property
    def out_element(self) -> type[cutlass.Numeric]:
        return ELEMENTS[self.out_dtype]

    @property
    def terms(self) -> int:
        """e4m3 numbers whose sum stands for one of Q or P: two where the query has 16 bits."""
        return 1 if self.dtype == self.kv_format else 2

    @property
    def item(self) -> int:
        """Bytes of an element of the MMAs."""
        return self.element.width // 8

    @property
    def span(self) -> int:
        """Bytes of a swizzled row: 64 columns."""
        return BOX_COLUMNS * self.item

    @property
    def atom_bytes(self) -> int:
        return ATOM * self.item

    @property
    def k_rows(self) -> int:
        """Rows of K in one TMA instruction."""
        return min(self.page_size, BLOCK)

    @property
    def v_rows(self) -> int:
        """Rows of V in one TMA instruction."""
        return min(self.page_size, V_TOKENS)

    @property
    def box_rows(self) -> int:
        """Of `tile_scheduler.record`: rows of a block that lie in one page."""
        return self.k_rows

    @property
    def q_elements(self) -> int:
        """Elements of one term of Q."""
        return ROWS * HEAD

    @property
    def p_elements(self) -> int:
        """Elements of one term of P."""
        return ROWS * TILE

    @property
    def ring_bytes(self) -> int:
        """Bytes of K and V; the merge reuses them."""
        return (K_ELEMENTS + V_ELEMENTS) * self.item

    @property
    def shared_bytes(self) -> int:
        """Q, K, V, P, and 2,048 B of barriers, records and row values."""
        return self.ring_bytes + self.terms * (self.q_elements + self.p_elements) * self.item + 2048

    @property
    def weight_log2(self) -> float:
        """log2 of the weight of a row max that has just moved: e4m3 has few bits below 1."""
        return 6.0 if self.item == 1 else 0.0

    @property
    def rescale_log2(self) -> float:
        """A row max moves when a score is more than 2**this above it: e4m3's greatest is 448."""
        return 2.75 if self.item == 1 else 8.0


@dataclass(frozen=True)
class Operands(Globals):
    """Operands of a launch: those of keep_ab, and V by a tensor map of its own."""

    tma_v: Any = None
    mV: Any = None  # (page rows, (64, 8), pages) coordinates
    query: Any = None  # [rows, 576], where it enters as two terms


@dataclass(frozen=True)
class Shared:
    """Views of shared memory; all tiles in atoms of 8 rows x 64 columns, swizzled by `span`.

    Q, P: boxes of 64 columns, 64 rows down. K: three chunks of three boxes, V: four chunks of 32
    tokens; within a chunk eight rows of all boxes after each other, so that a page is one copy.
    """

    sQ: cute.Tensor
    sKV: cute.Tensor  # K, then V
    sP: cute.Tensor
    sExchange: cute.Tensor  # fp32 (128): a thread's value for the thread with the row's other half
    sQ_scale: cute.Tensor  # fp32 (64): of a query of two terms
    records: cute.Tensor  # int32 (14, 3): `Work` by index % 3
    plan: cute.Tensor  # int32 (32)
    tmem: cute.Tensor  # int32 (1): base of the allocation
    q_pipe: Pipeline
    k_pipe: Pipeline  # full[chunk], empty[chunk]
    v_pipe: Pipeline
    s_full: MBarriers  # [2]
    p_full: MBarriers
    o_full: MBarriers
    work_full: MBarriers  # [3]


@dataclass(frozen=True)
class Cta:
    """What all roles of one CTA take."""

    cfg: Config
    g: Operands
    s: Shared
    plan: Any  # tile_scheduler.Plan
    rank: Int32  # in the pair; 0 leads it
    tmem: Int32  # base of the allocation
