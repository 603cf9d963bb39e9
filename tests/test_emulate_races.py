"""Orders between threads that only some schedules show: kernels of this source, every check on."""

from __future__ import annotations

import shutil

import pytest
import torch

from mla_lab import jit
from mla_lab.core.problem import Problem
from mla_lab.emulate import EmulatedKernel, Options, mutate
from mla_lab.emulate.calls import Call, is_right, make_call, problem_for
from mla_lab.plan.config import KernelConfig
from mla_lab.plan.workspace import KEPT_WORDS, MAX_CTAS

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")

#: (schedule, seed)
SCHEDULES = [("random", 1), ("random", 2), ("late", 0)]


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
@pytest.mark.parametrize("options", [(("fused_merge", 2), ("grid", 1)), (("fused_merge", 1),)])
def test_ranks_that_share_a_row_pair_merge_behind_the_lse_of_the_first(
    options: tuple[tuple[str, int], ...], schedule: str, seed: int
) -> None:
    config = KernelConfig(
        "cute/swap_ab_sm90",
        tile_rows=8,
        cluster=8,
        mask="causal",
        options=(*options, ("shaped", 1)),
    )
    check(config, problem_for(config, (300,)), schedule, seed, splits=2)


def of_eight_bits(q_dtype: str, kv_format: str, *options: tuple[str, int]) -> KernelConfig:
    """A build of swap_ab whose lanes read V by ldmatrix."""
    return KernelConfig(
        "cute/swap_ab_sm90",
        q_dtype=q_dtype,
        kv_format=kv_format,
        tile_rows=16,
        mask="causal",
        options=(*options, ("shaped", 1)),
    )


E4M3 = of_eight_bits("e4m3", "e4m3", ("fused_merge", 3), ("grid", 1))


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
@pytest.mark.parametrize(
    "config",
    [of_eight_bits("bf16", "fp8_656", ("fused_merge", 2)), E4M3],
    ids=lambda c: c.kv_format,
)
def test_lanes_that_read_a_stage_meet_before_one_of_them_releases_it(
    config: KernelConfig, schedule: str, seed: int
) -> None:
    check(config, problem_for(config, (600,)), schedule, seed)


def test_one_lane_that_releases_a_stage_for_all_is_reported() -> None:
    kernel, call = compiled(E4M3, problem_for(E4M3, (600,)), 1)
    found = [m for m in mutate.mutants(kernel, call) if m.kind == "warp barrier"]
    released = [m for m in found if m.place.file.endswith("swap_ab_sm90/mainloop_bf16.py")]
    assert released
    (done,) = mutate.prove(kernel, [call], released[-1:])
    assert done.noticed == "race"


KEEP_AB = [
    KernelConfig("cute/keep_ab_sm90", options=(("shaped", 1),)),
    KernelConfig("cute/keep_ab_sm90", q_dtype="e4m3", kv_format="e4m3", options=(("shaped", 1),)),
]


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES[1:])
@pytest.mark.parametrize("config", KEEP_AB, ids=lambda config: config.kv_format)
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
    kernel.options = Options(schedule=schedule, seed=seed, check=True)
    kernel(*call.args)
    assert not [f for f in kernel.run.findings if f.kind == "race"]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_words_of_an_earlier_launch_may_hold_anything(seed: int) -> None:
    # fp32 partials of another call lay there: 0, 1.0 and large numbers
    config = KernelConfig(
        "cute/swap_ab_sm90",
        tile_rows=16,
        mask="causal",
        options=(("fused_merge", 2), ("shaped", 1)),
    )
    kernel, call = compiled(config, problem_for(config, (40,) * 33), 0)
    kept = call.args[11].view(MAX_CTAS, KEPT_WORDS)
    kept[:, :32] = torch.tensor([0, 0, 0x3F800000, *[0x7F000000] * 29], dtype=torch.int32)
    kernel.options = Options(schedule="random", seed=seed, check=True)
    kernel(*call.args)  # a fetch out of bounds is a Fault
    assert is_right(call), call.errors()
