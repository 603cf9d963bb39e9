"""16-bit tokens fetched one by one into a stage of the ring: sparse calls, and pages of any size.

All eight PV warps fetch, by `cp.async` of 16 bytes, into the places that TMA boxes have in other
calls. After PV of a tile each warp group refills the boxes of its own half of V, which no other
warp group reads any more. After both warp groups have released the stage, each warp refills a part
of the rope's box, which held P. With a wait for both warp groups ahead of all copies 64 requests of
2,048 tokens and 128 heads took 69.9 us in place of 62.2 (H200, 2026-11-28,
`data/notes/kernel_attempts.jsonl`).

    copies of a warp    tokens    boxes of 64 columns
    own half of V       16        4 of 8: 0 to 3 by warps 0-3, 4 to 7 by warps 4-7
    rope                8         1

Eight lanes copy 128 bytes of a token, four tokens at a time; chunk c of row t of a box lies at
c ^ (t % 8). Each lane looks up one of 32 tokens; the table entry of a token is loaded one tile
ahead of the token. Missing tokens arrive as zeros; one bit per token (`Shared.valid`) masks their
scores.

A stage has two full barriers. The first (boxes 0 to 3) expects 128 arrivals: the lanes of warps
0-3. The second (boxes 4 to 8) expects 258: all 256 lanes, and threads 0 and 64 once more after each
has stored its word of valid bits. When the stage receives Q, the bytes of TMA count on the second
barrier, and the arrival of the lane that expects them replaces the second one of thread 0. The
copies do not write through the async proxy, which MMAs read through: each thread that issues MMAs
fences after the wait for a full barrier.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint32, const_expr

from ..common.pipeline import LazyState
from ..common.ptx_sm90 import fresh_thread
from ..rows_on_m.params import BLOCK, Cta, Work
from .params import BOX, ROPE_BOX, STAGE
from .token_fetch import copy16, load_entry, token_offset

#: tokens that a warp copies at once
AT_ONCE = 4
#: tokens and boxes of V that a warp copies; tokens of the rope
V_TOKENS, V_BOXES, ROPE_TOKENS = 16, 4, 8
#: of the two full barriers of a stage, the one on which the query's bytes count
QUERY_CHUNK = 1
#: arrivals of the full barriers of a stage in a phase
ARRIVALS = (128, 256 + 2)


def own_token(block: Int32):
    """The token of a KV tile that a lane looks up: one of the first 32 in warps 0, 1, 4 and 5, of
    the other 32 in warps 2, 3, 6 and 7."""
    tid = fresh_thread()
    return block * BLOCK + (((tid >> 6) & 1) << 5) + (tid & 31)


@cute.jit
def entry_of_block(cta: Cta, work: Work, block: Int32):
    """The table entry of the lane's token of a KV tile."""
    return load_entry(cta, work, own_token(block))


@cute.jit
def copy_tokens(
    cta: Cta, offset: Int64, stage: Int32, first_token: Int32, tokens: cutlass.Constexpr[int],
    first_box: Int32, boxes: cutlass.Constexpr[int],
):  # fmt: skip
    """Copy some boxes of some tokens of a tile into a stage; each lane holds the offset of
    `own_token`."""
    tid = fresh_thread()
    row, chunk = (tid >> 3) & 3, tid & 7
    first = row + (first_token & 31)
    low, high = Int32(offset & Int64(0xFFFFFFFF)), Int32(offset >> Int64(32))
    ring = Int32(cta.s.sKV.iterator.toint()) + stage * (STAGE * 2)
    target = ring + first_box * (BOX * 2) + (first_token + row) * 128 + ((chunk ^ row) << 4)
    for k in cutlass.range_constexpr(tokens // AT_ONCE):
        there = Int64(cute.arch.shuffle_sync(high, first + AT_ONCE * k))
        below = Int64(Uint32(cute.arch.shuffle_sync(low, first + AT_ONCE * k)))
        size = Int32(16) if there >= Int64(0) else Int32(0)
        at = cutlass.max((there << Int64(32)) | below, Int64(0))
        source = (cta.g.cache.iterator + (at + Int64(chunk * 8 + first_box * 64))).align(16)
        to = (target ^ (64 * (k % 2))) + k * (AT_ONCE * 128)
        for box in cutlass.range_constexpr(boxes):
            copy16(to + box * (BOX * 2), source, box * 128, size, line=128)


@cute.jit
def fetch_tile(
    cta: Cta, work: Work, block: Int32, entry: Int32, state: LazyState,
    after_pv: cutlass.Constexpr[bool],
):  # fmt: skip
    """Copy the warp's part of KV tile `block`, whose table entries its lanes hold, into a stage
    that is free; or, with `after_pv`, into the stage whose PV this warp group has just finished,
    which the other one may still read."""
    s, stage = cta.s, state.index
    full = s.kv_pipe.full.offset(stage * len(ARRIVALS))
    offset = token_offset(cta, work, own_token(block), entry)
    valid = Int32(cute.arch.vote_ballot_sync(offset >= Int64(0)))
    tid = fresh_thread()
    group, first_token = tid >> 7, ((tid >> 5) & 3) * V_TOKENS
    copy_tokens(cta, offset, stage, first_token, V_TOKENS, group * V_BOXES, V_BOXES)
    if tid < 128:
        cute.arch.cp_async_mbarrier_arrive_noinc(full.at(0))
    if const_expr(after_pv):
        s.kv_pipe.producer_acquire(state)
    tid = fresh_thread()
    first_token = ((tid >> 5) & 3) * V_TOKENS + (tid >> 7) * ROPE_TOKENS
    copy_tokens(cta, offset, stage, first_token, ROPE_TOKENS, Int32(ROPE_BOX), 1)
    if (tid == 0) | (tid == 64):
        s.valid[tid >> 6, stage] = valid
        full.arrive(1)
    cute.arch.cp_async_mbarrier_arrive_noinc(full.at(1))


@cute.jit
def arrive_with_query(cta: Cta):
    """Arrive at the query's stage, beside the arrival of the lane that expects its bytes."""
    tid, full = fresh_thread(), cta.s.kv_pipe.full
    if tid < 128:
        full.arrive(0)
    full.arrive(1)
    if tid == 64:
        full.arrive(1)
