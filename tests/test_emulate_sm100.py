"""tcgen05 in the emulator: layouts against CuTe's algebra, numbers against torch, and checks."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mla_lab.core.errors import InvalidInput, Unsupported
from mla_lab.emulate import Fault, Options, mutate
from mla_lab.emulate.direct import Direct, ptx_kernel
from mla_lab.emulate.ptx import Place
from mla_lab.emulate.tcgen05 import Issued, Multiply, shape_of
from mla_lab.emulate.tensor_memory import SHAPES, places_of

from .sm100_kernel import HEAD, Case, operands, run, text
from .sm100_layouts import LAYOUTS, N

CHECKED = Options(numbers="exact", check=True, strict=True)


@pytest.fixture(scope="module")
def cute_layouts() -> dict[str, Any]:
    """What CuTe says, in a process of its own: one process has one target architecture."""
    pytest.importorskip("cutlass")
    command = [sys.executable, str(Path(__file__).with_name("sm100_layouts.py"))]
    environment = os.environ | {"CUTE_DSL_ARCH": "sm_100a"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("repeat", [1, 4])
def test_registers_of_a_load_are_where_cute_has_them(
    cute_layouts: dict[str, Any], shape: str, repeat: int
) -> None:
    registers = SHAPES[shape][1] * repeat
    lanes, columns = places_of(shape, registers, registers)
    width = int(columns.max()) + 1
    assert np.array_equal((lanes * width + columns).T, cute_layouts[f"{shape}.x{repeat}"])


@pytest.mark.parametrize(("pair", "m"), LAYOUTS)
def test_accumulators_are_where_cute_has_them(
    cute_layouts: dict[str, Any], pair: bool, m: int
) -> None:
    descriptor = Case(m=m, n=N, pair=pair).descriptor
    shape = shape_of(descriptor, "f16", pair)
    issued = Issued(Multiply("f16", pair, False, 0), shape, [], 0, 0, 0, False, 0)
    rows = m // 2 if pair else m
    found = np.zeros((rows, N), np.int64)
    for part in issued.parts():
        lanes = np.arange(128)[part.lanes][:, None] << 16
        found[:, part.first : part.last] = lanes + np.arange(part.last - part.first)
    assert np.array_equal(found, cute_layouts[f"C {pair} {m}"])


def matrix(case: Case, found: np.ndarray) -> np.ndarray:
    """What threads loaded as the product's rows and columns."""
    if case.shape != "32x32b":
        count = case.registers // 2
        lanes, columns = places_of(case.shape, count, count)
        tiles = np.zeros((case.ctas, 4, 2, 16, case.columns), np.float32)
        tiles[:, :, :, lanes.T, columns.T] = (
            found.reshape(case.ctas, 4, 32, 2, count).transpose(0, 1, 3, 2, 4)
        )  # fmt: skip
        found = tiles.reshape(case.ctas, 128, case.columns)
    if case.m == 64:
        return found[0].reshape(4, 32, -1)[:, :16].reshape(64, -1)
    if case.pair and case.m == 128:
        return np.concatenate([np.concatenate([f[:64], f[64:]], 1) for f in found])
    return found.reshape(-1, found.shape[-1])


@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(kind="f16", b_transposed=True),
        Case(kind="e4m3", n=16),
        Case(pair=True),
        Case(pair=True, m=256, kind="e4m3"),
        Case(a_in_tensor=True),
        Case(a_in_tensor=True, pair=True),
        Case(a_in_tensor=True, pair=True, m=256),
        *(Case(shape=shape) for shape in SHAPES if shape != "32x32b"),
    ],
    ids=str,
)
@pytest.mark.parametrize("schedule", ["fair", "adverse"])
def test_products(case: Case, schedule: str) -> None:
    options = Options(numbers="exact", check=True, strict=True, schedule=schedule, seed=3)
    kernel, found, expected = run(case, options)
    assert [str(f) for f in kernel.run.findings] == []
    assert np.abs(matrix(case, found) - expected).max() < 1e-5


