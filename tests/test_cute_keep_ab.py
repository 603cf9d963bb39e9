"""cute/keep_ab_sm90 on a machine without a GPU: where a stage holds what, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from mla_lab.core.errors import Unsupported
from mla_lab.plan.config import KernelConfig

pytest.importorskip("cutlass")
import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warpgroup

from mla_lab.cute import keep_ab_sm90 as keep_ab
from mla_lab.cute.keep_ab_sm90.params import BLOCK, EIGHT_ROWS, HEAD, STAGE, Config

PLACES = [(r, c, s) for s in (0, 2) for r in (0, 1, 7, 8, 23, 63) for c in (0, 63, 64, 200, 575)]


def offsets(order: tuple[int, int, int]) -> list[int]:
    """Where CuTe puts PLACES in a ring of stages filled in this order, before the swizzle."""
    found: list[Any] = []

    @cute.jit
    def ask() -> None:
        kind = warpgroup.SmemLayoutAtomKind.K_SW128
        atom = warpgroup.make_smem_layout_atom(kind, cutlass.BFloat16)
        ring = cute.tile_to_shape(atom, (BLOCK, HEAD, 3), order).outer
        found.extend(int(ring(place)) for place in PLACES)

    ask()
    return found


@pytest.mark.parametrize("page_size", keep_ab.PAGE_SIZES)
def test_strides_are_those_of_the_layout(page_size: int) -> None:
    """P, V and cleared rows are addressed by strides that the configuration tells."""
    c = Config(page_size=page_size)
    told = [
        row // EIGHT_ROWS * c.rows_stride
        + row % EIGHT_ROWS * 64
        + column // 64 * c.box_stride
        + column % 64
        + stage * STAGE
        for row, column, stage in PLACES
    ]
    assert told == offsets(c.order)


@pytest.mark.parametrize("page_size", keep_ab.PAGE_SIZES)
def test_what_a_copy_writes_is_dense(page_size: int) -> None:
    c = Config(page_size=page_size)
    boxes, eights = c.boxes_per_copy, c.box_rows // EIGHT_ROWS
    strides = [(64, 1), (EIGHT_ROWS, 64), (boxes, c.box_stride), (eights, c.rows_stride)]
    size = 1
    for count, stride in sorted(strides, key=lambda mode: mode[1]):
        assert count == 1 or stride == size
        size *= count
    assert size == c.box_rows * boxes * 64


@pytest.mark.parametrize(("page_size", "copies"), [(16, 4), (32, 18), (64, 3), (128, 3)])
def test_copies_of_a_tile(page_size: int, copies: int) -> None:
    c = Config(page_size=page_size)
    assert BLOCK // c.box_rows * (9 // c.boxes_per_copy) == copies


@pytest.mark.parametrize(
    ("field", "value"), [("page_size", 8), ("kv_format", "fp16"), ("tile_rows", 32)]
)
def test_refusals_name_the_field(field: str, value: object) -> None:
    config = KernelConfig(**{"kernel": "cute/keep_ab_sm90", field: value})  # type: ignore[arg-type]
    with pytest.raises(Unsupported, match=field):
        keep_ab.static_facts(config)
