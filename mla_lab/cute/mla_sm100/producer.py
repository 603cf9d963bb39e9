"""The producer warp: Q once a work tile, then K and V of tiles of 128 tokens, as slots are freed.

K(t + 1) goes before V(t), as the MMAs take them. A CTA loads K of one half of the tokens, all 576
columns, and V of all tokens, one half of the 512 columns.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr

from ..common.pipeline import PipelineState
from ..common.ptx_sm90 import EVICT_FIRST
from ..common.tma import tma_views
from ..rows_on_m.params import BLOCK, NO_PAGE, RECORDS
from ..rows_on_m.work_records import read_work, record
from .params import (
    ATOM,
    ATOM_ROWS,
    BOX_COLUMNS,
    K_BOXES,
    K_CHUNKS,
    K_ELEMENTS,
    PAGE_GRAIN,
    ROWS,
    TILE,
    V_BOXES,
    V_CHUNKS,
    V_COLUMNS,
    V_TOKENS,
    Cta,
)


def tiles_of(work):
    """Tiles of a work tile; the last one may end with a block that is not the work tile's."""
    return (work.end - work.begin + 1) // 2


@cute.jit
def page_ids(cta: Cta, work, block):
    """Page ids of the tile from `block` on, lane i: tokens 16 i .. 16 i + 15; `NO_PAGE` past the
    work tile or the keys, where the table is undefined."""
    g = cta.g
    token = block * BLOCK + cute.arch.lane_idx() % (TILE // PAGE_GRAIN) * PAGE_GRAIN
    entry = cutlass.min(token // cta.cfg.page_size, g.block_table.shape[1] - 1)
    page = g.block_table[work.request, entry]
    if token >= cutlass.min(work.kv_len, work.end * BLOCK):
        page = Int32(NO_PAGE)
    return page


def atoms(cta: Cta, start, rows, boxes, chunk_rows, chunks):
    """Destinations of KV copies: (box of rows x boxes, chunk, part); atoms of eight rows of all
    boxes after each other."""
    row, size = boxes * ATOM, chunk_rows * boxes * BOX_COLUMNS
    layout = cute.make_layout(
        (
            (ATOM_ROWS, rows // ATOM_ROWS),
            (BOX_COLUMNS, boxes),
            chunks,
            chunk_rows // rows,
        ),
        stride=((BOX_COLUMNS, row), (1, ATOM), size, rows // ATOM_ROWS * row),
    )
    return cute.make_tensor(cta.s.sKV.iterator + start, layout)


@cute.jit
def expect(cta: Cta, pipe, chunk, elements: cutlass.Constexpr[int]):
    """Expect the bytes of a chunk."""
    if cute.arch.lane_idx() == 0:
        pipe.producer_expect_tx(chunk, elements * cta.cfg.item)


@cute.jit
def load_query(cta: Cta, work, index):
    """This CTA's 64 query rows; rows past the last one arrive as zeros."""
    g, s = cta.g, cta.s
    boxes = cute.make_layout(
        (ROWS, (BOX_COLUMNS, K_BOXES), K_CHUNKS),
        stride=(BOX_COLUMNS, (1, ROWS * BOX_COLUMNS), ROWS * BOX_COLUMNS * K_BOXES),
    )
    sQ = cute.make_tensor(s.sQ.iterator, boxes)
    rows = cute.domain_offset((work.global_row, (0, 0)), g.mQ)
    gQ = cute.local_tile(rows, (ROWS, (BOX_COLUMNS, K_BOXES)), (None, None))
    source, into = tma_views(g.tma_q, sQ, gQ)
    s.q_pipe.producer_acquire(PipelineState(0, (index & 1) ^ 1))
    expect(cta, s.q_pipe, 0, cta.cfg.q_elements)
    for chunk in cutlass.range_constexpr(K_CHUNKS):
        full = s.q_pipe.full.at(0)
        cute.copy(g.tma_q, source[None, 0, chunk], into[None, chunk], tma_bar_ptr=full)


@cute.jit
def load_k(cta: Cta, block, pages, tile):
    """K of this CTA's half of the tile that begins with `block`, chunk by chunk of its columns."""
    cfg, g, s = cta.cfg, cta.g, cta.s
    rows = cfg.box_rows
    sK = atoms(cta, 0, rows, K_BOXES, BLOCK, K_CHUNKS)
    shape = ((ATOM_ROWS, rows // ATOM_ROWS), (BOX_COLUMNS, K_BOXES))
    source, into = tma_views(g.tma_kv, sK, cute.local_tile(g.mKV, shape, (None, None, None)))
    row = Int32(0)
    if const_expr(cfg.page_size > BLOCK):
        row = (block + cta.rank) % (cfg.page_size // BLOCK)
    for chunk in cutlass.range_constexpr(K_CHUNKS):
        s.k_pipe.producer_acquire(PipelineState(chunk, (tile & 1) ^ 1))
        expect(cta, s.k_pipe, chunk, BLOCK * K_BOXES * BOX_COLUMNS)
        for part in cutlass.range_constexpr(BLOCK // rows):
            lane = cta.rank * (BLOCK // PAGE_GRAIN) + part * (rows // PAGE_GRAIN)
            page = cute.arch.shuffle_sync(pages, lane)
            cute.copy(
                g.tma_kv, source[None, row, chunk, page], into[None, chunk, part],
                tma_bar_ptr=s.k_pipe.full.at(chunk), cache_policy=Int64(EVICT_FIRST),
            )  # fmt: skip


@cute.jit
def load_v(cta: Cta, block, pages, tile):
    """V of this CTA's half of the columns, chunk by chunk of its tokens."""
    cfg, g, s = cta.cfg, cta.g, cta.s
    rows = cfg.v_rows
    sV = atoms(cta, K_ELEMENTS, rows, V_BOXES, V_TOKENS, V_CHUNKS)
    shape = ((ATOM_ROWS, rows // ATOM_ROWS), (BOX_COLUMNS, V_BOXES))
    source, into = tma_views(g.tma_v, sV, cute.local_tile(g.mV, shape, (None, None, None)))
    for chunk in cutlass.range_constexpr(V_CHUNKS):
        s.v_pipe.producer_acquire(PipelineState(chunk, (tile & 1) ^ 1))
        expect(cta, s.v_pipe, chunk, V_TOKENS * V_COLUMNS)
        for part in cutlass.range_constexpr(V_TOKENS // rows):
            page = cute.arch.shuffle_sync(pages, (chunk * V_TOKENS + part * rows) // PAGE_GRAIN)
            row = (block * BLOCK + (chunk * V_TOKENS + part * rows)) % cfg.page_size // rows
            cute.copy(
                g.tma_v, source[None, row, cta.rank, page], into[None, chunk, part],
                tma_bar_ptr=s.v_pipe.full.at(chunk), cache_policy=Int64(EVICT_FIRST),
            )  # fmt: skip


@cute.jit
def producer(cta: Cta):
    """All work tiles of the worker: the record, Q, and KV."""
    cfg, g, s = cta.cfg, cta.g, cta.s
    tile = Int32(0)
    for index in cutlass.range(cta.plan.first, cta.plan.last, unroll=1):
        record(cfg, g, s, cta.plan, index, cta.rank)
        if cute.arch.lane_idx() == 0:
            s.work_full.arrive(index % RECORDS)
        work = read_work(g, s, index)
        count = tiles_of(work)
        pages = page_ids(cta, work, work.begin)
        ahead = page_ids(cta, work, work.begin + 2)
        if const_expr(cfg.terms == 1):
            load_query(cta, work, index)
        load_k(cta, work.begin, pages, tile)
        for t in cutlass.range(count, unroll=1):
            block = work.begin + 2 * t
            # used only in the next turn, so the load latency is hidden
            further = page_ids(cta, work, block + 4)
            if t + 1 < count:
                load_k(cta, block + 2, ahead, tile + 1)
            load_v(cta, block, pages, tile)
            pages, ahead = ahead, further
            tile = tile + 1
