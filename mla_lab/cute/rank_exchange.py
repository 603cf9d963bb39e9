"""The exchange and the merge of decode context parallel in one kernel, through peer memory.

Each rank of a group has memory that all others can write to. A rank writes its rows to its own
buffer in the memory of every rank, itself included, and merges a row as soon as all buffers of its
memory hold it: one way over NVLink, where a collective and a merge behind it are two kernels.

    memory of a rank, two halves of     outs [ranks, buffer rows, 512] of 16 bits
                                        lses [ranks, buffer rows] of fp32

Each word of 4 bytes is its own flag, where NCCL's LL protocol stores a flag beside it. A word that
has not been written holds `EMPTY`, two negative zeros of 16 bits. No rank sends these bits: two
zeros are stored in their place. A reader polls until no word is empty, and then empties each one
again. So no store waits for another one, and there is no fence.

A call has a number, its epoch, which is the same on all ranks: it counts their calls, in device
memory, so that a CUDA graph may hold any number of them. Even and odd epochs take the two halves.
No one writes to a half that is still read: a rank sends epoch e + 2 behind its own epoch e + 1, for
which it needed rows of all others, which sent those behind their epoch e.

A warp takes every n-th row, n the warps of the launch. It sends all of its rows before it waits for
any, and all CTAs of a launch fit on the card at once, so no wait is for a CTA that has to wait.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.runtime import make_fake_stream

from ..plan.config import KernelConfig
from .common.launch_arguments import tensor
from .common.ptx_sm90 import bits_float, float_bits, load_relaxed, pick, ptx, store_relaxed
from .rank_memory import EMPTY, LSE_BYTES, OUT_BYTES, SMS
from .rank_merge import (
    BATCH,
    COLUMNS,
    ELEMENTS,
    VECTORS,
    WARPS,
    Merge,
    merge_row,
    parts_of,
    source_of,
    vector_of,
)
from .registry import CuteEntry

#: CTAs of a launch for each of `SMS`, at most: they fit at once
CTAS_PER_SM = 4
#: words of a 16-byte access
WORDS = 4


@dataclass(frozen=True)
class Exchange:
    """Operands of a launch, beside those of the merge."""

    bases: cute.Tensor  # int64 [ranks]: where the memory of each rank begins
    own_out: cute.Tensor  # [rows, 512]
    own_lse: cute.Tensor  # fp32 [rows]
    state: cute.Tensor  # int32: calls so far, CTAs of this one that are done
    rank: Int32
    buffer_rows: Int32  # a multiple of 4: halves begin at multiples of 16 bytes


@dataclass(frozen=True)
class Half:
    """The half of each rank's memory that a call takes."""

    x: Exchange
    odd: Int32

    def outs(self, owner: Any) -> cute.Tensor:
        """The outs of all ranks in the memory of rank `owner`: [ranks, buffer rows, 512]."""
        ranks, rows = self.x.bases.shape[0], self.x.buffer_rows
        begin, element = self._begin(owner), self.x.own_out.element_type
        return cute.make_tensor(
            cute.make_ptr(element, begin, cute.AddressSpace.gmem, assumed_align=16),
            cute.make_layout((ranks, rows, COLUMNS), stride=(rows * COLUMNS, COLUMNS, 1)),
        )

    def lse(self, owner: Any, rank: Any, row: Any) -> Int64:
        """Address of the lse of a row of rank `rank` in the memory of rank `owner`."""
        at = Int64(rank) * self.x.buffer_rows + row
        return self._begin(owner) + self._rows() * OUT_BYTES + at * LSE_BYTES

    def _begin(self, owner: Any) -> Int64:
        half = self._rows() * (OUT_BYTES + LSE_BYTES)
        return self.x.bases[owner] + Int64(self.odd) * half

    def _rows(self) -> Int64:
        return Int64(self.x.bases.shape[0]) * self.x.buffer_rows


def store_word(address: Int64, word: Int32) -> None:
    """A word that another card may be polling."""
    ptx("st.relaxed.sys.global.b32 [{$r0}], {$r1};", address, word)


def load_word(address: Int64) -> Int32:
    """A word that another card may be writing."""
    return ptx("ld.relaxed.sys.global.b32 {$w0}, [{$r0}];", address, out=Int32)


def store_vector(pointer: cute.Pointer, words: list[Any]) -> None:
    """`store_word` of four that follow each other."""
    ptx(
        "st.relaxed.sys.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        pointer.toint(),
        *words,
    )


def load_vector(pointer: cute.Pointer) -> tuple[Int32, Int32, Int32, Int32]:
    """`load_word` of four that follow each other."""
    return ptx(
        "ld.relaxed.sys.global.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        pointer.toint(),
        out=[Int32] * WORDS,
    )


def sent(word: Int32) -> Int32:
    """The bits that are sent for a word: 0 for those of an empty one."""
    return pick(word == EMPTY, Int32(0), word)


@cute.jit
def send_row(half: Half, row: Int32):
    """A row to this rank's buffer in the memory of each rank."""
    x, lane = half.x, cute.arch.lane_idx()
    to = Int64(x.rank) * x.buffer_rows + row
    values = [cute.make_rmem_tensor(8, x.own_out.element_type) for _ in range(VECTORS)]
    for i in cutlass.range_constexpr(VECTORS):
        cute.autovec_copy(vector_of(x.own_out, Int64(row), lane, i), values[i])
    words = [cute.recast_tensor(value, Int32) for value in values]
    for owner in cutlass.range(x.bases.shape[0], unroll=1):
        outs = half.outs(owner)
        for i in cutlass.range_constexpr(VECTORS):
            vector = [sent(words[i][e]) for e in range(WORDS)]
            store_vector(vector_of(outs, to, lane, i).iterator, vector)
    if lane < x.bases.shape[0]:
        store_word(half.lse(lane, x.rank, row), sent(float_bits(x.own_lse[row])))


