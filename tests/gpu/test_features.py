"""Features of the contract by the CuTe backend, on a card, against the float64 oracle.

Caches are poisoned: what no length reaches holds NaN, unused table entries name no page.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from mla_lab.api import decode
from mla_lab.core import masks
from mla_lab.core.problem import Problem
from mla_lab.plan import make_plan
from mla_lab.reference.inputs import DecodeInputs, make_inputs
from mla_lab.reference.mla import TileWalk, decode_reference, skip_tiles
from mla_lab.reference.operands import operands

from .calls import (
    LENGTHS,
    check,
    chosen_plan,
    counters_are_zero,
    inputs_of,
    native,
    no_synchronisation,
    plans_of_all_ways,
    walk_of,
)

pytestmark = pytest.mark.gpu


def check_all(inputs: DecodeInputs, workspace: torch.Tensor, splits: int = 3) -> None:
    """By the backend's own choice and by every kernel; the workspace is left as it was."""
    expected = decode_reference(inputs)
    check(inputs, native(inputs, workspace), expected)
    for plan in plans_of_all_ways(inputs.problem, splits):
        check(inputs, native(inputs, workspace, plan=plan), expected)
    assert counters_are_zero(workspace)


@pytest.mark.parametrize("features", [["sinks"], ["device_scales"], ["sinks", "device_scales"]])
@pytest.mark.parametrize(("heads", "q_len"), [(16, 1), (7, 3), (24, 2), (100, 2), (128, 1)])
def test_sinks_and_scales(
    heads: int, q_len: int, features: list[str], workspace: torch.Tensor
) -> None:
    problem = Problem((q_len,) * len(LENGTHS), LENGTHS, heads)
    check_all(inputs_of(problem, "lse", *features, seed=heads), workspace)


@pytest.mark.parametrize("value", [-math.inf, -80.0, 80.0])
def test_sinks_beyond_the_scores(value: float, workspace: torch.Tensor) -> None:
    inputs = inputs_of(Problem((2, 2), (300, 0), 24), "lse", "sinks")
    check_all(replace(inputs, sinks=torch.full_like(inputs.sinks, value)), workspace)


def test_a_list_of_sinks_and_an_lse_in_base_2(workspace: torch.Tensor) -> None:
    inputs = inputs_of(Problem((1, 1), (300, 3000), 16), "lse", "sinks", "device_scales")
    sinks: Any = inputs.sinks
    inputs = replace(inputs, sinks=[sinks], return_lse_base="base2")
    for _ in range(2):
        check(inputs, native(inputs, workspace))


@pytest.mark.parametrize("features", [["tree_mask"], ["tree_mask", "sinks", "device_scales"]])
@pytest.mark.parametrize(
    ("heads", "q_len"),
    [(16, 1), (16, 2), (7, 5), (16, 8), (1, 33), (8, 64), (24, 17), (128, 5), (100, 31)],
)
def test_draft_trees(heads: int, q_len: int, features: list[str], workspace: torch.Tensor) -> None:
    lengths = (0, 1, q_len - 1, q_len, q_len + 1, 63, 64, 65, 127 + q_len, 700)
    problem = Problem((q_len,) * len(lengths), lengths, heads)
    check_all(inputs_of(problem, "lse", *features, seed=q_len), workspace)


@pytest.mark.parametrize("features", [[], ["max_q_len"], ["sinks", "page_gap"]])
@pytest.mark.parametrize("heads", [16, 128])
def test_ragged_draft_trees(heads: int, features: list[str], workspace: torch.Tensor) -> None:
    problem = Problem((1, 0, 3, 40, 2, 64), (10, 5, 640, 30, 0, 1280), heads)
    check_all(inputs_of(problem, "lse", "ragged", "tree_mask", *features), workspace)


def test_a_flipped_bit_shows(workspace: torch.Tensor) -> None:
    inputs = inputs_of(Problem((8,), (100,), 16), "lse", "tree_mask")
    _, lse = (t.clone() for t in native(inputs, workspace))
    seen = masks.unpack(inputs.mask, 8)
    seen[0, 7, 0] ^= True
    _, other = native(replace(inputs, mask=masks.pack(seen)), workspace)
    changed = (lse != other).view(8, 16).any(1)
    assert changed.tolist() == [False] * 7 + [True]


