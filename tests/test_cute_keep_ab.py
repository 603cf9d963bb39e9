"""cute/keep_ab_sm90 on a machine without a GPU: where a stage holds what, and what it refuses."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mla_lab.core.errors import Unsupported
from mla_lab.plan.config import KernelConfig

pytest.importorskip("cutlass")
import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import warpgroup

import mla_lab.cute as cute_package
from mla_lab.cute import keep_ab_sm90 as keep_ab
from mla_lab.cute.keep_ab_sm90.params import STAGE, SWIZZLE_ROWS, Config
from mla_lab.cute.rows_on_m.mask import column_of, first_row
from mla_lab.cute.rows_on_m.params import BLOCK, HEAD

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
    """P, V and zeroed rows are addressed by the strides of the configuration."""
    c = Config(page_size=page_size)
    told = [
        row // SWIZZLE_ROWS * c.rows_stride
        + row % SWIZZLE_ROWS * 64
        + column // 64 * c.box_stride
        + column % 64
        + stage * STAGE
        for row, column, stage in PLACES
    ]
    assert told == offsets(c.order)


@pytest.mark.parametrize("page_size", keep_ab.PAGE_SIZES)
def test_what_a_copy_writes_is_dense(page_size: int) -> None:
    c = Config(page_size=page_size)
    boxes, eights = c.boxes_per_copy, c.box_rows // SWIZZLE_ROWS
    strides = [(64, 1), (SWIZZLE_ROWS, 64), (boxes, c.box_stride), (eights, c.rows_stride)]
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


def test_stages_that_do_not_fit_are_refused() -> None:
    """The number of KV stages is a knob; the refusal names what limits it."""
    config = KernelConfig("cute/keep_ab_sm90", options=(("stages", 4),))
    with pytest.raises(Unsupported, match="B of shared memory"):
        keep_ab.static_facts(config)
    with pytest.raises(Unsupported, match="2 to 3"):
        keep_ab.static_facts(replace(config, options=(("stages", 1),)))
    assert keep_ab.static_facts(replace(config, options=(("stages", 2),))).stages == 2


#: prints [thread, row half, column index, row, column] of CuTe's partition of an identity tensor
PARTITION = """
import cutlass, cutlass.cute as cute, cutlass.utils.hopper_helpers as sm90
from cutlass.cute.nvgpu import OperandMajorMode
from mla_lab.cute.rows_on_m.mask import rows_of
K, THREADS, found = OperandMajorMode.K, (0, 1, 37, 127), []

@cute.jit
def ask():
    bf16 = cutlass.BFloat16
    mma = sm90.make_trivial_tiled_mma(bf16, bf16, K, K, cutlass.Float32, (1, 1, 1), (64, 64))
    index = rows_of(cute.make_rmem_tensor(32, cutlass.Float32)).layout
    for thread in cutlass.range_constexpr(len(THREADS)):
        coords = mma.get_slice(THREADS[thread]).partition_C(cute.make_identity_tensor((64, 64)))
        for h in cutlass.range_constexpr(2):
            for c in cutlass.range_constexpr(16):
                row, column = coords[int(index((h, c)))]
                found.append([THREADS[thread], h, c, int(row), int(column)])

ask()
print(found)
"""


def test_accumulator_coordinates_are_those_of_partition_c(tmp_path: Path) -> None:
    """`rows_of`, `first_row` and `column_of`; in a process of its own, since the DSL takes the
    architecture when it is imported."""
    script = tmp_path / "partition.py"
    script.write_text(PARTITION, encoding="utf-8")
    root = str(Path(cute_package.__file__).parents[2])
    made = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "CUTE_DSL_ARCH": "sm_90a", "PYTHONPATH": root},
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    found = ast.literal_eval(made.stdout.splitlines()[-1])
    assert len(found) == 4 * 2 * 16
    for thread, h, c, row, column in found:
        assert (row, column) == (first_row(thread) + 8 * h, 2 * (thread % 4) + column_of(c))
