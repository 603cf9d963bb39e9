"""Orders between threads that only some schedules show: kernels of this source, every check on."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mla_lab import jit
from mla_lab.core.problem import Problem
from mla_lab.emulate import EmulatedKernel, Options, mutate
from mla_lab.emulate.calls import Call, is_right, make_call, problem_for
from mla_lab.plan.config import KernelConfig
from mla_lab.plan.workspace import KEPT_WORDS, MAX_CTAS

from .needs import needs_cxx, needs_time
from .shared_builds import (
    KEEP_AB,
    KEEP_AB_E4M3,
    SWAP_AB_CLUSTER,
    SWAP_AB_LL_E4M3,
    SWAP_AB_WALK,
    SWAP_AB_WALK_656,
)

pytestmark = needs_cxx

#: (schedule, seed)
SCHEDULES = [("random", 1), ("late", 0)]


def compiled(config: KernelConfig, problem: Problem, splits: int) -> tuple[EmulatedKernel, Call]:
    """A build of this source, and a call of it."""
    return EmulatedKernel.of(jit.compile(config)), make_call(config, problem, splits)


def check(
    config: KernelConfig, problem: Problem, schedule: str, seed: int, splits: int = 1
) -> None:
    """The build's result is right, nothing is found, and counters are back at zero."""
    kernel, call = compiled(config, problem, splits)
    kernel.options = Options(schedule=schedule, seed=seed, check=True)
    kernel(*call.args)
    assert kernel.run.findings == []
    assert is_right(call), call.errors()
    assert not call.args[6].any()


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
@pytest.mark.parametrize(
    "config",
    [
        SWAP_AB_CLUSTER,
        pytest.param(
            replace(SWAP_AB_CLUSTER, options=(("fused_merge", 1), ("shaped", 1))), marks=needs_time
        ),
    ],
    ids=["grid", "plan"],
)
def test_ranks_that_share_a_row_pair_merge_behind_the_lse_of_the_first(
    config: KernelConfig, schedule: str, seed: int
) -> None:
    check(config, problem_for(config, (300,)), schedule, seed, splits=2)


@pytest.mark.parametrize(
    ("config", "kv_lens", "splits", "workers"),
    [
        # a merge writes work records again, which all lanes of the producer warp have read
        (KEEP_AB_E4M3, (65, 200, 500, 64, 64, 77, 64, 130, 77), 2, 2),
        # lanes without a fragment load no partials, whose lines other warps discard
        (SWAP_AB_WALK, (1500, 700), 6, 0),
    ],
    ids=["records", "partials"],
)
def test_nothing_is_read_that_others_may_have_changed(
    config: KernelConfig, kv_lens: tuple[int, ...], splits: int, workers: int
) -> None:
    call = make_call(config, problem_for(config, kv_lens), splits, workers=workers)
    kernel = EmulatedKernel.of(jit.compile(config), Options(check=True))
    kernel(*call.args)
    assert kernel.run.findings == []
    assert is_right(call), call.errors()


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
@pytest.mark.parametrize(
    "config",
    [pytest.param(SWAP_AB_WALK_656, marks=needs_time), SWAP_AB_LL_E4M3],
    ids=["fp8_656", "e4m3"],
)
def test_lanes_that_read_a_stage_meet_before_one_of_them_releases_it(
    config: KernelConfig, schedule: str, seed: int
) -> None:
    """In builds of swap_ab whose lanes read V by ldmatrix."""
    check(config, problem_for(config, (600,)), schedule, seed)


def test_one_lane_that_releases_a_stage_for_all_is_reported() -> None:
    kernel, call = compiled(SWAP_AB_LL_E4M3, problem_for(SWAP_AB_LL_E4M3, (600,)), 1)
    found = [m for m in mutate.mutants(kernel, call) if m.kind == "warp barrier"]
    released = [m for m in found if m.place.file.endswith("swap_ab_sm90/mainloop_bf16.py")]
    assert released  # behind the last one nothing is loaded into the stage
    (done,) = mutate.prove(kernel, [call], released[:1])
    assert done.noticed == "race"


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES[1:])
@pytest.mark.parametrize("config", [KEEP_AB, KEEP_AB_E4M3], ids=lambda config: config.kv_format)
def test_all_that_keep_ab_asks_of_wgmma_groups_is_that_they_are_of_four_warps(
    config: KernelConfig, schedule: str, seed: int
) -> None:
    # strict: a wait_group ends the rows of the own warp alone
    kernel, call = compiled(config, problem_for(config, (300,)), 1)
    kernel.options = Options(schedule=schedule, seed=seed, check=True, strict=True)
    kernel(*call.args)
    assert is_right(call), call.errors()
    strict = [f for f in kernel.run.findings if f.kind == "race"]
    assert strict
    qk = {f"warp {8 + i} of CTA 0,0,0" for i in range(4)}
    for finding in strict:
        # P and zeros for V, over keys that products of the same warp group have read
        assert finding.who in qk and "is written, and its read" in finding.text
        assert {who.removeprefix("a product of ") for who, _ in finding.others} <= qk


@pytest.mark.parametrize("config", [KEEP_AB, KEEP_AB_E4M3], ids=lambda config: config.kv_format)
def test_keep_ab_asks_nothing_else(config: KernelConfig) -> None:
    check(config, problem_for(config, (300,)), *SCHEDULES[1])


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_words_of_an_earlier_launch_may_hold_anything(seed: int) -> None:
    # fp32 partials of another call lay there: 0, 1.0 and large numbers
    kernel, call = compiled(SWAP_AB_WALK, problem_for(SWAP_AB_WALK, (40,) * 33), 0)
    kept = call.args[11].view(MAX_CTAS, KEPT_WORDS)
    kept[:, :32] = torch.tensor([0, 0, 0x3F800000, *[0x7F000000] * 29], dtype=torch.int32)
    kernel.options = Options(schedule="random", seed=seed, check=True)
    kernel(*call.args)  # a fetch out of bounds is a Fault
    assert is_right(call), call.errors()
