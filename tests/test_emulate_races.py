"""Orders between threads that only some schedules show: kernels of this source, every check on."""

from __future__ import annotations

import shutil

import pytest

from mla_lab import jit
from mla_lab.core.problem import Problem
from mla_lab.emulate import EmulatedKernel, Options
from mla_lab.emulate.calls import is_right, make_call, problem_for
from mla_lab.plan.config import KernelConfig

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")

#: (schedule, seed)
SCHEDULES = [("random", 1), ("random", 2), ("late", 0)]


def check(
    config: KernelConfig, problem: Problem, schedule: str, seed: int, splits: int = 1
) -> EmulatedKernel:
    """Compiles and runs a build with checks: the result is right, nothing is found, and counters
    are back at zero. The kernel, for more checks."""
    pytest.importorskip("cutlass")
    kernel = EmulatedKernel.of(
        jit.compile(config), Options(schedule=schedule, seed=seed, check=True)
    )
    call = make_call(config, problem, splits)
    kernel(*call.args)
    assert kernel.run.findings == []
    assert is_right(call), call.errors()
    assert not call.args[6].any()
    return kernel


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


@pytest.mark.parametrize(("schedule", "seed"), SCHEDULES)
def test_units_of_656_byte_tokens_stay_until_their_stage_is_released(
    schedule: str, seed: int
) -> None:
    config = KernelConfig(
        "cute/swap_ab_sm90",
        kv_format="fp8_656",
        tile_rows=16,
        mask="causal",
        options=(("fused_merge", 2), ("shaped", 1)),
    )
    check(config, problem_for(config, (600,)), schedule, seed)
