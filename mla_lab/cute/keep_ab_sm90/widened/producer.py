"""The widening producer: tokens of 656 bytes from global memory to bf16 rows in shared memory.

Eight threads share a token. Of each box of 64 columns a thread loads eight e4m3, of the rope 16
bytes, and all four scales; each e4m3 becomes fp16 (exact), fp32, times its scale, bf16. The 16
bytes of bf16 go to where the 128-byte swizzle has them: chunk j of row r of a box at j ^ (r % 8).
In a cluster of two, CTA r widens tokens [32 r, 32 r + 32) of a tile, and stores every 16 bytes
twice: in its own stage, and by `st.async` in the other CTA's, whose full barrier counts the bytes.

    a thread and tile   cluster of 2   one CTA
    units of 1/8 token             2         4
    loads                         20        40   8 of 8 bytes, rope and scales of 16, per unit
    widened values               128       256   3 instructions each: 384 and 768
    st.shared.v4                  18        36
    st.async.v4                   18         -

Two units are in flight: when a unit has been stored, its registers take the loads of the unit after
the next one, of the next tile at the end of a tile. Tokens are brought into L2 a tile before that,
and their table entries yet one tile before: a tile takes less time than a load from memory. Nothing
looks at an entry in the tile that loads it, and the first unit of a tile is widened while its stage
is still in use (H200, 2026-11-23, `data/notes/kernel_attempts.jsonl`).
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr
from cutlass.cute.nvgpu import cpasync

from ...common.pipeline import PipelineState
from ...common.ptx_sm90 import fresh_thread, pick, ptx
from ..params import BLOCK, BOXES, Cta, Work
from ..tile_scheduler import load_plan, read_work, record
from .params import (
    AT_ONCE,
    BOX_BYTES,
    LATENT_BOXES,
    PAGED,
    PRODUCER_BARRIER,
    PRODUCERS,
    PUSH,
    ROPE_BEGIN,
    ROW_BYTES,
    SCALES_BEGIN,
    STAGE_BYTES,
    TOKEN_BYTES,
    TOKEN_THREADS,
    WIDEN,
    WidenedConfig,
)

#: 32-bit words that a thread holds of a unit: e4m3, rope, scales
LATENT_WORDS, ROPE_AT, SCALES_AT, UNIT_WORDS = 16, 16, 20, 24
#: units in flight
IN_FLIGHT = 2
#: tiles from the one that is stored to that whose tokens are brought into L2
AHEAD = 2
#: places of a token that are prefetched, and their distance: less than a line of L2, 128 bytes
TOKEN_LINES, LINE_STEP = 8, 96


def load_words(source: cute.Pointer, offset: int, count: int, there: Int32) -> list[Int32]:
    """`count` words of global memory past the L1, zeros where `there` is 0."""
    outs = ", ".join(f"{{$w{i}}}" for i in range(count))
    zeros = " ".join(f"mov.b32 {{$w{i}}}, 0;" for i in range(count))
    code = (
        "{ .reg .pred p; setp.ne.s32 p, {$r1}, 0; " + zeros + " @p ld.global.L1::no_allocate"
        f".v{count}.b32 {{{outs}}}, [{{$r0}}+{offset}]; }}"
    )
    return ptx(code, source, there, out=[Int32] * count)


def widen_four(word: Int32, scale: Float32) -> tuple[Int32, Int32]:
    """Four e4m3 times `scale` as two words of bf16."""
    half = (
        "mov.b32 {e, f}, {a}; cvt.f32.f16 x, e; cvt.f32.f16 y, f; mul.f32 x, x, {$r1};"
        " mul.f32 y, y, {$r1}; cvt.rn.bf16x2.f32 {a}, y, x; "
    )
    return ptx(
        "{ .reg .b16 l, h, e, f; .reg .b32 a, b; .reg .f32 x, y; mov.b32 {l, h}, {$r0};"
        " cvt.rn.f16x2.e4m3x2 a, l; cvt.rn.f16x2.e4m3x2 b, h; "
        + half.replace("{a}", "a")
        + half.replace("{a}", "b")
        + "mov.b32 {$w0}, a; mov.b32 {$w1}, b; }",
        word,
        scale,
        out=[Int32, Int32],
    )


@cute.jit
def load_entries(cta: Cta, work: Work, block: Int32, entries: cute.Tensor):
    """Table entries of the thread's tokens of a tile: page ids, or token slots."""
    for u in cutlass.range_constexpr(cta.cfg.units):
        entries[u] = entry_of(cta, work, cta.g.block_table, unit_token(cta, u, block))


