"""cute/keep_ab_sm90 over eight bits by its own interface, against the float64 oracle, on the plans
and shapes that break kernels. Nothing is compiled here: a build that is not at hand is skipped.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mla_lab.jit.shipped import shipped
from mla_lab.plan import make_plan
from mla_lab.plan.config import KernelConfig

from .test_swap_ab import SHAPES, check, name_of, problem_of

pytestmark = pytest.mark.gpu

EIGHT = [
    c
    for c in shipped()
    if c.kernel == "cute/keep_ab_sm90"
    and c.kv_format in ("e4m3", "fp8_656")
    and set(dict(c.options)) <= {"shaped"}
]
PLAIN = [c for c in EIGHT if c.mask == "none"]


@pytest.mark.parametrize("policy", ["none", "uniform", "greedy", "fixed_size"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"h{s[0]}")
@pytest.mark.parametrize("config", PLAIN, ids=name_of)
def test_plans_match_the_oracle(config: KernelConfig, shape: Any, policy: str) -> None:
    problem = problem_of(config, shape)
    plan = make_plan(problem, tile_rows=config.tile_rows, num_workers=9, policy=policy)
    check(config, problem, plan)


@pytest.mark.parametrize("heads", [64, 128])
@pytest.mark.parametrize("config", PLAIN, ids=name_of)
def test_more_work_tiles_than_stages(config: KernelConfig, heads: int) -> None:
    """Work tiles of one block, many a worker: records, queries and sums change hands each time."""
    problem = replace(problem_of(config, (heads, (1,) * 40, (64,) * 40)))
    plan = make_plan(problem, tile_rows=config.tile_rows, num_workers=2, policy="none")
    check(config, problem, plan)
