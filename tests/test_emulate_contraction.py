"""Sums of products that ptxas joins: `card` numbers round them once, others twice."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mla_lab.emulate import Options
from mla_lab.emulate.contraction import contracted
from mla_lab.emulate.direct import Direct, ptx_kernel
from mla_lab.emulate.ptx import parse, rewritten
from mla_lab.emulate.recorded import load

from .test_emulate_instructions import kernel

LOAD = """mov.u32 %r0, %tid.x; mul.wide.u32 %d2, %r0, 4; ld.param.u64 %d0, [a];
add.s64 %d0, %d0, %d2; ld.global.f32 %r1, [%d0]; ld.param.u64 %d1, [b]; add.s64 %d1, %d1, %d2;
"""
STORE = "st.global.f32 [%d1], %r4;"
X = torch.linspace(1.0, 1.7, 32) + 1e-4


def results(body: str, numbers: str) -> np.ndarray:
    out = torch.zeros(32)
    made = ptx_kernel(kernel(LOAD + body + STORE), "k", Direct(), Options(numbers))
    made(X.clone(), out)
    return out.numpy()


def once(first: float, second: float, third: float) -> np.ndarray:
    """first x^2 + second x + third, whose middle is exact in float64, in one rounding."""
    x = X.double().numpy()
    return (first * x * x + second * x + third).astype(np.float32)


@pytest.mark.parametrize(
    ("body", "joined"),
    [
        ("mul.f32 %r2, %r1, %r1; add.f32 %r4, %r2, %r1;", once(1, 1, 0)),
        ("mul.f32 %r2, %r1, %r1; sub.f32 %r4, %r2, %r1;", once(1, -1, 0)),
        ("mul.f32 %r2, %r1, %r1; sub.f32 %r4, %r1, %r2;", once(-1, 1, 0)),
        # operands that are written again behind the sum
        ("mul.f32 %r2, %r1, %r1; add.f32 %r4, %r1, %r2; mov.f32 %r1, 0f00000000;", once(1, 1, 0)),
    ],
)
def test_a_product_that_sums_alone_read_is_joined_with_them(body: str, joined: np.ndarray) -> None:
    assert np.array_equal(results(body, "card"), joined)
    assert not np.array_equal(results(body, "exact"), joined)


@pytest.mark.parametrize(
    "body",
    [
        "mul.rn.f32 %r2, %r1, %r1; add.f32 %r4, %r2, %r1;",
        "mul.f32 %r2, %r1, %r1; add.rn.f32 %r4, %r2, %r1;",
        "mul.f32 %r2, %r1, %r1; add.f32 %r4, %r2, %r2;",
        "mul.f32 %r2, %r1, %r1; add.f32 %r4, %r2, %r1; max.f32 %r4, %r4, %r2;",
        "mul.f32 %r2, %r1, %r1; mov.f32 %r1, 0f3F800000; add.f32 %r4, %r2, %r1;"
        " mul.f32 %r3, %r1, %r2;",
        "mul.f32 %r2, %r1, %r1; bra NEXT; NEXT: add.f32 %r4, %r2, %r1;",
    ],
)
def test_others_are_not(body: str) -> None:
    assert np.array_equal(results(body, "card"), results(body, "exact"))


def test_as_many_products_are_joined_as_ptxas_joins_in_keep_ab() -> None:
    """45 in its machine code: so many FMUL fewer, and FFMA more, than its PTX has."""
    (program,) = load("cute_keep_ab_sm90_shaped1").kernel().programs.values()
    pairs = zip(program.kernel.code, contracted(program).kernel.code, strict=True)
    changed = [(old, new) for old, new in pairs if old is not new]
    assert len(changed) == 45
    assert {old.opcode for old, _ in changed} == {"sub.f32"}
    assert {new.opcode for _, new in changed} == {"fma.rn.minus_a.f32", "fma.rn.minus_c.f32"}


def test_ptx_is_written_with_other_instructions() -> None:
    text = kernel("{ .reg .b32 x; mov.b32 x, 1; @%p1 add.s32 %r1, x, x; } // x\nmov.b32 %r2, 3;")
    (before,) = parse(text).values()
    old = next(s for s in before.code if s.opcode == "add.s32")
    from dataclasses import replace

    new = replace(old, opcode="sub.s32", args=old.args, negated=True)
    (after,) = parse(rewritten(text, [(old, new)])).values()
    changed = [(a, b) for a, b in zip(before.code, after.code, strict=True) if a.opcode != b.opcode]
    assert [(b.opcode, b.args, b.negated, b.guard) for _, b in changed] == [
        ("sub.s32", old.args, True, "%p1")
    ]
