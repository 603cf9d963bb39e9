"""Instructions of the fifth-generation tensor core (tcgen05), and their descriptors.

Bits as in the PTX ISA, "Tensor Memory Addressing", "Shared memory descriptor", "Instruction
descriptor". All of them are for a pair of CTAs (`cta_group::2`): operand A of 128 rows is halved
over the pair, operand B over its N, each half at the same descriptor in its CTA's shared memory. D
has 64 rows in each CTA: lanes 0-63 hold columns 0 .. N/2 - 1, lanes 64-127 the others (layout B).
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import BFloat16, Float8E4M3FN, Float16, Float32, Int32, Int64
from cutlass.cute.nvgpu import tcgen05

from .ptx_sm90 import ptx

#: both CTAs of a pair, as a multicast mask
PAIR = 3
#: bytes of operand A and B along K in one instruction
K_BYTES = 32
#: codes of the element types in the instruction descriptor, each within its kind
ELEMENT_CODES = {Float16: 0, BFloat16: 1, Float8E4M3FN: 0}
#: codes of the swizzles in the shared memory descriptor, by their span in bytes
SWIZZLE_CODES = {128: 2, 64: 4}
#: address bits of a descriptor: shared memory of the own CTA
ADDRESS_BITS = 0x3FFFF


def instruction_descriptor(element: Any, n: int, b_mn_major: bool) -> int:
    """D[128, n] fp32 += A B; A is K-major, B K-major or MN-major."""
    code = ELEMENT_CODES[element]
    major = int(b_mn_major) << 16
    return 1 << 4 | code << 7 | code << 10 | major | n // 8 << 17 | 128 // 16 << 24


def smem_descriptor(address: Int32, leading: int, stride: int, span: int) -> Int64:
    """Operand in shared memory whose rows of `span` bytes are swizzled, eight to an atom.

    K-major: atoms along MN are `stride` bytes apart, `leading` is not read. MN-major: atoms along
    MN are `leading` bytes apart, along K `stride` bytes.
    """
    bits = leading >> 4 << 16 | stride >> 4 << 32 | 1 << 46 | SWIZZLE_CODES[span] << 61
    signed = bits - (bits >> 63 << 64)
    return Int64(signed) + Int64((address & ADDRESS_BITS) >> 4)


def mma(element: Any, d: Int32, a: Int64, b: Int64, instruction: int, accumulate: Any) -> None:
    """D += A B, or D = A B where `accumulate` is 0; by one thread of the pair's leader."""
    kind = "f16" if element.width == 16 else "f8f6f4"
    ptx(
        "{ .reg .pred p; setp.ne.b32 p, {$r4}, 0;"
        f" tcgen05.mma.cta_group::2.kind::{kind} [{{$r0}}], {{$r1}}, {{$r2}}, {{$r3}}, p; }}",
        d,
        a,
        b,
        Int32(instruction),
        Int32(accumulate),
    )


def commit(barrier: cute.Pointer) -> None:
    """One arrival at `barrier` of both CTAs when all MMAs of the calling thread have finished."""
    tcgen05.commit(barrier, PAIR, tcgen05.CtaGroup.TWO)


def _group(name: str, first: int, count: int) -> str:
    return "{" + ", ".join("{$" + f"{name}{first + i}" + "}" for i in range(count)) + "}"


def load_columns(address: Int32, count: int) -> list[Float32]:
    """`count` columns of the thread's lane. The wait is in the same block: results must not be
    used before it."""
    code = f"tcgen05.ld.sync.aligned.32x32b.x{count}.b32 {_group('w', 0, count)}, [{{$r0}}];"
    return list(ptx(code + " tcgen05.wait::ld.sync.aligned;", address, out=[Float32] * count))


def store_columns(address: Int32, values: list[Float32]) -> None:
    """Columns of the thread's lane; `wait_stores` before others read them."""
    count = len(values)
    code = f"tcgen05.st.sync.aligned.32x32b.x{count}.b32 [{{$r0}}], {_group('r', 1, count)};"
    ptx(code, address, *values)


def wait_stores() -> None:
    """Until the warp's stores to tensor memory have been performed."""
    ptx("tcgen05.wait::st.sync.aligned;")


def fence_before() -> None:
    """Earlier tcgen05 operations stay before a barrier that follows."""
    ptx("tcgen05.fence::before_thread_sync;")


def fence_after() -> None:
    """Later tcgen05 operations stay behind a barrier that was passed."""
    ptx("tcgen05.fence::after_thread_sync;")
