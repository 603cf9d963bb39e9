"""Repeated calls of the CuTe backend on a CPU, through a stand-in for the kernel."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from mla_lab.api import decode, replay
from mla_lab.api.context_parallel import shard
from mla_lab.api.contract import trtllm_batch_decode_with_kv_cache_mla
from mla_lab.backends.cute import launch
from mla_lab.call.bind import bind
from mla_lab.core.errors import InvalidInput
from mla_lab.core.kv_cache import DTYPES
from mla_lab.core.problem import Problem
from mla_lab.plan import KernelConfig, make_plan
from mla_lab.reference.inputs import DecodeInputs

from . import test_backend_cute as first
from .attention_abi import AbiKernel
from .test_backend_cute import PIECES, PLAIN, RAGGED, WORKSPACE, check, inputs_of, native

#: the fixture of the first file
kernels = first.kernels


@pytest.fixture
def bindings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each call that took the long way."""
    seen: list[int] = []

    def counted(*arguments: Any, **named: Any) -> Any:
        seen.append(1)
        return bind(*arguments, **named)

    monkeypatch.setattr(decode, "bind", counted)
    return seen


def test_layers_of_a_step_are_checked_once(
    kernels: dict[KernelConfig, AbiKernel], bindings: list[int]
) -> None:
    first = inputs_of(PLAIN, "lse")
    plan = make_plan(PLAIN, policy="fixed", num_splits=3)
    for layer in range(4):
        other = inputs_of(PLAIN, "lse", seed=layer)
        inputs = replace(
            other, workspace_buffer=first.workspace_buffer, bmm1_scale=0.05 * (1 + layer)
        )
        check(inputs, native(inputs, plan=plan))
    assert len(bindings) == 1