@pytest.mark.parametrize("a_in_tensor", [False, True])
def test_64_rows_use_half_of_the_lanes(a_in_tensor: bool) -> None:
    case = Case(m=64, a_in_tensor=a_in_tensor)
    kernel, found, expected = run(case, CHECKED)
    assert np.abs(matrix(case, found) - expected).max() < 1e-5
    assert [f.text for f in kernel.run.findings] == [
        "lane 16, column 0 of tensor memory, which nobody has written, is read"
    ]


def test_a_trace_shows_the_tensor_core_before_what_waits_for_it() -> None:
    kernel, _, _ = run(Case(pair=True, n=256), Options(trace=True))
    assert kernel.run.recorder is not None
    events = kernel.run.recorder.events
    [core] = [e for e in events if e.track == "tensor core"]
    assert core.name == "4 tcgen05.mma" and core.end - core.begin == 128 * 256 * 64 // 2 // 8192
    waits = [e for e in events if e.kind == "wait" and "mbarrier" in e.name]
    assert len(waits) == 8 and {e.end for e in waits} == {core.end}


def test_a_debugger_shows_tensor_memory() -> None:
    case = Case()
    launch = Direct((1, 1, 1), (128, 1, 1), (1, 1, 1), 66560)
    _, _, expected = run(case)
    debugger = ptx_kernel(text(case), "k", launch).debug(operands(case, 0)[0], torch.zeros(1))
    allocated = debugger.run_to(lambda g: bool(g.cta.tensor and g.cta.tensor.blocks))
    assert allocated is not None and np.isnan(debugger.tensor_memory(0, 64)).all()
    done = debugger.run_to(lambda g: not np.isnan(debugger.tensor_memory(0, 64)).any())
    assert done is not None and np.abs(debugger.tensor_memory(0, 64) - expected).max() < 1e-4
    with pytest.raises(InvalidInput, match="kind, columns"):
        debugger.tensor_memory(500, 64)


def test_products_are_wide_and_all_numbers_agree_on_e4m3() -> None:
    case = Case(kind="e4m3", n=128)
    results = [run(case, Options(numbers=numbers))[1] for numbers in ("exact", "card", "fast")]
    assert np.array_equal(results[0], results[1])
    assert np.abs(results[0] - results[2]).max() < 1e-4


COMMIT = "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%r2];"
WAIT = "mbarrier.try_wait.parity.shared.b64 %p4, [%r2], 0; @!%p4 bra ISSUED;"
MMA = "tcgen05.mma.cta_group::1.kind::f16 [%r10], %d5, %d6"


@pytest.mark.parametrize(
    ("old", "new", "kind", "message"),
    [
        ("fence.proxy.async.shared::cta;", "", "proxy fence", "no fence.proxy.async between"),
        (WAIT, "mov.pred %p4, 1;", "race", "this load and a product of warp 0 of CTA 0,0,0"),
        ("tcgen05.wait::ld.sync.aligned;", "", "in flight", "belongs to a load that has not been"),
        ("tcgen05.wait::ld.sync.aligned;", "", "tcgen05 wait",
         "no tcgen05.wait::ld between a tcgen05.ld of warp 0 of CTA 0,0,0 and this deallocation"),
        ("tcgen05.fence::after_thread_sync;\nadd", "add", "tcgen05 fence",
         "no tcgen05.fence between a product of warp 0 of CTA 0,0,0 and this load"),
        ("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r10, 256;", "", "open at exit",
         "columns of tensor memory from 0 on were never deallocated"),
        (f"{COMMIT}\n", f"{COMMIT} {MMA}, {Case().descriptor}, 1;", "open at exit",
         "a product that nobody committed"),
        (f"{Case().descriptor}, 0;", f"{Case().descriptor}, 1;", "unwritten",
         "of tensor memory, which nobody has written, is added to"),
        ("st.shared.b32 [%r4+1024], %r5;", "", "unwritten", "which nobody has written, is read"),
    ],
)  # fmt: skip
def test_what_checks_report(old: str, new: str, kind: str, message: str) -> None:
    case = Case(changes=((old, new),))
    kernel, _, _ = run(case, CHECKED)
    found = [f for f in kernel.run.findings if f.kind == kind]
    assert found, kernel.run.findings
    assert any(message in f.text for f in found), found


