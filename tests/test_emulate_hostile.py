"""Numbers in device memory that nobody reads on the host, in the emulator: lengths below 0, bits of
a mask that stand for nothing, a query of zeros under a small scale."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mla_lab import jit
from mla_lab.emulate import EmulatedKernel, Options
from mla_lab.emulate.calls import EIGHT_BITS, NAMES, call_of, make_call, problem_for
from mla_lab.plan.config import KernelConfig
from mla_lab.reference.inputs import make_inputs
from mla_lab.reference.tolerance import lse_error, rel_error

from .needs import needs_cxx, needs_time
from .shared_builds import KEEP_AB_E4M3, keep_ab

pytestmark = needs_cxx
TREE = {"mask": "tree"}
HI_LO = {"kv_format": "e4m3"}
EIGHT = [
    KEEP_AB_E4M3,
    pytest.param(keep_ab(HI_LO), marks=needs_time),
    pytest.param(keep_ab({"kv_format": "fp8_656"}), marks=needs_time),
]


@pytest.mark.parametrize("length", [-200, -(2**31)])
@pytest.mark.parametrize("config", EIGHT, ids=KernelConfig.name)
def test_a_length_below_0_counts_as_none_over_eight_bits(config: KernelConfig, length: int) -> None:
    """No entry in front of a row of the table is read."""
    call = make_call(config, problem_for(config, (200, 200)), 0)
    call.args[NAMES.index("seq_lens")][0] = length
    kernel = EmulatedKernel.of(jit.compile(config), Options(check=True))
    kernel(*call.args)
    assert kernel.run.findings == []
    (none, out), (no_lse, lse) = call.out.view(2, -1).float(), call.lse.view(2, -1)
    assert none.eq(0).all() and no_lse.isneginf().all()
    assert out.isfinite().all() and lse.isfinite().all()


@pytest.mark.parametrize(
    ("config", "splits"),
    [
        (keep_ab(TREE, skip=1), 1),
        (keep_ab(TREE, skip=1), 4),
        pytest.param(keep_ab(TREE), 4, marks=needs_time),
        pytest.param(keep_ab(TREE | HI_LO), 4, marks=needs_time),
    ],
    ids=lambda value: value if isinstance(value, int) else value.name(),
)
def test_bits_past_the_query_tokens_count_for_nothing(config: KernelConfig, splits: int) -> None:
    """Slots behind a request's end may hold anything."""
    problem = replace(problem_for(config, (300, 130), heads=4), q_lens=(5, 3))
    call = make_call(config, problem, splits)
    *args, operands = call.args
    mask = next(value for value in operands if value.dtype is torch.uint16)
    bits = mask.view(torch.int16)
    bits[..., :5, 0] |= -1 << 5
    bits[..., 5:, 0] |= -1 << 3
    bits[..., 1] = -1
    EmulatedKernel.of(jit.compile(config))(*args, operands)
    expected = call.expected
    assert rel_error(call.out.view_as(expected.out), expected.out) < EIGHT_BITS[0]
    assert lse_error(call.lse.view_as(expected.lse), expected.lse) < EIGHT_BITS[1]


@needs_time
@pytest.mark.parametrize("kv_format", ["e4m3", "fp8_656"])
def test_a_query_of_zeros_weighs_all_keys_alike(kv_format: str) -> None:
    config = keep_ab({"kv_format": kv_format})
    inputs = make_inputs(problem_for(config, (150,)), 0, ["lse"], workspace_bytes=64)
    inputs.query.zero_()
    call = call_of(config, replace(inputs, bmm1_scale=1e-9), 1)
    EmulatedKernel.of(jit.compile(config))(*call.args)
    assert rel_error(call.out.view_as(call.expected.out), call.expected.out) < EIGHT_BITS[0]