@cute.jit
def take_lse(address: Int64, word: Int32):
    """The lse at an address, once it has been written; `word` is what an earlier load found there.
    -inf past the last rank, where the address is 0."""
    if address != 0:
        while word == EMPTY:
            word = load_word(address)
        store_word(address, Int32(EMPTY))
    return bits_float(word)


def missing(words: cute.Tensor) -> Any:
    """Whether one of the lane's words has not come."""
    found = words[0] == EMPTY
    for e in range(1, cute.size(words)):
        found = found | (words[e] == EMPTY)
    return found


@cute.jit
def take_parts(outs: cute.Tensor, parts: cute.Tensor, row: Int64, rank: Int32):
    """`load_parts`, once the rows are there. What is past the last rank stays as it is: zeros, or
    what an earlier rank sent."""
    lane, ranks, words = cute.arch.lane_idx(), outs.shape[0], cute.recast_tensor(parts, Int32)
    polls = True
    while polls:
        for k in cutlass.range_constexpr(BATCH):
            if rank + k < ranks:
                source = source_of(outs, row, rank + k)
                for i in cutlass.range_constexpr(VECTORS):
                    got = load_vector(vector_of(outs, source, lane, i).iterator)
                    for e in cutlass.range_constexpr(WORDS):
                        words[e, i, k] = got[e]
        polls = missing(words)
    empty = [Int32(EMPTY)] * WORDS
    for k in cutlass.range_constexpr(BATCH):
        if rank + k < ranks:
            source = source_of(outs, row, rank + k)
            for i in cutlass.range_constexpr(VECTORS):
                store_vector(vector_of(outs, source, lane, i).iterator, empty)


@cute.jit
def take_row(half: Half, merge: Merge, row: Int32):
    """Merge a row, once all ranks' parts of it are there."""
    x, lane = half.x, cute.arch.lane_idx()
    address, word = Int64(0), float_bits(-Float32.inf)
    if lane < x.bases.shape[0]:
        address = half.lse(x.rank, lane, row)
        # beside the first look at the outs
        word = load_word(address)
    parts = parts_of(merge.outs)
    parts.fill(0.0)
    take_parts(merge.outs, parts, Int64(row), Int32(0))
    lse = take_lse(address, word)
    cute.arch.sync_warp()
    merge_row(merge, row, lse, parts, take_parts)


@cute.jit
def end_call(state: cute.Tensor, epoch: Int32):
    """The last CTA of a launch to come here counts the call."""
    cute.arch.sync_threads()
    if cute.arch.thread_idx()[0] == 0:
        last = Int32(cute.arch.grid_dim()[0]) - 1
        before = ptx(
            "atom.relaxed.gpu.global.inc.u32 {$w0}, [{$r0}], {$r1};",
            state.iterator + 1,
            last,
            out=Int32,
        )
        if before == last:
            store_relaxed(state.iterator, epoch)


@cute.kernel
def _exchange(x: Exchange, m: Merge):
    warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
    first, rows = cute.arch.block_idx()[0] * WARPS + warp, x.own_lse.shape[0]
    warps = cute.arch.grid_dim()[0] * WARPS
    epoch = load_relaxed(x.state.iterator) + 1
    half = Half(x, epoch & 1)
    for row in cutlass.range(first, rows, warps, unroll=1):
        send_row(half, row)
    outs = half.outs(x.rank)
    there = Merge(outs, m.sinks, m.out, m.lse, m.heads, m.to_log2, m.from_log2)
    for row in cutlass.range(first, rows, warps, unroll=1):
        take_row(half, there, row)
    end_call(x.state, epoch)


@cute.jit
def _launch(*operands) -> None:
    """Operands in the order of `entry`, the stream last."""
    bases, own_out, own_lse, sinks, out, lse, state, *numbers, stream = operands
    rank, buffer_rows, heads, to_log2, from_log2 = numbers
    ctas = cutlass.min((own_lse.shape[0] + WARPS - 1) // WARPS, CTAS_PER_SM * SMS)
    _exchange(
        Exchange(bases, own_out, own_lse, state, rank, buffer_rows),
        Merge(own_out, sinks, out, lse, heads, to_log2, from_log2),
    ).launch(grid=(ctas, 1, 1), block=(32 * WARPS, 1, 1), stream=stream)


def entry(config: KernelConfig) -> CuteEntry:
    """Arguments: bases int64 [ranks]; this rank's out [rows, 512] in `out_dtype` and lse [rows]
    fp32, rows of all heads in turn; sinks [heads]; the merged out and lse; state int32 [2], zeros
    before the first call; this rank, the rows of a buffer, a multiple of 4; heads (0: no sinks, and
    `sinks` is not read); the factors of an lse to log2 units and back."""
    element, rows = ELEMENTS[config.out_dtype], cute.sym_int()
    out, lse = tensor(element, 16, rows, COLUMNS), tensor(Float32, 4, rows)
    bases, sinks = tensor(Int64, 8, None), tensor(Float32, 4, None)
    state, numbers = tensor(Int32, 4, 2), (*[Int32(0)] * 3, Float32(1.0), Float32(1.0))
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    given = (bases, out, lse, sinks, out, lse, state, *numbers, stream)
    return CuteEntry(_launch, given, "rank_exchange")