def test_a_store_to_tensor_memory_needs_its_wait() -> None:
    wait = "tcgen05.wait::st.sync.aligned;"
    kernel, _, _ = run(Case(a_in_tensor=True, changes=((wait, ""),)), CHECKED)
    text = "no tcgen05.wait::st between a tcgen05.st of warp 0 of CTA 0,0,0 and this product"
    found = kernel.run.findings[0]
    assert found.kind == "tcgen05 wait" and found.text.startswith(text), kernel.run.findings


def test_a_warp_that_reads_early_gets_what_was_there() -> None:
    case = Case(changes=((WAIT, "mov.pred %p4, 1;"),))
    _, late, expected = run(case, Options(schedule="late"))
    assert not np.abs(late[0] - expected).max() < 1e-3


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[%r2+16], 256;", "[%r2+16], 96;", "an allocation of 96 columns"),
        ("add.s32 %r14, %r10, %r11;", "add.s32 %r14, %r10, 0;",
         "lane 0 of tensor memory: this warp may touch lanes 32 to 63"),
        ("add.s32 %r14, %r10, %r11;", "add.s32 %r14, %r10, %r11; add.s32 %r14, %r14, 200;",
         "columns 200 to 263 of tensor memory; allocated are 0 to 255"),
        (".b32 %r10, 256;", ".b32 %r10, 128;", "no allocation of 128 columns at 0"),
        ("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;",
         "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;"
         "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r2+16], 64;",
         "an allocation behind relinquish_alloc_permit"),
    ],
)  # fmt: skip
def test_what_ends_a_run(old: str, new: str, message: str) -> None:
    with pytest.raises(Fault, match=message):
        run(Case(changes=((old, new),)))


def test_an_allocation_waits_for_free_columns() -> None:
    alloc = "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r2+16], 256;"
    more = alloc * 3
    with pytest.raises(Fault, match="deadlock") as error:
        run(Case(changes=((alloc, more),)))
    assert "tcgen05.alloc" in str(error.value.finding.others)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("kind::f16", "kind::tf32", "kinds f16 and f8f6f4"),
        (f"{Case().descriptor}, 0;", f"{Case().descriptor | 1 << 13}, 0;", "dense f16, bf16"),
        ("tcgen05.ld.sync.aligned.32x32b.x64.b32", "tcgen05.ld.sync.aligned.32x32b.x32.b32",
         "32 registers of 32 bits"),
    ],
)  # fmt: skip
def test_what_is_refused(old: str, new: str, message: str) -> None:
    with pytest.raises(Unsupported, match=message):
        run(Case(changes=((old, new),)))


def test_the_line_of_a_finding_is_the_source_line() -> None:
    loaded = "tcgen05.wait::ld.sync.aligned;"
    source = text(Case(changes=((loaded, ""), ("%p3 bra FREED;", "%p3 bra FREED; .loc 1 71 0"))))
    source += '\n.file 1 "/x/mla_lab/y.py"\n'
    images = torch.zeros((128 + 64) * 128, dtype=torch.uint8)
    kernel = ptx_kernel(source, "k", Direct((1, 1, 1), (128, 1, 1), (1, 1, 1), 66560), CHECKED)
    kernel(images, torch.zeros(1, 128, 64))
    found = next(f for f in kernel.run.findings if f.kind == "tcgen05 wait")
    assert found.place == Place("mla_lab/y.py", 71)


PAIR_COPY = """
.visible .entry k(.param .u64 a, .param .u64 map, .param .u64 b)
{
.reg .pred %p<9>; .reg .b16 %h<9>; .reg .b32 %r<20>; .reg .b64 %d<9>;
mov.u32 %r0, %tid.x; mov.u32 %r1, %cluster_ctarank; mov.u32 %r2, smem; mov.b16 %h1, 3;
and.b32 %r3, %r2, 0xFEFFFFFF;
setp.ne.s32 %p1, %r0, 0; @%p1 bra MADE;
mbarrier.init.shared.b64 [%r2], 1; fence.mbarrier_init.release.cluster;
MADE: barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
shl.b32 %r4, %r1, 5; or.b32 %r4, %r4, %r0; setp.ne.s32 %p2, %r4, FIRST;
@%p2 bra ISSUED;
ld.param.u64 %d1, [map];
mbarrier.arrive.expect_tx.shared::cluster.b64 _, [%r3], 1024;
cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes\
.multicast::cluster.cta_group::2 [%r2+1024], [%d1, {0, 0}], [%r3], %h1;
ISSUED: setp.ne.s32 %p3, %r1, 0; @%p3 bra LANDED;
WAIT: mbarrier.try_wait.parity.shared.b64 %p4, [%r2], 0; @!%p4 bra WAIT;
LANDED: barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
shl.b32 %r5, %r0, 4; add.s32 %r6, %r2, %r5;
ld.shared.v4.b32 {%r7, %r8, %r9, %r10}, [%r6+1024];
shl.b32 %r11, %r1, 9; add.s32 %r5, %r5, %r11; cvt.u64.u32 %d2, %r5;
ld.param.u64 %d0, [b]; add.s64 %d0, %d0, %d2; st.global.v4.b32 [%d0], {%r7, %r8, %r9, %r10};
ret;
}"""


