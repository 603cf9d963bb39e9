"""X-ray: opcodes, listings, PTX, differences, and a kernel that spills."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from mla_lab import jit, xray
from mla_lab.cli.commands import xray as command
from mla_lab.core.errors import BuildError, InvalidInput, Unsupported
from mla_lab.jit.cubin import KernelResources, read_resources
from mla_lab.jit.toolchain import nvidia_file
from mla_lab.plan.config import KernelConfig
from mla_lab.xray import opcodes, report, roles, sass

from .needs import needs_nvcc

needs_sass = pytest.mark.skipif(sass.find_nvdisasm() is None, reason="needs nvdisasm")

SPILLING = """
extern "C" __global__ void __launch_bounds__(1024, 2) spill(float* x, int n) {
  float kept[96];
#pragma unroll
  for (int i = 0; i < 96; ++i) kept[i] = x[i * n + threadIdx.x];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 96; ++i) x[i * n + threadIdx.x] = kept[95 - i] * kept[i] + kept[(7 * i) % 96];
}
"""

LISTING = """
.text.one:
	//## File "/src/a.cu", line 7
        /*0000*/                   LDC R1, c[0x0][0x28] ;
	//## File "/src/b.h", line 3 inlined at "/src/a.cu", line 9
        /*0010*/              @!P0 HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24 ;
.L_x_1:
        /*0020*/             @UP0  UTMALDG.4D [UR8], [UR4] ;
.text.two:
        /*0000*/                   EXIT ;
"""


#: lines of the SM100 kernel's, and of its e4m3 build's, as nvdisasm 13.0 prints them
BLACKWELL = """
.text.mla:
        /*ef80*/                   UTCATOMSWS.2CTA.FIND_AND_SET.ALIGN UP0, UR4, UR4 ;
        /*fd20*/                   LDTM.x64 R4, tmem[UR4] ;
        /*117d0*/                   LDTM.x32 R4, tmem[UR4+0x80] ;
        /*119f0*/                   STTM.x32 tmem[UR4+0x80], R4 ;
        /*14320*/                   UTCQMMA.2CTA gdesc[UR34], gdesc[UR30], tmem[UR4], tmem[UR20], idesc[UR21], !UPT ;
        /*14c90*/                   UTCHMMA.2CTA gdesc[UR42], gdesc[UR34], tmem[UR4], tmem[UR16], idesc[UR17], !UPT ;
        /*14ca0*/              @P1 UTCHMMA.2CTA gdesc[UR44], gdesc[UR36], tmem[UR4], tmem[UR16], idesc[UR17], UPT ;
        /*15590*/                   UTCBAR.2CTA.MULTICAST [UR5], URZ, UR4 ;
        /*1bf20*/                   UTMALDG.3D [UR72], [UR4], desc[URZ] ;
        /*1c0f0*/                   UTMALDG.5D [UR16], [UR4], desc[UR6] ;
