"""The producer warpgroup where tokens are stored in eight bits and the products want sixteen.

    global memory --bulk copies--> raw ring --ld.shared, cvt, st.shared--> stage of the KV ring

Each warp has tokens 16 w .. 16 w + 15 of every tile and a raw ring of its own, of 8 tokens a copy,
so that nobody waits for another warp's bytes; the next copy is asked for as soon as one is read.
Consumers find what TMA boxes would have left: nine boxes of 64 rows x 128 bytes, 16-byte chunk j of
row t at j ^ (t % 8).

Four lanes take a row's 64 columns of a box, a warp eight rows at once:

    lane = 4 row + c    reads  16 bytes (16 values) at column 64 box + 16 c
                        writes chunks 2c ^ row and (2c + 1) ^ row of the box

Eight lanes of a 128-bit access then meet all banks: two neighbouring rows have chunks of opposite
parity, and raw rows of 576 bytes lie half of 128 bytes apart. Rows of 656 bytes do so four apart:
there lanes take rows 0 4 1 5 2 6 3 7, and those of 4 and more write their second chunk first.

e4m3 is exact in bf16, and a tensor's scale is the caller's: part of bmm1_scale and bmm2_scale. In
the 656-byte format (`kv_cache`) each value is multiplied by its fp32 scale and rounded once more.

With two such warpgroups (option raw_groups) a copy is both's: one has its first five boxes, one the
others, and both meet at a named barrier before its place is filled anew.

Tokens past the end are neither fetched nor written: their scores are masked, their values zeroed.
"""

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from ...problem import LATENT_DIM
from ..hopper import nanoseconds
from .config import (
    BOX,
    BOXES,
    CONSUMER_WARPS,
    HEAD_DIM,
    RAW_BYTES,
    RAW_TOKENS,
    RAW_WARPS,
    TILE_KV,
    VALUE_BOXES,
    Shape,
)
from .load import leave_record, load_q
from .storage import END, Global, Shared
from .work import Work, ask, load_entries, open_grid, open_work, read_words

#: bytes of a 656-byte token that precede its scales, and its rope
SCALES_BEGIN, ROPE_BEGIN = LATENT_DIM, LATENT_DIM + 16
#: boxes whose raw bytes are in registers before they are turned
HELD = 3
BOX_BYTES = TILE_KV * BOX * 2
WARP_TOKENS = TILE_KV // RAW_WARPS
#: boxes of the first of two warpgroups, and the first of four named barriers where both meet
FIRST_PART, PARTS = 5, 4
#: raw copies of a tile and warp
COPIES = WARP_TOKENS // RAW_TOKENS


@dataclass(frozen=True)
class Lane:
    """Where one lane reads and writes, in bytes of shared memory."""

    #: which quarter of a tile's tokens
    warp: Int32
    #: warpgroup: which part of their columns
    part: Int32
    #: in the first raw copy of the warp's ring
    source: Int32
    #: of that row's scales
    scales: Int32
    #: in stage 0, for the first eight tokens: chunks that are written first and second
    first: Int32
    second: Int32
    #: of the rope's first chunk there
    rope: Int32
    #: whether the second eight of 16 values are written first
    swap: Any


