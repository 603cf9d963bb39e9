"""Bounds that callers give, and bounds of 32-bit offsets: refused, right or NaN, never silent."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from mla_lab.api import decode, replay
from mla_lab.backends.base import fill_with_nan
from mla_lab.backends.cuda import ops as cuda_ops
from mla_lab.backends.cute import backend as cute
from mla_lab.backends.cute import blackwell, device_plan, launch
from mla_lab.backends.cute.backend import CuteBackend
from mla_lab.backends.cute.device_plan import (
    MOST_ROWS,
    MOST_TOKENS,
    SelfScheduled,
    check_line,
    check_offsets,
)
from mla_lab.call.bind import bind
from mla_lab.call.checks import form_of
from mla_lab.call.form import Features
from mla_lab.core.errors import Unsupported
from mla_lab.core.gpu import B200, H200
from mla_lab.core.problem import Problem
from mla_lab.plan import KernelConfig, Plan, make_plan
from mla_lab.reference.inputs import DecodeInputs
from mla_lab.reference.mla import decode_reference
from mla_lab.reference.tolerance import lse_error, rel_error

from . import test_backend_cute as first
from .attention_abi import AbiKernel, plan_on_host
from .shared_builds import SWAP_AB_WALK
from .test_backend_cute import PIECES, PLAIN, RAGGED, check, inputs_of, native

#: the fixture of the first file
kernels = first.kernels


def on_device(inputs: DecodeInputs, made: Plan | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Results of a call whose lengths nobody reads, in memory that held something else; by the
    caller's plan where there is one."""
    rows = inputs.query.shape[:-1]
    out = torch.full((*rows, 512), 7.0, dtype=torch.bfloat16)
    lse = torch.full((rows.numel() // rows[-1], rows[-1]), 7.0)
    inputs = replace(inputs, out=out, lse=lse)
    form = replace(form_of(inputs), on_host=False)
    call = bind(inputs, form, reads_lengths=False, debug=False)
    runner = CuteBackend()
    assert runner.supports(call.features, form.bounds, H200) is None
    plan = made or runner.plan(call, H200)
    for _ in range(2):
        again = runner.run(call, plan, decode.allocate(call, plan))
    assert again is not None
    again(call.args, out, lse)
    return out.view(-1, 512), lse.view(-1)


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize(
    ("problem", "features", "change", "most"),
    [
        (PLAIN, [], {"max_seq_len": 1}, 0.0),
        (PIECES, [], {"max_seq_len": 64}, 0.0),
        (Problem.uniform(1, 1, 9000, 128), [], {"max_seq_len": 64}, 0.0),
        (replace(PIECES, page_size=1), [], {"max_seq_len": 64}, 0.0),
        (replace(PIECES, top_k=130), [], {"max_seq_len": 1}, 0.0),
        (RAGGED, ["max_q_len"], {"max_q_len": 1}, 0.0),
        (replace(RAGGED, heads=16), ["max_q_len"], {"max_q_len": 1}, 0.0),
        (replace(RAGGED, page_size=1), ["max_q_len"], {"max_q_len": 1}, 0.7),
        (replace(RAGGED, top_k=70), ["max_q_len"], {"max_q_len": 1}, 0.0),
    ],
)
def test_a_bound_that_is_too_small_leaves_no_row_unwritten(
    kernels: dict[KernelConfig, AbiKernel],
    problem: Problem,
    features: list[str],
    change: dict[str, Any],
    most: float,
    invariant: bool,
) -> None:
    """Rows are right, or NaN in both results where a launch believes the bound: at most a share
    `most` of them without batch invariance.
    """
    inputs = inputs_of(problem, "lse", *features)
    expected = decode_reference(inputs)
    out, lse = on_device(replace(inputs, **change, batch_invariant=invariant))
    missing = out.isnan().any(1)
    assert torch.equal(missing, out.isnan().all(1)) and torch.equal(missing, lse.isnan())
    assert invariant or missing.double().mean() <= most
    wanted = expected.out.view(-1, 512)[~missing], expected.lse.view(-1)[~missing]
    if not missing.all():
        assert rel_error(out[~missing], wanted[0]) < 4e-3
        assert lse_error(lse[~missing], wanted[1]) < 1e-5


@pytest.mark.parametrize(
    ("tile_rows", "heads"), [(64, 128), (64, 16), (16, 16), (16, 4), (16, 128)]
)
@pytest.mark.parametrize("schedule", ["persistent", "grid"])
def test_a_ragged_call_of_other_query_tokens_than_its_plan_leaves_no_row_unwritten(
    kernels: dict[KernelConfig, AbiKernel],
    monkeypatch: pytest.MonkeyPatch,
    tile_rows: int,
    heads: int,
    schedule: str,
) -> None:
    """A plan has the row tiles of the query tokens that it was made for: nothing is filled with NaN
    ahead of a launch where they hold all rows of the call."""
    made = make_plan(
        Problem((1, 2, 1), (300, 77, 9), heads),
        tile_rows=tile_rows,
        policy="fixed",
        num_splits=2,
        schedule=schedule,
    )
    inputs = inputs_of(Problem((2, 0, 2), (300, 77, 9), heads), "lse", "ragged")
    inputs = replace(inputs, max_q_len=4, plan=made)
    expected = decode_reference(inputs)
    filled: list[torch.Tensor] = []

    def fill(out: torch.Tensor, lse: torch.Tensor | None) -> None:
        filled.append(out)
        fill_with_nan(out, lse)

    monkeypatch.setattr(launch, "fill_with_nan", fill)
    out, lse = on_device(inputs, made)
    missing = out.isnan().any(1)
    assert torch.equal(missing, out.isnan().all(1)) and torch.equal(missing, lse.isnan())
    holds_all = 4 * heads <= tile_rows
    assert missing.any() or holds_all or schedule == "grid"
    assert bool(filled) is not holds_all and not (holds_all and missing.any())
    wanted = expected.out.view(-1, 512)[~missing], expected.lse.view(-1)[~missing]
    assert rel_error(out[~missing], wanted[0]) < 4e-3
    assert lse_error(lse[~missing], wanted[1]) < 1e-5


def test_bounds_that_hold_fill_nothing(kernels: dict[KernelConfig, AbiKernel]) -> None:
    for problem in (PLAIN, replace(RAGGED, page_size=1)):
        inputs = inputs_of(problem, "lse")
        if inputs.cum_seq_lens_q is not None:
            inputs = replace(inputs, max_q_len=problem.total_q)
        out, _ = on_device(replace(inputs, batch_invariant=True))
        assert rel_error(out, decode_reference(inputs).out.view(-1, 512)) < 4e-3
        call = bind(inputs, form_of(inputs), reads_lengths=False, debug=False)
        plan = CuteBackend().plan(call, H200)
        made = launch.Launch.of(call, plan, decode.allocate(call, plan), H200)
        assert made._fills is False


def test_one_ragged_request_takes_a_grid_that_reads_its_query_tokens_on_the_device(
    kernels: dict[KernelConfig, AbiKernel],
) -> None:
    inputs = inputs_of(Problem((2,), (700,), 16), "lse", "ragged")
    check(inputs, native(inputs))
    ((config, kernel),) = kernels.items()
    assert config.option("grid") == 1
    assert kernel.launches[0][-2:] == (2, 0)
    assert kernel.launches[0][9] is inputs.cum_seq_lens_q


def test_what_32_bit_offsets_do_not_reach_is_refused(
    kernels: dict[KernelConfig, AbiKernel],
) -> None:
    """An element of the last row of a query has the offset 2**31 with one row more."""
    assert MOST_ROWS * 576 < 1 << 31 <= (MOST_ROWS + 1) * 576
    query = torch.empty(MOST_ROWS // 10, 10, 576, device="meta")
    tables = torch.empty(4096, (1 << 19) - 1, dtype=torch.int32, device="meta")
    check_offsets(query, tables)
    with pytest.raises(Unsupported, match=f"query: got {MOST_ROWS + 10} rows"):
        check_offsets(torch.empty(MOST_ROWS // 10 + 1, 10, 576, device="meta"), tables)
    with pytest.raises(Unsupported, match=f"query: got {MOST_TOKENS + 1} tokens"):
        check_offsets(torch.empty(MOST_TOKENS + 1, 1, 576, device="meta"), tables)
    apart = torch.empty(4096, 1 << 19, dtype=torch.int32, device="meta")[:, :8]
    with pytest.raises(Unsupported, match="block_tables: got 4096 rows 524288 entries apart"):
        check_offsets(query, apart)


def test_more_blocks_than_32_bits_count_are_refused() -> None:
    """200,000 query tokens of one request over a million keys: no worker found a tile."""
    problem = Problem.uniform(1, 200_000, 1_000_000, 16)
    plan = SelfScheduled.of(SWAP_AB_WALK, H200, problem)
    check_line(plan, 16 * 100_000, torch.empty(1, 15_625, device="meta"), 64)
    with pytest.raises(Unsupported, match="got up to 200001 row tiles of 15625 blocks"):
        check_line(plan, 16 * 200_000, torch.empty(1, 15_625, device="meta"), 64)
    check_line(plan, 16 * 200_000, torch.empty(200_000, 2048, device="meta"), 1)


def test_a_launch_checks_offsets(
    kernels: dict[KernelConfig, AbiKernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = inputs_of(PLAIN)
    apart = torch.full((4, 64), -1, dtype=torch.int32)[:, : inputs.block_tables.shape[1]]
    apart.copy_(inputs.block_tables)
    check(inputs, native(inputs))
    monkeypatch.setattr(device_plan, "MOST_OFFSETS", 256)
    replay.clear()
    with pytest.raises(Unsupported, match="block_tables: got 4 rows 64 entries apart"):
        native(inputs, block_tables=apart)
    check(inputs, native(inputs))


@pytest.mark.parametrize("heads", [16, 128])
def test_a_batch_invariant_call_wants_no_more_memory_for_a_larger_bound(heads: int) -> None:
    """The partials of three tiles a worker, whatever the batch, and not one for each piece."""
    sizes = set()
    for batch, bound in ((1, 64), (64, 131_072), (4096, 1 << 20)):
        problem = Problem.uniform(batch, 1, bound, heads)
        planned = cute._plan(problem, problem.total_q, H200, Features(batch_invariant=True))
        sizes.add(planned.workspace.nbytes)
    assert len(sizes) == 1 and sizes.pop() < 96 << 20


def idle_plan(planner: Any, seq_lens: Any, q_begin: Any, words: Any) -> None:
    """What the planner writes of requests that share query tokens."""
    words.worker_begin.zero_()


@pytest.mark.parametrize(
    ("bound", "planner"), [(4000, plan_on_host), (64, plan_on_host), (4000, idle_plan)]
)
def test_the_planner_precedes_the_sm100_kernel_and_bounds_of_it_may_be_wrong(
    kernels: dict[KernelConfig, AbiKernel],
    monkeypatch: pytest.MonkeyPatch,
    bound: int,
    planner: Any,
) -> None:
    monkeypatch.setattr(cuda_ops.DevicePlanner, "__call__", planner)
    monkeypatch.setattr(launch, "load_planner", lambda device: None)
    inputs = inputs_of(Problem((1, 2), (3000, 70), 128), "ragged", "lse")
    out, lse = torch.full((3, 128, 512), 7.0, dtype=torch.bfloat16), torch.full((3, 128), 7.0)
    inputs = replace(inputs, out=out, lse=lse, max_seq_len=bound)
    form = replace(form_of(inputs), on_host=False)
    call = bind(inputs, form, reads_lengths=False, debug=False)
    features = Features(ragged=True, lse=True, batch_invariant=True)
    plan = blackwell.plan(call.problem, form.total_q, B200, features)
    made = launch.Launch.of(call, plan, decode.allocate(call, plan), B200)
    for _ in range(2):
        made.repeat(call.args, out, lse)
    (config,) = kernels
    assert config.kernel == "cute/mla_sm100"
    if bound == 64 or planner is idle_plan:
        assert out.isnan().all() and lse.isnan().all()
        return
    check(inputs, (out, lse))
    assert int(kernels[config].launches[-1][11][-1]) == 2 + 2