CHANGES: dict[str, Callable[[DecodeInputs], dict[str, Any]]] = {
    "lse": lambda i: {"return_lse": True},
    "base": lambda i: {"return_lse_base": "base2"},
    "batch": lambda i: {"seq_lens": i.seq_lens[:2].clone()},
    "table": lambda i: {"block_tables": i.block_tables[:2].clone()},
    "dtype": lambda i: {"query": i.query.half(), "kv_cache": i.kv_cache.half()},
    "pages": lambda i: {"kv_cache": i.kv_cache[:, :32].contiguous()},
    "flag": lambda i: {"return_lse": 1},
    "scale": lambda i: {"bmm1_scale": -1.0},
    "nan": lambda i: {"bmm1_scale": float("nan")},
    "text": lambda i: {"bmm2_scale": "1"},
    "sinks": lambda i: {"sinks": torch.zeros(128)},
    "workspace": lambda i: {"workspace_buffer": torch.zeros(WORKSPACE, dtype=torch.uint8)},
    "backend": lambda i: {"backend": "torch"},
    "debug": lambda i: {"debug": True},
    "plan": lambda i: {"plan": make_plan(PLAIN, tile_rows=128)},
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_call_that_differs_is_checked_in_full(
    kernels: dict[KernelConfig, AbiKernel], bindings: list[int], change: str
) -> None:
    inputs = inputs_of(PIECES if change == "workspace" else PLAIN)
    native(inputs)
    fresh = CHANGES[change](inputs)
    outcomes = []
    for _ in range(2):  # after another call, and as the first one
        try:
            outcomes.append(native(inputs, **fresh))
        except Exception as error:
            outcomes.append(str(error))
        replay.clear()
    assert len(bindings) >= 3 or all(isinstance(o, str) for o in outcomes)
    first, second = outcomes
    if isinstance(first, torch.Tensor):
        assert torch.equal(first, second)
    elif isinstance(first, str):
        assert first == second


def test_a_remembered_call_keeps_no_workspace_alive(
    kernels: dict[KernelConfig, AbiKernel],
) -> None:
    inputs = inputs_of(PIECES)
    buffer = torch.zeros(WORKSPACE, dtype=torch.uint8)
    native(inputs, workspace_buffer=buffer)
    kernels.clear()
    assert replay._RECORDED
    del buffer
    gc.collect()
    assert not replay._RECORDED


def test_a_plan_without_partials_needs_no_workspace(
    kernels: dict[KernelConfig, AbiKernel], bindings: list[int]
) -> None:
    inputs = inputs_of(PLAIN)
    plan = make_plan(PLAIN, policy="none")
    for _ in range(3):
        check(inputs, native(inputs, plan=plan, workspace_buffer=None))
    assert len(bindings) == 1


def test_many_plans_are_forgotten(kernels: dict[KernelConfig, AbiKernel]) -> None:
    problem = Problem.uniform(1, 1, 64, 1)
    inputs = inputs_of(problem)
    plan = make_plan(problem, policy="none")
    for _ in range(replay.MAX_RECORDED + 10):
        native(inputs, plan=replace(plan))
    assert len(replay._RECORDED) <= replay.MAX_RECORDED


@pytest.mark.parametrize("features", [["sinks"], ["device_scales"], ["tree_mask", "sinks"]])
def test_calls_with_features_are_repeated_too(
    features: list[str], kernels: dict[KernelConfig, AbiKernel], bindings: list[int]
) -> None:
    inputs = inputs_of(RAGGED, "max_q_len", *features)
    for _ in range(3):
        check(inputs, native(inputs))
    assert len(bindings) == 1
    # one feature less is another call, whose sinks or mask are not this one's
    plain = inputs_of(RAGGED, "max_q_len")
    check(plain, native(plain))
    check(inputs, native(inputs))
    sinks: Any = inputs.sinks
    if sinks is not None:
        listed = replace(inputs, sinks=[sinks * 2])
        check(listed, native(listed))


@pytest.mark.parametrize("bound", [None, 40])
def test_a_mask_as_wide_as_drafts_that_were_read_is_not_repeated(
    kernels: dict[KernelConfig, AbiKernel], bindings: list[int], bound: int | None
) -> None:
    """Without max_q_len the longest draft decides how wide a mask is: one that is longer in another
    call is refused there, and not read by a mask of too few columns."""
    inputs = inputs_of(Problem((20, 20), (70, 90), 16), "tree_mask", "ragged")
    if bound is not None and inputs.mask is not None:
        wide = torch.zeros(40, 4, dtype=torch.uint16)
        wide[:, :2] = inputs.mask
        inputs = replace(inputs, mask=wide, max_q_len=bound)
    for _ in range(2):
        check(inputs, native(inputs))
    assert len(bindings) == (2 if bound is None else 1)
    longer = replace(inputs, cum_seq_lens_q=torch.tensor([0, 36, 40], dtype=torch.int32))
    if bound is None:
        with pytest.raises(InvalidInput, match="mask: got shape"):
            native(longer)


def test_a_grid_for_drafts_that_were_read_is_not_repeated(
    kernels: dict[KernelConfig, AbiKernel], bindings: list[int]
) -> None:
    """Without max_q_len the longest request decides how many row tiles a grid has: one that is
    longer in another call found none for its last rows, which stayed as the memory was."""
    inputs = inputs_of(Problem((1, 2, 1), (70, 90, 60), 16, page_size=1), "ragged")
    for _ in range(2):
        check(inputs, native(inputs))
    assert len(bindings) == 2
    sums = torch.tensor([0, 0, 0, 4], dtype=torch.int32)
    longer = replace(inputs, cum_seq_lens_q=sums, problem=replace(inputs.problem, q_lens=(0, 0, 4)))
    check(longer, native(longer))


def test_a_context_parallel_call_without_a_bound_is_repeated_with_any_query_tokens(
    kernels: dict[KernelConfig, AbiKernel], bindings: list[int]
) -> None:
    inputs = inputs_of(Problem((2, 2, 2), (70, 90, 60), 16), "ragged")
    rank = shard(inputs, 2)[1]
    check(rank, native(rank))
    sums = torch.tensor([0, 1, 1, 6], dtype=torch.int32)
    problem = replace(rank.problem, q_lens=(1, 0, 5))
    check(replace(rank, problem=problem, cum_seq_lens_q=sums), native(rank, cum_seq_lens_q=sums))
    assert len(bindings) == 1


def entry(config: KernelConfig, device: torch.device) -> Callable[..., None]:
    """A kernel's entry alone: it refuses pages, widths and dtypes that it was not compiled for."""
    dtype = DTYPES.get(config.kv_format, torch.uint8)
    width = 656 if config.kv_format == "fp8_656" else 576

    def launch(query: torch.Tensor, cache: torch.Tensor, *_: Any) -> None:
        page = cache.shape[1] if not config.option("gather") else config.page_size
        shape = (page, cache.shape[-1])
        if shape != (config.page_size, width) or cache.dtype is not dtype:
            raise ValueError("kv_cache")

    return launch


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int32, torch.bool])
def test_a_cache_of_other_numbers_is_no_cache_of_bytes(
    kernels: dict[KernelConfig, AbiKernel],
    bindings: list[int],
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
) -> None:
    """A cache of 656-byte tokens that is typed int8 is seen as bytes; one of as many bytes a token
    in another dtype is refused in a repeated call as in a first one."""
    monkeypatch.setattr(launch, "kernel", entry)
    inputs = inputs_of(replace(PLAIN, kv_format="fp8_656"))
    for _ in range(2):
        native(inputs, kv_cache=inputs.kv_cache.view(torch.int8))
    assert len(bindings) == 1
    with pytest.raises(InvalidInput, match="kv_cache: got"):
        native(inputs, kv_cache=inputs.kv_cache.view(dtype))