@cute.jit
def entry_of(cta: Cta, work: Work, table: cute.Tensor, token: Int32):
    """The table entry of a token; past the length it is undefined. Whether there is a token
    (`is_token`) is for its use to find out, a tile later: here that would wait for the load."""
    column = token
    if const_expr(cta.cfg.gather == PAGED):
        column = Int32(Uint32(token) // Uint32(cta.g.cache.shape[1]))
    return table[work.request, cutlass.min(column, table.shape[1] - 1)]


def is_token(work: Work, token: Int32, entry):
    """Whether a token of a request, with this table entry, is there."""
    return (token < work.kv_len) & (entry >= 0)


def first_token(cta: Cta) -> Int32:
    """First token of a tile that this CTA widens."""
    return cta.rank * AT_ONCE if cta.cfg.cluster == 2 else Int32(0)


def unit_tokens(cfg: WidenedConfig, unit: int) -> int:
    """Tokens from a thread's first unit to another one: the CTAs of a cluster take turns."""
    return AT_ONCE * cfg.cluster * unit


def unit_token(cta: Cta, unit: int, block: Int32) -> Int32:
    """The token that the thread widens an eighth of."""
    row = fresh_thread() % PRODUCERS // TOKEN_THREADS
    return block * BLOCK + first_token(cta) + row + unit_tokens(cta.cfg, unit)


@cute.jit
def token_place(cta: Cta, token: Int32, entry: Int32):
    """Where a token with a table entry (0 or more) begins in the cache."""
    cache = cta.g.cache
    page_size = cache.shape[1]
    if const_expr(cta.cfg.gather == PAGED):
        page, row = entry, Int32(Uint32(token) % Uint32(page_size))
    else:
        page = Int32(Uint32(entry) // Uint32(page_size))
        row = entry - page * page_size
    return cache.iterator + (Int64(page) * cache.stride[0] + Int64(row * TOKEN_BYTES))


def prefetch_token(cta: Cta, block: Int32) -> Int32:
    """The token of a tile that the thread brings into L2, with `cfg.sharers` - 1 others."""
    cfg = cta.cfg
    count = fresh_thread() % PRODUCERS // cfg.sharers
    return block * BLOCK + first_token(cta) + count % AT_ONCE + unit_tokens(cfg, count // AT_ONCE)


@cute.jit
def prefetch(cta: Cta, work: Work, block: Int32, entry: Int32):
    """The thread's lines of a token into L2; of none past the last tile."""
    token = prefetch_token(cta, block)
    if (block < work.end) & is_token(work, token, entry):
        at = token_place(cta, token, entry)
        share = fresh_thread() % cta.cfg.sharers
        for k in cutlass.range_constexpr(TOKEN_LINES // cta.cfg.sharers):
            line = (share + k * cta.cfg.sharers) * LINE_STEP
            ptx("prefetch.global.L2 [{$r0}];", at + cutlass.min(line, Int32(TOKEN_BYTES - 16)))


@cute.jit
def entry_ahead(cta: Cta, work: Work, block: Int32):
    """The entry of the token that the thread prefetches of a tile."""
    return entry_of(cta, work, cta.g.block_table, prefetch_token(cta, block))


@cute.jit
def load_unit(
    cta: Cta,
    work: Work,
    words: cute.Tensor,
    unit: cutlass.Constexpr[int],
    entry: Int32,
    block: Int32,
):
    """The thread's part of a token into `words[unit]`; zeros where there is none, and past the
    last tile."""
    tid, _, _ = cute.arch.thread_idx()
    place = tid % TOKEN_THREADS
    token = unit_token(cta, unit, block)
    token_at = token_place(cta, token, cutlass.max(entry, Int32(0)))
    there = pick((block < work.end) & is_token(work, token, entry), Int32(1), Int32(0))
    near = token_at + place * 8
    slot = unit % IN_FLIGHT * UNIT_WORDS
    for box in cutlass.range_constexpr(LATENT_BOXES):
        pair = load_words(near, 64 * box, 2, there)
        words[slot + 2 * box], words[slot + 2 * box + 1] = pair[0], pair[1]
    rope = load_words(near + place * 8, ROPE_BEGIN, 4, there)
    scales = load_words(token_at, SCALES_BEGIN, 4, there)
    for i in cutlass.range_constexpr(4):
        words[slot + ROPE_AT + i], words[slot + SCALES_AT + i] = rope[i], scales[i]


@cute.jit
def widened_row(words: cute.Tensor, unit: cutlass.Constexpr[int], box: cutlass.Constexpr[int]):
    """The thread's 16 bytes of a box, of `words[unit]`."""
    slot = unit % IN_FLIGHT * UNIT_WORDS
    if const_expr(box == LATENT_BOXES):
        return [words[slot + ROPE_AT + i] for i in range(4)]
    scale = cute.recast_tensor(words, Float32)[slot + SCALES_AT + box // 2]
    low = widen_four(words[slot + 2 * box], scale)
    return [*low, *widen_four(words[slot + 2 * box + 1], scale)]


@cute.jit
def store_unit(
    cta: Cta,
    words: cute.Tensor,
    unit: cutlass.Constexpr[int],
    boxes: cutlass.Constexpr[tuple],
    own: Int32,
    peer: tuple,
    early: list,
):
    """Store unit `unit`: the first one as `early` has it, others widened here. `own` is the
    thread's place in the stage, `peer` that in the other CTA's stage and its barrier."""
    offset = unit_tokens(cta.cfg, unit) * ROW_BYTES
    for box in cutlass.range_constexpr(*boxes):
        row = early[box] if unit == 0 else widened_row(words, unit, box)
        store_sixteen(cta, row, box * BOX_BYTES + offset, own, peer)


def widened_rows(cta: Cta, words: cute.Tensor) -> list:
    """The first unit of a tile, widened before its stage is free; more than one unit would take
    more registers than there are."""
    if not cta.cfg.parts & (WIDEN | PUSH):
        return []
    return [widened_row(words, 0, box) for box in range(BOXES)]


def store_sixteen(cta: Cta, row: list, offset: int, own: Int32, peer: tuple) -> None:
    """16 bytes into this CTA's stage and into the other's."""
    if cta.cfg.parts & WIDEN:
        code = f"st.shared.v4.b32 [{{$r0}}+{offset}], {{ {{$r1}}, {{$r2}}, {{$r3}}, {{$r4}} }};"
        ptx(code, own, *row)
    if cta.cfg.pushed_bytes and not cta.cfg.bulk:
        ptx(
            "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 "
            f"[{{$r0}}+{offset}], {{ {{$r2}}, {{$r3}}, {{$r4}}, {{$r5}} }}, [{{$r1}}];",
            *peer,
            *row,
        )


@cute.jit
def push_unit(cta: Cta, unit: cutlass.Constexpr[int], own: Int32, peer: tuple):
    """The warp's rows of a unit to the other CTA: four of each box, a bulk copy a lane."""
    cute.arch.fence_view_async_shared()
    cute.arch.sync_warp()
    lane, (to, full) = cute.arch.lane_idx(), peer
    # the first lane's place in the stage, without the swizzle
    offset = unit_tokens(cta.cfg, unit) * ROW_BYTES + lane * BOX_BYTES
    first = lane // TOKEN_THREADS * ROW_BYTES + ((lane % TOKEN_THREADS ^ (fresh_row() & 7)) << 4)
    if lane < BOXES:
        ptx(
            "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes "
            f"[{{$r0}}], [{{$r1}}], {ROW_BYTES * 32 // TOKEN_THREADS}, [{{$r2}}];",
            to - first + offset,
            own - first + offset,
            full,
        )


def fresh_row() -> Int32:
    """The thread's row of a unit."""
    return fresh_thread() % PRODUCERS // TOKEN_THREADS


@cute.jit
def store_valid(cta: Cta, work: Work, block: Int32, tokens: cute.Tensor, stage: Int32):
    """Which tokens of a tile there are, by one warp whose lanes hold the entries of tokens `lane`
    and `lane` + 32."""
    lane = cute.arch.lane_idx()
    there = [is_token(work, block * BLOCK + lane + 32 * h, tokens[h]) for h in range(2)]
    words = [Int32(cute.arch.vote_ballot_sync(found)) for found in there]
    valid = cta.s.sValid
    if lane == 0:
        for h in cutlass.range_constexpr(2):
            valid[h, stage] = words[h]


@cute.jit
def load_tokens(cta: Cta, work: Work, block: Int32, tokens: cute.Tensor):
    """Entries of tokens `lane` and `lane` + 32 of a tile."""
    lane = cute.arch.lane_idx()
    for h in cutlass.range_constexpr(2):
        tokens[h] = entry_of(cta, work, cta.g.block_table, block * BLOCK + lane + 32 * h)


@cute.jit
def load_query(cta: Cta, work: Work):
    """This CTA's 64 query rows; rows past the last one arrive as zeros."""
    s, tma = cta.s, cta.g.tma_q
    rows = cute.domain_offset((work.global_row, (0, 0)), cta.g.mQ)
    gQ = cute.local_tile(rows, (BLOCK, (64, BOXES)), (0, 0))
    sQ = cute.make_tensor(
        s.sQ.iterator,
        cute.make_layout((BLOCK, (64, BOXES)), stride=(64, (1, BLOCK * 64))),
    )
    tQsQ, tQgQ = cpasync.tma_partition(
        tma, 0, cute.make_layout(1), cute.group_modes(sQ, 0, 2), cute.group_modes(gQ, 0, 2)
    )
    if cute.arch.lane_idx() == 0:  # the lane that has written the record
        s.q_pipe.full.arrive_expect_tx(0, STAGE_BYTES)
    cute.copy(tma, tQgQ, tQsQ, tma_bar_ptr=s.q_pipe.full.at(0))


def peer_of(cta: Cta, address: cute.Pointer) -> Int32:
    """The address of the same place in the other CTA of the cluster."""
    if cta.cfg.cluster == 1:
        return Int32(0)
    return Int32(cute.arch.map_dsmem_ptr(address, cta.rank ^ 1).toint())


@cute.jit
def commit(cta: Cta, stage: Int32):
    """Arrive at the stage's full barrier: the thread's own stores are done."""
    tid, _, _ = cute.arch.thread_idx()
    if const_expr(cta.cfg.pushed_bytes > 0):
        if tid % PRODUCERS == 0:
            cta.s.kv_pipe.full.arrive_expect_tx(stage, cta.cfg.pushed_bytes)
        else:
            cta.s.kv_pipe.producer_commit(stage)
    else:
        cta.s.kv_pipe.producer_commit(stage)


@cute.jit
def fill_tiles(cta: Cta, work: Work, state: PipelineState):
    """The tiles of one work tile into the ring."""
    cfg, s = cta.cfg, cta.s
    tid, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(tid % PRODUCERS // 32)
    row = tid % PRODUCERS // TOKEN_THREADS
    place = (first_token(cta) + row) * ROW_BYTES + ((tid % TOKEN_THREADS ^ (row & 7)) << 4)
    ring = Int32(s.sKV.iterator.toint()) + place
    peer_ring = peer_of(cta, s.sKV.iterator) + place
    peer_full = peer_of(cta, s.kv_pipe.full.base)
    words = cute.make_rmem_tensor(IN_FLIGHT * UNIT_WORDS, Int32)
    words.fill(0)
    tokens = cute.make_rmem_tensor(2, Int32)
    entries, ahead, later = (cute.make_rmem_tensor(cfg.units, Int32) for _ in range(3))
    start_tiles(cta, work, entries, tokens, words)
    load_entries(cta, work, work.begin + 1, ahead)
    entry = entry_ahead(cta, work, work.begin + AHEAD)
    for block in cutlass.range(work.begin, work.end, unroll=1):
        state = state.uniform()
        load_entries(cta, work, block + 2, later)
        prefetch(cta, work, block + AHEAD, entry)
        entry = entry_ahead(cta, work, block + AHEAD + 1)
        early = widened_rows(cta, words)
        acquire(cta, state, 0)
        if warp == 0:
            store_valid(cta, work, block, tokens, state.index)
            load_tokens(cta, work, block + 1, tokens)
        own = ring + state.index * STAGE_BYTES
        peer = (peer_ring + state.index * STAGE_BYTES, peer_full + state.index * 8)
        for u in cutlass.range_constexpr(cfg.units):
            if const_expr(cfg.parts & (WIDEN | PUSH)):
                fill_unit(cta, words, u, state, own, peer, early)
            if const_expr(u == cfg.units - 1):
                commit(cta, state.index)
            refill(cta, work, words, u, block, (entries, ahead))
        cute.autovec_copy(ahead, entries)
        cute.autovec_copy(later, ahead)
        state = state.advance(cfg.stages)
    return state


@cute.jit
def start_tiles(
    cta: Cta, work: Work, entries: cute.Tensor, tokens: cute.Tensor, words: cute.Tensor
):
    """Loads of the first tile; the tokens of the next into L2."""
    load_entries(cta, work, work.begin, entries)
    load_tokens(cta, work, work.begin, tokens)
    if const_expr(cta.cfg.parts & WIDEN):
        for u in cutlass.range_constexpr(IN_FLIGHT):
            load_unit(cta, work, words, u, entries[u], work.begin)
        for k in cutlass.range_constexpr(1, AHEAD):
            block = work.begin + k
            prefetch(cta, work, block, entry_ahead(cta, work, block))


@cute.jit
def refill(
    cta: Cta,
    work: Work,
    words: cute.Tensor,
    unit: cutlass.Constexpr[int],
    block: Int32,
    entries: tuple,
):
    """The loads of the unit that takes the registers of a stored one; `entries` of the tile and of
    the next one."""
    cfg = cta.cfg
    if const_expr(cfg.parts & WIDEN):
        v = unit + IN_FLIGHT
        if const_expr(v < cfg.units):
            load_unit(cta, work, words, v, entries[0][v], block)
        else:
            load_unit(cta, work, words, v - cfg.units, entries[1][v - cfg.units], block + 1)


@cute.jit
def acquire(cta: Cta, state: PipelineState, part: cutlass.Constexpr[int]):
    """Wait until a part of a stage is free in both CTAs."""
    cta.s.kv_pipe.empty.wait(state.index * cta.cfg.parts_of_stage + part, state.phase)


@cute.jit
def fill_unit(
    cta: Cta,
    words: cute.Tensor,
    unit: cutlass.Constexpr[int],
    state: PipelineState,
    own: Int32,
    peer: tuple,
    early: list,
):
    """Store a unit, where its part of the stage is free; the rope, which all of P is on, where all
    of it is."""
    cfg = cta.cfg
    if const_expr(cfg.halves and cfg.part_of(unit) == 0):
        store_unit(cta, words, unit, (0, LATENT_BOXES), own, peer, early)
        acquire(cta, state, 1)
        store_unit(cta, words, unit, (LATENT_BOXES, BOXES), own, peer, early)
    else:
        store_unit(cta, words, unit, (0, BOXES), own, peer, early)
    if const_expr(cfg.bulk and cfg.pushed_bytes):
        push_unit(cta, unit, own, peer)


@cute.jit
def producer(cta: Cta):
    """Per work tile: its record and its query, by the first warp; then its tiles, by all four.

    Of three records the oldest is free: when the QK-softmax warp group has released the previous
    query, it has stored the row sums of the work tile before, whose predecessor's epilogue has read
    its own.
    """
    cfg, g, s = cta.cfg, cta.g, cta.s
    tid, _, _ = cute.arch.thread_idx()
    warp = cute.arch.make_warp_uniform(tid % PRODUCERS // 32)
    state, turn = PipelineState.start(1), Int32(1)
    for index in cutlass.range(cta.plan.first, cta.plan.last, unroll=1):
        s.q_pipe.empty.wait(0, turn)
        turn = turn ^ 1
        if warp == 0:
            record(cfg, g, s, load_plan(cfg, s), index, cta.rank)
            load_query(cta, read_work(g, s, index))
        PRODUCER_BARRIER.sync()
        state = fill_tiles(cta, read_work(g, s, index), state)
