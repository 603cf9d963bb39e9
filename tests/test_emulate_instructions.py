"""PTX text, registers, and what single instructions compute."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mla_lab.core.errors import InvalidInput, Unsupported
from mla_lab.emulate import EmulatedKernel, Fault, Options, arithmetic, card_arithmetic, tiles
from mla_lab.emulate.direct import Direct, ptx_kernel
from mla_lab.emulate.ptx import parse
from mla_lab.emulate.rows import assign, names_in

HEAD = """
.version 9.0
.target sm_90a
.address_size 64
"""


def kernel(body: str, params: str = ".param .u64 a, .param .u64 b", shared: str = "") -> str:
    """A kernel `k` of 32 threads with some registers."""
    regs = ".reg .pred %p<9>; .reg .b16 %h<9>; .reg .b32 %r<40>; .reg .b64 %d<9>;"
    return f"{HEAD}{shared}\n.visible .entry k({params})\n{{\n{regs}\n{body}\nret;\n}}\n"


def per_thread(body: str, values: torch.Tensor, options: Options | None = None) -> torch.Tensor:
    """Runs `body`, which makes %r2 of %r1, for each of 32 values."""
    around = f"""
    mov.u32 %r0, %tid.x; mul.wide.u32 %d2, %r0, 4;
    ld.param.u64 %d0, [a]; add.s64 %d0, %d0, %d2; ld.global.b32 %r1, [%d0];
    {body}
    ld.param.u64 %d1, [b]; add.s64 %d1, %d1, %d2; st.global.b32 [%d1], %r2;"""
    out = torch.zeros_like(values)
    ptx_kernel(kernel(around), "k", Direct(), options)(values, out)
    return out


FLOATS = torch.linspace(-3, 5, 32)
WHOLE = torch.arange(-7, 25, dtype=torch.int32)


def test_scoped_names_and_source_lines() -> None:
    block = "{ .reg .pred p; LAB: .loc 1 42 3\n setp.eq.s32 p, %r1, 0; @p bra LAB; }"
    text = kernel(f".loc 1 7 0\n mov.b32 %r1, 1; {block} {block}") + '\n.file 1 "/x/mla_lab/y.py"\n'
    code = parse(text)["k"]
    branches = [s for s in code.code if s.opcode == "bra"]
    assert [s.args for s in branches] == [("LAB@1",), ("LAB@2",)]
    assert [s.guard for s in branches] == ["p@1", "p@2"]
    assert branches[0].place == ("mla_lab/y.py", 42) and code.code[0].place.line == 7


def test_text_without_a_kernel_is_refused() -> None:
    with pytest.raises(InvalidInput, match="PTX"):
        parse("nothing")


def test_an_unknown_instruction_is_refused_by_name() -> None:
    with pytest.raises(Unsupported, match=r"tcgen05\.shift"):
        ptx_kernel(kernel("tcgen05.shift.cta_group::1.down [%r1];"), "k", Direct())


def test_registers_share_rows_only_while_they_are_dead() -> None:
    body = """
    mov.b32 %r1, 1; mov.b32 %r2, 2; add.s32 %r3, %r1, %r2;
    mov.b32 %r4, 0;
    LOOP: add.s32 %r4, %r4, %r3; mov.b32 %r5, 3; add.s32 %r6, %r5, %r4;
    setp.lt.s32 %p1, %r6, 9; @%p1 bra LOOP;
    mov.b32 %r7, 5;"""
    code = parse(kernel(body))["k"]
    rows, counts = assign(code, [names_in(s, code.registers) for s in code.code])
    assert counts[4] < 7
    assert rows["%r3"] not in (rows["%r4"], rows["%r5"], rows["%r6"])  # live round the loop
    assert rows["%r1"] != rows["%r2"]


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("fma.rn.f32 %r2, %r1, %r1, %r1;", FLOATS * FLOATS + FLOATS),
        ("max.f32 %r2, %r1, 0f00000000;", FLOATS.clamp_min(0)),
        ("neg.f32 %r2, %r1;", -FLOATS),
        ("ex2.approx.ftz.f32 %r2, %r1;", torch.exp2(FLOATS.double()).float()),
        ("{ .reg .pred p; setp.lt.f32 p, %r1, 0f00000000; selp.f32 %r2, 0f00000000, %r1, p; }",
         FLOATS.clamp_min(0)),
    ],
)  # fmt: skip
def test_float_instructions(body: str, expected: torch.Tensor) -> None:
    torch.testing.assert_close(per_thread(body, FLOATS), expected, rtol=2e-7, atol=0)


@pytest.mark.parametrize(
    ("test", "number", "nan"),
    [("eq", 0, 0), ("ne", 1, 0), ("equ", 0, 1), ("neu", 1, 1), ("ltu", 1, 1), ("gt", 0, 0)],
)
def test_comparisons_of_nan(test: str, number: int, nan: int) -> None:
    """With 1.0, of 0.5 and of NaN; alone, and beside a predicate that is true of NaN."""
    values = FLOATS.clone().fill_(0.5)
    values[1::2] = torch.nan
    body = "{{ .reg .pred p, q; setp.eq.f32 q, %r1, %r1; setp.{0}.f32 p, %r1, 0f3f800000; {1} "
    body += "selp.f32 %r2, 0f3f800000, 0f00000000, p; }}"
    for combined in ("", f"not.pred q, q; setp.{test}.or.f32 p, %r1, 0f3f800000, q;"):
        found = per_thread(body.format(test, combined), values)
        assert set(found[0::2].tolist()) == {number}
        assert set(found[1::2].tolist()) == {nan if not combined else 1}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("add.s32 %r2, %r1, 5;", WHOLE + 5),
        ("div.s32 %r2, %r1, 3;", torch.div(WHOLE, 3, rounding_mode="trunc")),
        ("rem.s32 %r2, %r1, 3;", torch.fmod(WHOLE, 3)),
        ("shl.b32 %r2, %r1, 3;", WHOLE << 3),
        ("shr.s32 %r2, %r1, 1;", WHOLE >> 1),
        ("mul.hi.s32 %r2, %r1, 1073741824;", WHOLE >> 2),
        (
            "cvt.u16.u32 %h0, %r1; mul.hi.u16 %h1, %h0, 2731; cvt.u32.u16 %r2, %h1;",
            (WHOLE & 0xFFFF) * 2731 >> 16,
        ),
        ("shfl.sync.bfly.b32 %r2, %r1, 1, 31, -1;", WHOLE.view(-1, 2).flip(1).flatten()),
        ("shfl.sync.up.b32 %r2|%p1, %r1, 1, 0, -1;", WHOLE[[0, *range(31)]]),
        ("redux.sync.max.s32 %r2, %r1, -1;", torch.full((32,), 24)),
        ("setp.gt.s32 %p1, %r1, 20; vote.sync.ballot.b32 %r2, %p1, -1;",
         torch.full((32,), -(1 << 28))),
        ("""setp.lt.s32 %p1, %r1, 5; setp.gt.and.s32 %p2, %r1, -5, !%p1;
         setp.lt.or.s32 %p2, %r1, -6, %p2; selp.s32 %r2, 1, 0, %p2;""",
         (WHOLE >= 5) | (WHOLE < -6)),
        ("mov.b32 {%h1, %h2}, %r1; mov.b32 %r2, {%h2, %h1};",
         (WHOLE << 16) | (WHOLE >> 16 & 65535)),
        ("prmt.b32 %r2, %r1, 0, 0x0123;", torch.from_numpy(WHOLE.numpy().byteswap())),
        ("cvt.s8.s32 %h1, %r1; cvt.s32.s16 %r2, %h1;", WHOLE),
        # threads part and meet again
        ("""setp.lt.s32 %p1, %r1, 0; @%p1 bra NEG; add.s32 %r2, %r1, 1; bra END;
         NEG: sub.s32 %r2, %r1, 1; END: shfl.sync.idx.b32 %r2, %r2, 0, 31, -1;""",
         torch.full((32,), -8)),
        ("elect.sync _|%p1, -1; selp.s32 %r2, 1, 0, %p1;", torch.arange(32) == 0),
    ],
)  # fmt: skip
def test_whole_number_instructions(body: str, expected: torch.Tensor) -> None:
    assert torch.equal(per_thread(body, WHOLE), expected.int())


def test_fma_rounds_once() -> None:
    rng = np.random.default_rng(0)
    a, b, c = (rng.standard_normal(4096).astype(np.float32) for _ in range(3))
    c = np.concatenate([-(a * b)[:2048], c[2048:]])  # what cancels shows the second rounding
    exact = a.astype(np.longdouble) * b + c
    assert np.array_equal(arithmetic.fma(a, b, c), exact.astype(np.float32))


def test_conversions_round_as_torch() -> None:
    x = torch.cat([torch.randn(4096) * 200, torch.tensor([0.0, -0.0, 448, 464, 1e9, 2**-10])])
    bf16 = torch.from_numpy(arithmetic.to_bf16(x.numpy()).astype(np.int16)).view(torch.bfloat16)
    assert torch.equal(bf16, x.bfloat16())
    e4m3 = torch.from_numpy(arithmetic.to_e4m3(x.numpy()).astype(np.uint8))
    saturated = x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(e4m3, saturated)


def test_card_tables_differ_by_one_place_at_most() -> None:
    x = np.linspace(1, 2, 1000, endpoint=False, dtype=np.float32)
    for ours, card in (
        (arithmetic.ex2, card_arithmetic.card_ex2),
        (arithmetic.rcp, card_arithmetic.card_rcp),
    ):
        places = card(x).view(np.int32) - ours(x).view(np.int32)
        assert np.abs(places).max() == 1 and (places != 0).mean() < 0.5


def test_a_card_inverts_negative_numbers_where_it_would_negate() -> None:
    x = np.array([-(2.0**-30), -1, -0.5, 0.5, 1, 2, 3, 0, -1, np.inf], dtype=np.float32)
    ex2, lg2 = card_arithmetic.card_ex2(x[:3]), card_arithmetic.card_lg2(x[3:])
    assert ex2.tolist()[:2] == [1, 0.5] and 0 < np.float32(2**-0.5) - ex2[2] < 2e-7
    assert lg2[1:3].tolist() == [0, 1] and 0 < lg2[0] + 1 < 2e-7
    assert abs(lg2[3] - np.log2(3)) < 3e-7 and lg2[4] == -np.inf and lg2[6] == np.inf
    assert np.isnan(lg2[5])


def test_a_card_cuts_sums_towards_zero() -> None:
    rng = np.random.default_rng(1)
    x, y = (
        arithmetic.from_bf16(rng.integers(0x3F00, 0x4000, (8, 16)).astype(np.uint32)) for _ in "ab"
    )
    c = rng.standard_normal((8, 8)).astype(np.float32)
    exact = x.astype(np.float64) @ y.astype(np.float64).T + c
    card = tiles.card_product(x, y, c, 25)
    assert (np.abs(card) <= np.abs(exact) + 1e-12).all()
    np.testing.assert_allclose(card, exact, rtol=1e-6)
    coarse = tiles.card_product(x, y, c, 13)
    assert 1e-6 < np.abs(coarse - exact).max() < 1e-2


def test_accumulator_layout_goes_both_ways() -> None:
    registers = np.arange(32 * 128, dtype=np.float32).reshape(32, 128)
    matrix = tiles.accumulator(registers)
    assert matrix.shape == (64, 64) and np.array_equal(
        tiles.accumulator_registers(matrix), registers
    )
    assert matrix[16, 0] == registers[0, 32] and matrix[8, 1] == registers[3, 0]


def test_global_bounds_and_alignment() -> None:
    wide = "mov.u32 %r0, %tid.x; mul.wide.u32 %d2, %r0, {0}; ld.param.u64 %d0, [a];"
    wide += "add.s64 %d0, %d0, %d2; ld.global.b32 %r1, [%d0]; ld.param.u64 %d1, [b];"
    values = torch.zeros(32)
    for step, kind in ((8, "out of bounds"), (2, "misaligned")):
        with pytest.raises(Fault, match=kind) as caught:
            ptx_kernel(kernel(wide.format(step)), "k", Direct())(values, values.clone())
        assert caught.value.finding.kind == kind and "warp 0" in str(caught.value)


def test_both_zeros_are_constants_of_their_own() -> None:
    body = "mul.f32 %r3, %r1, 0f00000000; mul.f32 %r4, %r1, 0f80000000; or.b32 %r2, %r3, %r4;"
    assert per_thread(body, torch.ones(32)).signbit().all()


def test_what_is_discarded_is_undefined_and_a_whole_line() -> None:
    body = "mov.u32 %r0, %tid.x; setp.eq.u32 %p0, %r0, 0; ld.param.u64 %d0, [a];"
    body += "@%p0 discard.global.L2 [%d0 + {0}], 128;"
    values = torch.zeros(96)
    ptx_kernel(kernel(body.format(128)), "k", Direct())(values, values.clone())
    assert values[32:64].isnan().all() and not values[:32].any() and not values[64:].any()
    with pytest.raises(Fault, match="misaligned"):
        ptx_kernel(kernel(body.format(64)), "k", Direct())(values, values.clone())


def test_arguments_are_counted() -> None:
    emulated = ptx_kernel(kernel("mov.b32 %r1, 1;"), "k", Direct())
    assert isinstance(emulated, EmulatedKernel)
    with pytest.raises(InvalidInput, match="arguments"):
        emulated(torch.zeros(1))


@pytest.mark.parametrize(
    "body",
    [
        "add.rz.f32 %r2, %r1, %r1;",
        "add.sat.s32 %r2, %r1, %r1;",
        "add.cc.u32 %r2, %r1, %r1;",
        "mul.ftz.f32 %r2, %r1, %r1;",
        "fma.rn.relu.f16x2 %r2, %r1, %r1, %r1;",
        "min.xorsign.abs.f32 %r2, %r1, %r1;",
        "max.NaN.xorsign.abs.bf16x2 %r2, %r1, %r1;",
        "max.f16 %h1, %h2, %h3;",
        "setp.ne.f16 %p1, %h1, %h2;",
        "ex2.approx.f16x2 %r2, %r1;",
        "sqrt.rz.f32 %r2, %r1;",
        "prmt.b32.rc16 %r2, %r1, 0, 1;",
        "cvt.sat.u8.s32 %h1, %r1;",
        "cvt.rz.f16.f32 %h1, %r1;",
        "cvt.rn.relu.bf16x2.f32 %r2, %r1, %r1;",
        "cvt.rn.f16.s32 %h1, %r1;",
        "cvt.rzi.s32.f16 %r2, %h1;",
        "cvt.rz.f32.s32 %r2, %r1;",
        "cvt.pack.sat.u8.s32.b32 %r2, %r1, %r1, 0;",
        "vote.sync.uni.pred %p1, %p2, -1;",
        "redux.sync.max.NaN.f32 %r2, %r1, -1;",
        "barrier.cta.arrive 1, 64;",
        "ldmatrix.sync.aligned.m16n16.x1.trans.shared.b8 {%r2, %r3}, [%r1];",
        "stmatrix.sync.aligned.m16n8.x1.trans.shared.b8 [%r1], {%r2};",
        "mbarrier.try_wait.parity.acquire.gpu.shared.b64 %p1, [%r1], 0;",
        "fence.proxy.alias;",
        "ld.local.b32 %r2, [%d1];",
        "ld.acquire.cta.global.b32 %r2, [%d1];",
        "cp.async.bulk.tensor.3d.shared::cta.global.im2col.mbarrier::complete_tx::bytes "
        "[%r1], [%d1, {%r2, %r3, %r4}], [%r5], {%h1};",
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%r2, %r3, %r4, %r5}, "
        "{%r1, %r1, %r1, %r1}, {%r1, %r1}, {%r1, %r1, %r1, %r1};",
        "wgmma.mma_async.sync.aligned.m64n8k32.f32.e5m2.e5m2 {%r2, %r3, %r4, %r5}, %d1, %d2, "
        "%p1, 1, 1;",
    ],
)
def test_a_form_that_would_be_taken_for_another_is_refused(body: str) -> None:
    with pytest.raises(Unsupported, match=body.split()[0].replace(".", r"\.")):
        ptx_kernel(kernel(body), "k", Direct())


def filled(value: float) -> torch.Tensor:
    """32 times an fp32."""
    return torch.full((32,), value)


@pytest.mark.parametrize(
    ("body", "value", "expected"),
    [
        # what has no .ftz computes with subnormal numbers
        ("ex2.approx.f32 %r2, %r1;", -130.0, 2.0**-130),
        ("ex2.approx.ftz.f32 %r2, %r1;", -130.0, 0.0),
        ("rcp.rn.f32 %r2, %r1;", 2.0**127, 2.0**-127),
        ("rcp.rn.f32 %r2, %r1;", 2.0**-127, 2.0**127),
        ("rcp.approx.f32 %r2, %r1;", 2.0**127, 2.0**-127),
        ("rcp.approx.f32 %r2, %r1;", 2.0**-127, 2.0**127),
        ("rcp.approx.ftz.f32 %r2, %r1;", 2.0**127, 0.0),
        ("lg2.approx.f32 %r2, %r1;", 2.0**-140, -140.0),
        ("rsqrt.approx.f32 %r2, %r1;", 2.0**-140, 2.0**70),
        ("sqrt.rn.f32 %r2, %r1;", 2.0**-140, 2.0**-70),
        # towards minus infinity, of a sum that float64 cannot hold; an exact zero is negative
        ("fma.rm.f32 %r2, %r1, 0f3f800000, 0f9b800000;", 1.0, 1 - 2.0**-24),
        ("fma.rm.f32 %r2, %r1, 0f3f800000, 0f9f800000;", 1.0, 1 - 2.0**-24),
        ("mad.rn.f32 %r2, %r1, %r1, 0fbf800000;", 1 + 2.0**-13, 2.0**-12 + 2.0**-26),
        ("max.f32 %r2, %r1, 0f3f800000, 0f40400000;", 2.0, 3.0),
    ],
)
@pytest.mark.parametrize("numbers", ["exact", "card"])
def test_values_of_single_instructions(
    body: str, value: float, expected: float, numbers: str
) -> None:
    found = per_thread(body, filled(value), Options(numbers=numbers))
    torch.testing.assert_close(found, filled(expected), rtol=3e-7, atol=0)


@pytest.mark.parametrize(
    ("body", "negative"),
    [
        ("max.f32 %r2, %r1, 0f00000000;", False),
        ("max.f32 %r2, 0f00000000, %r1;", False),
        ("max.f32 %r2, %r1, %r1;", True),
        ("min.f32 %r2, %r1, 0f00000000;", True),
        ("min.f32 %r2, 0f00000000, %r1;", True),
        ("min.NaN.f32 %r2, 0f00000000, 0f00000000;", False),
        ("fma.rm.f32 %r2, 0f3f800000, 0f3f800000, 0fbf800000;", True),
        ("fma.rn.f32 %r2, 0f3f800000, 0f3f800000, 0fbf800000;", False),
    ],
)
def test_signs_of_zeros(body: str, negative: bool) -> None:
    """%r1 holds -0.0, which is less than +0.0."""
    assert torch.equal(per_thread(body, filled(-0.0)).signbit(), torch.full((32,), negative))


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("shl.b32 %r2, %r1, 32;", WHOLE * 0),
        ("shr.u32 %r2, %r1, 40;", WHOLE * 0),
        ("shr.s32 %r2, %r1, 40;", WHOLE >> 31),
        ("mov.b32 %r3, 40; shf.r.clamp.b32 %r2, %r1, 7, %r3;", WHOLE * 0 + 7),
        ("mov.b32 %r3, 40; shf.r.wrap.b32 %r2, %r1, 0, %r3;", WHOLE >> 8 & 0xFFFFFF),
        ("mad.hi.s32 %r2, %r1, 1073741824, 5;", (WHOLE >> 2) + 5),
        # of %r1 as fp32: NaN is 0, infinity the largest number
        ("mov.b32 %r3, 0f7f800000; cvt.rzi.s64.f32 %d3, %r3; shr.s64 %d3, %d3, 32;"
         "cvt.u32.u64 %r2, %d3;", WHOLE * 0 + 0x7FFFFFFF),
        ("mov.b32 %r3, 0f7fc00000; cvt.rzi.s32.f32 %r2, %r3;", WHOLE * 0),
        ("mov.b32 %r3, 0fcf800000; cvt.rzi.s32.f32 %r2, %r3;", WHOLE * 0 - 0x80000000),
        ("mov.b32 %r3, 0fffc00000; cvt.rn.f16.f32 %h1, %r3; cvt.u32.u16 %r2, %h1;",
         WHOLE * 0 + 0x7FFF),
    ],
)  # fmt: skip
def test_ends_of_ranges(body: str, expected: torch.Tensor) -> None:
    assert torch.equal(per_thread(body, WHOLE), expected.int())


def test_packed_fma_rounds_once() -> None:
    """a b lies in the middle of two numbers but for c, which fp32 cannot hold beside it."""
    for kind, a, b, c in (("f16x2", 0x3C10, 0x3C20, 0x0001), ("bf16x2", 0x3F82, 0x3FA0, 0x2F80)):
        x, y, z = (np.array([v | v << 16], np.uint32) for v in (a, b, c))
        found = int(arithmetic.packed("fma", kind, x, y, z)[0])
        without = int(arithmetic.packed("fma", kind, x, y, z & np.uint32(0))[0])
        dtype = torch.float16 if kind == "f16x2" else torch.bfloat16
        exact = [torch.tensor(v, dtype=torch.int16).view(dtype).item() for v in (a, b, c)]
        middle = exact[0] * exact[1]
        assert middle != torch.tensor(without & 0xFFFF, dtype=torch.int16).view(dtype).item()
        assert np.float32(middle + exact[2]) == np.float32(middle), "fp32 drops c"
        assert found & 0xFFFF == (without & 0xFFFF) + 1 and found >> 16 == found & 0xFFFF


@pytest.mark.parametrize(
    ("kind", "nan", "one"), [("bf16x2", 0x7FFF, 0x3F80), ("f16x2", 0x7FFF, 0x3C00)]
)
def test_packed_extremes_keep_or_leave_out_nan(kind: str, nan: int, one: int) -> None:
    """The upper half of one operand is NaN; signs go by abs, of NaN too."""
    a = WHOLE * 0 + (-0x8000 | one)  # upper half 0xFFFF, NaN; lower half -1
    body = f"abs.{kind} %r3, %r1; mov.b32 %r4, {(one << 16) + 1}; {{}}.{kind} %r2, %r3, %r4;"
    for op, upper in (("max.NaN", nan), ("min.NaN", nan), ("max", one), ("min", one)):
        lower = one if op.startswith("max") else 1
        found = per_thread(body.format(op), a)
        assert torch.equal(found, WHOLE * 0 + (upper << 16 | lower)), op
    assert torch.equal(per_thread(f"abs.{kind} %r2, %r1;", a), WHOLE * 0 + (0x7FFF << 16 | one))


def test_threads_that_have_exited_take_no_part_in_a_reduction() -> None:
    body = "setp.gt.s32 %p1, %r1, 3; @%p1 bra END; redux.sync.max.s32 %r2, %r1, -1;"
    stores = "ld.param.u64 %d1, [b]; add.s64 %d1, %d1, %d2; st.global.b32 [%d1], %r2; END:"
    loads = "mov.u32 %r0, %tid.x; mul.wide.u32 %d2, %r0, 4; ld.param.u64 %d0, [a];"
    loads += "add.s64 %d0, %d0, %d2; ld.global.b32 %r1, [%d0];"
    out = torch.zeros_like(WHOLE)
    ptx_kernel(kernel(loads + body.replace("bra END", "ret") + stores), "k", Direct())(WHOLE, out)
    assert out.tolist() == [3 if value <= 3 else 0 for value in WHOLE.tolist()]


LANES = torch.arange(32)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("mov.b32 %r3, 40; shl.b32 %r2, %r1, %r3;", WHOLE * 0),
        ("mov.b32 %r3, 40; shr.u32 %r2, %r1, %r3;", WHOLE * 0),
        ("mov.b32 %r3, 40; shr.s32 %r2, %r1, %r3;", WHOLE >> 31),
        ("shfl.sync.down.b32 %r2|%p1, %r1, 1, 31, -1;", WHOLE[[*range(1, 32), 31]]),
        # segments of eight lanes
        ("shfl.sync.down.b32 %r2, %r1, 1, 0x181f, -1;", WHOLE[LANES + (LANES % 8 != 7).long()]),
        ("shfl.sync.up.b32 %r2, %r1, 2, 0x1800, -1;", WHOLE[LANES - 2 * (LANES % 8 > 1).long()]),
        ("shfl.sync.idx.b32 %r2, %r1, 3, 0x181f, -1;", WHOLE[LANES & 24 | 3]),
        ("bfi.b32 %r2, %r1, 0x0f0f0f0f, 4, 8;", (WHOLE & 255) << 4 | 0x0F0F0F0F & ~0xFF0),
        ("bfi.b32 %r2, %r1, 7, 32, 4;", WHOLE * 0 + 7),
        ("prmt.b32 %r2, %r1, 0, 0x8888;", WHOLE >> 31),
        ("mov.b32 %r3, 0x00030002; dp2a.hi.u32.u32 %r2, %r3, 0x07050100, %r1;", WHOLE + 31),
        ("mov.b32 %r3, 0xfffe0001; dp2a.lo.s32.s32 %r2, %r3, 0x0000ff03, %r1;", WHOLE + 5),
    ],
)  # fmt: skip
def test_instructions_that_pick_bits_and_lanes(body: str, expected: torch.Tensor) -> None:
    assert torch.equal(per_thread(body, WHOLE), expected.int())


@pytest.mark.parametrize(
    ("atomic", "first", "last"),
    [
        ("atom.global.inc.u32 %r2, [%d1], 9;", 0, 2),
        ("atom.global.dec.u32 %r2, [%d1], 9;", 0, 8),
        ("atom.global.dec.u32 %r2, [%d1], 9;", 40, 9 - 31 % 10),
        ("atom.global.cas.b32 %r2, [%d1], 5, %r0;", 5, 0),
        ("atom.global.cas.b32 %r2, [%d1], 6, %r0;", 5, 5),
        ("atom.global.exch.b32 %r2, [%d1], %r0;", 5, 31),
        ("atom.global.min.s32 %r2, [%d1], %r0;", -3, -3),
        ("atom.global.max.u32 %r2, [%d1], %r0;", 7, 31),
        ("red.global.add.u32 [%d1], 2;", 5, 69),
    ],
)
def test_atomics(atomic: str, first: int, last: int) -> None:
    """Of 32 threads on one word."""
    out = torch.tensor([first], dtype=torch.int32)
    body = f"mov.u32 %r0, %tid.x; ld.param.u64 %d1, [b]; {atomic}"
    ptx_kernel(kernel(body), "k", Direct())(torch.zeros(1), out)
    assert out.item() == last