def test_out_of_another_dtype_is_another_build(
    kernels: dict[KernelConfig, AbiKernel], bindings: list[int]
) -> None:
    inputs = inputs_of(PLAIN)
    for dtype in (torch.bfloat16, torch.float16, torch.float16):
        check(inputs, native(inputs, out=torch.empty(4, 1, 128, 512, dtype=dtype)))
    assert len(bindings) == 2
    assert {config.out_dtype for config in kernels} == {"bf16", "fp16"}


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32])
def test_a_repeated_context_parallel_call_takes_a_mask_of_uint16_alone(
    kernels: dict[KernelConfig, AbiKernel], dtype: torch.dtype
) -> None:
    inputs = inputs_of(Problem.uniform(2, 3, 70, 16), "tree_mask")
    rank = shard(inputs, 2)[1]
    for _ in range(2):
        check(rank, native(rank))
    assert rank.mask is not None
    with pytest.raises(InvalidInput, match=r"mask: got torch.int"):
        native(rank, mask=torch.zeros(rank.mask.shape, dtype=dtype))


def test_a_bound_or_a_wider_table_is_no_new_call(
    kernels: dict[KernelConfig, AbiKernel], bindings: list[int]
) -> None:
    """Where work follows from the lengths, nothing of a launch depends on their bound."""
    inputs = inputs_of(PIECES)
    wide = torch.cat([inputs.block_tables, torch.full((1, 900), 1 << 30, dtype=torch.int32)], 1)
    expected = native(inputs)
    for more in (
        {"block_tables": wide},
        {"max_seq_len": 131072, "block_tables": wide},
        {"max_seq_len": 4097},
        {"max_seq_len": 0},
    ):
        assert torch.equal(native(inputs, **more), expected)
    assert len(bindings) == 1
    with pytest.raises(InvalidInput, match="max_seq_len: got -1"):
        native(inputs, max_seq_len=-1)
    with pytest.raises(InvalidInput, match="block_tables: got shape"):
        native(inputs, block_tables=wide[:, :0])


