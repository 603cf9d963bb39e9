"""`backend="cute-keep-ab-gather"`: keep_ab with tokens fetched one by one.

Compiled kernels are emulated on a card of six SMs, so that a CTA has several work tiles and splits
merge; with MLA_LAB_LONG=1 every format, all features and pages of any size, some twenty seconds a
case. A record has all builds in the emulator (`test_verify_emulated`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from mla_lab import backends
from mla_lab.api import decode
from mla_lab.backends.cute import keep_ab_gather
from mla_lab.backends.cute.backend import CuteBackend, _plan
from mla_lab.backends.cute.device_plan import Formula, SelfScheduled
from mla_lab.backends.cute.gather_backend import KeepAbGatherBackend
from mla_lab.backends.cute.keep_ab_gather import config_for
from mla_lab.backends.emulate.backend import EmulateBackend
from mla_lab.bench import peers
from mla_lab.bench.peers.ours import native_arguments
from mla_lab.call.decode_args import native_args
from mla_lab.call.form import Features
from mla_lab.core.errors import Unsupported
from mla_lab.core.gpu import H200
from mla_lab.core.problem import Problem
from mla_lab.plan.launch_modes import FORMATS
from mla_lab.plan.self_schedule import COSTS
from mla_lab.reference.inputs import DecodeInputs, make_inputs
from mla_lab.reference.mla import decode_reference
from mla_lab.reference.tolerance import error, lse_error

from .needs import needs_cxx, needs_time

#: a build of each format takes twenty seconds
IN_TIME = FORMATS if "MLA_LAB_LONG" in os.environ else (("bf16", "fp8_656"), ("bf16", "bf16"))
#: (error of the output, which is bf16, of the lse) by the query's format: e4m3 throughout rounds
#: weights to e4m3
BOUNDS = {"bf16": (0.004, 1e-5), "fp16": (0.004, 1e-5), "e4m3": (0.04, 0.01)}


class Emulated(EmulateBackend, KeepAbGatherBackend):
    """The backend's launches, emulated on six SMs."""

    gpu = replace(H200, sms=6)


