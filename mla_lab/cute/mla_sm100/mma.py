"""The MMA warp: S = Q K^T and O += P V of a pair of CTAs, issued by one thread of the leader.

Operands arrive in each CTA at its own barriers. The second CTA's MMA warp passes each arrival on to
the leader's barrier of the same name, so that the leader waits for both halves at once.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ..common.ptx_sm100 import (
    K_BYTES,
    commit,
    fence_after,
    instruction_descriptor,
    mma,
    smem_descriptor,
)
from ..rows_on_m.params import BLOCK, LATENT, RECORDS
from ..rows_on_m.work_records import read_work
from .params import (
    K_BOXES,
    K_CHUNKS,
    K_ELEMENTS,
    O_COLUMN,
    ROWS,
    S_COLUMNS,
    TILE,
    V_BOXES,
    V_CHUNKS,
    V_TOKENS,
    Cta,
)
from .producer import tiles_of


@cute.jit
def operand_ready(cta: Cta, full, index, phase):
    """Wait for this CTA's half. The second CTA then arrives at the leader's barrier, so that the
    leader's wait is for both halves."""
    full.wait(index, phase)
    if cta.rank == 1:
        with cute.arch.elect_one():
            full.arrive(index, 0)


def issues(cta: Cta):
    """True in the thread that issues MMAs."""
    return (cta.rank == 0) & (cute.arch.lane_idx() == 0)


def row_operand(cta: Cta, tensor):
    """Descriptor of Q or P: boxes of 64 columns, 64 rows down, K-major."""
    address = Int32(tensor.iterator.toint())
    return smem_descriptor(address, 16, cta.cfg.atom_bytes, cta.cfg.span)


def k_operand(cta: Cta):
    """Descriptor of K's first chunk: K-major."""
    address = Int32(cta.s.sKV.iterator.toint())
    return smem_descriptor(address, 16, K_BOXES * cta.cfg.atom_bytes, cta.cfg.span)


def v_operand(cta: Cta):
    """Descriptor of V's first chunk: MN-major, as V is stored by tokens."""
    cfg = cta.cfg
    address = Int32(cta.s.sKV.iterator.toint()) + K_ELEMENTS * cfg.item
    return smem_descriptor(address, cfg.atom_bytes, V_BOXES * cfg.atom_bytes, cfg.span)


@cute.jit
def qk_chunk(cta: Cta, chunk: cutlass.Constexpr[int], d):
    """S over the three boxes of a chunk, in steps of 32 bytes; by one thread."""
    cfg, q, k = cta.cfg, row_operand(cta, cta.s.sQ), k_operand(cta)
    code = instruction_descriptor(cfg.element, TILE, False)
    for box in cutlass.range_constexpr(K_BOXES):
        for step in cutlass.range_constexpr(cfg.span // K_BYTES):
            keys = chunk * BLOCK * K_BOXES * cfg.span + box * cfg.atom_bytes + step * K_BYTES
            row = (chunk * K_BOXES + box) * ROWS * cfg.span + step * K_BYTES
            for term in cutlass.range_constexpr(cfg.terms):
                at = row + term * cfg.q_elements * cfg.item
                first = chunk + box + step + term == 0
                mma(cfg.element, d, q + (at >> 4), k + (keys >> 4), code, int(not first))


@cute.jit
def qk(cta: Cta, tile, last):
    """S(tile) = Q K^T; K's chunks are released as they have been read, Q behind the `last` tile."""
    s = cta.s
    buffer = tile & 1
    for chunk in cutlass.range_constexpr(K_CHUNKS):
        operand_ready(cta, s.k_pipe.full, chunk, tile & 1)
        fence_after()
        if issues(cta):
            qk_chunk(cta, chunk, cta.tmem + S_COLUMNS * buffer)
            commit(s.k_pipe.empty.at(chunk))
    if issues(cta):
        commit(s.s_full.at(buffer))
        if last:
            commit(s.q_pipe.empty.at(0))


@cute.jit
def pv_chunk(cta: Cta, chunk: cutlass.Constexpr[int], accumulate):
    """O over the 32 tokens of a chunk; by one thread. N = 256 of the 512 columns at a time, 128 of
    each CTA's."""
    cfg, p, v = cta.cfg, row_operand(cta, cta.s.sP), v_operand(cta)
    code = instruction_descriptor(cfg.element, LATENT // 2, True)
    tokens = K_BYTES // cfg.item
    for step in cutlass.range_constexpr(V_TOKENS // tokens):
        token = chunk * V_TOKENS + step * tokens
        row = token // BLOCK * ROWS * cfg.span + token % BLOCK * cfg.item
        for half in cutlass.range_constexpr(2):
            value = token // 8 * V_BOXES * cfg.atom_bytes + half * (V_BOXES // 2) * cfg.atom_bytes
            for term in cutlass.range_constexpr(cfg.terms):
                at = row + term * cfg.p_elements * cfg.item
                more = accumulate if token + term == 0 else 1
                d = cta.tmem + (O_COLUMN + half * LATENT // 4)
                mma(cfg.element, d, p + (at >> 4), v + (value >> 4), code, more)


@cute.jit
def pv(cta: Cta, tile, accumulate):
    """O = P V of the first tile of a work tile, O += P V of the others."""
    s = cta.s
    if cta.rank == 0:
        s.p_full.wait(0, tile & 1)
    for chunk in cutlass.range_constexpr(V_CHUNKS):
        operand_ready(cta, s.v_pipe.full, chunk, tile & 1)
        fence_after()
        if issues(cta):
            pv_chunk(cta, chunk, accumulate)
            commit(s.v_pipe.empty.at(chunk))
    if issues(cta):
        commit(s.o_full.at(0))


@cute.jit
def mma_warp(cta: Cta):
    """All work tiles: S of the next tile before O of this one, so that the tensor core works under
    the softmax."""
    g, s = cta.g, cta.s
    tile = Int32(0)
    for index in cutlass.range(cta.plan.first, cta.plan.last, unroll=1):
        s.work_full.wait(index % RECORDS, (index // RECORDS) & 1)
        count = tiles_of(read_work(g, s, index))
        cute.arch.sync_warp()  # all lanes have read the record before one of them arrives
        operand_ready(cta, s.q_pipe.full, 0, index & 1)
        qk(cta, tile, count == 1)
        for t in cutlass.range(count, unroll=1):
            if t + 1 < count:
                qk(cta, tile + 1, t + 2 == count)
            pv(cta, tile, cutlass.min(t, 1))
            tile = tile + 1
