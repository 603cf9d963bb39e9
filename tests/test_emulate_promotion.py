"""keep_ab in e4m3: work tiles of so many KV tiles that O is promoted to fp32, and row maxes behind
an attention sink."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from mla_lab import jit
from mla_lab.api.decode import decode
from mla_lab.core import kv_cache as formats
from mla_lab.core.dims import LATENT_DIM
from mla_lab.core.errors import InvalidInput
from mla_lab.core.problem import Problem
from mla_lab.emulate import EmulatedKernel, Options
from mla_lab.emulate.calls import call_of, is_right, problem_for
from mla_lab.plan import KernelConfig, make_plan
from mla_lab.plan.promotion import PROMOTED_KEYS, promoted_slots
from mla_lab.reference.inputs import make_inputs
from mla_lab.reference.tolerance import error, lse_error

from .needs import needs_cxx
from .shared_builds import E4M3
from .shared_builds import KEEP_AB_E4M3 as BUILD


@needs_cxx
@pytest.mark.parametrize("tiles", [129, 300])
def test_row_maxes_may_move_behind_a_promotion(tiles: int) -> None:
    """Scores rise by a power of two every 32 tiles, so that what was promoted is rescaled. A first
    request of one tile promotes nothing."""
    length = 64 * tiles
    problem = problem_for(BUILD, (64, length))
    inputs = make_inputs(problem, 0, ["lse"], workspace_bytes=64)
    cache = formats.unpack(inputs.kv_cache)
    query = torch.zeros_like(inputs.query, dtype=torch.float32)
    query[..., LATENT_DIM] = 1.0
    cache[..., LATENT_DIM:] = 0
    for index, page in enumerate(inputs.block_tables[1, : 64 * tiles // BUILD.page_size].tolist()):
        # a score times bmm1_scale is a natural logarithm
        tile = index * BUILD.page_size // 64
        octaves = round(tile / 32 * math.log(2) / float(inputs.bmm1_scale))
        for column in range(8):  # e4m3 holds up to 448
            share = min(octaves // 8 + (column < octaves % 8), 448)
            cache[page].view(-1, cache.shape[-1])[:, LATENT_DIM + column] = share
    query[..., LATENT_DIM : LATENT_DIM + 8] = 1.0
    packed = formats.pack(cache, problem.kv_format)
    call = call_of(BUILD, replace(inputs, query=query.to(inputs.query.dtype), kv_cache=packed))
    EmulatedKernel.of(jit.compile(BUILD))(*call.args)
    # apart: a few keys have a larger result than many, whose values cancel
    for out, expected in zip(call.out, call.expected.out.reshape(call.out.shape), strict=True):
        assert error(out, expected).relative < 0.05
    assert call.lse is not None and call.expected.lse is not None
    assert lse_error(call.lse, call.expected.lse.reshape(call.lse.shape)) < 1e-3


@needs_cxx
def test_the_next_work_tile_leaves_the_factors_alone_until_all_warps_have_read_them() -> None:
    """One CTA runs two work tiles that both promote."""
    inputs = make_inputs(problem_for(BUILD, (PROMOTED_KEYS + 1,) * 2), 0, workspace_bytes=64)
    call = call_of(BUILD, inputs, workers=1)
    kernel = EmulatedKernel.of(jit.compile(BUILD), Options(check=True, schedule="adverse"))
    kernel(*call.args)
    assert is_right(call), call.errors()
    assert kernel.run.findings == []


@needs_cxx
@pytest.mark.parametrize("sink", [0, 7, 60])
def test_keys_17_octaves_below_a_sink_among_the_first_tokens_count(sink: int) -> None:
    """Their weights are e4m3's least, 2**-9, where that of the sink is 2**8; elsewhere a row max
    that moves begins at 2**6, and they round to zero."""
    inputs = make_inputs(problem_for(BUILD, (1024,)), 0, ["lse"], workspace_bytes=64)
    query = torch.zeros_like(inputs.query, dtype=torch.float32)
    query[..., LATENT_DIM : LATENT_DIM + 16] = 1.0
    cache = torch.zeros_like(formats.unpack(inputs.kv_cache))
    cache[..., :LATENT_DIM] = 1.0
    octaves = 17 * math.log(2) / float(inputs.bmm1_scale)
    page = inputs.block_tables[0, sink // BUILD.page_size]
    token = cache[page].view(-1, cache.shape[-1])[sink % BUILD.page_size]
    token[:LATENT_DIM] = 0.0
    token[LATENT_DIM : LATENT_DIM + 16] = octaves / 16
    packed = formats.pack(cache, inputs.problem.kv_format)
    call = call_of(BUILD, replace(inputs, query=query.to(inputs.query.dtype), kv_cache=packed))
    EmulatedKernel.of(jit.compile(BUILD))(*call.args)
    expected = call.expected.out.reshape(call.out.shape)
    assert (error(call.out, expected).relative < 0.5) == (sink < 8)


@pytest.mark.parametrize("batch", [1, 200])
def test_a_plan_has_a_slot_a_worker_behind_its_partials(batch: int) -> None:
    problem = Problem.uniform(batch, 1, PROMOTED_KEYS, 64, **E4M3)  # type: ignore[arg-type]
    named = {"tile_rows": 64, "tile_kv": 64, "num_workers": 132, "policy": "fixed"}
    plan = make_plan(problem, **named, num_splits=4)  # type: ignore[arg-type]
    assert plan.workspace["partial_out"].shape == (plan.num_slots + 132, 64, 512)
    wide = make_plan(replace(problem, q_dtype="bf16"), **named, num_splits=4)  # type: ignore[arg-type]
    assert wide.workspace["partial_out"].shape == (wide.num_slots, 64, 512)


def test_a_plan_without_those_slots_is_refused() -> None:
    """The kernel would promote O where the workspace has nothing."""
    made = Problem.uniform(1, 1, PROMOTED_KEYS + 1, 64)
    for rows, schedule, refused in ((64, "persistent", True), (16, "persistent", False)):
        plan = make_plan(
            made, tile_rows=rows, tile_kv=64, num_workers=4, policy="none", schedule=schedule
        )
        inputs = make_inputs(replace(made, **E4M3), 0, workspace_bytes=1 << 25)  # type: ignore[arg-type]
        named = {**inputs.contract_args(), "plan": plan, "backend": "torch"}
        if refused:
            with pytest.raises(InvalidInput, match="plan: got one for bf16 over bf16"):
                decode(**named)
        else:
            assert decode(**named) is not None


def test_other_kernels_and_lower_tiles_promote_nothing() -> None:
    problem = Problem.uniform(1, 1, PROMOTED_KEYS, 64, **E4M3)  # type: ignore[arg-type]
    assert promoted_slots(problem, 64, 132, KernelConfig("cute/keep_ab_sm90")) == 132
    assert promoted_slots(problem, 64, 132, None) == 132
    assert not promoted_slots(problem, 32, 132, None)
    assert not promoted_slots(problem, 64, 132, KernelConfig("cute/mla_sm100"))
    assert not promoted_slots(replace(problem, kv_format="bf16"), 64, 132, None)
