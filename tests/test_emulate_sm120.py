"""The CUDA C++ decode kernel as compiled for sm_120a, in the emulator, against the oracle."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mla_lab import jit
from mla_lab.backends.cuda import xqa
from mla_lab.call.workspace import Workspace
from mla_lab.core.errors import InvalidInput, Unsupported
from mla_lab.core.problem import Problem
from mla_lab.emulate import EmulatedKernel, Options
from mla_lab.emulate.direct import Direct, ptx_kernel
from mla_lab.emulate.host import DeviceTensor
from mla_lab.plan.xqa import MLA_DIMS, Cuts, Rows, config_for
from mla_lab.plan.xqa import cut as xqa_cut
from mla_lab.reference.gqa import decode_gqa_reference
from mla_lab.reference.inputs import DecodeInputs, make_inputs
from mla_lab.reference.inputs_gqa import GqaInputs, GqaShape, make_gqa_inputs
from mla_lab.reference.mla import decode_reference
from mla_lab.reference.tolerance import lse_error, rel_error
from mla_lab.verify import emulated_xqa
from mla_lab.verify.pairwise import allowed_pairs, pairs_of
from mla_lab.verify.published import configurations

from .needs import needs_nvcc, needs_time
from .xqa_abi import NAMES

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


CPU = torch.device("cpu")
ARCH = "sm_120a"
#: DLPack's codes and bits
BF16, FLOAT, INT, UINT = (4, 16), (2, 32), (0, 32), (1, 16)
KINDS = ("mla", "gqa")
Inputs = DecodeInputs | GqaInputs


def inputs_of(kind: str, q_lens: tuple[int, ...], kv_lens: tuple[int, ...], *names: str) -> Inputs:
    """Poisoned inputs of four heads in pages of 16."""
    if kind == "gqa":
        return make_gqa_inputs(GqaShape(q_lens, kv_lens, 4, 2, page_size=16), 1, names)
    problem = Problem(q_lens, kv_lens, 4, kv_format="e4m3", page_size=16)
    return make_inputs(problem, 1, names, workspace_bytes=64)


def launched(
    monkeypatch: pytest.MonkeyPatch, inputs: Inputs, q_len: int, most: int = 1, window: int = -1
) -> tuple[Tensor, Tensor]:
    """out and lse of a launch for `q_len` query tokens a request, in `most` pieces of 64 keys. Rows
    around them stay as they were."""
    mla = isinstance(inputs, DecodeInputs)
    dims, formats = (MLA_DIMS, ("bf16", "e4m3")) if mla else ((128, 128), ("bf16", "bf16"))
    config = config_for(dims, formats, ARCH)
    emulated = EmulatedKernel.of(jit.compile(config, ARCH), Options(check=True))

    class Kernel:
        launch = staticmethod(emulated)

    monkeypatch.setattr(xqa, "kernel", lambda config, device: Kernel)
    keys, values = (inputs.kv_cache, inputs.kv_cache) if mla else inputs.kv_cache
    tokens = inputs.query.view(-1, *inputs.query.shape[-2:]).shape[0]
    room = torch.full((3 * tokens, 4, dims[1]), 7.0, dtype=torch.bfloat16)
    room_of_lse = torch.full((3 * tokens, 4), 7.0)
    out, lse = (whole[tokens : 2 * tokens] for whole in (room, room_of_lse))
    tiles = len(inputs.seq_lens) * (-(-4 * q_len // 16) if mla else 2 * -(-2 * q_len // 16))
    cuts = Cuts(config, tiles, most, 64, dims[1])
    believed = inputs.cum_seq_lens_q is not None and q_len < tokens
    settings = xqa.Settings(q_len, believed, window_left=window, programmatic_launch=False)
    launch = xqa.XqaLaunch(cuts, settings, Workspace.of(cuts.workspace, None, CPU), CPU)
    launch(xqa.Operands.of(inputs, keys, values, out, lse))  # type: ignore[arg-type]
    overlap = mixed_up(inputs.cum_seq_lens_q)
    assert not [f for f in emulated.run.findings if not (overlap and f.kind == "race")]
    for whole in (room, room_of_lse):
        assert whole[:tokens].eq(7).all() and whole[2 * tokens :].eq(7).all()
    return out, lse


def mixed_up(sums: Tensor | None) -> bool:
    """Whether requests share query tokens, whose rows have several writers then."""
    return sums is not None and bool((sums[1:] < sums.cummax(0).values[:-1]).any())


def right(inputs: Inputs, out: Tensor, lse: Tensor, rows: slice = slice(None)) -> bool:
    """Whether the rows of these query tokens are the oracle's."""
    mla = isinstance(inputs, DecodeInputs)
    want = decode_reference(inputs) if mla else decode_gqa_reference(inputs)
    expected, of_lse = want.out.view(out.shape)[rows], want.lse.view(lse.shape)[rows]
    return rel_error(out[rows], expected) < 0.01 and lse_error(lse[rows], of_lse) < 1e-4


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "most"),
    [
        ("mla", 1),
        ("gqa", 2),
        *(pytest.param(*case, marks=needs_time) for case in (("mla", 2), ("gqa", 1))),
    ],
)
def test_a_request_with_more_tokens_than_its_mask_has_columns_is_nan(
    monkeypatch: pytest.MonkeyPatch, kind: str, most: int
) -> None:
    inputs = inputs_of(kind, (3, 33, 2), (70, 100, 9), "ragged", "tree_mask")
    assert inputs.mask is not None and inputs.mask.shape == (38, 4)
    out, lse = launched(monkeypatch, inputs, 33, most)
    assert right(inputs, out, lse)
    narrow = replace(inputs, mask=inputs.mask[:, :2].contiguous())
    out, lse = launched(monkeypatch, narrow, 3, most)
    assert out[3:36].isnan().all() and lse[3:36].isnan().all()
    for honest in (slice(3), slice(36, None)):
        assert right(inputs, out, lse, honest)


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [math.nan, math.inf, 1e12, -1e12])
@pytest.mark.parametrize("most", [1, 2])
def test_a_scale_without_a_result_gives_nan(
    monkeypatch: pytest.MonkeyPatch, kind: str, scale: float, most: int
) -> None:
    """Scores times 1e12 are rounded by more than the exponent of a weight holds. Without a weight
    that is not 0, a row must not pass for one without a key."""
    inputs = replace(inputs_of(kind, (1,), (70,)), bmm1_scale=torch.tensor([scale]))
    out, lse = launched(monkeypatch, inputs, 1, most)
    assert out.isnan().all() and (lse.isnan() | lse.eq(math.inf)).all()


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("most", [1, 2])
@pytest.mark.parametrize("length", [-(2**31), -1, 97, 2**30, 2**31 - 64, 2**31 - 1])
def test_a_length_out_of_bounds_reads_no_page_that_the_table_does_not_name(
    monkeypatch: pytest.MonkeyPatch, kind: str, length: int, most: int
) -> None:
    """A request of a length below 0 has no key, one of a length beyond its row of the table NaN."""
    inputs = inputs_of(kind, (2, 2), (96, 96))
    lengths = torch.tensor([96, length], dtype=torch.int32)
    table = inputs.block_tables[:, :6].contiguous()
    given = replace(inputs, seq_lens=lengths, block_tables=table)
    out, lse = launched(monkeypatch, given, 2, most)
    assert right(inputs, out, lse, slice(2))
    if length > 0:
        assert out[2:].isnan().all() and lse[2:].isnan().all()
    else:
        assert not out[2:].any() and lse[2:].eq(-math.inf).all()


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("most", [1, 2])
@pytest.mark.parametrize(
    ("sums", "nan"),
    [
        ((0, 2, 4, 9), (4, 6)),
        ((0, 2, 4, 2**31 - 1), (4, 6)),
        ((-3, 2, 4, 6), (0, 2)),
        ((0, 2, 7, 6), (2, 6)),
        ((0, 2, 9, -1), (2, 6)),
        ((-(2**31), 2**31 - 1, -(2**31), 2**31 - 1), (0, 6)),
        ((0, 4, 2, 6), None),
    ],
)
def test_offsets_out_of_bounds_touch_no_row_outside(
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    most: int,
    sums: tuple[int, ...],
    nan: tuple[int, int] | None,
) -> None:
    """Rows of a request whose offsets lie outside are NaN, those of the others right. Where two
    requests have the same rows, either result may stand there."""
    inputs = inputs_of(kind, (2, 2, 2), (70, 100, 9), "ragged")
    given = torch.tensor(sums, dtype=torch.int32)
    out, lse = launched(monkeypatch, replace(inputs, cum_seq_lens_q=given), 6, most)
    if nan is None:
        assert out.isfinite().all() and lse.isfinite().all()
        return
    rows = torch.arange(6)
    wrong = (rows >= nan[0]) & (rows < nan[1])
    assert out[wrong].isnan().all() and lse[wrong].isnan().all()
    for honest in (slice(nan[0]), slice(nan[1], None)):
        assert not wrong[honest].numel() or right(inputs, out, lse, honest)


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [math.nan, math.inf])
@pytest.mark.parametrize("sinks", [(), ("sinks",)])
def test_a_row_without_keys_is_0_under_any_scale_of_out(
    monkeypatch: pytest.MonkeyPatch, kind: str, scale: float, sinks: tuple[str, ...]
) -> None:
    inputs = replace(inputs_of(kind, (1, 1), (0, 70), *sinks), bmm2_scale=torch.tensor([scale]))
    out, lse = launched(monkeypatch, inputs, 1)
    assert not out[0].any() and lse[0].eq(-math.inf).all()
    assert not out[1].isfinite().any() and lse[1].isfinite().all()


