"""Batch-invariant calls on emulated kernels: right, equal bits in any company, slots used again."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from mla_lab import jit, trtllm_batch_decode_with_kv_cache_mla
from mla_lab.backends.cute import backend as cute
from mla_lab.backends.emulate import backend as emulated
from mla_lab.core.gpu import H200
from mla_lab.core.problem import Problem
from mla_lab.emulate import EmulatedKernel, Options
from mla_lab.plan.config import KernelConfig
from mla_lab.plan.fixed_pieces import MOST_PIECES, RING, PieceCuts, fixed_pieces
from mla_lab.reference.inputs import DecodeInputs, make_inputs, zero_bytes
from mla_lab.reference.mla import decode_reference
from mla_lab.reference.tolerance import error, lse_error

from .needs import needs_cxx, needs_time
from .test_batch_invariant import bits, chosen

pytestmark = needs_cxx
#: CTAs of the card: few, so that each runs several pieces and a slot is written again
SMS = 16
#: pieces of one or two blocks, the most that calls of this size can have
CUTS = {"split_blocks": 1, "max_splits": 32, "half_blocks": 2}
RUNS: list[Any] = []


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Short pieces on a small card, by a schedule; launches are checked, or run for their bits."""

    def by(
        schedule: str, sms: int = SMS, cuts: dict[str, int] = CUTS, *, check: bool = True
    ) -> None:
        def kernel(config: KernelConfig) -> EmulatedKernel:
            options = Options(check=check, schedule=schedule, seed=3)
            made = EmulatedKernel.of(jit.compile(config), options)
            RUNS.append(made)
            return made

        monkeypatch.setattr(emulated, "_kernel", kernel)
        monkeypatch.setattr(emulated.EmulateBackend, "gpu", replace(H200, sms=sms))
        monkeypatch.setitem(
            vars(sys.modules["mla_lab.plan.choose"]),
            "INVARIANT_CUTS",
            dict.fromkeys((16, 64, 128), cuts),
        )
        cute._plan.cache_clear()
        RUNS.clear()

    return by


