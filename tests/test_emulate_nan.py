"""A key that holds NaN makes the lse of the rows that see it NaN, as it makes their out: -inf would
say that there was no key, and `context_parallel.merge` would leave the rank out. NaN also marks the
rows of a request that has more query tokens than its packed mask has columns."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from mla_lab import jit
from mla_lab.emulate import EmulatedKernel
from mla_lab.emulate.calls import EIGHT_BITS, call_of, make_call, problem_for
from mla_lab.plan.config import KernelConfig
from mla_lab.reference.inputs import make_inputs
from mla_lab.reference.tolerance import lse_error, rel_error

from .needs import needs_cxx, needs_time
from .shared_builds import (
    E4M3,
    KEEP_AB,
    KEEP_AB_E4M3,
    SWAP_AB_CLUSTER,
    SWAP_AB_LL,
    SWAP_AB_LL_E4M3,
    SWAP_AB_SKIP,
    keep_ab,
    swap_ab,
)

pytestmark = needs_cxx
#: the last CTA of a row tile merges
LAST_CTA = swap_ab({"tile_rows": 16, "mask": "tree"}, fused_merge=1, gather=1, grid=1)
#: workers cut requests into pieces of their own length
PIECES = swap_ab({"tile_rows": 16, "mask": "causal"}, fused_merge=2, pieces=1)
E4M3_NAN = 0x7F
TREE = {"mask": "tree"}
TREE_16 = TREE | {"tile_rows": 16}


@pytest.mark.parametrize(
    ("config", "splits"),
    [
        (SWAP_AB_LL, 1),
        (SWAP_AB_LL, 3),
        (SWAP_AB_LL, 6),
        (SWAP_AB_LL_E4M3, 2),
        (SWAP_AB_CLUSTER, 1),
        (SWAP_AB_CLUSTER, 2),
        (SWAP_AB_CLUSTER, 6),
        (KEEP_AB, 1),
        (KEEP_AB, 3),
        (KEEP_AB_E4M3, 2),
        pytest.param(LAST_CTA, 3, marks=needs_time),
        pytest.param(PIECES, 0, marks=needs_time),
    ],
    ids=lambda value: value if isinstance(value, int) else value.name(),
)
def test_lse_is_nan_where_a_key_is(config: KernelConfig, splits: int) -> None:
    kv_len = 64 * (splits or 40) - 5
    problem = problem_for(config, (kv_len, kv_len))
    inputs = make_inputs(problem, 0, ["lse"], workspace_bytes=64)
    first = inputs.kv_cache.view(torch.uint8)[int(inputs.block_tables[0, 0])]
    token = first.view(inputs.kv_cache.dtype)[3]
    token.view(torch.uint8)[5] = E4M3_NAN
    if problem.kv_format != "e4m3":
        token[5] = math.nan
    call = call_of(config, inputs, splits)
    EmulatedKernel.of(jit.compile(config))(*call.args)
    out, lse = call.out.view(2, -1).float(), call.lse.view(2, -1)
    assert bool(out[0].isnan().all()) and bool(lse[0].isnan().all())
    assert bool(out[1].isfinite().all()) and bool(lse[1].isfinite().all())


@pytest.mark.parametrize(
    "config",
    [
        SWAP_AB_SKIP,
        pytest.param(keep_ab({}, skip=1), marks=needs_time),
        pytest.param(
            swap_ab(TREE_16 | {"kv_format": "e4m3"}, fused_merge=2, skip=1), marks=needs_time
        ),
        pytest.param(
            swap_ab(TREE_16 | {"kv_format": "fp8_656"}, fused_merge=2, skip=1), marks=needs_time
        ),
    ],
    ids=KernelConfig.name,
)
def test_a_tile_with_a_nan_is_not_skipped(config: KernelConfig) -> None:
    """Under this factor all other tiles but a request's first are."""
    inputs = make_inputs(problem_for(config, (250, 250)), 0, ["lse"], workspace_bytes=64)
    inputs = replace(inputs, skip_softmax_threshold_scale_factor=1e6)
    page = inputs.kv_cache.view(torch.uint8)[int(inputs.block_tables[0, 2])]
    token = page.view(inputs.kv_cache.dtype)[3]
    token.view(torch.uint8)[5] = E4M3_NAN
    if config.kv_format == "bf16":
        token[5] = math.nan
    call = call_of(config, inputs)
    EmulatedKernel.of(jit.compile(config))(*call.args)
    out, lse = call.out.view(2, -1).float(), call.lse.view(2, -1)
    assert bool(out[0].isnan().all()) and bool(lse[0].isnan().all())
    assert bool(out[1].isfinite().all()) and bool(lse[1].isfinite().all())