"""  # noqa: E501


@pytest.mark.parametrize(
    ("opcode", "kind"),
    [
        ("HGMMA.64x256x16.F32.BF16", "matrix"),
        ("QGMMA.64x64x32.F32.E4M3.E4M3", "matrix"),
        ("UTCHMMA.2CTA", "matrix"),
        ("UTCQMMA", "matrix"),
        ("LDTM.x64", "tensor memory"),
        ("UTCBAR.2CTA.MULTICAST", "tensor memory"),
        ("HMMA.16816.F32", "matrix"),
        ("UTMALDG.4D.MULTICAST", "tma"),
        ("UBLKCP.S.G", "tma"),
        ("LDL.LU", "local"),
        ("STL.64", "local"),
        ("LDSM.16.MT88.4", "shared"),
        ("STS.128", "shared"),
        ("STAS.128", "shared"),
        ("LDG.E.128", "global"),
        ("STG.E", "global"),
        ("REDG.E.ADD.STRONG.GPU", "global"),
        ("SYNCS.PHASECHK.TRANS64.TRYWAIT", "barrier"),
        ("BAR.SYNC.DEFER_BLOCKING", "barrier"),
        ("ARRIVES.LDGSTSBAR.64", "barrier"),
        ("LDGDEPBAR", "barrier"),
        ("MUFU.EX2", "special function"),
        ("REDUX.SUM.S32", "shuffle"),
        ("LDGSTS.E.BYPASS.128", "shared"),
        ("USETMAXREG.DEALLOC.CTAPOOL", "register file"),
        ("FFMA", "other"),
        ("STRANGE", "other"),
    ],
)
def test_sass_classes(opcode: str, kind: str) -> None:
    assert opcodes.sass_class(opcode) == kind


@pytest.mark.parametrize(
    ("opcode", "kind"),
    [
        ("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16", "matrix"),
        ("tcgen05.mma.cta_group::1.kind::f16", "matrix"),
        ("tcgen05.ld.sync.aligned.32x32b.x64.b32", "tensor memory"),
        ("tcgen05.dealloc.cta_group::2.sync.aligned.b32", "tensor memory"),
        ("tcgen05.commit.cta_group::2.mbarrier::arrive::one", "barrier"),
        ("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier", "tma"),
        ("ld.local.f32", "local"),
        ("st.shared.v4.b32", "shared"),
        ("ld.relaxed.gpu.global.L2::cache_hint.b32", "global"),
        ("ld.acquire.gpu.global.b32", "global"),
        ("st.release.gpu.global.b32", "global"),
        ("ld.volatile.shared.u32", "shared"),
        ("red.release.gpu.global.inc.u32", "global"),
        ("redux.sync.max.s32", "shuffle"),
        ("cp.async.cg.shared.global.L2::128B", "shared"),
        ("cp.async.mbarrier.arrive.noinc.shared.b64", "barrier"),
        ("cp.async.commit_group", "barrier"),
        ("cp.async.wait_group", "barrier"),
        ("mbarrier.try_wait.parity.shared.b64", "barrier"),
        ("wgmma.fence.sync.aligned", "barrier"),
        ("ex2.approx.ftz.f32", "special function"),
        ("setmaxnreg.inc.sync.aligned.u32", "register file"),
        ("add.f32", "other"),
    ],
)
def test_ptx_classes(opcode: str, kind: str) -> None:
    assert opcodes.ptx_class(opcode) == kind


def test_a_listing_becomes_instructions_with_their_lines() -> None:
    kernels = sass.parse(LISTING)
    assert list(kernels) == ["one", "two"]
    ldc, hgmma, tma = kernels["one"]
    assert (ldc.address, ldc.opcode, ldc.source) == (0, "LDC", ("/src/a.cu", 7))
    assert (hgmma.predicate, hgmma.kind, hgmma.source) == ("@!P0", "matrix", ("/src/b.h", 3))
    assert (tma.opcode, tma.operands, tma.address) == ("UTMALDG.4D", "[UR8], [UR4]", 0x20)
    assert kernels["two"][0].source is None


def test_a_blackwell_kernel_shows_its_matrix_tma_and_tensor_memory_opcodes() -> None:
    resources = KernelResources("mla", 219, 0, 1024, 3, 231424, (256, 1, 1))
    code = tuple(sass.parse(BLACKWELL)["mla"])
    kernel = xray.KernelReport("mla", resources, code, Counter())
    counts = {name: kernel.count(name) for name in ("UTCHMMA", "UTCQMMA", "LDTM", "UTMALDG")}
    assert counts == {"UTCHMMA": 2, "UTCQMMA": 1, "LDTM": 2, "UTMALDG": 2}
    assert kernel.classes == {"matrix": 3, "tma": 2, "tensor memory": 5} and kernel.spills == 0
    artifact = jit.Artifact(KernelConfig("cute/mla_sm100"), "sm_100a", Path(), (), (), (), {})
    shown = [line.split() for line in xray.render(xray.Report(artifact, (kernel,))).splitlines()]
    for line in (["2", "UTCHMMA.2CTA"], ["1", "LDTM.x64"], ["1", "STTM.x32"], ["1", "UTMALDG.5D"]):
        assert line in shown
    assert ["5", "tensor", "memory"] in shown


#: warp 0 takes the softmax in a loop, warp 1 multiplies, the others load; then all merge
ROLES = """
.text.roles:
        /*0000*/                   S2R R9, SR_TID.X ;
        /*0010*/              @P0  BRA `(.L_x_1) ;
.L_x_0:
        /*0020*/                   LDTM.x32 R10, tmem[UR4] ;
        /*0030*/                   FADD R11, R10, R12 ;
        /*0040*/              @P1  BRA `(.L_x_0) ;
        /*0050*/                   BRA `(.L_x_3) ;
.L_x_1:
        /*0060*/              @P2  BRA `(.L_x_2) ;
        /*0070*/                   IADD3 R1, R2, R3, RZ ;
        /*0080*/                   BRA.U UP0, `(.L_x_4) ;
        /*0090*/                   UTCHMMA.2CTA gdesc[UR42], gdesc[UR34], tmem[UR4] ;
.L_x_4:
        /*00a0*/                   BRA `(.L_x_3) ;
