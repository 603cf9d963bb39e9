"""A key that holds NaN makes the lse of the rows that see it NaN, as it makes their out: -inf would
say that there was no key, and `context_parallel.merge` would leave the rank out."""

from __future__ import annotations

import math

import pytest
import torch

from mla_lab import jit
from mla_lab.emulate import EmulatedKernel
from mla_lab.emulate.calls import call_of, problem_for
from mla_lab.plan.config import KernelConfig
from mla_lab.reference.inputs import make_inputs

from .needs import needs_cxx, needs_time
from .shared_builds import (
    KEEP_AB,
    KEEP_AB_E4M3,
    SWAP_AB_CLUSTER,
    SWAP_AB_LL,
    SWAP_AB_LL_E4M3,
    swap_ab,
)

pytestmark = needs_cxx
#: the last CTA of a row tile merges
LAST_CTA = swap_ab({"tile_rows": 16, "mask": "tree"}, fused_merge=1, gather=1, grid=1)
#: workers cut requests into pieces of their own length
PIECES = swap_ab({"tile_rows": 16, "mask": "causal"}, fused_merge=2, pieces=1)
E4M3_NAN = 0x7F


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