SCALED: tuple[tuple[tuple[str, str], dict[str, int]], ...] = (
    (("bf16", "bf16"), {}),
    (("bf16", "bf16"), {"top_k": 70}),
    (("bf16", "bf16"), {"page_size": 1}),
    (("bf16", "e4m3"), {}),
    (("bf16", "fp8_656"), {"top_k": 70}),
    (("e4m3", "e4m3"), {}),
    (("e4m3", "e4m3"), {"page_size": 5}),
)


@pytest.mark.parametrize("value", [-0.07, 0.0, math.nan])
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize(("formats", "more"), SCALED)
def test_a_scale_in_memory_may_have_any_value(
    formats: tuple[str, str],
    more: dict[str, int],
    heads: int,
    value: float,
    workspace: torch.Tensor,
) -> None:
    """The CuTe kernels' answer is the oracle's; under NaN it is NaN where there are keys."""
    names = {"q_dtype": formats[0], "kv_format": formats[1]}
    problem = Problem((2, 2, 2), (70, 1300, 0), heads, **{**names, **more})
    inputs = inputs_of(problem, "lse", "sinks", "device_scales")
    inputs = replace(inputs, bmm1_scale=torch.full((1,), value, device="cuda"))
    if math.isnan(value):
        assert native(inputs, workspace)[0][:2].isnan().all()
    else:
        check(inputs, native(inputs, workspace))


@pytest.mark.parametrize("value", [-0.07, 0.0])
@pytest.mark.parametrize("kv_format", ["bf16", "e4m3", "fp8_656"])
def test_a_scale_in_memory_may_have_any_value_with_drafts(
    kv_format: str, value: float, workspace: torch.Tensor
) -> None:
    problem = Problem((4, 4, 4), (70, 1300, 3), 100, kv_format=kv_format)
    inputs = inputs_of(problem, "lse", "tree_mask", "device_scales")
    inputs = replace(inputs, bmm1_scale=torch.full((1,), value, device="cuda"))
    check(inputs, native(inputs, workspace))
    if kv_format == "bf16":
        check(inputs, native(inputs, workspace, plan=chosen_plan(problem)))


@pytest.mark.parametrize("heads", [16, 128])
def test_without_a_synchronisation_and_in_a_graph(heads: int, workspace: torch.Tensor) -> None:
    problem = Problem((4,) * 3, (700, 65, 3), heads)
    inputs = inputs_of(problem, "lse", "sinks", "device_scales", "tree_mask")
    out = torch.empty(3, 4, heads, 512, dtype=torch.bfloat16, device="cuda")
    lse = torch.empty(3, 4, heads, device="cuda")
    native(inputs, workspace, out=out, lse=lse)
    with no_synchronisation():
        native(inputs, workspace, out=out, lse=lse)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        native(inputs, workspace, out=out, lse=lse)
    inputs.bmm1_scale.mul_(0.5)
    inputs.sinks.add_(1.0)
    inputs.seq_lens.copy_(torch.tensor([65, 700, 4], dtype=torch.int32))
    # all of a longer request's pages exist: those of the first request's table
    inputs.block_tables.copy_(inputs.block_tables[:1].expand(3, -1).clone())
    out.fill_(torch.nan)
    graph.replay()
    check(inputs, (out, lse))


def test_explain_says_who_runs_them() -> None:
    inputs = inputs_of(Problem((2, 2), (70, 300), 16), "sinks", "tree_mask", "device_scales")
    assert [v.name for v in decode.explain(**inputs.contract_args()) if v.taken] == ["cute"]


# --- tokens fetched one by one ------------------------------------------------------------------


@pytest.mark.parametrize("features", [[], ["tree_mask", "sinks"], ["page_gap", "device_scales"]])
@pytest.mark.parametrize("page_size", [1, 2, 4, 5, 8])
@pytest.mark.parametrize(("heads", "q_len"), [(16, 1), (7, 3), (100, 2)])
def test_small_pages(
    heads: int, q_len: int, page_size: int, features: list[str], workspace: torch.Tensor
) -> None:
    problem = Problem((q_len,) * len(LENGTHS), LENGTHS, heads, page_size=page_size)
    inputs = inputs_of(problem, "lse", *features)
    expected = decode_reference(inputs)
    for invariant in (False, True):
        check(inputs, native(inputs, workspace, batch_invariant=invariant), expected)
    assert counters_are_zero(workspace)