.L_x_2:
        /*00b0*/                   UTMALDG.5D [UR16], [UR4], desc[UR6] ;
.L_x_3:
        /*00c0*/                   FADD R20, R21, R9 ;
        /*00d0*/                   EXIT ;
"""


def test_serialized_mmas_are_seen() -> None:
    """An arrive and a wait for each of many, as ptxas makes them where registers do not suffice:
    80 e4m3 MMAs had 160 such instructions, and have 28. A loop over one may well have two."""
    assert xray.serializes({"QGMMA.64x64x32": 80, "WARPGROUP.ARRIVE": 80, "WARPGROUP.DEPBAR": 80})
    assert not xray.serializes({"QGMMA": 80, "WARPGROUP": 28})
    assert not xray.serializes({"HGMMA": 1, "WARPGROUP": 2})
    resources = KernelResources("attend", 168, 0, 1024, 3, 231424, (512, 1, 1))
    lines = ("WARPGROUP.ARRIVE", "QGMMA.64x64x32.F32.E4M3.E4M3 R24, R108, gdesc[UR8], R24, gsb0")
    step = [*lines, "WARPGROUP.DEPBAR.LE gsb0, 0x0"]
    listed = (f"        /*{16 * n:04x}*/  {line} ;" for n, line in enumerate(step * 8))
    code = tuple(sass.parse("\n".join((".text.attend:", *listed)))["attend"])
    kernel = xray.KernelReport("attend", resources, code, Counter())
    artifact = jit.Artifact(KernelConfig("cute/keep_ab_sm90"), "sm_90a", Path(), (), (), (), {})
    assert kernel.count("QGMMA") == 8
    assert "MMAS SERIALIZED" in xray.render(xray.Report(artifact, (kernel,)))


def test_roles_are_what_one_branch_leads_to() -> None:
    found = roles.roles(sass.parse(ROLES)["roles"])
    assert [(r.name, r.instructions, r.registers) for r in found] == [
        ("MMA", 4, 3),
        ("producer", 1, 0),
        ("softmax", 4, 3),
        ("shared", 5, 3),
    ]
    assert roles.roles(sass.parse(BLACKWELL)["mla"]) == ()
    assert roles.roles(sass.parse(LISTING)["one"]) == roles.roles([]) == ()


def test_ptx_is_counted_by_kernel() -> None:
    text = """
