"""The CuTe backend on a card: every anchor shape and many odd ones against the oracle.

Caches are poisoned: what no length reaches holds NaN, unused table entries name no page.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from mla_lab.api import decode
from mla_lab.backends.cute.families import config_for
from mla_lab.bench.cases import Case, anchor_cases
from mla_lab.core.errors import InvalidInput, Unsupported
from mla_lab.core.problem import Problem
from mla_lab.plan import KernelConfig, make_plan
from mla_lab.plan.launch_modes import KEEP_AB_PERSISTENT, SWAP_AB_PERSISTENT
from mla_lab.reference.inputs import make_inputs
from mla_lab.reference.mla import decode_reference
from mla_lab.reference.tolerance import rel_error, sdpa_error

from .calls import (
    LENGTHS,
    check,
    chosen_plan,
    counters_are_zero,
    inputs_of,
    native,
    plans_of_all_ways,
)

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", anchor_cases(), ids=lambda case: case.name)
def test_anchors(case: Case, workspace: torch.Tensor) -> None:
    inputs = inputs_of(case.problem, "lse")
    expected = decode_reference(inputs, dtype=torch.float32)
    check(inputs, native(inputs, workspace), expected)
    check(inputs, native(inputs, workspace, plan=chosen_plan(case.problem)), expected)
    assert counters_are_zero(workspace)


@pytest.mark.parametrize(
    "case", [c for c in anchor_cases() if c.problem.batch <= 16], ids=lambda case: case.name
)
def test_small_anchors_by_every_kernel(case: Case, workspace: torch.Tensor) -> None:
    inputs = inputs_of(case.problem, "lse")
    expected = decode_reference(inputs, dtype=torch.float32)
    for plan in plans_of_all_ways(case.problem, 4):
        check(inputs, native(inputs, workspace, plan=plan), expected)
    assert counters_are_zero(workspace)


@pytest.mark.parametrize("q_len", range(1, 9))
@pytest.mark.parametrize("heads", [1, 7, 24, 100])
def test_odd_shapes(heads: int, q_len: int, workspace: torch.Tensor) -> None:
    problem = Problem((q_len,) * len(LENGTHS), LENGTHS, heads)
    inputs = inputs_of(problem, "lse", seed=q_len)
    expected = decode_reference(inputs)
    for plan in (
        None,
        chosen_plan(problem),
        make_plan(problem, tile_rows=64, policy="fixed", num_splits=4, num_workers=7),
        make_plan(problem, tile_rows=128, policy="none", schedule="grid"),
        make_plan(problem, tile_rows=128, policy="greedy", num_workers=66),
        *plans_of_all_ways(problem, 3),
    ):
        check(inputs, native(inputs, workspace, plan=plan), expected)
    assert counters_are_zero(workspace)


@pytest.mark.parametrize("q_len", [1, 8])
@pytest.mark.parametrize("heads", [1, 7, 24, 100])
def test_long_among_short(heads: int, q_len: int, workspace: torch.Tensor) -> None:
    problem = Problem((q_len,) * 4, (131072, 0, 64, 1), heads)
    inputs = inputs_of(problem, "lse")
    expected = decode_reference(inputs)
    check(inputs, native(inputs, workspace), expected)
    check(inputs, native(inputs, workspace, batch_invariant=True), expected)
    check(inputs, native(inputs, workspace, plan=chosen_plan(problem)), expected)


@pytest.mark.parametrize("features", [[], ["max_q_len"], ["page_gap", "cache_4d", "scales"]])
@pytest.mark.parametrize("heads", [7, 128, 200])
def test_ragged(heads: int, features: list[str], workspace: torch.Tensor) -> None:
    problem = Problem((1, 0, 3, 8, 2, 5), (10, 5, 640, 3, 0, 1280), heads)
    inputs = inputs_of(problem, "lse", "ragged", *features)
    expected = decode_reference(inputs)
    for plan in (None, chosen_plan(problem), *plans_of_all_ways(problem, 2)):
        check(inputs, native(inputs, workspace, plan=plan), expected)


FORMATS = [
    ("bf16", 16, torch.bfloat16),
    ("bf16", 32, torch.bfloat16),
    ("bf16", 128, torch.bfloat16),
    ("fp16", 64, torch.bfloat16),
    ("fp16", 64, torch.float16),
]


@pytest.mark.parametrize("splits", [2, 3, 4, 5, 7, 8, 9, 33])
@pytest.mark.parametrize("tile", KEEP_AB_PERSISTENT.tiles)
def test_merges_of_few_and_of_many(
    tile: tuple[int, int], splits: int, workspace: torch.Tensor
) -> None:
    """Partials that go to registers straight, and those that go by shared memory; a worker's last
    work tile, of which it keeps its share, and earlier ones."""
    problem = Problem((1, 2), (4096, 705), 100)
    inputs = inputs_of(problem, "lse", "page_gap")
    expected = decode_reference(inputs)
    for workers in (132 // tile[1], 5):
        plan = make_plan(
            problem, tile_rows=tile[0], num_workers=workers, policy="fixed", num_splits=splits
        )
        plan = replace(plan, config=config_for(KEEP_AB_PERSISTENT, tile))
        check(inputs, native(inputs, workspace, plan=plan), expected)
        assert counters_are_zero(workspace)


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize(("dtype", "page_size", "out_dtype"), FORMATS)
def test_formats(
    dtype: str, page_size: int, out_dtype: torch.dtype, heads: int, workspace: torch.Tensor
) -> None:
    problem = Problem(
        (2, 2, 2), (1000, 65, 4), heads, q_dtype=dtype, kv_format=dtype, page_size=page_size
    )
    inputs = inputs_of(problem, "lse", "page_gap")
    out = torch.full((3, 2, heads, 512), torch.nan, dtype=out_dtype, device="cuda")
    check(inputs, native(inputs, workspace, out=out))
    for plan in (chosen_plan(problem), *plans_of_all_ways(problem, 3)):
        out.fill_(torch.nan)
        check(inputs, native(inputs, workspace, out=out, plan=plan))


@pytest.mark.parametrize("heads", [7, 16, 64, 128])
@pytest.mark.parametrize("kv_format", ["e4m3", "fp8_656"])
def test_a_cache_of_eight_bits(kv_format: str, heads: int, workspace: torch.Tensor) -> None:
    lengths = (1000, 65, 0, 8, 4097)
    problem = Problem((2,) * 5, lengths, heads, kv_format=kv_format)
    inputs = inputs_of(problem, "lse", "page_gap", "scales")
    expected = decode_reference(inputs)
    for more in ({}, {"batch_invariant": True}, {"plan": chosen_plan(problem)}):
        check(inputs, native(inputs, workspace, **more), expected)
    for features in (("device_scales", "sinks"), ("tree_mask",)):
        few = Problem((2, 2), (1000, 65), heads, kv_format=kv_format)
        inputs = inputs_of(few, "lse", *features)
        check(inputs, native(inputs, workspace))
    ragged = Problem((1, 0, 3, 8, 2), lengths, heads, kv_format=kv_format)
    inputs = inputs_of(ragged, "lse", "ragged", "cache_4d")
    check(inputs, native(inputs, workspace))
    assert counters_are_zero(workspace)


@pytest.mark.parametrize("heads", [7, 16, 64, 128])
@pytest.mark.parametrize(
    "features",
    [(), ("scales",), ("device_scales", "sinks"), ("tree_mask",)],
    ids=lambda features: "-".join(features) or "plain",
)
def test_e4m3_throughout(features: tuple[str, ...], heads: int, workspace: torch.Tensor) -> None:
    lengths, formats = (1000, 65, 3, 8, 4097), {"q_dtype": "e4m3", "kv_format": "e4m3"}
    problem = Problem((2,) * 5, lengths, heads, **formats)
    inputs = inputs_of(problem, "lse", "page_gap", *features)
    expected = decode_reference(inputs)
    choices: list[dict[str, Any]] = [{}, {"batch_invariant": True}]
    if not {"tree_mask", "device_scales"} & set(features):
        choices.append({"plan": chosen_plan(problem)})
    for more in choices:
        check(inputs, native(inputs, workspace, **more), expected)
    ragged = Problem((1, 0, 3, 8, 2), (1000, 65, 0, 8, 4097), heads, **formats)
    if "tree_mask" not in features:
        inputs = inputs_of(ragged, "lse", "ragged", "cache_4d", *features)
        check(inputs, native(inputs, workspace))
    assert counters_are_zero(workspace)


@pytest.mark.parametrize("heads", [16, 128])
def test_e4m3_results_saturate(heads: int, workspace: torch.Tensor) -> None:
    formats = {"q_dtype": "e4m3", "kv_format": "e4m3", "out_dtype": "e4m3"}
    problem = Problem((1,) * 5, (1000, 65, 3, 8, 4097), heads, **formats)
    inputs = inputs_of(problem, "lse")
    shape = (*inputs.query.shape[:-1], 512)
    for scale in (1.0, 4000.0):
        out = torch.zeros(shape, device="cuda").to(torch.float8_e4m3fn)
        call = replace(inputs, bmm2_scale=scale)
        native(call, workspace, out=out)
        wanted = decode_reference(call).out.clamp(-448.0, 448.0)
        assert rel_error(out.double(), wanted) < 6e-2


@pytest.mark.parametrize("distribution", ["gauss", "heavy_tailed"])
@pytest.mark.parametrize("kv_format", ["bf16", "e4m3", "fp8_656"])
def test_no_worse_than_twice_torch(
    kv_format: str, distribution: str, workspace: torch.Tensor
) -> None:
    problem = Problem((2, 2), (3000, 777), 128, kv_format=kv_format)
    inputs = make_inputs(problem, 3, distribution=distribution, device="cuda")
    expected = decode_reference(inputs)
    mine = rel_error(native(inputs, workspace), expected.out)
    assert mine <= 2 * sdpa_error(inputs, expected).relative + 1e-6


@pytest.mark.compiler
def test_a_plan_without_pdl(workspace: torch.Tensor) -> None:
    problem = Problem((1, 3, 2), (1000, 65, 0), 24)
    inputs = inputs_of(problem, "lse", "scales", "ragged")
    plan = make_plan(problem, policy="fixed", num_splits=3)
    config = KernelConfig("cute/keep_ab_sm90", options=(("pdl", 0),))
    check(inputs, native(inputs, workspace, plan=replace(plan, config=config)))


@pytest.mark.parametrize(
    "how",
    [
        {"policy": "none", "schedule": "grid"},
        {"policy": "fixed", "schedule": "grid"},
        {"policy": "fixed", "num_splits": 3, "num_workers": 300},
        {"policy": "greedy", "num_workers": 1000},
    ],
    ids=lambda how: "-".join(map(str, how.values())),
)
@pytest.mark.parametrize("tile", [*SWAP_AB_PERSISTENT.tiles, *KEEP_AB_PERSISTENT.tiles])
def test_more_workers_than_run_at_once(
    tile: tuple[int, int], how: dict[str, Any], workspace: torch.Tensor
) -> None:
    """Neighbours are one worker, which has several pieces of a row tile where they had one each."""
    mode = KEEP_AB_PERSISTENT if tile in KEEP_AB_PERSISTENT.tiles else SWAP_AB_PERSISTENT
    problem = Problem((2,) * 80, tuple(range(0, 8000, 100)), 128)
    inputs = inputs_of(problem, "lse")
    plan = replace(make_plan(problem, tile_rows=tile[0], **how), config=config_for(mode, tile))
    assert plan.num_workers > 132
    check(inputs, native(inputs, workspace, plan=plan))
    assert counters_are_zero(workspace)


def test_more_workers_than_run_at_once_write_e4m3(workspace: torch.Tensor) -> None:
    formats = {"q_dtype": "e4m3", "kv_format": "e4m3", "out_dtype": "e4m3"}
    problem = Problem((1,) * 5, (1000, 65, 3, 8, 4097), 128, **formats)
    inputs = inputs_of(problem, "lse")
    out = torch.zeros((*inputs.query.shape[:-1], 512), device="cuda").to(torch.float8_e4m3fn)
    plan = make_plan(problem, tile_rows=64, policy="fixed", num_splits=20, num_workers=200)
    native(inputs, workspace, out=out, plan=plan)
    assert rel_error(out.double(), decode_reference(inputs).out) < 6e-2


def test_lse_in_base_2_and_in_the_callers_shape(workspace: torch.Tensor) -> None:
    problem = Problem((2, 2), (300, 0), 16)
    inputs = replace(inputs_of(problem, "lse"), return_lse_base="base2")
    lse = torch.full((2, 2, 16), torch.nan, device="cuda")
    out, given = native(inputs, workspace, lse=lse)
    assert given is lse
    check(inputs, (out, lse))


def test_negative_output_scale(workspace: torch.Tensor) -> None:
    inputs = replace(inputs_of(Problem((1,), (300,), 16)), bmm2_scale=-0.5)
    check(inputs, native(inputs, workspace))


# --- equal bits --------------------------------------------------------------------------------


def test_equal_calls_give_equal_bits(workspace: torch.Tensor) -> None:
    inputs = inputs_of(Problem((1,) * 5, (5000, 1, 0, 64, 9000), 128), "lse")
    first = [t.clone() for t in native(inputs, workspace)]
    for _ in range(5):
        assert all(torch.equal(a, b) for a, b in zip(first, native(inputs, workspace), strict=True))


# --- streams, graphs, memory -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("features", "words"),
    [(["separate_tables"], "a table of its own for values")],
)
def test_what_it_lacks_raises_by_name_and_runs_by_auto(
    features: list[str], words: str, workspace: torch.Tensor
) -> None:
    inputs = inputs_of(Problem((2, 2), (70, 300), 16), *features)
    with pytest.raises(Unsupported, match=words):
        native(inputs, workspace)
    check(inputs, native(inputs, workspace, backend="auto"))


def test_auto_takes_it() -> None:
    inputs = inputs_of(Problem((1,), (300,), 16))
    assert [v.name for v in decode.explain(**inputs.contract_args()) if v.taken] == ["cute"]


def test_data_out_of_line_is_refused(workspace: torch.Tensor) -> None:
    inputs = inputs_of(Problem((1,), (300,), 16))
    shifted = torch.zeros(inputs.query.numel() + 1, dtype=torch.bfloat16, device="cuda")[1:]
    query = shifted.view(inputs.query.shape).copy_(inputs.query)
    with pytest.raises(InvalidInput, match="multiples of 16 bytes"):
        native(replace(inputs, query=query), workspace)


def test_compiled(workspace: torch.Tensor) -> None:
    from mla_lab import trtllm_batch_decode_with_kv_cache_mla as call

    inputs = inputs_of(Problem((1, 1), (300, 900), 16), "lse")
    arguments = {**inputs.contract_args(), "workspace_buffer": workspace}

    def step(query: torch.Tensor) -> Any:
        out, lse = call(**{**arguments, "query": query * 1.0})
        return out * 1.0, lse

    check(inputs, torch.compile(step, backend="aot_eager", fullgraph=True)(inputs.query))