@pytest.mark.parametrize("issuer", [0, 1])
def test_one_barrier_counts_a_copy_to_both_ctas_of_a_pair(issuer: int) -> None:
    data = torch.arange(512).to(torch.uint8).view(8, 64)
    # a map of bytes: rank 2, rows of 64 bytes, boxes of all; the first argument lies at 256
    words = [256, 1 << 8, 1 << 4, 4, 0, 0, 0, 0, 63, 7, 0, 0, 0, 63 << 24, 7, *[0] * 17]
    raw = torch.frombuffer(bytearray(struct.pack("<32I", *words)), dtype=torch.uint8)
    out = torch.zeros(2, 512, dtype=torch.uint8)
    launch = Direct((2, 1, 1), (32, 1, 1), (2, 1, 1), 4096)
    source = HEAD + PAIR_COPY.replace("\\\n", "").replace("FIRST", str(32 * issuer))
    kernel = ptx_kernel(source, "k", launch, Options(check=True))
    kernel(data, raw, out)
    assert torch.equal(out, data.view(1, 512).expand(2, 512))
    assert [str(f) for f in kernel.run.findings] == []


def test_pairs_of_floats() -> None:
    body = """
    mov.u32 %r0, %tid.x; mul.wide.u32 %d2, %r0, 8; ld.param.u64 %d0, [a]; add.s64 %d0, %d0, %d2;
    ld.global.b64 %d3, [%d0]; mul.rn.f32x2 %d4, %d3, %d3; add.rn.f32x2 %d4, %d4, %d3;
    fma.rn.f32x2 %d4, %d4, %d3, %d3;
    ld.param.u64 %d1, [b]; add.s64 %d1, %d1, %d2; st.global.b64 [%d1], %d4; ret;"""
    regs = ".reg .b32 %r<9>; .reg .b64 %d<9>;"
    source = f"{HEAD}\n.visible .entry k(.param .u64 a, .param .u64 b)\n{{\n{regs}\n{body}\n}}\n"
    x, out = torch.randn(32, 2), torch.zeros(32, 2)
    ptx_kernel(source, "k", Direct())(x, out)
    y = x * x + x
    assert torch.equal(out, (y.double() * x + x).float())


def test_either_of_two_fences_may_go() -> None:
    fence = "tcgen05.fence::after_thread_sync;\n"
    case = Case(changes=((f"{fence}add", f"{fence}{fence}add"),))
    launch = Direct((1, 1, 1), (128, 1, 1), (1, 1, 1), 66560)
    kernel, out = ptx_kernel(text(case), "k", launch), torch.zeros(1, 128, case.registers)
    call = SimpleNamespace(args=(operands(case, 0)[0], out), written=(out,), results=(out,))
    fences = [m for m in mutate.mutants(kernel, call) if "after_thread_sync" in m.text]
    done = [m.noticed for m in mutate.prove(kernel, [call], fences, strict=True)]
    assert done.count(mutate.IDLE) == 2 and set(done) == {mutate.IDLE, "tcgen05 fence"}
    kernel = ptx_kernel(text(Case()), "k", launch)
    single = [m for m in mutate.mutants(kernel, call) if "after_thread_sync" in m.text]
    done = [m.noticed for m in mutate.prove(kernel, [call], single, strict=True)]
    assert len(single) == len(fences) - 1 and set(done) == {"tcgen05 fence"}
