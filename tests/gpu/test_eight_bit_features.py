"""Features over caches of eight bits, and sparse calls of every format, by the CuTe backend, on a
card, against the float64 oracle.

What no length or slot reaches holds NaN in every byte, scales of 656-byte tokens among them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from mla_lab.core.problem import Problem
from mla_lab.plan import make_plan
from mla_lab.reference.inputs import DecodeInputs, make_inputs
from mla_lab.reference.mla import Result, TileWalk, decode_reference
from mla_lab.reference.tolerance import rel_error
from mla_lab.verify.limits import limits_of

from .calls import LENGTHS, check, counters_are_zero, inputs_of, native, walk_of

pytestmark = pytest.mark.gpu

#: query, cache
FORMATS = [("bf16", "fp8_656"), ("e4m3", "e4m3"), ("bf16", "e4m3")]
SPARSE_FORMATS = [("bf16", "bf16"), *FORMATS]


def problem_of(
    formats: tuple[str, str], q_lens: Any, kv_lens: Any, heads: int, **named: Any
) -> Problem:
    q_dtype, kv_format = formats
    given = {"q_dtype": q_dtype, "kv_format": kv_format, "out_dtype": "bf16", **named}
    return Problem(q_lens, kv_lens, heads, **given)


@pytest.mark.parametrize("features", [[], ["sinks", "device_scales", "page_gap"]])
@pytest.mark.parametrize("top_k", [1, 64, 100, 2048])
@pytest.mark.parametrize(("heads", "page_size"), [(16, 64), (7, 1), (128, 16), (24, 64)])
@pytest.mark.parametrize("formats", SPARSE_FORMATS)
def test_sparse(
    formats: tuple[str, str],
    heads: int,
    page_size: int,
    top_k: int,
    features: list[str],
    workspace: torch.Tensor,
) -> None:
    lengths = ((2,) * 3, (3000, 0, 65), heads)
    made = problem_of(formats, *lengths, page_size=page_size, top_k=top_k)
    inputs = inputs_of(made, "lse", *features)
    expected = decode_reference(inputs)
    for invariant in (False, True):
        check(inputs, native(inputs, workspace, batch_invariant=invariant), expected)
    assert counters_are_zero(workspace)


@pytest.mark.parametrize("heads", [16, 100])
@pytest.mark.parametrize("formats", SPARSE_FORMATS)
def test_sparse_ragged(formats: tuple[str, str], heads: int, workspace: torch.Tensor) -> None:
    made = problem_of(formats, (1, 0, 3, 40, 2), (10, 5, 640, 1300, 0), heads, top_k=200)
    inputs = inputs_of(made, "lse", "ragged", "max_q_len", "cache_4d")
    check(inputs, native(inputs, workspace))


@pytest.mark.parametrize("formats", SPARSE_FORMATS)
def test_sparse_in_more_workers_than_run_at_once(
    formats: tuple[str, str], workspace: torch.Tensor
) -> None:
    made = problem_of(formats, (8,) * 40, (700,) * 40, 24, top_k=130)
    inputs = inputs_of(made, "lse")
    check(inputs, native(inputs, workspace))


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("formats", SPARSE_FORMATS)
def test_sparse_rows_without_a_slot(
    formats: tuple[str, str], heads: int, workspace: torch.Tensor
) -> None:
    inputs = inputs_of(problem_of(formats, (2,) * 2, (300, 300), heads, top_k=256), "lse", "sinks")
    inputs.block_tables[0, 1] = -1
    inputs.block_tables[1, :, 64:192] = -1
    out, lse = native(inputs, workspace)
    check(inputs, (out, lse))
    assert not out[0, 1].any() and lse[1].isneginf().all()


@pytest.mark.parametrize("formats", FORMATS)
def test_a_slot_given_twice_counts_twice(formats: tuple[str, str], workspace: torch.Tensor) -> None:
    inputs = inputs_of(problem_of(formats, (1,) * 2, (300, 300), 16, top_k=200), "lse")
    inputs.block_tables[:, :, 100:] = inputs.block_tables[:, :, :100]
    out, lse = (t.clone() for t in native(inputs, workspace))
    check(inputs, (out, lse))
    half = replace(inputs, block_tables=inputs.block_tables[:, :, :100].contiguous())
    half = replace(half, sparse_mla_top_k=100)
    _, once = native(half, workspace)
    limit = limits_of(inputs, decode_reference(inputs)).lse_error * float(lse.abs().max())
    assert float((lse - once - torch.log(torch.tensor(2.0))).abs().max()) < 2 * limit


@pytest.mark.parametrize("distribution", ["heavy_tailed", "concentrated"])
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("formats", FORMATS)
def test_sparse_of_other_caches(
    formats: tuple[str, str], heads: int, distribution: str, workspace: torch.Tensor
) -> None:
    made = problem_of(formats, (1,) * 4, (9000, 300, 4000, 2), heads, top_k=1000)
    inputs = make_inputs(
        made, 5, ["lse"], distribution=distribution, device="cuda", workspace_bytes=256
    )
    check(inputs, native(inputs, workspace))


@pytest.mark.parametrize("features", [["page_gap"], ["tree_mask", "sinks", "device_scales"]])
@pytest.mark.parametrize("page_size", [1, 5])
@pytest.mark.parametrize(("heads", "q_len"), [(16, 1), (7, 3), (100, 2)])
@pytest.mark.parametrize("formats", FORMATS)
def test_small_pages(
    formats: tuple[str, str],
    heads: int,
    q_len: int,
    page_size: int,
    features: list[str],
    workspace: torch.Tensor,
) -> None:
    lengths = ((q_len,) * len(LENGTHS), LENGTHS, heads)
    inputs = inputs_of(problem_of(formats, *lengths, page_size=page_size), "lse", *features)
    expected = decode_reference(inputs)
    for invariant in (False, True):
        check(inputs, native(inputs, workspace, batch_invariant=invariant), expected)
    assert counters_are_zero(workspace)


# --- skip-softmax over eight bits ---------------------------------------------------------------

E4M3 = ("e4m3", "e4m3")
FACTOR = "skip_softmax_threshold_scale_factor"


def skipping(problem: Problem, distribution: str, factor: float, *features: str) -> DecodeInputs:
    inputs = make_inputs(
        problem, 3, features, distribution=distribution, device="cuda", workspace_bytes=256
    )
    return replace(inputs, **{FACTOR: factor})


def check_skipped(inputs: DecodeInputs, result: Any, walked: Result, exact: Result) -> None:
    """As close to the oracle that skips alike as a call without a factor is to its own."""
    allowed = limits_of(replace(inputs, **{FACTOR: None}), exact)
    assert rel_error(result[0], walked.out) <= allowed.rel_error
    check(inputs, result, exact)


@pytest.mark.parametrize("features", [["lse"], ["lse", "sinks", "ragged", "device_scales"]])
@pytest.mark.parametrize("factor", [1e-4, 1e-2, 1.0])
@pytest.mark.parametrize(
    ("heads", "q_len", "tile_rows"),
    [
        pytest.param(16, 1, 16, marks=pytest.mark.compiler),
        (128, 2, 32),
        (7, 5, 32),
        pytest.param(7, 5, 16, marks=pytest.mark.compiler),
    ],
)
def test_skips_what_its_definition_says(
    heads: int,
    q_len: int,
    tile_rows: int,
    factor: float,
    features: list[str],
    workspace: torch.Tensor,
) -> None:
    problem = problem_of(E4M3, (q_len,) * 5, (4000, 0, 65, 1, 700), heads)
    inputs = skipping(problem, "heavy_tailed", factor, *features)
    exact = decode_reference(replace(inputs, **{FACTOR: None}))
    for splits in (1, 3):
        plan = make_plan(problem, tile_rows=tile_rows, policy="fixed", num_splits=splits)
        result = native(inputs, workspace, plan=plan)
        check_skipped(inputs, result, decode_reference(inputs, walk=walk_of(plan)), exact)
    assert counters_are_zero(workspace)


@pytest.mark.parametrize("tile_rows", [pytest.param(16, marks=pytest.mark.compiler), 32])
@pytest.mark.parametrize("heads", [3, 20])
def test_what_is_left_out_shows(heads: int, tile_rows: int, workspace: torch.Tensor) -> None:
    """Where most tiles are: the result is that of the tiles that are kept."""
    problem = problem_of(E4M3, (1,) * 3, (1500, 130, 2000), heads)
    inputs = skipping(problem, "gauss", 800.0, "lse")
    exact = decode_reference(replace(inputs, **{FACTOR: None}))
    walked = decode_reference(inputs, walk=TileWalk(tile_rows))
    limit = limits_of(replace(inputs, **{FACTOR: None}), exact).rel_error
    assert rel_error(walked.out.float(), exact.out) > 4 * limit
    plan = make_plan(problem, tile_rows=tile_rows, policy="none")
    check_skipped(inputs, native(inputs, workspace, plan=plan), walked, exact)


@pytest.mark.parametrize("kv_format", ["e4m3", "fp8_656"])
@pytest.mark.parametrize("heads", [3, 20, 128])
def test_skips_under_a_query_of_16_bits(
    heads: int, kv_format: str, workspace: torch.Tensor
) -> None:
    """By plans of one and of three pieces, what is left out as the definition has it."""
    formats = ("bf16", kv_format)
    for distribution, factor in (("gauss", 800.0), ("heavy_tailed", 1e-2)):
        problem = problem_of(formats, (2, 2, 2), (1500, 130, 2000), heads)
        inputs = skipping(problem, distribution, factor, "lse", "sinks", "device_scales")
        exact = decode_reference(replace(inputs, **{FACTOR: None}))
        for splits in (1, 3):
            plan = make_plan(problem, tile_rows=16, policy="fixed", num_splits=splits)
            walked = decode_reference(inputs, walk=walk_of(plan))
            check_skipped(inputs, native(inputs, workspace, plan=plan), walked, exact)
    assert counters_are_zero(workspace)


@pytest.mark.parametrize("kv_format", ["e4m3", "fp8_656"])
def test_a_query_of_16_bits_by_the_backends_own_choice(
    kv_format: str, workspace: torch.Tensor
) -> None:
    problem = problem_of(("bf16", kv_format), (8, 3, 0, 1), (3000, 65, 5, 700), 24)
    inputs = skipping(problem, "heavy_tailed", 1e-3, "lse", "ragged", "tree_mask", "max_q_len")
    exact = decode_reference(replace(inputs, **{FACTOR: None}))
    for invariant in (False, True):
        check(inputs, native(inputs, workspace, batch_invariant=invariant), exact)
    assert counters_are_zero(workspace)


def test_skips_with_draft_trees_and_by_the_backends_own_choice(workspace: torch.Tensor) -> None:
    problem = problem_of(E4M3, (8, 3, 0, 1), (3000, 65, 5, 700), 24)
    inputs = skipping(problem, "heavy_tailed", 1e-3, "lse", "ragged", "tree_mask", "max_q_len")
    exact = decode_reference(replace(inputs, **{FACTOR: None}))
    check(inputs, native(inputs, workspace), exact)
    check(inputs, native(inputs, workspace, plan=make_plan(problem, tile_rows=32)), exact)
    assert counters_are_zero(workspace)
