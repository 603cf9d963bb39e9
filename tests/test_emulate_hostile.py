"""Numbers in device memory that nobody reads on the host, in the emulator: lengths below 0 or past
the block table, query tokens outside of q, bits of a mask that stand for nothing, a query of zeros
under a small scale."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mla_lab import jit
from mla_lab.emulate import EmulatedKernel, Options
from mla_lab.emulate.calls import (
    EIGHT_BITS,
    NAMES,
    Call,
    call_of,
    is_right,
    make_call,
    problem_for,
)
from mla_lab.plan.config import KernelConfig
from mla_lab.reference.inputs import make_inputs
from mla_lab.reference.tolerance import lse_error, rel_error

from .needs import needs_cxx, needs_time
from .shared_builds import E4M3, KEEP_AB, KEEP_AB_E4M3, SWAP_AB_WALK, keep_ab

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


#: builds and splits; 0: workers find their pieces from the lengths, as they are
IN_TIME = [(KEEP_AB, 1), (KEEP_AB, 0), (KEEP_AB_E4M3, 3)]
LONG_RUN = [
    (KEEP_AB, 3),
    (keep_ab({"page_size": 16, "tile_rows": 128, "cluster": 2}), 9),
    (keep_ab({}, gather=1), 3),
    (keep_ab({}, features=1), 1),
    (keep_ab({}, features=1), 3),
    (keep_ab({}, skip=1), 3),
    (keep_ab(TREE, scales=1, skip=1), 1),
    (keep_ab({}, pieces=1), 0),
    (keep_ab(TREE, pieces=1, scales=1, skip=1), 0),
    (KEEP_AB_E4M3, 1),
    (KEEP_AB_E4M3, 0),
    (keep_ab(E4M3, gather=1), 3),
    (keep_ab(E4M3 | {"out_dtype": "e4m3"}), 1),
    (keep_ab(E4M3 | {"tile_rows": 128, "cluster": 2}), 3),
    (keep_ab(HI_LO | {"page_size": 128}), 3),
    (keep_ab(HI_LO | {"tile_rows": 128, "cluster": 2}), 1),
    (keep_ab(HI_LO, gather=1), 0),
    (keep_ab({"kv_format": "fp8_656"}), 3),
    (keep_ab({"kv_format": "fp8_656"}, gather=1), 1),
    (keep_ab({"kv_format": "fp8_656", "tile_rows": 128, "cluster": 2}), 0),
]


def crossed(*values: Any) -> list[Any]:
    """Each build and number of splits with each of `values`. Outside of a long run the first has
    all of them, the second and third every second one, from another on."""
    found = []
    for at, (config, splits) in enumerate([*IN_TIME, *LONG_RUN]):
        for n, value in enumerate(values):
            soon = at < len(IN_TIME) and (at == 0 or n % 2 == at % 2)
            marks = () if soon else needs_time
            found.append(pytest.param(config, splits, value, marks=marks))
    return found


GUARD = 4096
#: the rows of a plan among the arguments
TILES = len(NAMES)


def name_of(value: Any) -> str:
    """Of a parameter."""
    return value.name() if isinstance(value, KernelConfig) else str(value)


def guarded(call: Call) -> tuple[tuple[Any, ...], list[Tensor]]:
    """The call's arguments with out and lse between elements that nobody may touch, and these."""
    args, walls = list(call.args), []
    for at in (2, 3):
        whole = torch.full((args[at].numel() + 2 * GUARD,), 5.0).to(args[at].dtype)
        args[at] = whole[GUARD:-GUARD].view_as(args[at]).copy_(args[at])
        walls += [whole[:GUARD], whole[-GUARD:]]
    return tuple(args), walls


def run_guarded(config: KernelConfig, call: Call) -> tuple[Tensor, Tensor]:
    """out and lse of a call by query tokens; nothing else was touched."""
    args, walls = guarded(call)
    kernel = EmulatedKernel.of(jit.compile(config), Options(check=True))
    kernel(*args)
    assert kernel.run.findings == []
    assert all(bool(wall.float().eq(5.0).all()) for wall in walls)
    tokens = call.lse.shape[0]
    return args[2].reshape(tokens, -1).float(), args[3].reshape(tokens, -1)


