"""Instructions on floats, one a kernel: the bits that a card computes, and those of the emulator.

Each opcode of `scalar_opcodes` runs on random bits, special values among them, and on numbers of
ordinary size; each kind of wgmma on products of narrow and wide ranges of exponents.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor

from ..core.errors import unsupported
from ..emulate import Options
from ..emulate.direct import Direct, ptx_kernel
from ..emulate.recorded import load, recordings

HEAD = ".version 8.4\n.target sm_90a\n.address_size 64\n"
SAMPLES, TILES, THREADS = 1024, 8, 128
FLOATS = ("f32", "f16", "f16x2", "bf16", "bf16x2", "e4m3x2")
#: mnemonics that compute nothing with a number, and wgmma, which has probes of its own
MOVES = ("ld", "st", "mov", "selp", "wgmma", "shfl", "red", "atom")
ONE, THREE = ("abs", "neg", "ex2", "lg2", "rcp", "rsqrt", "sqrt", "tanh"), ("fma",)
HALVES = ("f16", "bf16", "e4m3x2")
#: wgmma: what follows B's descriptor, and the ranges of exponents
PRODUCTS = {
    "m64n8k16.f32.bf16.bf16": ", %p, 1, 1, 0",
    "m64n8k16.f32.f16.f16": ", %p, 1, 1, 0",
    "m64n8k32.f32.e4m3.e4m3": ", %p, 1, 1",
}
RANGES = (2, 12)
SCALAR = """.visible .entry k(.param .u64 a, .param .u64 b, .param .u64 c, .param .u64 d)
{{
.reg .b32 %r<9>; .reg .b16 %h<9>; .reg .b64 %x<9>; .reg .pred %p<2>;
mov.u32 %r0, %tid.x; mov.u32 %r1, %ctaid.x; mad.lo.s32 %r0, %r1, {threads}, %r0;
mul.wide.u32 %x0, %r0, 4;
ld.param.u64 %x1, [a]; add.s64 %x1, %x1, %x0; ld.global.b32 %r1, [%x1];
ld.param.u64 %x2, [b]; add.s64 %x2, %x2, %x0; ld.global.b32 %r2, [%x2];
ld.param.u64 %x3, [c]; add.s64 %x3, %x3, %x0; ld.global.b32 %r3, [%x3];
cvt.u16.u32 %h1, %r1; cvt.u16.u32 %h2, %r2;
{line}
ld.param.u64 %x4, [d]; add.s64 %x4, %x4, %x0; st.global.b32 [%x4], %r4;
ret;
}}
"""
PRODUCT = """.visible .entry k(.param .u64 a, .param .u64 b, .param .u64 c, .param .u64 d)
{{
.reg .b32 %r<20>; .reg .b64 %x<9>; .reg .pred %p;
.shared .align 1024 .b8 s[256];
mov.u32 %r0, %tid.x; mov.u32 %r1, %ctaid.x; mad.lo.s32 %r2, %r1, 128, %r0;
mul.wide.u32 %x0, %r2, 16;
ld.param.u64 %x1, [a]; add.s64 %x1, %x1, %x0; ld.global.v4.b32 {{%r4, %r5, %r6, %r7}}, [%x1];
ld.param.u64 %x2, [c]; add.s64 %x2, %x2, %x0; ld.global.v4.b32 {{%r14, %r15, %r16, %r17}}, [%x2];
and.b32 %r8, %r0, 63; mad.lo.s32 %r9, %r1, 64, %r8; mul.wide.u32 %x3, %r9, 4;
ld.param.u64 %x4, [b]; add.s64 %x4, %x4, %x3; ld.global.b32 %r10, [%x4];
mov.u32 %r11, s; shl.b32 %r12, %r8, 2; add.s32 %r12, %r12, %r11;
setp.lt.u32 %p, %r0, 64; @%p st.shared.b32 [%r12], %r10;
fence.proxy.async; bar.sync 0; setp.eq.s32 %p, %r0, %r0;
shr.u32 %r13, %r11, 4; cvt.u64.u32 %x5, %r13; or.b64 %x5, %x5, 34360262656;
wgmma.fence.sync.aligned;
wgmma.mma_async.sync.aligned.{kind} {{%r14, %r15, %r16, %r17}}, {{%r4, %r5, %r6, %r7}}, %x5{rest};
wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;
ld.param.u64 %x6, [d]; add.s64 %x6, %x6, %x0;
st.global.v4.b32 [%x6], {{%r14, %r15, %r16, %r17}};
ret;
}}
"""
_OPCODE = re.compile(r"(?<![\w.%$])[a-z]\w*(?:\.[\w:]+)+(?=\s)")
#: (PTX, CTAs, operands a, b, c, result) -> fills the result
Launch = Callable[[str, int, Sequence[Tensor]], None]


@cache
def scalar_opcodes() -> tuple[str, ...]:
    """Those with floats in the recorded builds, without moves."""
    words = {word for name in recordings() for word in _OPCODE.findall(load(name).text)}
    parts = {word: word.split(".") for word in words}
    return tuple(sorted(w for w, p in parts.items() if p[0] not in MOVES and set(FLOATS) & set(p)))


def names() -> list[str]:
    """Of all probes."""
    return [*scalar_opcodes(), *(f"{kind} {spread}" for kind in PRODUCTS for spread in RANGES)]


def answer(name: str, launch: Launch) -> np.ndarray:
    """The bits that `launch` computes for a probe, uint32."""
    kind, _, spread = name.partition(" ")
    if spread:
        text, ctas = HEAD + PRODUCT.format(kind=kind, rest=PRODUCTS[kind]), TILES
        operands = _tiles(kind, int(spread))
    else:
        text = HEAD + SCALAR.format(line=_line(kind), threads=THREADS)
        ctas, operands = SAMPLES // THREADS, _numbers()
    tensors = [torch.from_numpy(x.view(np.int32).reshape(-1).copy()) for x in operands]
    tensors.append(torch.zeros_like(tensors[2]))
    launch(text, ctas, tensors)
    found: np.ndarray = tensors[3].numpy().view(np.uint32)
    return found


def _line(opcode: str) -> str:
    """The instruction on %r1 to %r3, with its result in %r4."""
    parts = opcode.split(".")
    if parts[0] == "setp":
        return f"{opcode} %p0, %r1, %r2; selp.b32 %r4, 1, 0, %p0;"
    if parts[0] == "cvt":
        target, source = parts[-2:]
        two = source == "f32" and target in ("bf16x2", "f16x2", "e4m3x2")
        args = "%h1" if source in HALVES else "%r1, %r2" if two else "%r1"
        if target in HALVES:
            return f"{opcode} %h4, {args}; cvt.u32.u16 %r4, %h4;"
        return f"{opcode} %r4, {args};"
    count = 1 if parts[0] in ONE else 3 if parts[0] in THREE else 2
    return f"{opcode} %r4, {', '.join(f'%r{i + 1}' for i in range(count))};"


def _numbers() -> list[np.ndarray]:
    """Operands: a half random bits, a half numbers between 2**-12 and 2**12, some special."""
    draw = np.random.default_rng(9)
    shape = (3, SAMPLES)
    anything = draw.integers(0, 1 << 32, shape, np.uint64).astype(np.uint32)
    ordinary = (draw.normal(size=shape) * 2.0 ** draw.integers(-12, 12, shape)).astype(np.float32)
    found = np.where(np.arange(SAMPLES) % 2 == 0, anything, ordinary.view(np.uint32))
    special = np.array([0, 1 << 31, 0x7F800000, 0xFF800000, 0x7FC00000, 1, 0x3F800000], np.uint32)
    grid = np.stack(np.meshgrid(special, special, special, indexing="ij")).reshape(3, -1)
    found[:, : grid.shape[1]] = grid
    return list(found)


def _tiles(kind: str, spread: int) -> list[np.ndarray]:
    """A of 64 rows and B of 8 columns, 32 bytes each along K, and the accumulator."""
    draw = np.random.default_rng(spread).integers
    shape = (TILES, THREADS, 4)
    sums = draw(0, 2, shape) << 31 | draw(127 - spread, 128 + spread, shape) << 23
    sums |= draw(0, 1 << 23, shape)

    def factors(words: int) -> np.ndarray:
        if "e4m3" in kind:
            eight = draw(0, 256, (TILES, words * 4)).astype(np.uint8)
            eight[eight & 127 == 127] = 0
            return eight.view(np.uint32)
        width, zero = (7, 127) if "bf16" in kind else (10, 15)
        size, most = (TILES, words * 2), min(spread, 12)
        bits = draw(0, 2, size) << 15 | draw(zero - most, zero + most + 1, size) << width
        return (bits | draw(0, 1 << width, size)).astype(np.uint16).view(np.uint32)

    return [factors(512), factors(64), sums.astype(np.uint32)]


def on_emulator(text: str, ctas: int, tensors: Sequence[Tensor]) -> None:
    """Runs a probe as an H200 rounds."""
    launch = Direct(grid=(ctas, 1, 1), block=(THREADS, 1, 1))
    ptx_kernel(text, "k", launch, Options("card"))(*tensors)


def on_card(text: str, ctas: int, tensors: Sequence[Tensor]) -> None:
    """Runs a probe on the current CUDA device, through the driver, which compiles its PTX."""
    driver = ctypes.CDLL("libcuda.so.1")
    there = [tensor.cuda() for tensor in tensors]
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    _done(driver.cuModuleLoadData(ctypes.byref(module), text.encode()))
    _done(driver.cuModuleGetFunction(ctypes.byref(function), module, b"k"))
    pointers = [ctypes.c_uint64(tensor.data_ptr()) for tensor in there]
    array = (ctypes.c_void_p * len(pointers))(*(ctypes.addressof(p) for p in pointers))
    _done(driver.cuLaunchKernel(function, ctas, 1, 1, THREADS, 1, 1, 0, None, array, None))
    torch.cuda.synchronize()
    tensors[3].copy_(there[3])
    _done(driver.cuModuleUnload(module))


def _done(error: int) -> None:
    if error:
        raise unsupported("probe", f"error {error} of the CUDA driver", "a Hopper card")
