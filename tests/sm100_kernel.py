"""PTX of a tcgen05 product: one CTA or a pair, A in shared or tensor memory."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from mla_lab.emulate import EmulatedKernel, Options
from mla_lab.emulate.direct import Direct, ptx_kernel
from mla_lab.emulate.tensor_memory import SHAPES
from mla_lab.emulate.tiles import operand_bytes

HEAD = """
.version 9.0
.target sm_100a
.address_size 64
.extern .shared .align 1024 .b8 smem[];
"""
#: bytes of operands' rows in shared memory: one swizzle atom
ROW = 128
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "e4m3": torch.float8_e4m3fn}
#: an operand's descriptor behind its address: 1024 bytes from one group of 8 rows to the next,
#: SM100's version, 128-byte swizzle; and the same as wgmma has it
DESCRIPTOR = 64 << 32 | 1 << 46 | 2 << 61
IMAGE = 64 << 32 | 1 << 62


@dataclass(frozen=True)
class Case:
    """A product of [m, 128 bytes] and [n, 128 bytes], of one CTA or a pair."""

    m: int = 128
    n: int = 64
    kind: str = "bf16"
    pair: bool = False
    #: A goes through tensor memory, behind the accumulators
    a_in_tensor: bool = False
    #: rows of B follow each other in memory, not its columns; 64 of 16 bits
    b_transposed: bool = False
    shape: str = "32x32b"
    #: pieces of text -> what takes their place
    changes: tuple[tuple[str, str], ...] = field(default=())

    @property
    def ctas(self) -> int:
        return 1 + self.pair

    @property
    def columns(self) -> int:
        """Columns of the accumulators."""
        return self.n // 2 if self.pair and self.m == 128 else self.n

    @property
    def registers(self) -> int:
        """Registers of a thread that hold accumulators: its own lane's, or its share of 32."""
        return self.columns

    @property
    def descriptor(self) -> int:
        code = {"f16": 0, "bf16": 1, "e4m3": 0}[self.kind]
        types = 1 << 4 | code << 7 | code << 10 | self.b_transposed << 16
        return types | self.n // 8 << 17 | self.m // 16 << 24

    @property
    def element(self) -> int:
        return 1 if self.kind == "e4m3" else 2

    @property
    def rows(self) -> tuple[int, int]:
        """Rows of A and B in one CTA."""
        return self.m // self.ctas, self.n // self.ctas


def _image(matrix: torch.Tensor, element: int, transposed: bool) -> torch.Tensor:
    """An operand as shared memory holds it."""
    rows, depth = matrix.shape
    where = operand_bytes(IMAGE, rows, depth, element, transposed)
    found = np.zeros(rows * ROW, np.uint8)
    data = matrix.contiguous().view(torch.uint8).numpy().reshape(rows, depth, element)
    for byte in range(element):
        found[where + byte] = data[..., byte]
    return torch.from_numpy(found)


def text(case: Case) -> str:
    """The kernel `k(images of operands, out [ctas, 128 lanes, registers])`."""
    group = f"cta_group::{case.ctas}"
    a_rows, b_rows = case.rows
    words = (a_rows + b_rows) * ROW // 4
    loads, stores = _read_accumulators(case)
    cast, mask = (".multicast::cluster", ", %h1") if case.pair else ("", "")
    body = f"""
.reg .pred %p<9>; .reg .b16 %h<9>; .reg .b32 %r<40>; .reg .b64 %d<12>; .reg .b32 %a<32>;
.reg .b32 %o<{case.registers}>;
mov.u32 %r0, %tid.x; mov.u32 %r1, %cluster_ctarank; mov.u32 %r2, smem; mov.b16 %h1, 3;
ld.param.u64 %d0, [a]; mul.wide.u32 %d1, %r1, {4 * words}; add.s64 %d0, %d0, %d1;
mov.b32 %r3, %r0;
COPY: shl.b32 %r4, %r3, 2; cvt.u64.u32 %d2, %r4; add.s64 %d2, %d0, %d2;
ld.global.b32 %r5, [%d2]; add.s32 %r4, %r4, %r2; st.shared.b32 [%r4+1024], %r5;
add.s32 %r3, %r3, 128; setp.lt.s32 %p1, %r3, {words}; @%p1 bra COPY;
setp.ne.s32 %p2, %r0, 0;
@%p2 bra MADE;
mbarrier.init.shared.b64 [%r2], 1; fence.mbarrier_init.release.cluster;
MADE: bar.warp.sync -1;
setp.ge.s32 %p3, %r0, 32;
@%p3 bra ALLOCATED;
tcgen05.alloc.{group}.sync.aligned.shared::cta.b32 [%r2+16], 256;
tcgen05.relinquish_alloc_permit.{group}.sync.aligned;
ALLOCATED: fence.proxy.async.shared::cta;
barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
ld.shared.b32 %r10, [%r2+16]; and.b32 %r11, %r0, 96; shl.b32 %r11, %r11, 16;
add.s32 %r14, %r10, %r11; add.s32 %r12, %r10, 128; add.s32 %r13, %r12, %r11;
{_a_to_tensor(case) if case.a_in_tensor else ""}
or.b32 %r6, %r0, %r1; setp.ne.s32 %p2, %r6, 0;
@%p2 bra ISSUED;
add.s32 %r7, %r2, 1024; and.b32 %r7, %r7, 0x3FFFF; shr.u32 %r7, %r7, 4;
cvt.u64.u32 %d5, %r7; or.b64 %d5, %d5, {DESCRIPTOR}; add.s64 %d6, %d5, {a_rows * ROW // 16};
{_steps(case, group)}
tcgen05.commit.{group}.mbarrier::arrive::one.shared::cluster{cast}.b64 [%r2]{mask};
ISSUED: mbarrier.try_wait.parity.shared.b64 %p4, [%r2], 0; @!%p4 bra ISSUED;
tcgen05.fence::after_thread_sync;
{loads}
tcgen05.wait::ld.sync.aligned;
tcgen05.fence::before_thread_sync;
ld.param.u64 %d8, [b]; shl.b32 %r8, %r1, 7; add.s32 %r8, %r8, %r0;
mul.wide.u32 %d9, %r8, {4 * case.registers}; add.s64 %d9, %d8, %d9;
{stores}
barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
tcgen05.fence::after_thread_sync;
@%p3 bra FREED;
tcgen05.dealloc.{group}.sync.aligned.b32 %r10, 256;
FREED: ret;
"""
    made = f"{HEAD}\n.visible .entry k(.param .u64 a, .param .u64 b)\n{{\n{body}\n}}\n"
    for old, new in case.changes:
        if old not in made:
            raise ValueError(old)
        made = made.replace(old, new)
    return made


