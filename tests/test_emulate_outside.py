"""swap_ab in the emulator: lengths beyond a request's row of the block table, query offsets that
fall or go beyond the query, and scales at the ends of what fp32 holds. Rows of a request that goes
too far are NaN, all others stay as they are."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from mla_lab import jit
from mla_lab.emulate import EmulatedKernel, Options
from mla_lab.emulate.calls import (
    EIGHT_BITS,
    NAMES,
    SIXTEEN_BITS,
    Call,
    call_of,
    make_call,
    problem_for,
)
from mla_lab.plan.config import KernelConfig
from mla_lab.reference.inputs import make_inputs
from mla_lab.reference.tolerance import lse_error, rel_error

from .needs import needs_cxx, needs_time
from .shared_builds import (
    E4M3,
    SWAP_AB_CLUSTER,
    SWAP_AB_LL,
    SWAP_AB_LL_E4M3,
    SWAP_AB_SKIP,
    SWAP_AB_WALK,
    SWAP_AB_WALK_656,
    swap_ab,
)

pytestmark = needs_cxx
TREE = {"tile_rows": 16, "mask": "tree"}
CAUSAL = {"tile_rows": 16, "mask": "causal"}
HI_LO = swap_ab(CAUSAL | {"kv_format": "e4m3"}, fused_merge=2)
#: by how they find and merge their work; splits 0: workers find it from the lengths
BUILDS = (
    (SWAP_AB_LL, 3),
    (SWAP_AB_LL_E4M3, 3),
    (SWAP_AB_WALK, 0),
    (SWAP_AB_SKIP, 3),
)
MORE_BUILDS = (
    (SWAP_AB_LL, 1),
    (SWAP_AB_LL_E4M3, 1),
    (SWAP_AB_CLUSTER, 1),
    (SWAP_AB_CLUSTER, 3),
    (SWAP_AB_WALK, 3),
    (SWAP_AB_WALK_656, 0),
    (swap_ab(TREE, fused_merge=1, gather=1, grid=1), 3),
    (swap_ab(TREE, fused_merge=2, gather=1, grid=1), 3),
    (swap_ab(CAUSAL, fused_merge=2, pieces=1), 0),
    (swap_ab(CAUSAL, fused_merge=3, grid=1, pair=2), 3),
    (swap_ab(E4M3 | {"mask": "causal"}, fused_merge=3, grid=1, pair=2), 3),
    (swap_ab(TREE | {"cluster": 8}, fused_merge=2, grid=1), 3),
    (swap_ab(TREE | {"kv_format": "fp8_656"}, fused_merge=2, gather=1, grid=1), 3),
    (swap_ab(TREE | {"kv_format": "e4m3"}, fused_merge=2, pieces=1, skip=1), 0),
)


def cases(quick: tuple[Any, ...], more: tuple[Any, ...], all_of: KernelConfig) -> list[Any]:
    """Builds with what a test tries of each: `quick`, and of one build `more` as well."""
    short = [(*build, case) for build in BUILDS for case in quick]
    short += [(*build, case) for build in BUILDS for case in more if build[0] == all_of]
    long = [(*build, case) for build in MORE_BUILDS for case in quick]
    return [*short, *(pytest.param(*case, marks=needs_time) for case in long)]


def named(value: Any) -> str | None:
    """Of a parameter in a test's name."""
    return value.name() if isinstance(value, KernelConfig) else None


#: rows of a guard before and behind out and lse
GUARD = 64


def launched(call: Call) -> None:
    """Run the call with all checks; there must be no finding."""
    kernel = EmulatedKernel.of(jit.compile(call.config), Options(check=True))
    kernel(*call.args)
    assert kernel.run.findings == []


def check_rows(call: Call, tokens: list[int], right: bool) -> None:
    """Rows of query tokens are right, or all NaN."""
    out, lse = call.out.flatten(0, 1)[tokens].float(), call.lse.flatten(0, -2)[tokens]
    if not right:
        assert bool(out.isnan().all()) and bool(lse.isnan().all())
        return
    expected = call.expected.out.reshape(call.out.shape).flatten(0, 1)[tokens]
    coarse = "e4m3" in (call.config.q_dtype, call.config.out_dtype)
    bounds = EIGHT_BITS if coarse else SIXTEEN_BITS
    assert rel_error(out, expected) < bounds[0]
    assert lse_error(lse, call.expected.lse.view(call.lse.shape)[tokens]) < bounds[1]


