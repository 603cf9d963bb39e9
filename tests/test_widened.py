"""`backend="cute-widened"`: the kernel that widens 656-byte tokens once per cluster.

With MLA_LAB_LONG=1 compiled kernels are emulated, about a minute a case, most of it compilation.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from typing import Any

import pytest
import torch

from mla_lab import backends
from mla_lab.api import decode
from mla_lab.backends.cute import widening
from mla_lab.backends.cute.backend import CuteBackend, _plan
from mla_lab.backends.cute.device_plan import Formula, SelfScheduled
from mla_lab.backends.cute.widened import WidenedBackend
from mla_lab.backends.cute.widening import config_for
from mla_lab.backends.emulate.backend import EmulateBackend
from mla_lab.bench import peers
from mla_lab.bench.peers.ours import native_arguments
from mla_lab.call.decode_args import native_args
from mla_lab.call.form import Features
from mla_lab.core.errors import Unsupported
from mla_lab.core.gpu import H200
from mla_lab.core.problem import Problem
from mla_lab.reference.inputs import DecodeInputs, make_inputs
from mla_lab.reference.mla import decode_reference
from mla_lab.reference.tolerance import error, lse_error

needs_cxx = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
needs_time = pytest.mark.skipif("MLA_LAB_LONG" not in os.environ, reason="MLA_LAB_LONG is not set")
SPARSE = Problem((1,) * 64, (32768,) * 64, 128, kv_format="fp8_656", top_k=2048)


class Emulated(EmulateBackend, WidenedBackend):
    """The backend's launches, emulated."""


def run(inputs: DecodeInputs, kind: type[EmulateBackend] = Emulated) -> tuple[torch.Tensor, ...]:
    arguments = {**native_arguments(inputs, False), "workspace_buffer": None}
    call, _ = decode.prepare(native_args(**arguments, backend="torch"))
    backend = kind()
    assert backend.supports(call.features, call.problem, None) is None
    plan = backend.plan(call, None)
    repeat = backend.run(call, plan, decode.allocate(call, plan))
    first = call.out.clone()
    repeat(call.args, call.out, call.lse)
    assert torch.equal(first, call.out)
    assert call.lse is not None
    return call.out, call.lse


def small(heads: int, q_len: int = 1, top_k: int = 0, kv: tuple[int, ...] = (300,)) -> Problem:
    return Problem((q_len,) * len(kv), kv, heads, kv_format="fp8_656", top_k=top_k)


@needs_cxx
@needs_time
@pytest.mark.slow
@pytest.mark.parametrize(
    ("problem", "features"),
    [
        (small(128, top_k=70), ()),
        (small(128, top_k=300, kv=(300, 0)), ("sinks",)),
        (small(64, q_len=2, top_k=130), ("ragged",)),
        (small(20, top_k=65), ("device_scales",)),
        (small(70, top_k=200, kv=(300, 40)), ("top_k_lens",)),
        (small(64, q_len=2, kv=(300, 77)), ()),
        (small(64, kv=(130, 0, 65)), ()),
    ],
    ids=str,
)
def test_results_are_those_of_the_reference(problem: Problem, features: tuple[str, ...]) -> None:
    inputs = make_inputs(problem, 3, ["lse", *features])
    out, lse = run(inputs)
    expected = decode_reference(inputs)
    assert error(out, expected.out.reshape(out.shape)).relative < 0.008
    assert lse_error(lse, expected.lse.reshape(lse.shape)) < 1e-4


def test_its_name_is_not_among_those_that_auto_tries() -> None:
    assert "cute-widened" in backends.NAMES
    assert "cute-widened" not in backends.ORDER
    assert [peer.name for peer in peers.select(["mla-lab-cute-widened"])]


def plan_of(problem: Problem, **more: Any) -> Any:
    """What "cute" makes of a sparse call on an H200."""
    inputs = make_inputs(problem, 0, workspace_bytes=0)
    arguments = {**native_arguments(inputs, False), "workspace_buffer": None, **more}
    call, _ = decode.prepare(native_args(**arguments, backend="torch"))
    assert CuteBackend().supports(call.features, call.form.bounds, H200) is None
    return CuteBackend().plan(call, H200)


@pytest.mark.parametrize(
    ("heads", "batch", "tile_rows"),
    [(128, 2, 128), (128, 1, 0), (64, 4, 64), (64, 3, 0), (32, 64, 0)],
)
def test_cute_takes_it_where_the_record_has_it_ahead(
    monkeypatch: pytest.MonkeyPatch, heads: int, batch: int, tile_rows: int
) -> None:
    monkeypatch.setattr(widening, "missing_for", lambda *_: None)
    _plan.cache_clear()
    plan = plan_of(small(heads, top_k=70, kv=(64,) * batch))
    assert isinstance(plan, SelfScheduled if tile_rows else Formula)
    assert not tile_rows or plan.config.tile_rows == tile_rows
    _plan.cache_clear()


def test_cute_gathers_what_the_widening_kernel_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = small(128, top_k=70, kv=(64,) * 4)
    monkeypatch.setattr(widening, "missing_for", lambda *_: None)
    _plan.cache_clear()
    assert isinstance(plan_of(problem), SelfScheduled)
    assert isinstance(plan_of(problem, batch_invariant=True), Formula)
    monkeypatch.setattr(widening, "missing_for", lambda *_: "it is not compiled here")
    _plan.cache_clear()
    assert isinstance(plan_of(problem), Formula)
    _plan.cache_clear()


def test_tiles_follow_the_rows_that_share_their_tokens() -> None:
    tiles = {
        heads: (config.tile_rows, config.cluster, config.option("gather"))
        for heads in (16, 64, 65, 128)
        if (config := config_for(replace(SPARSE, heads=heads)))
    }
    assert tiles == {16: (64, 1, 2), 64: (64, 1, 2), 65: (128, 2, 2), 128: (128, 2, 2)}
    drafts = small(64, q_len=2)
    assert (config_for(drafts).cluster, config_for(drafts).option("gather")) == (2, 1)


def test_workers_are_the_clusters_of_the_card() -> None:
    inputs = make_inputs(small(128, top_k=70), 0)
    arguments = {**native_arguments(inputs, False), "workspace_buffer": None}
    call, _ = decode.prepare(native_args(**arguments, backend="torch"))
    plan = WidenedBackend().plan(call, H200)
    assert isinstance(plan, SelfScheduled)
    assert plan.num_workers == H200.workers(2)


@pytest.mark.parametrize(
    ("problem", "features", "words"),
    [
        (replace(SPARSE, kv_format="bf16"), Features(sparse=True), "takes bf16 over fp8_656"),
        (small(64, 2), Features(mask=True), "no draft masks"),
        (SPARSE, Features(sparse=True, batch_invariant=True), "no batch_invariant"),
        (SPARSE, Features(planned=True), "no plan of the caller"),
        (replace(SPARSE, q_dtype="e4m3"), Features(sparse=True), "e4m3 over fp8_656"),
    ],
)
def test_what_the_kernel_lacks_is_refused_by_name(
    problem: Problem, features: Features, words: str
) -> None:
    reason = WidenedBackend().supports(features, problem, H200)
    assert reason is not None
    assert words in reason


def test_without_a_card_the_name_is_refused() -> None:
    inputs = make_inputs(small(64, top_k=70), 0)
    with pytest.raises(Unsupported, match="its kernel runs on a GPU"):
        decode.decode(**native_arguments(inputs, False), backend="cute-widened")
