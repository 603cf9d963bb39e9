"""cute/swap_ab_sm90 by its own interface, against the float64 oracle: every shipped build, on the
plans and shapes that break kernels. Nothing is compiled here: a build that is not at hand is
skipped.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from mla_lab import jit
from mla_lab.core.errors import BuildError
from mla_lab.core.problem import Problem
from mla_lab.jit.shipped import shipped
from mla_lab.plan import Plan, make_plan
from mla_lab.plan.config import KernelConfig
from mla_lab.plan.formula import ll_words
from mla_lab.plan.launch_modes import mode_of
from mla_lab.reference.inputs import DecodeInputs, make_inputs
from mla_lab.reference.mla import decode_reference
from mla_lab.reference.tolerance import lse_error
from mla_lab.verify.limits import WEIGHTS, limits_of

pytestmark = pytest.mark.gpu

#: most clusters that may wait for each other; every H200 holds these
WORKERS = {1: 132, 2: 60, 4: 28, 8: 12, 16: 4}
#: heads, q_lens, kv_lens
SHAPES = [
    (1, (1, 1, 1, 1, 1, 1), (0, 1, 63, 64, 65, 1000)),
    (7, (3, 1, 8), (129, 0, 515)),
    (16, (1, 1, 1), (8192, 0, 700)),
    (24, (2, 5), (64, 2048)),
    (100, (1, 4), (127, 3)),
    (128, (1, 2), (1000, 65)),
]
#: those of batch-invariant calls take no plan (`tests/gpu/test_cute_backend.py` calls them)
ALL = [
    c
    for c in shipped()
    if c.kernel == "cute/swap_ab_sm90" and c.mask == "causal" and not c.option("pieces")
]
PLAIN = [c for c in ALL if c.page_size == 64 and c.q_dtype == "bf16" and not c.option("features")]
OTHER = [c for c in ALL if (c.page_size != 64 or c.q_dtype != "bf16") and not c.option("features")]
EIGHT = [c for c in ALL if c.q_dtype == "e4m3" and c.page_size == 64]
FORMULAS = [c for c in (*PLAIN, *EIGHT) if c.option("grid")]
WALKS = [c for c in (*PLAIN, *EIGHT) if mode_of(c) == "swap_ab_persistent"]
OUT = {"bf16": torch.bfloat16, "fp16": torch.float16, "e4m3": torch.float8_e4m3fn}


def name_of(config: KernelConfig) -> str:
    page = f"page{config.page_size}"
    tile = f"{config.tile_rows}x{config.cluster}"
    formats = f"{config.q_dtype}-{config.kv_format}-{config.out_dtype}"
    return f"{tile}-{mode_of(config)}-{page}-{formats}"


def built(config: KernelConfig) -> jit.Kernel:
    """The prebuilt kernel, or one from a compiler where there is one."""
    try:
        return jit.kernel(config, jit.device_arch())
    except BuildError as error:
        pytest.skip(str(error))


def most_pieces(config: KernelConfig, problem: Problem) -> int:
    """With which all workers of the formula run at once."""
    pair = config.option("pair", 1)
    tiles = -(-max(problem.q_lens) * problem.heads // config.tile_rows)
    groups = problem.batch * -(-tiles // pair) * pair
    return WORKERS[config.cluster * pair] * pair // groups


def problem_of(config: KernelConfig, shape: Any) -> Problem:
    heads, q_lens, kv_lens = shape
    return Problem(
        q_lens,
        kv_lens,
        heads,
        q_dtype=config.q_dtype,
        kv_format=config.kv_format,
        out_dtype=config.out_dtype,
        page_size=config.page_size,
    )


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"h{s[0]}")
@pytest.mark.parametrize("config", FORMULAS, ids=name_of)
def test_formulas_match_the_oracle(config: KernelConfig, shape: Any) -> None:
    problem = problem_of(config, shape)
    most = most_pieces(config, problem)
    if most == 0:
        pytest.skip("one piece a row tile is more than the card runs at once")
    for pieces in sorted({1, min(3, most), most}):
        check(config, problem, pieces)


@pytest.mark.parametrize("policy", ["none", "uniform", "greedy", "fixed_size"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"h{s[0]}")
@pytest.mark.parametrize("config", WALKS, ids=name_of)
def test_walks_match_the_oracle(config: KernelConfig, shape: Any, policy: str) -> None:
    problem = problem_of(config, shape)
    plan = make_plan(problem, tile_rows=config.tile_rows, num_workers=9, policy=policy)
    check(config, problem, plan)


@pytest.mark.parametrize("config", OTHER, ids=name_of)
def test_other_pages_and_dtypes(config: KernelConfig) -> None:
    problem = Problem(
        (1, 2),
        (1000, 65),
        16,
        q_dtype=config.q_dtype,
        kv_format=config.kv_format,
        out_dtype=config.out_dtype,
        page_size=config.page_size,
    )
    work: Plan | int = min(3, most_pieces(config, problem))
    if mode_of(config) == "swap_ab_persistent":
        work = make_plan(problem, tile_rows=config.tile_rows, num_workers=5, policy="greedy")
    if work:
        check(config, problem, work)


def check(config: KernelConfig, problem: Problem, work: Plan | int) -> None:
    """One launch twice: right, equal bits, nothing written outside, flags left at zero.

    work: a plan to walk, or a formula's pieces.
    """
    kernel = built(config)
    inputs = make_inputs(problem, seed=2, features=("ragged", "page_gap"), device="cuda")
    rows = len(inputs.query)
    results = []
    for _ in range(2):
        out = torch.zeros(rows + 3, problem.heads, 512, device="cuda").to(OUT[config.out_dtype])
        out.view(torch.uint8).fill_(0xFF)
        lse = torch.full((rows + 3, problem.heads), 7e7, device="cuda")
        launch(kernel, config, inputs, work, (out, lse))
        assert (out[rows:].view(torch.uint8) == 0xFF).all()
        assert (lse[rows:] == 7e7).all()
        results.append((out[:rows], lse[:rows]))
    assert torch.equal(results[0][0].view(torch.uint8), results[1][0].view(torch.uint8))
    assert torch.equal(results[0][1], results[1][1])
    expected = decode_reference(inputs)
    found, found_lse = results[0][0].double(), results[0][1].double()
    wanted, wanted_lse = expected.out.to(found), expected.lse.to(found_lse)
    error = (found - wanted.view_as(found)).norm() / wanted.norm()
    if (config.q_dtype, config.kv_format) in WEIGHTS:  # twice torch's error with such weights
        allowed, _, allowed_lse = limits_of(inputs, expected)
        assert error <= allowed and lse_error(found_lse, wanted_lse) <= allowed_lse
        return
    assert error <= 4e-3
    torch.testing.assert_close(found_lse, wanted_lse.view_as(found_lse), rtol=1e-5, atol=1e-5)


def launch(
    kernel: jit.Kernel,
    config: KernelConfig,
    inputs: DecodeInputs,
    work: Plan | int,
    results: tuple[Tensor, Tensor],
) -> None:
    """The kernel ABI; flags are zero before and after."""
    problem, rows = inputs.problem, config.tile_rows
    walk: tuple[Tensor, ...] = ()
    numbers: tuple[int, ...] = ()
    if isinstance(work, Plan):
        walk = tuple(torch.from_numpy(a.copy()).cuda() for a in (work.tiles, work.worker_begin))
        slots = work.num_slots
        # workers, query tokens of every request (0: see q_begin), costs of the rule (unused)
        numbers = (len(work.worker_begin) - 1, 0, 0)
    else:
        tiles = max(1, -(-max(problem.q_lens) * problem.heads // rows))
        uniform = problem.q_lens[0] if len(set(problem.q_lens)) == 1 else 0
        numbers = (work, tiles, uniform)
        slots = problem.batch * tiles * work if work > 1 else 0
    counters = torch.zeros(16384, dtype=torch.int32, device="cuda")
    partial = torch.full((slots, rows, 512), math.nan, device="cuda")
    notes = torch.full((slots, rows), math.nan, device="cuda")
    flags = [counters]
    if config.option("fused_merge") == 3 and not isinstance(work, Plan):
        # partials that are their own flags
        partial.zero_()
        notes = torch.zeros(ll_words(slots, rows, work, 512)[1] // 4, 4, device="cuda")
        flags += [partial.view(torch.int32), notes.view(torch.int32)]
    out, lse = results
    kernel(
        inputs.query.unsqueeze(0), inputs.kv_cache, out.unsqueeze(0), lse, partial, notes,
        counters, inputs.block_tables, inputs.seq_lens, inputs.cum_seq_lens_q, *walk,
        problem.heads, float(inputs.bmm1_scale) / math.log(2.0), float(inputs.bmm2_scale),
        *numbers,
    )  # fmt: skip
    torch.cuda.synchronize()
    assert not any(flag.any() for flag in flags)