@pytest.mark.parametrize(
    ("config", "splits", "length"),
    cases((2**31 - 1,), (769, 2**31 - 64), SWAP_AB_LL),
    ids=named,
)
def test_a_request_longer_than_its_row_is_nan(
    config: KernelConfig, splits: int, length: int
) -> None:
    """All pages that its row names hold finite numbers."""
    call = make_call(config, problem_for(config, (330, 768, 77)), splits)
    args, table = list(call.args), NAMES.index("block_tables")
    args[table] = args[table][:, : 768 // call.inputs.problem.page_size]
    args[NAMES.index("seq_lens")][1] = length
    call.args = tuple(args)
    launched(call)
    check_rows(call, [1], right=False)
    check_rows(call, [0, 2], right=True)


def guarded(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse of the call become views of larger tensors, which are returned."""
    args, whole = list(call.args), []
    for name in ("out", "lse"):
        at, tokens = NAMES.index(name), call.inputs.problem.total_q
        shape = args[at].shape
        large = torch.full((tokens + 2 * GUARD, *shape[-2 if name == "out" else -1 :]), 7.0)
        whole.append(large.to(args[at].dtype))
        args[at] = whole[-1][GUARD:-GUARD].view(shape)
    call.args, call.out, call.lse = tuple(args), *args[2:4]
    return whole[0], whole[1]


#: of requests of 2, 3 and 1 tokens: offsets, tokens that are right, and that are NaN
OFFSETS = {
    "begins below 0": ([-3, 2, 5, 6], [2, 3, 4, 5], [0, 1]),
    "falls": ([0, 2, 5, 3], [0, 1, 2, 3, 4], []),
    "ends beyond the query": ([0, 2, 5, 9], [0, 1, 2, 3, 4], [5]),
    "goes from end to end": ([0, 2, 2**31 - 1, -(2**31)], [0, 1], [2, 3, 4, 5]),
    "begins beyond the query": ([9, 12, 20, 6], [], []),
    "begins above 0": ([1, 2, 5, 6], [2, 3, 4, 5], []),
}


@pytest.mark.parametrize(
    ("config", "splits", "case"),
    cases(("begins below 0",), tuple(OFFSETS)[1:], SWAP_AB_WALK),
    ids=named,
)
def test_query_tokens_outside_of_the_query(config: KernelConfig, splits: int, case: str) -> None:
    """Nothing around out and lse is written, nor rows that no request has."""
    offsets, right, nan = OFFSETS[case]
    heads = max(16, config.tile_rows)
    problem = replace(problem_for(config, (330, 520, 77), heads=heads), q_lens=(2, 3, 1))
    call = make_call(config, problem, splits)
    call.args[NAMES.index("q_begin")].copy_(torch.tensor(offsets))
    whole = guarded(call)
    launched(call)
    if config.option("grid") or splits:
        nan = [token for token in nan if token < 5 or offsets[2] == 5]  # row tiles of 3 tokens
    check_rows(call, right, right=True)
    check_rows(call, nan, right=False)
    has = {t for t in range(6) if any(begin <= t < end for begin, end in pairwise(offsets))}
    none = [token for token in range(-GUARD, 6 + GUARD) if token not in has]
    for tensor in whole:
        assert bool(tensor[[GUARD + token for token in none]].eq(7.0).all())


@pytest.mark.parametrize("splits", [1, pytest.param(3, marks=needs_time)])
def test_a_request_without_keys_outside_of_the_query_is_nan(splits: int) -> None:
    """No CTA of the cluster has a key."""
    config = SWAP_AB_CLUSTER
    problem = replace(problem_for(config, (0, 330), heads=16), q_lens=(1, 2))
    call = make_call(config, problem, splits)
    call.args[NAMES.index("q_begin")][0] = -1
    launched(call)
    check_rows(call, [0], right=False)
    check_rows(call, [1, 2], right=True)


@needs_time
@pytest.mark.parametrize("config", [SWAP_AB_WALK_656, HI_LO], ids=named)
def test_a_query_of_zeros_weighs_all_keys_alike(config: KernelConfig) -> None:
    """Under the smallest scale."""
    inputs = make_inputs(problem_for(config, (150,)), 0, ["lse"], workspace_bytes=64)
    inputs.query.zero_()
    call = call_of(config, replace(inputs, bmm1_scale=1e-30), 1)
    launched(call)
    check_rows(call, [0], right=True)


@needs_time
@pytest.mark.parametrize(("exponent", "finite"), [(112, True), (126, False), (127, False)])
def test_columns_under_a_great_scale_are_right_or_not_finite(exponent: int, finite: bool) -> None:
    """Not 0. Out has bf16's range: latents of the first group are small."""
    config = SWAP_AB_WALK_656
    inputs = make_inputs(problem_for(config, (150, 77)), 0, ["lse"], workspace_bytes=64)
    pages = inputs.kv_cache.view(torch.uint8)
    token = pages[int(inputs.block_tables[0, 1])].view(-1, pages.shape[-1])[3]
    token[:128] = 0x10
    token[512:516].view(torch.float32)[0] = 2.0**exponent
    inputs.query[..., :128] = 0.0
    call = call_of(config, inputs, 1)
    launched(call)
    own = call.out.flatten(0, 1)[0].float()
    assert bool(own[:, :128].isfinite().all()) == finite
    if finite:
        expected = call.expected.out.reshape(call.out.shape).flatten(0, 1)[0]
        assert rel_error(own[:, :128], expected[:, :128]) < EIGHT_BITS[0]
    check_rows(call, [1], right=True)