def _steps(case: Case, group: str) -> str:
    """Four products along K."""
    kind, a = "f8f6f4" if case.kind == "e4m3" else "f16", "[%r12]" if case.a_in_tensor else "%d5"
    b_step = 128 if case.b_transposed else 2
    return "\n".join(
        f"""tcgen05.mma.{group}.kind::{kind} [%r10], {a}, %d6, {case.descriptor}, {int(step > 0)};
        add.s64 %d5, %d5, 2; add.s64 %d6, %d6, {b_step}; add.s32 %r12, %r12, 8;"""
        for step in range(4)
    )


def _read_accumulators(case: Case) -> tuple[str, str]:
    """tcgen05.ld of all columns, of 16 lanes at a time where the shape has no more; and stores."""
    halves = (0,) if case.shape == "32x32b" else (0, 16)
    count = case.registers // len(halves)
    loads = []
    for i, half in enumerate(halves):
        registers = ", ".join(f"%o{count * i + j}" for j in range(count))
        op = f"tcgen05.ld.sync.aligned.{case.shape}.x{count // SHAPES[case.shape][1]}.b32"
        split = f", {count}" if case.shape == "16x32bx2" else ""
        loads.append(f"add.s32 %r15, %r14, {half << 16};\n{op} {{{registers}}}, [%r15]{split};")
    stores = (f"st.global.b32 [%d9+{4 * i}], %o{i};" for i in range(case.registers))
    return "\n".join(loads), "\n".join(stores)


def _a_to_tensor(case: Case) -> str:
    """Row `lane` of A to tensor memory: a thread reads its row word by word, and stores it."""
    rows, _ = case.rows
    words = [f"%a{i}" for i in range(32)]
    loads = []
    for unit in range(8):
        four = ", ".join(words[4 * unit : 4 * unit + 4])
        loads.append(f"and.b32 %r17, %r16, 7; xor.b32 %r17, %r17, {unit}; shl.b32 %r17, %r17, 4;")
        loads.append("shl.b32 %r18, %r16, 7; add.s32 %r17, %r17, %r18; add.s32 %r17, %r17, %r2;")
        loads.append(f"ld.shared.v4.b32 {{{four}}}, [%r17+1024];")
    # of 64 rows alone, each warp has sixteen, or, of a pair, the upper lanes repeat the lower
    row = f"and.b32 %r16, %r0, {rows - 1};"
    if rows == 64 and not case.pair:
        row = "shr.u32 %r16, %r0, 5; shl.b32 %r16, %r16, 4; and.b32 %r17, %r0, 15;"
        row += "or.b32 %r16, %r16, %r17;"
    return f"""{row}
{" ".join(loads)}
tcgen05.st.sync.aligned.32x32b.x32.b32 [%r13], {{{", ".join(words)}}};
tcgen05.wait::st.sync.aligned;
tcgen05.fence::before_thread_sync;
barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
tcgen05.fence::after_thread_sync;"""


def operands(case: Case, seed: int) -> tuple[torch.Tensor, np.ndarray]:
    """Images of random A and B, of each CTA, and A B^T."""
    generator = torch.Generator().manual_seed(seed)
    depth, dtype = ROW // case.element, DTYPES[case.kind]
    a, b = (torch.randn(rows, depth, generator=generator).to(dtype) for rows in (case.m, case.n))
    images = []
    for cta in range(case.ctas):
        for x, transposed in ((a, False), (b, case.b_transposed)):
            images.append(_image(x.chunk(case.ctas)[cta], case.element, transposed))
    return torch.cat(images), (a.double() @ b.double().T).numpy()


def run(
    case: Case, options: Options | None = None, seed: int = 0
) -> tuple[EmulatedKernel, np.ndarray, np.ndarray]:
    """The kernel after its run, what the threads got [ctas, 128, registers], and A B^T."""
    images, expected = operands(case, seed)
    found = torch.zeros(case.ctas, 128, case.registers)
    launch = Direct((case.ctas, 1, 1), (128, 1, 1), (case.ctas, 1, 1), 1024 + 65536)
    kernel = ptx_kernel(text(case), "k", launch, options)
    kernel(images, found)
    return kernel, found.numpy(), expected