def tensor(kind: tuple[int, int], *shape: int, strides: tuple[int, ...] = ()) -> DeviceTensor:
    """One that has no memory; contiguous without `strides`."""
    dense = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    return DeviceTensor(0, kind, shape, strides or dense)


APART = tensor(BF16, 1, 2, 16, 128, strides=(1 << 31, 128, 1 << 27, 1))


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "given", "says"),
    [
        ("keys", APART, r"k_cache: got bfloat16 \[1, 2, 16, 128\], strides .* within 2 GiB"),
        ("tables", tensor(INT, 1, (1 << 26) + 1), r"block_tables: .* rows of up to 2\^30 tokens"),
        ("query", tensor(BF16, 1, 5, 128), r"query: got 5 heads; supported: a multiple"),
        ("query", tensor(BF16, 2, 4, 128), r"out: .* a row of v_dim for each of the query"),
        ("out", tensor(BF16, 2, 4, 128), r"out: .* a row of v_dim for each of the query"),
        ("lse", tensor(FLOAT, 2, 4), r"lse: got float32 \[2, 4\].* one for each row"),
        ("mask", tensor(UINT, 2, 2), r"mask: got uint16 \[2, 2\]"),
        ("q_len", 2, r"query: .* q_len tokens of each request"),
        ("max_splits", 129, r"max_splits, .*: got 1, 129, 64; .* up to 128 splits"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_before_a_launch(
    name: str, given: Any, says: str
) -> None:
    kernel = EmulatedKernel.of(jit.compile(config_for((128, 128), ("bf16", "bf16"), ARCH), ARCH))
    query, cache = tensor(BF16, 1, 4, 128), tensor(BF16, 1, 2, 16, 128)
    args: dict[str, Any] = dict.fromkeys(NAMES, tensor(FLOAT, 0))
    args |= {
        "query": query,
        "out": query,
        "keys": cache,
        "values": cache,
        "seq_lens": tensor(INT, 1),
    }
    args |= {"tables": tensor(INT, 1, 1), "q_begin": tensor(INT, 0), "mask": tensor(UINT, 0)}
    args |= {"scale1": 1.0, "scale2": 1.0, "lse_scale": 1.0, "q_len": 1, "window_left": -1}
    args |= {"max_splits": 1, "split_tokens": 64, "nhd": False, "pdl": False}
    assert len(kernel.host.launches(kernel.function, list(args.values()), kernel.sizes)) == 1
    args[name] = given
    with pytest.raises(InvalidInput, match=says):
        kernel.host.launches(kernel.function, list(args.values()), kernel.sizes)


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
