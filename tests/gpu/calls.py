"""How the tests on a card make a call of the CuTe backend, and what they accept."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from mla_lab.api import decode
from mla_lab.backends.cute.families import config_for, costs
from mla_lab.core.gpu import Gpu
from mla_lab.core.problem import Problem
from mla_lab.plan import Plan, choose, make_plan
from mla_lab.plan.cuts import Shape
from mla_lab.plan.formula import most_splits
from mla_lab.plan.launch_modes import LAUNCH_MODES
from mla_lab.plan.workspace import LL_WORDS
from mla_lab.reference.inputs import DecodeInputs, make_inputs
from mla_lab.reference.mla import Result, TileWalk, decode_reference
from mla_lab.reference.tolerance import lse_error, rel_error
from mla_lab.verify.limits import WEIGHTS, limits_of

#: ||out - oracle|| / ||oracle||: rounding out to bf16 alone is 1.7e-3
TOLERANCE = 4e-3
LSE_TOLERANCE = 2e-5
WORKSPACE_BYTES = 384 << 20
#: keys of requests: nothing, one key, block ends, several pieces
LENGTHS = (0, 1, 63, 64, 65, 700, 0, 129, 5)


@contextmanager
def no_synchronisation() -> Iterator[None]:
    """A host that waits for the device raises. Torch's notice that this mode is a prototype does
    not, as it would leave the mode on."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def inputs_of(problem: Problem, *features: str, seed: int = 1) -> DecodeInputs:
    return make_inputs(problem, seed, features, device="cuda", workspace_bytes=256)


def native(inputs: DecodeInputs, workspace: torch.Tensor, **more: Any) -> Any:
    """The native call by the CuTe backend; unless one is given, into an out full of NaN."""
    arguments = inputs.contract_args() | {"workspace_buffer": workspace}
    if "out" not in more:
        dtype = torch.bfloat16
        shape = (*inputs.query.shape[:-1], 512)
        more["out"] = torch.full(shape, torch.nan, dtype=dtype, device="cuda")
    return decode.decode(**{**arguments, "backend": "cute", **more})


def check(inputs: DecodeInputs, result: Any, expected: Result | None = None) -> None:
    expected = expected or decode_reference(inputs)
    out, lse = result if inputs.return_lse else (result, None)
    allowed, allowed_lse = TOLERANCE, LSE_TOLERANCE
    formats = inputs.problem.q_dtype, inputs.problem.kv_format
    if formats in WEIGHTS:  # sums are those of rounded weights: twice torch's error with them
        allowed, _, allowed_lse = limits_of(inputs, expected)
    # of one key: exactly
    assert rel_error(out, expected.out) <= allowed
    if lse is not None:
        assert lse_error(lse, expected.lse) < allowed_lse


def chosen_plan(problem: Problem, batch_invariant: bool = False) -> Plan:
    gpu = Gpu.here()
    assert gpu is not None
    return choose(problem, gpu, batch_invariant, costs()).plan(problem)


def counters_are_zero(workspace: torch.Tensor) -> bool:
    """And the mail behind them, which lies there whatever else the buffer held."""
    return not bool(workspace[: 65536 + 4 * LL_WORDS].any())


def plans_of_all_ways(problem: Problem, splits: int) -> list[Plan]:
    """One plan for each kernel that can run the shape: whole requests and `splits` pieces."""
    gpu = Gpu.here()
    assert gpu is not None
    plans = []
    every = [(mode, tile) for mode in LAUNCH_MODES for tile in mode.tiles]
    for mode, tile in every:
        config = config_for(mode, tile)
        workers = gpu.workers(config.cluster * mode.pair) * mode.pair
        shape = Shape.of(problem, config.tile_rows, config.tile_kv, workers)
        most = splits
        if mode.formula:
            most = most_splits(shape, problem.batch, config.cluster, mode.pair)
        for pieces in sorted({1, min(splits, most), min(most, 99)} if most else set()):
            plan = make_plan(
                problem,
                tile_rows=config.tile_rows,
                num_workers=workers,
                policy="fixed",
                schedule="grid" if mode.formula else "persistent",
                num_splits=pieces,
            )
            plans.append(replace(plan, config=config))
    return plans


def walk_of(plan: Plan) -> TileWalk:
    """The oracle's walk over the tiles of a plan, which begins each of its pieces anew."""
    begins = [[0] for _ in plan.problem.q_lens]
    for tile in plan:
        begins[tile.request].append(tile.block_begin)
    return TileWalk(plan.tile_rows, split_begins=begins)
