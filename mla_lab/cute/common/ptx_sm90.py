"""Small words for Hopper that the DSL lacks: distributed shared memory, transposes, quads.

Each is one instruction or a short fixed sequence; the kernels above say when to use them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

#: L2 policy words of the bulk tensor copy (CUTLASS, cute/arch/copy_sm90_desc.hpp)
EVICT_FIRST = 0x12F0000000000000
EVICT_LAST = 0x14F0000000000000

#: a running maximum that no score has reached; finite, so that differences are never NaN
NO_SCORE = -1.0e30

LN2 = 0.6931471805599453
LOG2E = 1.4426950408889634


def smem_f32(pointer: cute.Pointer, align: int = 16) -> cute.Pointer:
    """A plain (unswizzled) fp32 view of shared memory."""
    return cute.make_ptr(Float32, pointer.toint(), cute.AddressSpace.smem, assumed_align=align)


def vec4(pointer: cute.Pointer) -> cute.Tensor:
    """Four elements of 4 bytes at a 16-byte aligned address."""
    return cute.make_tensor(pointer.align(16), cute.make_layout(4))


def vec2(pointer: cute.Pointer) -> cute.Tensor:
    """Two elements of 4 bytes at an 8-byte aligned address."""
    return cute.make_tensor(pointer.align(8), cute.make_layout(2))


def load4(pointer: cute.Pointer) -> cute.Tensor:
    """The four elements at `pointer`, in registers."""
    r = cute.make_rmem_tensor(4, pointer.dtype)
    cute.autovec_copy(vec4(pointer), r)
    return r


def load2(pointer: cute.Pointer) -> cute.Tensor:
    """The two elements at `pointer`, in registers."""
    r = cute.make_rmem_tensor(2, pointer.dtype)
    cute.autovec_copy(vec2(pointer), r)
    return r


def push4(
    pointer: cute.Pointer, words: tuple[Any, Any, Any, Any], barrier: cute.Pointer, rank: Any
) -> None:
    """st.async: 16 bytes into the same place of CTA `rank`, counted on its `barrier`."""
    cute.arch.store_async_dsmem(pointer.align(16), words, barrier, rank)


def transpose_8x8(word: Int32) -> Int32:
    """movmatrix: lane 4r+q holds (r, 2q), (r, 2q+1) of 16-bit values; gets the transpose's."""
    return cute.arch.inline_ptx(
        "movmatrix.sync.aligned.m8n8.trans.b16 {$w0}, {$r0};",
        write_only_types=[Int32],
        read_only_args=[word],
    )


def fresh_thread() -> Int32:
    """threadIdx.x through an opaque move: what follows from it is computed here, not hoisted
    out of the caller's loops into registers that the loops need."""
    tid, _, _ = cute.arch.thread_idx()
    return cute.arch.inline_ptx(
        "mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[Int32(tid)]
    )


def fresh_block() -> Int32:
    """blockIdx.x, by the same means and for the same end."""
    block, _, _ = cute.arch.block_idx()
    return cute.arch.inline_ptx(
        "mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[Int32(block)]
    )


def pack2(a: Float32, b: Float32, dtype: Any) -> Int32:
    """Two fp32 rounded to a 16-bit type, `a` in the low half."""
    pair = cute.make_rmem_tensor(2, dtype)
    pair[0] = a.to(dtype)
    pair[1] = b.to(dtype)
    return cute.recast_tensor(pair, Int32)[0]


def shift_pair(low: Uint32, high: Uint32, bits: Any) -> Uint32:
    """The 32 bits from bit `bits` % 32 on of two words that follow each other."""
    return cute.arch.inline_ptx(
        "shf.r.wrap.b32 {$w0}, {$r0}, {$r1}, {$r2};",
        write_only_types=[Uint32],
        read_only_args=[low, high, bits],
    )


def count_up(counter: cute.Pointer, last: Any, order: str) -> None:
    """Add one to a global counter that goes from `last` back to 0; `order`: release or relaxed.

    Without an answer: nobody waits for it.
    """
    cute.arch.inline_ptx(
        f"red.{order}.gpu.global.inc.u32 [{{$r0}}], {{$r1}};", read_only_args=[counter, last]
    )


@cute.jit
def pick(condition: Any, yes: Any, no: Any) -> Any:
    """A select, for trace-time code."""
    return yes if condition else no


def add(a: Float32, b: Float32) -> Float32:
    """The sum, as an operation for `fold_lanes`."""
    return a + b


#: lane distances of a butterfly over a whole warp
WARP_BUTTERFLY = (16, 8, 4, 2, 1)


def butterfly(
    op: Callable[[Any, Any], Any], values: list[Any], offsets: tuple[int, ...] = WARP_BUTTERFLY
) -> list[Any]:
    """Reduce each value over the lanes that `offsets` connect, the values side by side; every lane
    gets the results."""
    for offset in offsets:
        values = [op(v, cute.arch.shuffle_sync_bfly(v, offset=offset)) for v in values]
    return values


def fold_lanes(values: list[Any], op: Callable[[Any, Any], Any], lane: Any) -> list[Any]:
    """Reduce each value over the 8 lanes that share lane % 4, splitting the list on the way.

    Step by step (lane bits 4, 3, 2) a lane keeps half of the list and hands the other half
    away; once one value is left, both sides keep it. `folded_index` says which values stay.
    """
    for bit in (16, 8, 4):
        if len(values) > 1:
            half = len(values) // 2
            upper = (lane & bit) != 0
            kept = []
            for low, high in zip(values[:half], values[half:], strict=True):
                keep, give = pick(upper, high, low), pick(upper, low, high)
                kept.append(op(keep, cute.arch.shuffle_sync_bfly(give, offset=bit)))
            values = kept
        else:
            values = [op(values[0], cute.arch.shuffle_sync_bfly(values[0], offset=bit))]
    return values


def folded_index(count: int, lane: Any) -> Any:
    """Index (of the original list of `count`) of the first value that `fold_lanes` leaves."""
    index = Int32(0)
    for bit in (16, 8, 4):
        if count > 1:
            count //= 2
            index = index + ((lane & bit) // bit) * count
    return index


def nanoseconds() -> Int64:
    """The global timer; steps of 32 ns on an H200."""
    return Int64(cute.arch.globaltimer())


def read4_relaxed(pointer: cute.Pointer) -> tuple[Int32, Int32, Int32, Int32]:
    """Four words of global memory at an aligned address, as other SMs left them last."""
    return cute.arch.inline_ptx(
        "ld.relaxed.gpu.global.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Int32] * 4,
        read_only_args=[pointer],
    )


def write4_relaxed(pointer: cute.Pointer, words: Any) -> None:
    """Four words to global memory at an aligned address, for readers on other SMs; kept in order
    with the other accesses of this kind."""
    cute.arch.inline_ptx(
        "st.relaxed.gpu.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[pointer, words[0], words[1], words[2], words[3]],
    )
