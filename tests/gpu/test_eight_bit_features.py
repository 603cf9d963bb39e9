"""Features over caches of eight bits by the CuTe backend, on a card, against the float64 oracle.

What no length or slot reaches holds NaN in every byte, scales of 656-byte tokens among them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from mla_lab.inputs import make_inputs
from mla_lab.problem import Problem
from mla_lab.proof.limits import limits_of
from mla_lab.reference import decode_reference

from .calls import check, counters_are_zero, inputs_of, native

pytestmark = pytest.mark.gpu

#: query, cache
FORMATS = [("bf16", "fp8_656"), ("e4m3", "e4m3"), ("bf16", "e4m3")]
#: nothing, one key, block ends, several pieces
LENGTHS = (0, 1, 63, 64, 65, 700, 0, 129, 5)


def problem_of(formats: tuple[str, str], *lengths: Any, **named: Any) -> Problem:
    q_dtype, kv_format = formats
    return Problem(*lengths, q_dtype=q_dtype, kv_format=kv_format, out_dtype="bf16", **named)


@pytest.mark.parametrize("features", [[], ["sinks", "device_scales", "page_gap"]])
@pytest.mark.parametrize("top_k", [1, 64, 100, 2048])
@pytest.mark.parametrize(("heads", "page_size"), [(16, 64), (7, 1), (128, 16), (24, 64)])
@pytest.mark.parametrize("formats", FORMATS)
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
@pytest.mark.parametrize("formats", FORMATS)
def test_sparse_ragged(formats: tuple[str, str], heads: int, workspace: torch.Tensor) -> None:
    made = problem_of(formats, (1, 0, 3, 40, 2), (10, 5, 640, 1300, 0), heads, top_k=200)
    inputs = inputs_of(made, "lse", "ragged", "max_q_len", "cache_4d")
    check(inputs, native(inputs, workspace))


@pytest.mark.parametrize("formats", FORMATS)
def test_sparse_in_more_workers_than_run_at_once(
    formats: tuple[str, str], workspace: torch.Tensor
) -> None:
    made = problem_of(formats, (8,) * 40, (700,) * 40, 24, top_k=130)
    inputs = inputs_of(made, "lse")
    check(inputs, native(inputs, workspace))


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("formats", FORMATS)
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


@pytest.mark.parametrize("features", [[], ["tree_mask", "sinks"], ["page_gap", "device_scales"]])
@pytest.mark.parametrize("page_size", [1, 4, 5])
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