def call(inputs: DecodeInputs, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
    given = inputs.contract_args() | {"workspace_buffer": zero_bytes(128 << 20)}
    given |= {"backend": "emulate", "return_lse": True, "batch_invariant": True} | more
    out, lse = trtllm_batch_decode_with_kv_cache_mla(**given)
    assert [run.run.findings for run in RUNS if run.run] == [[]] * len(RUNS)
    return out, lse


#: one request with more pieces than a round has, and more pieces in all than slots
LONG = Problem((1,) * 26, (2100, 1, 64, 0, 511, 513, *(65, 128, 100, 66) * 5), 16)


@pytest.mark.parametrize(
    ("problem", "features", "schedules"),
    [
        (LONG, (), ("fair", "adverse") if "MLA_LAB_LONG" in os.environ else ("adverse",)),
        pytest.param(
            Problem((1,) * 5, (700, 1290, 0, 300, 1100), 64),
            ("sinks",),
            ("random",),
            marks=needs_time,
        ),
        pytest.param(
            Problem((1,) * 3, (1300, 129, 300), 16, q_dtype="e4m3", kv_format="e4m3"),
            (),
            ("fair",),
            marks=needs_time,
        ),
        pytest.param(
            Problem((1,) * 3, (300, 129, 700), 16, kv_format="fp8_656"),
            (),
            ("random",),
            marks=needs_time,
        ),
        # 16 rows by swap_ab, more by keep_ab, in two launches
        (Problem((2, 1, 3), (400, 129, 300), 16), ("ragged",), ("random",)),
    ],
)
def test_right_and_the_same_in_any_company(
    small: Callable[..., None],
    problem: Problem,
    features: tuple[str, ...],
    schedules: tuple[str, ...],
) -> None:
    inputs = make_inputs(problem, 3, ["lse", *features], workspace_bytes=64)
    expected = decode_reference(inputs)
    e4m3 = problem.q_dtype == "e4m3"
    order = [problem.batch - 1, 0]
    some = chosen(inputs, order)
    small("greedy", SMS + 5, check=False)
    alone = requests(some.problem, *call(some))
    first = None
    for schedule in schedules:
        small(schedule)
        out, lse = call(inputs)
        limits = (0.03, 2e-2) if e4m3 else (0.008, 1e-5)
        assert error(out, expected.out.reshape(out.shape)).relative < limits[0], schedule
        assert lse_error(lse, expected.lse.reshape(lse.shape)) < limits[1], schedule
        whole = requests(problem, out, lse)
        assert alone == [whole[b] for b in order], schedule
        assert whole == (first := first or whole), schedule


@pytest.mark.parametrize(
    ("heads", "formats", "features"),
    [
        (64, ("bf16", "bf16"), ()),
        pytest.param(16, ("bf16", "bf16"), (), marks=needs_time),
        pytest.param(64, ("bf16", "bf16"), ("sinks",), marks=needs_time),
        pytest.param(16, ("bf16", "fp8_656"), (), marks=needs_time),
        pytest.param(16, ("bf16", "e4m3"), (), marks=needs_time),
        pytest.param(64, ("e4m3", "e4m3"), ("sinks",), marks=needs_time),
    ],
)
def test_a_worker_that_runs_an_item_whole_leaves_the_same_bits(
    small: Callable[..., None], heads: int, formats: tuple[str, str], features: tuple[str, ...]
) -> None:
    """Requests of lengths that are alike: a worker has all pieces of one or two of them, where one
    request alone has its pieces on as many workers."""
    lengths = (255, 300, 256, 300, 129, 301, 255, 240)
    q_dtype, kv_format = formats
    kv_lens = (*lengths, *lengths, 256, 270, 50, 300)
    problem = Problem((1,) * 20, kv_lens, heads, q_dtype=q_dtype, kv_format=kv_format)
    cuts = PieceCuts(CUTS["split_blocks"], CUTS["half_blocks"])
    rows = 32 if heads > 16 and q_dtype == "e4m3" else heads
    inputs = make_inputs(problem, 3, ["lse", *features], workspace_bytes=64)
    expected = decode_reference(inputs)
    order = [problem.batch - 1]
    some = chosen(inputs, order)
    for one, whole in ((problem, True), (some.problem, False)):
        plan = fixed_pieces(one, tile_rows=rows, num_workers=SMS, cuts=cuts)
        assert set(plan.splits()) == ({1, 2, 3} if whole else {3})
        owners = np.repeat(np.arange(SMS), np.diff(plan.worker_begin))
        for item in {tuple(item) for item in plan.tiles[:, :2].tolist()}:
            mine = owners[(plan.tiles[:, :2] == item).all(axis=1)]
            assert len(set(mine)) == (1 if whole else len(mine))
    small("greedy", check=False)
    alone = requests(some.problem, *call(some))
    small("random")
    out, lse = call(inputs)
    limits = (0.03, 2e-2) if q_dtype == "e4m3" else (0.008, 1e-3)
    assert error(out, expected.out.reshape(out.shape)).relative < limits[0]
    assert lse_error(lse, expected.lse.reshape(lse.shape)) < limits[1]
    found = requests(problem, out, lse)
    assert alone == [found[b] for b in order]


def test_a_worker_may_be_late_by_more_rounds_than_slots(small: Callable[..., None]) -> None:
    """One long request ahead of short ones: two workers of the first round run eight blocks, while
    the others go through four rounds of one block, and write slots again."""
    cuts = {"split_blocks": 1, "max_splits": 32, "half_blocks": 32}
    lengths = (1024,) + (128,) * 72
    problem = Problem((1,) * len(lengths), lengths, 16)
    plan = fixed_pieces(problem, tile_rows=16, num_workers=MOST_PIECES, cuts=PieceCuts(1, 32))
    sizes = (plan.tiles[:, 3] - plan.tiles[:, 2])[plan.worker_begin[:-1]]
    assert sorted(sizes)[-2:] == [8, 8] and np.diff(plan.worker_begin).max() > RING
    inputs = make_inputs(problem, 3, ["lse"], workspace_bytes=64)
    small("fair", MOST_PIECES, cuts, check=False)
    out, _ = call(inputs)
    assert error(out, decode_reference(inputs).out.reshape(out.shape)).relative < 0.008


def requests(problem: Problem, out: torch.Tensor, lse: torch.Tensor) -> list[tuple[bytes, bytes]]:
    """The bits of each request."""
    outs = out.reshape(-1, *out.shape[-2:]).split(problem.q_lens)
    lses = lse.reshape(-1, lse.shape[-1]).split(problem.q_lens)
    return [(bits(o), bits(s)) for o, s in zip(outs, lses, strict=True)]


def test_slots_are_written_again() -> None:
    """The first case has more split pieces than the ring of so few CTAs has slots, and a request
    whose pieces do not fit into a round."""
    cuts = PieceCuts(CUTS["split_blocks"], CUTS["half_blocks"])
    plan = fixed_pieces(LONG, tile_rows=16, num_workers=SMS, cuts=cuts)
    assert plan.num_slots > RING * SMS
    assert plan.tiles[:, 5].max() > SMS


def test_rounds_that_go_back_write_slots_again(small: Callable[..., None]) -> None:
    """From MOST_PIECES CTAs on every second round goes back; here in pieces of one block."""
    cuts = CUTS | {"half_blocks": 1}
    problem = Problem((1,) * 8, (2048, 1, 1030, 0, 2048, 900, 2048, 66), 16)
    plan = fixed_pieces(problem, tile_rows=16, num_workers=MOST_PIECES, cuts=PieceCuts(1, 1))
    assert np.diff(plan.worker_begin).max() > RING
    inputs = make_inputs(problem, 3, ["lse"], workspace_bytes=64)
    small("random", MOST_PIECES, cuts, check=False)
    out, _ = call(inputs)
    assert error(out, decode_reference(inputs).out.reshape(out.shape)).relative < 0.008