@pytest.mark.parametrize("features", [["cache_4d"], ["max_q_len", "tree_mask"]])
def test_small_pages_ragged(features: list[str], workspace: torch.Tensor) -> None:
    problem = Problem((1, 0, 3, 8, 2, 5), (10, 5, 640, 3, 0, 8000), 16, page_size=4)
    inputs = inputs_of(problem, "lse", "ragged", *features)
    check(inputs, native(inputs, workspace))


# --- skip-softmax -------------------------------------------------------------------------------


def skipping(problem: Problem, factor: float | None, *features: str) -> DecodeInputs:
    inputs = make_inputs(
        problem, 3, features, distribution="heavy_tailed", device="cuda", workspace_bytes=256
    )
    return replace(inputs, skip_softmax_threshold_scale_factor=factor)


@pytest.mark.parametrize("features", [["lse"], ["lse", "sinks", "ragged", "device_scales"]])
@pytest.mark.parametrize("factor", [1e-4, 1e-2, 1.0])
@pytest.mark.parametrize(("heads", "q_len"), [(16, 1), (128, 2), (7, 5)])
def test_skips_what_its_definition_says(
    heads: int, q_len: int, factor: float, features: list[str], workspace: torch.Tensor
) -> None:
    problem = Problem((q_len,) * 5, (4000, 0, 65, 1, 700), heads)
    inputs = skipping(problem, factor, *features)
    exact = decode_reference(replace(inputs, skip_softmax_threshold_scale_factor=None))
    for splits in (1, 3):
        plan = make_plan(problem, policy="fixed", num_splits=splits)
        result = native(inputs, workspace, plan=plan)
        check(inputs, result, decode_reference(inputs, walk=walk_of(plan)))
        # never more than the factor, of whatever a row holds
        dropped = 1 - torch.exp(result[1].double().view_as(exact.lse) - exact.lse)
        assert float(dropped.nan_to_num().max()) <= factor + 1e-5
    assert counters_are_zero(workspace)


@pytest.mark.parametrize("features", [["lse"], ["lse", "ragged", "device_scales"]])
@pytest.mark.parametrize("heads", [64, 128])
def test_skips_most_of_what_is_concentrated(
    heads: int, features: list[str], workspace: torch.Tensor
) -> None:
    """And loses no more than the factor; the oracle keeps a fifth of the tiles at most."""
    inputs = make_inputs(
        Problem((1,) * 3, (6000, 130, 8192), heads),
        5,
        features,
        distribution="concentrated",
        device="cuda",
        workspace_bytes=256,
    )
    inputs = replace(inputs, skip_softmax_threshold_scale_factor=1e-2)
    request, scale = next(operands(inputs, torch.float32)), float(inputs.bmm1_scale)
    kept = skip_tiles(request, scale, 1e-2, TileWalk()).visible
    assert float(kept.float().mean()) < 0.2
    exact = decode_reference(replace(inputs, skip_softmax_threshold_scale_factor=None))
    result = native(inputs, workspace, plan=make_plan(inputs.problem, policy="none"))
    check(inputs, result, decode_reference(inputs))
    dropped = 1 - torch.exp(result[1].double().view_as(exact.lse) - exact.lse)
    assert float(dropped.max()) <= 1e-2 + 1e-5
    check(inputs, native(inputs, workspace), exact)


@pytest.mark.parametrize("features", [["lse"], ["lse", "ragged"]])
def test_a_factor_of_0_is_none_bit_for_bit(features: list[str], workspace: torch.Tensor) -> None:
    problem = Problem((1,) * 3, (4000, 65, 700), 128)
    none = [t.clone() for t in native(skipping(problem, None, *features), workspace)]
    zero = native(skipping(problem, 0.0, *features), workspace)
    assert all(torch.equal(a, b) for a, b in zip(none, zero, strict=True))


def test_skips_with_draft_trees(workspace: torch.Tensor) -> None:
    problem = Problem((8, 3, 0, 1), (3000, 65, 5, 700), 24)
    inputs = skipping(problem, 1e-3, "lse", "ragged", "tree_mask", "max_q_len")
    plan = make_plan(problem, policy="none")
    check(inputs, native(inputs, workspace, plan=plan))
