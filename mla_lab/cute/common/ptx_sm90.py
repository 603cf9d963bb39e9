"""Instructions of SM90 that the DSL has no function for, and short fixed sequences of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32

#: L2 policy words (CUTLASS, cute/arch/copy_sm90_desc.hpp). As operands of inline PTX: a constant in
#: its text is two instructions for each load
EVICT_FIRST = 0x12F0000000000000
EVICT_LAST = 0x14F0000000000000

#: initial row max; finite, so that a row without keys never computes inf - inf = NaN
NO_SCORE = -1.0e30

LN2 = 0.6931471805599453
LOG2E = 1.4426950408889634


def ptx(code: str, *args: Any, out: Any = None) -> Any:
    """Inline PTX: {$r0}, ... are `args`; {$w0}, ... are results of type `out` or of these types."""
    types = out if isinstance(out, list) else [out]
    if out is None:
        return cute.arch.inline_ptx(code, read_only_args=list(args))
    return cute.arch.inline_ptx(code, write_only_types=types, read_only_args=list(args))


def load_relaxed(pointer: cute.Pointer) -> Int32:
    """An int32 of global memory that another kernel may be writing; past the L1, where a stale
    value would stay."""
    return cute.arch.load(pointer, Int32, sem="relaxed", scope="gpu")


def load_lasting(pointer: cute.Pointer) -> Int32:
    """`load_relaxed` of what each layer of a step reads: lengths, block tables, kept work tiles. L2
    keeps its line while the weights of a layer's other kernels pass through."""
    return ptx(
        "ld.relaxed.gpu.global.L2::cache_hint.b32 {$w0}, [{$r0}], {$r1};",
        pointer,
        Int64(EVICT_LAST),
        out=Int32,
    )


def div_pow2(a: Int32, power: int) -> Int32:
    """a // power, of a power of two, by one shift; `//` of an int32 tests its sign as well."""
    shift = power.bit_length() - 1
    if power != 1 << shift:
        raise ValueError(f"div_pow2: {power}, not a power of two")
    return a >> shift


def small_quotient(a: Int32, b: Int32) -> Int32:
    """a // b of numbers that are not negative, b > 0, with a quotient below 2**19, by a fifth of
    the instructions of a division. The fp32 ratio is off by less than 2**-21 of itself; lowered by
    twice that, it gives the quotient or one less."""
    inverse = cute.arch.rcp_approx(b.to(Float32)) * Float32(1 - 2.0**-20)
    estimate = (a.to(Float32) * inverse).to(Int32)
    return estimate + pick(a - estimate * b >= b, Int32(1), Int32(0))


def load_where(pointer: cute.Pointer, offset: int, count: Int32, least: int) -> Int32:
    """`load_lasting` of the int32 `offset` behind `pointer` where `count` > `least`, else 0."""
    return ptx(
        f"{{ .reg .pred p; setp.gt.s32 p, {{$r1}}, {least}; mov.b32 {{$w0}}, 0;"
        "@p ld.relaxed.gpu.global.L2::cache_hint.b32 {$w0},"
        f" [{{$r0}} + {4 * offset}], {{$r2}}; }}",
        pointer,
        count,
        Int64(EVICT_LAST),
        out=Int32,
    )


def store_relaxed(pointer: cute.Pointer, value: Int32) -> None:
    """An int32 into global memory that another warp may be reading."""
    cute.arch.store(pointer, value, sem="relaxed", scope="gpu")


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
    return ptx("movmatrix.sync.aligned.m8n8.trans.b16 {$w0}, {$r0};", word, out=Int32)


def opaque(x: Int32) -> Int32:
    """x through an opaque move, so that the compiler recomputes what depends on it here instead of
    holding it in registers through the caller's loops."""
    return ptx("mov.b32 {$w0}, {$r0};", Int32(x), out=Int32)


def fresh_thread() -> Int32:
    """threadIdx.x, `opaque`. The mask says that it is not negative, so that divisions by powers of
    two are shifts."""
    return opaque(cute.arch.thread_idx()[0]) & 1023


def fresh_block() -> Int32:
    """blockIdx.x, `opaque`."""
    return opaque(cute.arch.block_idx()[0])


def pack2(a: Float32, b: Float32, dtype: Any) -> Int32:
    """Two fp32 rounded to a 16-bit type, `a` in the low half."""
    pair = cute.make_rmem_tensor(2, dtype)
    pair[0] = a.to(dtype)
    pair[1] = b.to(dtype)
    return cute.recast_tensor(pair, Int32)[0]


def shift_pair(low: Uint32, high: Uint32, bits: Any) -> Uint32:
    """The 32 bits from bit `bits` % 32 on of two words that follow each other."""
    return ptx("shf.r.wrap.b32 {$w0}, {$r0}, {$r1}, {$r2};", low, high, bits, out=Uint32)


def bits_below(count: Any) -> Uint32:
    """A word whose first `count` bits are set: none from 0 down, all from 32 on."""
    return ptx(
        "{ .reg .s32 n; .reg .b32 one; max.s32 n, {$r0}, 0; mov.b32 one, 1;"
        "shl.b32 one, one, n; sub.s32 {$w0}, one, 1; }",
        count,
        out=Uint32,
    )


