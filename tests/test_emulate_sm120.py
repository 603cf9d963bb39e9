"""The CUDA C++ decode kernel as compiled for sm_120a, in the emulator, against the oracle."""

from __future__ import annotations

import pytest
import torch

from mla_lab.core.errors import Unsupported
from mla_lab.emulate import Options
from mla_lab.emulate.direct import Direct, ptx_kernel
from mla_lab.plan.xqa import MLA_DIMS, Rows, config_for
from mla_lab.plan.xqa import cut as xqa_cut
from mla_lab.verify import emulated_xqa
from mla_lab.verify.pairwise import allowed_pairs, pairs_of
from mla_lab.verify.published import configurations

from .needs import needs_nvcc

#: a whole library, with its binding
FORMATS = "bf16 e4m3"


def test_cases_hold_every_pair() -> None:
    cases, factors = emulated_xqa.cases(), emulated_xqa.FACTORS
    found = {pair for case in cases for pair in pairs_of(case, factors)}
    assert found == set(allowed_pairs(factors, emulated_xqa.allowed))
    assert all(emulated_xqa.allowed(case) for case in cases)


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize("pieces", ["cluster", "workspace"])
def test_sm_120a_gives_the_oracle_s_numbers(pieces: str) -> None:
    cases = (c for c in emulated_xqa.cases() if (c["formats"], c["pieces"]) == (FORMATS, pieces))
    case = next(cases) | {"heads": "5", "lengths": "long"}
    row = emulated_xqa.run_case(case, "sm_120a")
    assert row["status"] == "ok", row
    assert 0 < row["out_error"] < 0.01 and row["build"] == "cuda_xqa_kv_type2"


def test_every_published_configuration_has_a_shape_that_is_cut_as_it_says() -> None:
    shapes = emulated_xqa.shapes()
    assert len(shapes) == 24 and shapes.total() == len(configurations()) == 396
    for index, shape in enumerate(shapes):
        problem = shape.problem(index)
        pieces = [-(-length // emulated_xqa.KEYS) for length in problem.kv_lens]
        assert pieces == [shape.pieces] * problem.batch
        assert all(length % 64 for length in problem.kv_lens)
        assert problem.batch == len(set(problem.kv_lens)) == (2 if shape.q_len == 1 else 1)
        build = config_for(MLA_DIMS, (shape.dtype, shape.dtype), "sm_120a")
        cut = Rows(batch=problem.batch, kv_heads=1, rows=128 * shape.q_len, longest=8192)
        assert xqa_cut(build, cut, 512, 188, batch_invariant=False).max_splits >= 1


HEAD = ".version 9.0\n.target sm_120a\n.address_size 64\n"
#: warp 1 of each CTA writes, thread 0 counts the CTA, and warp 1 of the last one reads
LAST = """
.visible .entry k(.param .u64 a, .param .u64 b)
{{
.reg .pred %p<9>; .reg .b32 %r<9>; .reg .b64 %d<9>; .shared .align 4 .b8 last[4];
mov.u32 %r0, %tid.x; mov.u32 %r1, %ctaid.x; ld.param.u64 %d0, [a]; ld.param.u64 %d1, [b];
setp.lt.s32 %p1, %r0, 32; @%p1 bra WRITTEN;
mul.wide.u32 %d2, %r1, 4; add.s64 %d2, %d0, %d2;
setp.eq.s32 %p4, %r0, 32; @%p4 st.global.b32 [%d2+8], 7;
{fence}
WRITTEN: {fence} bar.sync 0;
setp.ne.s32 %p2, %r0, 0; @%p2 bra COUNTED;
atom.global.add.u32 %r2, [%d0], 1; {fence} st.shared.b32 [last], %r2;
COUNTED: bar.sync 0;
ld.shared.b32 %r2, [last]; setp.ne.s32 %p3, %r2, 1; @%p3 bra DONE;
setp.ne.s32 %p5, %r0, 33; @%p5 bra DONE;
ld.global.b32 %r3, [%d0+8]; ld.global.b32 %r4, [%d0+12]; add.s32 %r3, %r3, %r4;
st.global.b32 [%d1], %r3;
DONE: ret;
}}
"""


@pytest.mark.parametrize(
    ("fence", "found"),
    [("membar.gl;", 0), ("fence.sc.gpu;", 0), ("fence.acq_rel.gpu;", 1), ("", 1)],
)
def test_the_last_cta_reads_what_others_wrote_before_a_strong_fence(fence: str, found: int) -> None:
    counter, out = torch.zeros(8, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    launch = Direct((2, 1, 1), (64, 1, 1))
    kernel = ptx_kernel(HEAD + LAST.format(fence=fence), "k", launch, Options(check=True))
    kernel(counter, out)
    assert out.item() == 14
    assert [f.kind for f in kernel.run.findings] == ["race"] * found


def test_members_of_a_struct_that_nobody_uses_are_not_read() -> None:
    body = """.visible .entry k(.param .u64 a)
    {{ .reg .b32 %r<9>; .reg .b64 %d<9>; .shared .align 16 .b8 s[16];
    mov.b32 %r1, 5; st.shared.v2.b32 [s], {{%r1, %r1}}; bar.warp.sync -1;
    ld.shared.v4.b32 {{%r2, %r3, %r4, %r5}}, [s]; ld.param.u64 %d0, [a];
    st.global.b32 [%d0], {used}; ret; }}"""
    for used, count in (("%r3", 0), ("%r4", 1)):
        kernel = ptx_kernel(HEAD + body.format(used=used), "k", Direct(), Options(check=True))
        kernel(torch.zeros(1, dtype=torch.int32))
        assert [f.kind for f in kernel.run.findings if f.kind != "race"] == ["unwritten"] * count


def test_an_opcode_of_other_matrix_units_is_refused() -> None:
    text = f"{HEAD}.visible .entry k()\n{{ .reg .b32 %r<9>; tcgen05.cp.cta_group::1 [%r1], 0; }}"
    with pytest.raises(Unsupported, match=r"tcgen05\.cp"):
        ptx_kernel(text, "k", Direct())
