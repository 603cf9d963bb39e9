"""Static configuration, operands and shared-memory views of the SM100 kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ..common.barriers import MBarriers, NamedBarrier
from ..common.pipeline import Pipeline
from ..rows_on_m.params import BLOCK, BOXES, ELEMENTS, HEAD, Globals
from ..rows_on_m.params import Config as SharedConfig

#: query rows of a CTA; K of a tile is one block in each CTA
ROWS = BLOCK
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
#: columns of tensor memory: two of S, 64 each, then O; the allocation is a power of two
S_COLUMNS, O_COLUMN, TMEM_COLUMNS = 64, 128, 512

#: warps 0-3 are the softmax warp group, then one warp a role; all of them merge
SOFTMAX_WARPS, MMA_WARP, PRODUCER_WARP = 4, 4, 5
THREADS, SOFTMAX_THREADS = 256, 128
#: see the table in `kernel`; barrier 2, of all threads, is the merge's
SOFTMAX_BARRIER = NamedBarrier(1, SOFTMAX_THREADS)


@dataclass(frozen=True)
class Config(SharedConfig):
    """What is compiled in; `cluster` is a pair of CTAs, which halves a row tile of 128 rows."""

    kv_format: str = "bf16"

    @property
    def element(self) -> type[cutlass.Numeric]:
        """Element type of the cache and of the MMAs."""
        return ELEMENTS[self.kv_format]

    @property
    def q_element(self) -> type[cutlass.Numeric]:
        return ELEMENTS[self.dtype]

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
    def v_rows(self) -> int:
        """Rows of V in one TMA instruction."""
        return min(self.page_size, V_TOKENS)

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
        """Of K and V."""
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
    plan: Any  # self_schedule.Plan
    rank: Int32  # in the pair; 0 leads it
    tmem: Int32  # base of the allocation