.visible .entry one(
	.param .u64 p
)
{
	.reg .f32 %f<3>;
	ld.global.f32 %f1, [%rd1];
	@%p1 bra $L__BB0_2;
	wgmma.fence.sync.aligned;
	ret;
}
.entry two()
{
	ret;
}
"""
    counts = opcodes.ptx_opcodes(text)
    assert counts["one"] == {"ld.global.f32": 1, "bra": 1, "wgmma.fence.sync.aligned": 1, "ret": 1}
    assert opcodes.ptx_class_counts(counts["one"]) == {"global": 1, "barrier": 1, "other": 2}
    assert counts["two"] == {"ret": 1}


def fake(registers: int, codes: list[str]) -> xray.KernelReport:
    code = tuple(xray.Instruction(16 * i, c, "", "", None) for i, c in enumerate(codes))
    resources = KernelResources("k", registers, 0, 0, 1, 1024, (128, 1, 1))
    return xray.KernelReport("k", resources, code, Counter())


def test_a_difference_names_what_moved() -> None:
    before = fake(128, ["HGMMA.64x64x16", "HGMMA.64x64x16", "FADD"])
    after = fake(168, ["HGMMA.64x64x16", "FADD", "LDL"])
    changes = [(c.fact, c.before, c.after) for c in xray.compare(before, after)]
    assert changes == [("registers", 128, 168), ("HGMMA.64x64x16", 2, 1), ("LDL", 0, 1)]
    assert (before.spills, after.spills) == (0, 1)
    assert before.count("HGMMA") == 2
    assert xray.compare(before, before) == []
    assert "+40" in xray.render_changes(xray.compare(before, after))
    assert "no difference" in xray.render_changes([])


@pytest.fixture(scope="module")
def planner() -> jit.Artifact:
    return jit.compile(KernelConfig("cuda/planner"), progress=lambda _: None)


@needs_nvcc
@needs_sass
def test_a_kernel_seen_through(planner: jit.Artifact) -> None:
    seen = xray.inspect(planner)
    names = [kernel.name for kernel in seen.kernels]
    assert names == ["mla::planner::plan_kernel"]
    for kernel in seen.kernels:
        assert kernel.classes["global"] > 0 and kernel.classes["special function"] > 0
        assert kernel.classes.total() == len(kernel.instructions)
        assert {Path(i.source[0]).name for i in kernel.instructions if i.source} >= {"plan.h"}
    text = xray.render(seen)
    assert "cuda_planner for sm_90a" in text and "MUFU.RCP" in text
    assert all(k.code_bytes == 16 * len(k.instructions) for k in seen.kernels)
    assert f"machine code {seen.kernels[0].code_bytes:,} B" in text and "beyond" not in text
    listing = xray.render_sass(seen.kernels[0], frozenset({"special function"}))
    assert "planner.cu:" in listing and "MUFU" in listing and "LDG" not in listing


@needs_nvcc
def test_without_a_disassembler_ptx_remains(
    planner: jit.Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sass, "find_nvdisasm", lambda: None)
    seen = xray.inspect(planner)
    assert not seen.has_sass
    assert seen.kernels[0].classes["global"] > 0
    assert seen.kernels[0].spills == 0
    assert "counts are PTX" in xray.render(seen)
    assert ".entry" in seen.ptx()
    with pytest.raises(Unsupported, match="nvidia-cuda-nvdisasm"):
        sass.disassemble(planner.cubin)


@needs_sass
def test_a_file_that_is_no_cubin(tmp_path: Path) -> None:
    (tmp_path / "x.cubin").write_bytes(b"nothing")
    with pytest.raises(BuildError, match="nvdisasm: could not read"):
        sass.disassemble(tmp_path / "x.cubin")


@pytest.fixture(scope="module")
def spilling(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("spill")
    (folder / "spill.cu").write_text(SPILLING)
    cubin = folder / "spill.cubin"
    subprocess.run(
        ["nvcc", "-cubin", "-arch=sm_90a", "-o", str(cubin), str(folder / "spill.cu")], check=True
    )
    return cubin


@needs_nvcc
def test_a_spilling_kernel_is_seen(spilling: Path) -> None:
    (resources,) = read_resources(spilling.read_bytes())
    assert resources.stack > 0
    without = xray.KernelReport("spill", resources, (), Counter())
    assert without.spills > 0
    if sass.find_nvdisasm():
        code = tuple(sass.disassemble(spilling)["spill"])
        assert xray.KernelReport("spill", resources, code, Counter()).spills > 90


@needs_nvcc
def test_resources_agree_with_cuobjdump(planner: jit.Artifact, spilling: Path) -> None:
    tool = nvidia_file("cu*/bin/cuobjdump")
    if tool is None:
        pytest.skip("needs cuobjdump")
    empty = jit.compile(KernelConfig("cute/empty"), progress=lambda _: None)
    for cubin in (planner.cubin, spilling, empty.cubin):
        done = subprocess.run(
            [str(tool), "-res-usage", str(cubin)], capture_output=True, text=True, check=True
        )
        theirs = dict(re.findall(r"Function (\S+):\s+(REG:\d+ STACK:\d+ SHARED:\d+)", done.stdout))
        ours = {
            r.kernel: f"REG:{r.registers} STACK:{r.stack} SHARED:{r.static_shared}"
            for r in read_resources(cubin.read_bytes())
        }
        assert ours == theirs


@needs_nvcc
def test_the_command_prints_reports_and_differences(
    capsys: pytest.CaptureFixture[str],
) -> None:
    import argparse

    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    args = ["xray", "--kernel", "cute/empty"]
    assert command.run(parser.parse_args([*args, "--diff", "page_size=32"])) == 0
    text = capsys.readouterr().out
    assert "block 32x1x1" in text and "cute_empty -> cute_empty_page_size-32" in text
    assert "no difference" in text
    with pytest.raises(InvalidInput, match="got None; supported: one kernel, with --diff"):
        command.run(parser.parse_args(["xray", "--diff", "page_size=32"]))
    assert command.run(parser.parse_args([*args, "--ptx"])) == 0
    assert ".target sm_90a" in capsys.readouterr().out


def test_names_are_readable() -> None:
    assert report.short_name("kernel_cutlass_decode_tensorptrbf16gmem_0") == "decode"
    assert report.short_name("plain") == "plain"