def run(
    inputs: DecodeInputs, lens: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result of a call and of its repetition, which have the same bits. `lens`: the call's
    lengths or numbers of slots once it has been checked, as a GPU's may hold anything."""
    arguments = {**native_arguments(inputs, False), "workspace_buffer": None}
    call, _ = decode.prepare(native_args(**arguments, backend="torch"))
    if lens is not None:
        slots = call.args.sparse_mla_top_k_lens
        (call.args.seq_lens if slots is None else slots).copy_(lens)
    backend = Emulated()
    assert backend.supports(call.features, call.problem, None) is None
    plan = backend.plan(call, None)
    repeat = backend.launch(call, plan, decode.allocate(call, plan))
    first = call.out.clone()
    repeat(call.args, call.out, call.lse)
    assert torch.equal(first, call.out)
    assert call.lse is not None
    return call.out, call.lse


def small(heads: int, top_k: int = 0, kv: tuple[int, ...] = (300,), q_len: int = 1) -> Problem:
    return Problem((q_len,) * len(kv), kv, heads, kv_format="fp8_656", top_k=top_k)


def check(problem: Problem, features: tuple[str, ...], formats: tuple[str, str]) -> None:
    made = replace(problem, q_dtype=formats[0], kv_format=formats[1])
    inputs = make_inputs(made, 3, ["lse", *features])
    out, lse = run(inputs)
    expected = decode_reference(inputs)
    most, most_lse = BOUNDS[formats[0]]
    assert error(out, expected.out.reshape(out.shape)).relative < most
    assert lse_error(lse, expected.lse.reshape(lse.shape)) < most_lse


@needs_cxx
@pytest.mark.slow
@pytest.mark.parametrize("formats", IN_TIME, ids="-".join)
def test_lists_of_slots_are_decoded_in_every_format(formats: tuple[str, str]) -> None:
    check(small(128, top_k=300, kv=(400, 70, 400)), (), formats)


@needs_cxx
@pytest.mark.slow
def test_a_cta_has_work_tiles_of_one_to_six_kv_tiles() -> None:
    """17 row tiles on six CTAs."""
    problem = small(64, top_k=330, kv=(400,) * 17)
    lens = make_inputs(problem, 3, ["lse", "top_k_lens"]).sparse_mla_top_k_lens
    assert lens is not None
    assert {-(-n // 64) for n in lens.flatten().tolist()} == {1, 2, 3, 4, 5, 6}
    check(problem, ("top_k_lens",), ("bf16", "bf16"))


@needs_cxx
@needs_time
@pytest.mark.slow
@pytest.mark.parametrize("formats", FORMATS, ids="-".join)
@pytest.mark.parametrize(
    ("problem", "features"),
    [
        (small(20, top_k=65), ("device_scales",)),
        (small(128, top_k=300, kv=(400, 0, 70)), ("sinks", "device_scales")),
        (small(64, top_k=130, kv=(200,) * 6, q_len=2), ("ragged",)),
        (small(70, top_k=200, kv=(300, 40)), ("top_k_lens",)),
        (small(64, top_k=1500, kv=(2000, 1700)), ()),
        (replace(small(64, kv=(300, 77, 500), q_len=2), page_size=8), ("device_scales",)),
        (replace(small(64, kv=(130, 0, 65)), page_size=128), ()),
        (replace(small(40, kv=(1300,)), page_size=3), ()),
    ],
    ids=str,
)
def test_results_are_those_of_the_reference(
    problem: Problem, features: tuple[str, ...], formats: tuple[str, str]
) -> None:
    check(problem, features, formats)


def test_its_name_is_not_among_those_that_auto_tries() -> None:
    assert "cute-keep-ab-gather" in backends.NAMES
    assert "cute-keep-ab-gather" not in backends.ORDER
    assert [peer.name for peer in peers.select(["mla-lab-cute-keep-ab-gather"])]


def test_every_cta_takes_64_rows_and_a_bf16_query_weighs_splits_by_its_own_blocks() -> None:
    problem = small(128, top_k=70)
    config = config_for(problem)
    plan = SelfScheduled.of(config, H200, problem)
    assert (config.tile_rows, config.cluster, plan.num_workers) == (64, 1, H200.workers(1))
    assert plan.costs == COSTS["keep_ab_gather"] != COSTS["keep_ab_persistent"]
    throughout = replace(config, q_dtype="e4m3", kv_format="e4m3")
    dense = replace(COSTS["keep_ab_persistent"], deals=False)
    assert SelfScheduled.of(throughout, H200, problem).costs == dense
    assert config_for(small(64)).option("gather") != config.option("gather")


def plan_of(problem: Problem, **more: Any) -> SelfScheduled | Formula:
    """What "cute" makes of a call whose tokens are fetched one by one, on an H200."""
    inputs = make_inputs(problem, 0, workspace_bytes=0)
    arguments = {**native_arguments(inputs, False), "workspace_buffer": None, **more}
    call, _ = decode.prepare(native_args(**arguments, backend="torch"))
    assert CuteBackend().supports(call.features, call.form.bounds, H200) is None
    made = CuteBackend().plan(call, H200)
    assert isinstance(made, SelfScheduled | Formula)
    return made


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """All builds of the kernel are there, until a test says otherwise."""
    monkeypatch.setattr(keep_ab_gather, "missing_for", lambda *_: None)
    _plan.cache_clear()
    yield monkeypatch
    _plan.cache_clear()


@pytest.mark.parametrize(
    ("heads", "batch", "top_k", "kept"),
    [
        (128, 1, 512, True),
        (64, 8, 1024, True),
        (32, 64, 2048, True),
        (17, 1, 512, True),
        (16, 64, 2048, False),
        (8, 4, 1024, False),
    ],
)
@pytest.mark.parametrize("formats", FORMATS, ids="-".join)
@pytest.mark.usefixtures("builds")
def test_cute_takes_it_where_the_record_has_it_ahead(
    heads: int, batch: int, top_k: int, kept: bool, formats: tuple[str, str]
) -> None:
    made = small(heads, top_k=top_k, kv=(64,) * batch)
    plan = plan_of(replace(made, q_dtype=formats[0], kv_format=formats[1]))
    assert isinstance(plan, SelfScheduled if kept else Formula)
    assert plan.config.kernel == f"cute/{'keep' if kept else 'swap'}_ab_sm90"


def test_cute_takes_the_other_kernel_for_what_it_lacks(builds: pytest.MonkeyPatch) -> None:
    problem = small(128, top_k=2048, kv=(64,) * 4)
    assert isinstance(plan_of(problem), SelfScheduled)
    assert isinstance(plan_of(problem, batch_invariant=True), Formula)
    builds.setattr(keep_ab_gather, "missing_for", lambda *_: "it is not compiled here")
    _plan.cache_clear()
    assert isinstance(plan_of(problem), Formula)


def test_without_a_card_the_name_is_refused() -> None:
    inputs = make_inputs(small(64, top_k=70), 0)
    with pytest.raises(Unsupported, match="its kernel runs on a GPU"):
        decode.decode(**native_arguments(inputs, False), backend="cute-keep-ab-gather")


@pytest.mark.parametrize(
    ("problem", "features", "words"),
    [
        (replace(small(64, 9), q_dtype="fp16"), Features(sparse=True), "fp16 over fp8_656"),
        (small(64), Features(mask=True), "no draft masks"),
        (small(64, 9), Features(sparse=True, batch_invariant=True), "no batch_invariant"),
    ],
)
def test_what_the_kernel_lacks_is_refused_by_name(
    problem: Problem, features: Features, words: str
) -> None:
    reason = KeepAbGatherBackend().supports(features, problem, H200)
    assert reason is not None
    assert words in reason


@pytest.mark.parametrize("kv_format", ["fp8_656", "bf16"])
def test_missing_slots_anywhere_in_a_list_are_left_out(kv_format: str) -> None:
    """Lists that begin with a whole tile of empty slots, and slots that repeat."""
    problem = replace(small(16, top_k=200, kv=(300, 300)), kv_format=kv_format)
    inputs = make_inputs(problem, 5, ["lse"])
    table = inputs.block_tables
    table[0, ..., :70] = -1
    table[1, ..., 100:140] = table[1, ..., 3:4].clone()
    expected = decode_reference(inputs)
    out, lse = run(inputs)
    assert error(out, expected.out.reshape(out.shape)).relative < 0.004
    assert lse_error(lse, expected.lse.reshape(lse.shape)) < 1e-5
    assert torch.isfinite(lse).all()


@needs_cxx
@pytest.mark.slow
@pytest.mark.parametrize("formats", IN_TIME, ids="-".join)
def test_lengths_beyond_a_list_count_its_slots_once(formats: tuple[str, str]) -> None:
    """Lengths on a GPU are read by the kernel alone: those above top_k count as top_k, and negative
    ones as 0."""
    made = replace(small(64, top_k=70, kv=(300,) * 5), q_dtype=formats[0], kv_format=formats[1])
    inputs = make_inputs(made, 3, ["lse"])
    lens = torch.tensor((70, 70, 70, 0, 60), dtype=torch.int32)
    inputs = replace(inputs, sparse_mla_top_k_lens=lens)
    expected = decode_reference(inputs)
    out, lse = run(inputs, torch.tensor((71, 128, 700, -200, 60)))
    assert error(out, expected.out.reshape(out.shape)).relative < BOUNDS[formats[0]][0]
    assert lse_error(lse, expected.lse.reshape(lse.shape)) < BOUNDS[formats[0]][1]


@needs_cxx
@pytest.mark.slow
@pytest.mark.parametrize("length", [-1, -200, -(2**31)])
def test_negative_lengths_are_empty_requests(length: int) -> None:
    """With small pages no entry in front of a row of the table is read."""
    inputs = make_inputs(replace(small(64, kv=(0, 130)), kv_format="bf16", page_size=8), 3, ["lse"])
    expected = decode_reference(inputs)
    out, lse = run(inputs, torch.tensor((length, 130)))
    assert error(out, expected.out.reshape(out.shape)).relative < BOUNDS["bf16"][0]
    assert lse_error(lse, expected.lse.reshape(lse.shape)) < BOUNDS["bf16"][1]