#: of unlike masks, formats, merges and ways to find work
LONG_DRAFTS = (
    (keep_ab(TREE), 4),
    (keep_ab(TREE, pieces=1, scales=1, skip=1), 0),
    (keep_ab(TREE | {"tile_rows": 128, "cluster": 2}), 4),
    (LAST_CTA, 4),
    (swap_ab(TREE_16, fused_merge=3, grid=1), 1),
    (swap_ab(TREE_16, fused_merge=3, grid=1), 4),
    (swap_ab(TREE_16 | {"cluster": 8}, fused_merge=2, grid=1), 4),
    (swap_ab(TREE_16, fused_merge=2), 4),
    (swap_ab(TREE_16, fused_merge=2, pieces=1), 0),
    (swap_ab(TREE_16 | E4M3, fused_merge=3, grid=1), 4),
    (swap_ab(TREE_16 | {"kv_format": "e4m3"}, fused_merge=2, skip=1), 4),
    (swap_ab(TREE_16 | {"kv_format": "fp8_656"}, fused_merge=2, skip=1), 4),
)


@pytest.mark.parametrize(
    ("config", "splits"),
    [
        (SWAP_AB_SKIP, 1),
        (SWAP_AB_SKIP, 4),
        (SWAP_AB_SKIP, 0),
        (keep_ab(TREE, skip=1), 1),
        (keep_ab(TREE, skip=1), 4),
        *(pytest.param(*case, marks=needs_time) for case in LONG_DRAFTS),
    ],
    ids=lambda value: value if isinstance(value, int) else value.name(),
)
def test_rows_of_a_request_longer_than_its_mask_is_wide_are_nan(
    config: KernelConfig, splits: int
) -> None:
    """34 query tokens over a mask of 32 columns, whose last bits are set; the request of 3 tokens
    is right."""
    short = problem_for(config, (300, 200), heads=max(2, config.tile_rows // 32))
    problem = replace(short, q_lens=(34, 3))
    call = make_call(config, problem, splits)
    assert call.inputs.mask is not None
    mask = call.inputs.mask[None, :, :2].contiguous()
    mask[0, :34] = 0xFFFF
    *args, operands = call.args
    extras = tuple(mask if value.dtype is torch.uint16 else value for value in operands[:4])
    EmulatedKernel.of(jit.compile(config))(*args, (*extras, *operands[4:]))
    out, lse = call.out.view(37, -1).float(), call.lse.view(37, -1)
    assert bool(out[:34].isnan().all()) and bool(lse[:34].isnan().all())
    right = call.expected.out.reshape(37, -1)[34:], call.expected.lse.view(37, -1)[34:]
    assert rel_error(out[34:], right[0]) < EIGHT_BITS[0]
    assert lse_error(lse[34:], right[1]) < EIGHT_BITS[1]


@pytest.mark.parametrize(
    ("config", "splits"),
    [
        (keep_ab({}, features=1), 1),
        (keep_ab({}, features=1), 3),
        pytest.param(keep_ab({"kv_format": "fp8_656"}, features=1, gather=2), 0, marks=needs_time),
    ],
    ids=lambda value: value if isinstance(value, int) else value.name(),
)
def test_out_is_nan_where_a_sink_is(config: KernelConfig, splits: int) -> None:
    """The lse is without the sink."""
    inputs = make_inputs(problem_for(config, (150,)), 0, ["lse", "sinks"], workspace_bytes=64)
    assert isinstance(inputs.sinks, torch.Tensor)
    inputs.sinks[3] = math.nan
    call = call_of(config, inputs, splits)
    EmulatedKernel.of(jit.compile(config))(*call.args)
    rows = call.out.view(-1, call.out.shape[-1]).float()
    assert bool(rows[3].isnan().all()) and bool(call.lse.isfinite().all())
    rows[3] = 0.0
    assert bool(rows.isfinite().all())