def test_no_bound_decides_a_build_of_e4m3(
    kernels: dict[KernelConfig, AbiKernel], bindings: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "kernel", entry)
    inputs = inputs_of(replace(PLAIN, q_dtype="e4m3", kv_format="e4m3"))
    wide = torch.zeros(4, 1 << 15, dtype=torch.int32)
    room = {"workspace_buffer": torch.zeros(2 * WORKSPACE, dtype=torch.uint8)}
    for bound in (300, 131072, 1 << 20):
        native(inputs, block_tables=wide, max_seq_len=bound, **room)
        assert len(bindings) == 1


def test_a_gathered_call_s_pieces_follow_from_the_bound(
    kernels: dict[KernelConfig, AbiKernel], bindings: list[int]
) -> None:
    inputs = inputs_of(replace(PIECES, page_size=1))
    for bound, checked in ((4096, 1), (4000, 1), (64, 2), (4096, 2)):
        native(inputs, max_seq_len=bound)
        assert len(bindings) == checked


def test_a_call_of_many_rows_whose_tokens_are_gathered_has_any_bound_and_one_page_size(
    kernels: dict[KernelConfig, AbiKernel], bindings: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "kernel", entry)
    problem = replace(PLAIN, heads=128, page_size=1)
    inputs = inputs_of(problem)
    wide = torch.zeros(4, 1 << 15, dtype=torch.int32)
    room = {"workspace_buffer": torch.zeros(2 * WORKSPACE, dtype=torch.uint8)}
    for bound in (300, 131072):
        native(inputs, block_tables=wide, max_seq_len=bound, **room)
        assert len(bindings) == 1
    native(inputs_of(replace(problem, page_size=2)), **room)
    assert len(bindings) == 2


def test_caches_under_one_query_shape_do_not_evict_each_other(
    kernels: dict[KernelConfig, AbiKernel], bindings: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers with other pages, tables and formats, in turn."""
    monkeypatch.setattr(launch, "kernel", entry)
    first = inputs_of(PLAIN)
    calls = [
        replace(
            inputs_of(replace(PLAIN, page_size=size, kv_format=form)),
            workspace_buffer=first.workspace_buffer,
        )
        for size in (1, 8, 16, 64)
        for form in ("bf16", "e4m3", "fp8_656")
    ]
    for inputs in calls:
        native(inputs)
    seen = len(bindings)
    for inputs in [*calls, *reversed(calls)]:
        native(inputs)
    assert len(bindings) == seen


def work_of(call: Callable[[], Any]) -> tuple[int, int]:
    """Python functions that `call` enters, itself included, and bytecodes that they run."""
    counts = [0, 0]

    def trace(frame: Any, event: str, _: Any) -> Any:
        counts[0] += event == "call"
        counts[1] += event == "opcode"
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return counts[0], counts[1]


@pytest.mark.parametrize(("contract", "frames", "bytecodes"), [(False, 8, 580), (True, 8, 580)])
def test_a_repeated_call_stays_short(
    kernels: dict[KernelConfig, AbiKernel],
    monkeypatch: pytest.MonkeyPatch,
    contract: bool,
    frames: int,
    bytecodes: int,
) -> None:
    """Host time that no CPU's speed blurs: what stands between a caller and the kernel's entry.

    The order of the tensors' addresses decides how soon a comparison of two ranges ends: 540 to
    570 bytecodes.
    """
    monkeypatch.setattr(launch, "kernel", lambda *_: lambda *arguments: None)
    inputs = inputs_of(PLAIN)
    out = torch.empty(4, 1, 128, 512, dtype=torch.bfloat16)
    named = {**inputs.contract_args(), "out": out, "backend": "cute", "plan": make_plan(PLAIN)}
    function: Callable[..., Any] = trtllm_batch_decode_with_kv_cache_mla
    if not contract:
        function = decode.decode
    for _ in range(3):
        function(**named)
    entered, run = work_of(lambda: function(**named))
    assert entered <= frames and run <= bytecodes