def count_up(counter: cute.Pointer, last: Any, order: str) -> None:
    """Add one to a global counter that wraps from `last` to 0; `order` is "release" or "relaxed".
    A reduction (`red`): no value returns."""
    ptx(f"red.{order}.gpu.global.inc.u32 [{{$r0}}], {{$r1}};", counter, last)


@cute.jit
def pick(condition: Any, yes: Any, no: Any) -> Any:
    """`yes` if the condition holds, else `no`: one select instruction."""
    return yes if condition else no


def add(a: Float32, b: Float32) -> Float32:
    """The sum, as an operation for `butterfly` and `fold_lanes`."""
    return a + b


#: lane offsets of a `butterfly` over the four lanes that hold one accumulator row
QUAD = (1, 2)

#: lane offsets of a butterfly over a whole warp, in the order in which its sums are formed
WARP, UPWARD = (16, 8, 4, 2, 1), (1, 2, 4, 8, 16)


def butterfly(op: Callable[[Any, Any], Any], value: Any, offsets: tuple[int, ...] = QUAD) -> Any:
    """Reduce over the lanes that differ in the bits `offsets`; all of them get the result."""
    return butterflies(op, [value], offsets)[0]


def butterflies(
    op: Callable[[Any, Any], Any], values: list[Any], offsets: tuple[int, ...]
) -> list[Any]:
    """Reduce several values as `butterfly` does, side by side, so that their latencies overlap."""
    for offset in offsets:
        values = [op(v, cute.arch.shuffle_sync_bfly(v, offset=offset)) for v in values]
    return values


def float_of_exponent(exponent: Any) -> Any:
    """The power of two with this biased exponent; 0 for exponent 0."""
    bits = cute.make_rmem_tensor(1, Int32)
    bits[0] = exponent << 23
    return cute.recast_tensor(bits, Float32)[0]


def float_bits(value: Any) -> Any:
    """The 32 bits of an fp32 (or of two 16-bit values) as Int32, by an opaque move."""
    return ptx("mov.b32 {$w0}, {$r0};", value, out=Int32)


def bits_float(bits: Any) -> Any:
    """32 bits as fp32, by an opaque move: computed here, not scheduled elsewhere."""
    return ptx("mov.b32 {$w0}, {$r0};", bits, out=Float32)


def stmatrix_x4(address: Any, offset: int, words: Any) -> None:
    """Four 8 x 8 matrices of 16-bit elements; each lane gives the address of one row, less the
    static `offset` in bytes."""
    ptx(
        f"stmatrix.sync.aligned.m8n8.x4.shared.b16 [{{$r0}}+{offset}], "
        "{ {$r1}, {$r2}, {$r3}, {$r4} };",
        address,
        *words,
    )


def fold_lanes(values: list[Any], op: Callable[[Any, Any], Any], lane: Any) -> list[Any]:
    """Reduce each value over the 8 lanes that share lane % 4, splitting the list on the way.

    At each step (lane bits 4, 3, 2) a lane keeps half of the list and sends the other half to its
    partner; once one value is left, both keep it. `folded_index` tells which values a lane keeps.
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


def load4_where(left: Int32, least: Int32, pointer: cute.Pointer, words: Any) -> None:
    """`words` from a 16-byte aligned address of global memory, if `left` > `least`."""
    got = ptx(
        "{ .reg .pred p; setp.gt.s32 p, {$r0}, {$r1}; mov.b32 {$w0}, 0; mov.b32 {$w1}, 0;"
        "mov.b32 {$w2}, 0; mov.b32 {$w3}, 0;"
        "@p ld.global.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r2}]; }",
        left,
        least,
        pointer,
        out=[Int32] * 4,
    )
    for e in range(4):
        words[e] = got[e]


def discard_line(pointer: cute.Pointer) -> None:
    """Give up the 128-byte line of global memory at `pointer`: nobody reads it again, and what
    takes its place in L2 need not write it to memory. Without effect where the address is no
    multiple of 128: a workspace may begin in the middle of a line."""
    ptx(
        "{ .reg .pred p; .reg .b64 rest; and.b64 rest, {$r0}, 127; setp.eq.u64 p, rest, 0;"
        "@p discard.global.L2 [{$r0}], 128; }",
        pointer,
    )


def read4_relaxed(pointer: cute.Pointer) -> tuple[Int32, Int32, Int32, Int32]:
    """Four words of global memory at a 16-byte aligned address, coherent with other SMs."""
    return ptx(
        "ld.relaxed.gpu.global.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        pointer,
        out=[Int32] * 4,
    )


def write4_relaxed(pointer: cute.Pointer, words: Any) -> None:
    """Four words to global memory at a 16-byte aligned address, visible to `read4_relaxed` on other
    SMs."""
    ptx(
        "st.relaxed.gpu.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        pointer,
        words[0],
        words[1],
        words[2],
        words[3],
    )


def write4_lasting(pointer: cute.Pointer, words: Any) -> None:
    """`write4_relaxed` of words that the next layer of a step uses again: L2 keeps their line as of
    `load_lasting`."""
    ptx(
        "st.relaxed.gpu.global.L2::cache_hint.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}}, {$r5};",
        pointer,
        words[0],
        words[1],
        words[2],
        words[3],
        Int64(EVICT_LAST),
    )