def assert_right(call: Call, out: Tensor, lse: Tensor, tokens: slice) -> None:
    """These query tokens are as they should be without the hostile numbers."""
    expected = call.expected.out.reshape(len(out), -1)[tokens], call.expected.lse.view_as(lse)
    assert rel_error(out[tokens], expected[0]) < EIGHT_BITS[0]
    assert lse_error(lse[tokens], expected[1][tokens]) < EIGHT_BITS[1]


@pytest.mark.parametrize(
    ("config", "splits", "length"), crossed("one too many", 2**31 - 64, 2**31 - 1), ids=name_of
)
def test_a_request_longer_than_its_row_of_the_table_is_nan(
    config: KernelConfig, splits: int, length: int | str
) -> None:
    """The others are right."""
    call = make_call(config, problem_for(config, (330, 200, 330)), splits)
    table = call.args[NAMES.index("block_tables")]
    table[1] = table[1, 0]  # a page that may be read
    beyond = length if isinstance(length, int) else table.shape[1] * config.page_size + 1
    call.args[NAMES.index("seq_lens")][1] = beyond
    out, lse = run_guarded(config, call)
    assert bool(out[1].isnan().all()) and bool(lse[1].isnan().all())
    for token in (slice(0, 1), slice(2, 3)):
        assert_right(call, out, lse, token)


@pytest.mark.parametrize("block", [2**24 + 6, 2**25 - 20])
@pytest.mark.parametrize("config", [KEEP_AB, SWAP_AB_WALK], ids=KernelConfig.name)
def test_a_work_tile_may_begin_at_any_block(config: KernelConfig, block: int) -> None:
    """Of a plan whose only work tile begins so far behind, up to the greatest length."""
    call = make_call(config, problem_for(config, (187,)), 1)
    args, table = list(call.args), NAMES.index("block_tables")
    pages, before = args[table], 64 * block // config.page_size
    args[table] = torch.zeros(1, before + pages.shape[1], dtype=torch.int32)
    args[table][:, before:] = pages
    args[NAMES.index("seq_lens")] += 64 * block
    args[TILES][0, 2:4] += block
    kernel = EmulatedKernel.of(jit.compile(config), Options(check=True))
    kernel(*args)
    assert kernel.run.findings == []
    assert is_right(call), call.errors()


@pytest.mark.parametrize(
    ("config", "splits", "ranges"),
    crossed(
        ((-3, 2, 4, 6), (0, 2), (2, 6)),
        ((-(2**31), 2, 4, 6), (0, 2), (2, 6)),
        ((0, 2, 4, 7), (4, 6), (0, 4)),
        ((0, 2, 4, 2**31 - 1), (4, 6), (0, 4)),
        ((0, 2, 7, 9), (2, 6), (0, 2)),
        ((1, 2, 4, 6), (0, 0), (2, 6)),
        ((0, 2, 0, -5), (0, 0), (0, 2)),
        ((2**31 - 1, -(2**31), 4, 6), (0, 4), (4, 6)),
    ),
    ids=name_of,
)
def test_query_tokens_outside_of_q_are_left_out(
    config: KernelConfig, splits: int, ranges: tuple[tuple[int, ...], ...]
) -> None:
    """Nothing outside of out and lse is touched; what is inside of them of such a request is NaN.
    `ranges`: where requests begin; query tokens that are NaN, and that are right."""
    begin, nan, right = ranges
    problem = problem_for(config, (200, 130, 330), heads=config.tile_rows // 4, q_len=2)
    if config.mask == "tree":
        pytest.skip("the mask's rows follow q")
    call = make_call(config, problem, splits)
    call.args[NAMES.index("q_begin")][:] = torch.tensor(begin, dtype=torch.int32)
    out, lse = run_guarded(config, call)
    assert bool(out[slice(*nan)].isnan().all()) and bool(lse[slice(*nan)].isnan().all())
    assert_right(call, out, lse, slice(*right))


@pytest.mark.parametrize(
    ("config", "splits"),
    [
        (keep_ab(TREE, skip=1), 1),
        (keep_ab(TREE, skip=1), 4),
        pytest.param(keep_ab(TREE), 4, marks=needs_time),
        pytest.param(keep_ab(TREE | HI_LO), 4, marks=needs_time),
    ],
    ids=name_of,
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