@cute.jit
def lane_of(c: cutlass.Constexpr[Shape], s: Shared) -> Lane:
    """This thread's places."""
    tid, _, _ = cute.arch.thread_idx()
    index = cute.arch.make_warp_uniform(tid // 32) - CONSUMER_WARPS
    warp, part = index % RAW_WARPS, index // RAW_WARPS
    row, chunk = tid % 32 // 4, tid % 4
    swap = Int32(0)
    if const_expr(c.raw == "fp8_656"):
        row = (row >> 1) + 4 * (row & 1)
        swap = row >> 2
    ring = Int32(s.raw.toint()) + warp * (c.raw_ahead * c.raw_bytes)
    target = Int32(s.k.iterator.toint()) + (warp * WARP_TOKENS + row) * (BOX * 2)
    start = ring + row * RAW_BYTES[c.raw]
    return Lane(
        warp,
        part,
        start + chunk * 16,
        start + SCALES_BEGIN,
        target + (((2 * chunk + swap) ^ row) << 4),
        target + (((2 * chunk + 1 - swap) ^ row) << 4),
        target + ((chunk ^ row) << 4),
        swap,
    )


def read16(address: Int32, offset: int) -> tuple[Int32, Int32, Int32, Int32]:
    """Four words of shared memory."""
    return cute.arch.inline_ptx(
        f"ld.shared.v4.b32 {{{{$w0}}, {{$w1}}, {{$w2}}, {{$w3}}}}, [{{$r0}} + {offset}];",
        write_only_types=[Int32] * 4,
        read_only_args=[address],
    )


def write16(address: Int32, offset: int, words: Any) -> None:
    """Four words to shared memory."""
    cute.arch.inline_ptx(
        f"st.shared.v4.b32 [{{$r0}} + {offset}], {{{{$r1}}, {{$r2}}, {{$r3}}, {{$r4}}}};",
        read_only_args=[address, *words],
    )


def widen4(word: Int32) -> tuple[Int32, Int32]:
    """Four e4m3 values as bf16, exactly; NaN stays NaN."""
    return cute.arch.inline_ptx(
        "{ .reg .b16 l, h, a, b, x, y; .reg .b32 p, q; .reg .f32 e, f, g, i;"
        " mov.b32 {l, h}, {$r0};"
        " cvt.rn.f16x2.e4m3x2 p, l; cvt.rn.f16x2.e4m3x2 q, h;"
        " mov.b32 {a, b}, p; mov.b32 {x, y}, q;"
        " cvt.f32.f16 e, a; cvt.f32.f16 f, b; cvt.f32.f16 g, x; cvt.f32.f16 i, y;"
        " cvt.rn.bf16x2.f32 {$w0}, f, e; cvt.rn.bf16x2.f32 {$w1}, i, g; }",
        write_only_types=[Int32, Int32],
        read_only_args=[word],
    )


def widen4_scaled(word: Int32, scale: Float32) -> tuple[Int32, Int32]:
    """Four e4m3 values times an fp32 scale, rounded to bf16."""
    return cute.arch.inline_ptx(
        "{ .reg .b16 l, h, a, b, x, y; .reg .b32 p, q; .reg .f32 e, f, g, i;"
        " mov.b32 {l, h}, {$r0};"
        " cvt.rn.f16x2.e4m3x2 p, l; cvt.rn.f16x2.e4m3x2 q, h;"
        " mov.b32 {a, b}, p; mov.b32 {x, y}, q;"
        " cvt.f32.f16 e, a; cvt.f32.f16 f, b; cvt.f32.f16 g, x; cvt.f32.f16 i, y;"
        " mul.rn.f32 e, e, {$r1}; mul.rn.f32 f, f, {$r1};"
        " mul.rn.f32 g, g, {$r1}; mul.rn.f32 i, i, {$r1};"
        " cvt.rn.bf16x2.f32 {$w0}, f, e; cvt.rn.bf16x2.f32 {$w1}, i, g; }",
        write_only_types=[Int32, Int32],
        read_only_args=[word, scale],
    )


@cute.jit
def turn_copy(
    c: cutlass.Constexpr[Shape], lane: Lane, slot: Int32, stage: Int32,
    half: cutlass.Constexpr[int],
):  # fmt: skip
    """One raw copy into the stage, or this warpgroup's part of it; on return the copy is read."""
    if const_expr(c.raw_groups == 1):
        turn_boxes(c, lane, slot, stage, half, 0, BOXES)
        cute.arch.sync_warp()
    else:
        if lane.part == 0:
            turn_boxes(c, lane, slot, stage, half, 0, FIRST_PART)
        else:
            turn_boxes(c, lane, slot, stage, half, FIRST_PART, BOXES)
        cute.arch.barrier(barrier_id=PARTS + lane.warp, number_of_threads=64)


def turn_boxes(
    c: Shape, lane: Lane, slot: Any, stage: Any, half: int, begin: int, end: int
) -> None:
    """Boxes begin .. end - 1 of a raw copy: this lane's 16 values of each, a quarter of a rope."""
    place = slot * c.raw_bytes
    source = lane.source + place
    target = stage * (TILE_KV * HEAD_DIM * 2)
    first, second = lane.first + target, lane.second + target
    packed = c.raw == "fp8_656"
    last = min(end, VALUE_BOXES) if packed else end
    held = [read16(source, BOX * b) for b in range(begin, min(begin + HELD, last))]
    scales = [as_float(w) for w in read16(lane.scales + place, 0)] if packed else None
    rope = None
    if packed and end == BOXES:
        rope = [read16(source, ROPE_BEGIN + offset) for offset in (0, BOX)]
    for b in range(begin, last):
        words = held.pop(0)
        if b + HELD < last:
            held.append(read16(source, BOX * (b + HELD)))
        if scales:
            words = pick_halves(words, lane.swap)
        new: list[Int32] = []
        for word in words:
            new += widen4_scaled(word, scales[b // 2]) if scales else widen4(word)
        offset = b * BOX_BYTES + half * RAW_TOKENS * BOX * 2
        write16(first, offset, new[:4])
        write16(second, offset, new[4:])
    if rope:
        offset = VALUE_BOXES * BOX_BYTES + half * RAW_TOKENS * BOX * 2
        write16(lane.rope + target, offset, rope[0])
        write16((lane.rope ^ 64) + target, offset, rope[1])


def as_float(word: Int32) -> Float32:
    """The same 32 bits."""
    return cute.arch.inline_ptx(
        "mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[word]
    )


@cute.jit
def pick_halves(words: tuple, swap: Int32):
    """The two halves of 16 bytes, the second before the first where `swap`."""
    turned = swap != 0
    a = words[2] if turned else words[0]
    b = words[3] if turned else words[1]
    d = words[0] if turned else words[2]
    e = words[1] if turned else words[3]
    return a, b, d, e


@cute.jit
def copies_of(w: Work, lane: Lane):
    """Raw copies of this CTA's share that this warp takes: those with a token of the request."""
    last = w.kv_len - (w.first + w.mine - 1) * TILE_KV - lane.warp * WARP_TOKENS
    tail = cutlass.min((cutlass.max(last, Int32(0)) + RAW_TOKENS - 1) // RAW_TOKENS, COPIES)
    return (w.mine - 1) * COPIES + tail if w.mine > 0 else Int32(0)


def token_of(w: Work, lane: Lane, n: Any) -> Int32:
    """First token of this warp's raw copy `n`."""
    tile, half = n // COPIES, n % COPIES
    return (w.first + tile) * TILE_KV + lane.warp * WARP_TOKENS + half * RAW_TOKENS


@cute.jit
def ask_copy(
    c: cutlass.Constexpr[Shape], g: Global, s: Shared, lane: Lane, token: Int32, base: Int32,
    entry: Int32, slot: Int32,
):  # fmt: skip
    """Eight tokens from `token` on into the warp's `slot`: one piece of a page."""
    width = RAW_BYTES[c.raw]
    page = cute.arch.shuffle_sync(entry, token // c.page - base)
    at = Int64(page) * g.kv.stride[0] + Int64(token % c.page * width)
    place = lane.warp * c.raw_ahead + slot
    with cute.arch.elect_one():
        cute.arch.mbarrier_arrive_and_expect_tx(s.raw_full + place, c.raw_bytes)
        cute.arch.inline_ptx(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
            " [{$r0}], [{$r1}], {$r2}, [{$r3}];",
            read_only_args=[
                Int32(s.raw.toint()) + place * c.raw_bytes,
                (g.kv.iterator + at).align(16),
                Int32(c.raw_bytes),
                Int32((s.raw_full + place).toint()),
            ],
        )


@cute.jit
def ask_first(
    c: cutlass.Constexpr[Shape], g: Global, s: Shared, lane: Lane, w: Work, slot: Int32
):  # fmt: skip
    """The copies that the warp's ring, empty now, has room for."""
    copies = copies_of(w, lane)
    for n in cutlass.range_constexpr(c.raw_ahead):
        if (n < copies) & (lane.part == 0):
            ask_copy(c, g, s, lane, token_of(w, lane, n), w.base, w.entry, (slot + n) % c.raw_ahead)


@cute.jit
def turn_tiles(
    c: cutlass.Constexpr[Shape], g: Global, s: Shared, lane: Lane, w: Work, done: Int32,
    taken: Int32,
):  # fmt: skip
    """All tiles of this CTA's share, `done` tiles and `taken` raw copies into the walk. Returns
    the raw copies taken then."""
    copies = copies_of(w, lane)
    base = w.base
    entry = w.entry
    slot = taken % c.raw_ahead
    phase = taken // c.raw_ahead & 1
    for i in cutlass.range(w.mine, unroll=1):
        stage = (done + i) % c.stages
        cute.arch.mbarrier_wait(s.empty + stage, (((done + i) // c.stages) & 1) ^ 1)
        for half in cutlass.range_constexpr(COPIES):
            n = i * COPIES + half
            if n < copies:
                cute.arch.mbarrier_wait(s.raw_full + (lane.warp * c.raw_ahead + slot), phase)
                turn_copy(c, lane, slot, stage, half)
                if (n + c.raw_ahead < copies) & (lane.part == 0):
                    token = token_of(w, lane, n + c.raw_ahead)
                    if token // c.page - base > 31:
                        base = token // c.page
                        entry = load_entries(g, w.request, base)
                    ask_copy(c, g, s, lane, token, base, entry, slot)
                slot = slot + 1
                if slot == c.raw_ahead:
                    slot = Int32(0)
                    phase = phase ^ 1
        cute.arch.fence_view_async_shared()
        cute.arch.mbarrier_arrive(s.full + stage)
    return taken + copies


@cute.jit
def widen(c: cutlass.Constexpr[Shape], g: Global, s: Shared, worker: Int32, rank: Int32):
    """The producer warpgroup's whole work; its first warp also loads Q and leaves the record."""
    lane = lane_of(c, s)
    if const_expr(c.grid):
        widen_one(c, g, s, lane, rank)
    else:
        widen_walk(c, g, s, lane, worker, rank)


@cute.jit
def widen_one(c: cutlass.Constexpr[Shape], g: Global, s: Shared, lane: Lane, rank: Int32):
    """Grid mode: the one work tile of this CTA, as `load.produce_one` has it."""
    a = ask(c, g)
    if lane.warp + lane.part == 0:
        with cute.arch.elect_one():
            cute.arch.mbarrier_expect_tx(s.q_full, c.q_bytes)
        load_q(c, g, s, a.begin * g.heads + a.row_tile * c.rows)
    w, record = open_grid(c, g, a, rank)
    ask_first(c, g, s, lane, w, Int32(0))
    if lane.warp + lane.part == 0:
        with cute.arch.elect_one():
            if const_expr(c.stamps):
                cute.arch.store(s.stamps + 8, nanoseconds())
            leave_record(s, record)
            cute.arch.mbarrier_arrive(s.q_full)
    turn_tiles(c, g, s, lane, w, Int32(0), Int32(0))


@cute.jit
def widen_walk(
    c: cutlass.Constexpr[Shape], g: Global, s: Shared, lane: Lane, worker: Int32, rank: Int32
):
    """Walk the worker's tiles, as `load.produce` has it; every warp reads the plan for itself."""
    words = read_words(g, cutlass.min(worker, g.tiles.shape[0] - 1))
    begin = g.worker_begin[worker]
    end = g.worker_begin[worker + 1]
    if begin != worker and begin < end:
        cute.autovec_copy(read_words(g, begin), words)
    done = Int32(0)
    taken = Int32(0)
    for it in cutlass.range(begin, end, unroll=1):
        turn = it - begin
        w, record = open_work(c, g, words, rank)
        ask_first(c, g, s, lane, w, taken % c.raw_ahead)
        if const_expr(c.aliased):
            if turn > 0:
                cute.arch.mbarrier_wait(s.drained, (turn & 1) ^ 1)
        if lane.warp + lane.part == 0:
            cute.arch.mbarrier_wait(s.q_empty, (turn & 1) ^ 1)
            with cute.arch.elect_one():
                leave_record(s, record)
                if w.mine > 0:
                    cute.arch.mbarrier_arrive_and_expect_tx(s.q_full, c.q_bytes)
                else:
                    cute.arch.mbarrier_arrive(s.q_full)
            if w.mine > 0:
                load_q(c, g, s, record[5])
        if it + 1 < end:
            cute.autovec_copy(read_words(g, it + 1), words)
        taken = turn_tiles(c, g, s, lane, w, done, taken)
        done = done + w.mine
    if lane.warp + lane.part == 0:
        cute.arch.mbarrier_wait(s.q_empty, ((end - begin) & 1) ^ 1)
        with cute.arch.elect_one():
            cute.arch.store(s.work, Int32(END))
            cute.arch.mbarrier_arrive(s.q_full)
