"""The CUDA backend on a CPU: reasons, cuts, calls through a stand-in, self-checks."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from mla_lab import backends, jit
from mla_lab.api import decode, replay
from mla_lab.api.context_parallel import shard
from mla_lab.api.contract import xqa_batch_decode_with_kv_cache_mla
from mla_lab.backends import self_check
from mla_lab.backends.base import SKIPS_NOTHING
from mla_lab.backends.cuda import backend as cuda
from mla_lab.backends.cuda import xqa
from mla_lab.backends.cuda.backend import CudaBackend
from mla_lab.call import checks as validate
from mla_lab.call.decode_args import native_args
from mla_lab.call.form import Features
from mla_lab.core.errors import BuildError, InvalidInput, Unsupported
from mla_lab.core.gpu import B200, H200, Gpu
from mla_lab.core.problem import Problem
from mla_lab.jit import toolchain
from mla_lab.plan import KernelConfig, make_plan
from mla_lab.plan.xqa import Cuts, Rows, common, config_for, cut, row_tiles_for
from mla_lab.reference.inputs import DecodeInputs, make_inputs
from mla_lab.reference.mla import decode_reference
from mla_lab.reference.tolerance import rel_error

from .test_backend_cute import DRAFTS, PLAIN, RAGGED, check
from .xqa_abi import AbiKernel, with_current_card

WORKSPACE = 64 << 20
MLA = (576, 512)
LONG = Problem.uniform(1, 1, 8192, 16)
L40S = replace(H200, name="L40S", arch="sm_89")

Made = dict[KernelConfig, AbiKernel]


def with_card(monkeypatch: pytest.MonkeyPatch, gpu: Gpu, wrong_by: float = 0.0) -> Made:
    """Lets CPU tensors pass for `gpu`'s, and the oracle for its kernel; what was "compiled"."""
    made: Made = {}

    def kernel(config: KernelConfig, device: torch.device) -> AbiKernel:
        return made.setdefault(config, AbiKernel(config, wrong_by))

    monkeypatch.setattr(xqa, "kernel", kernel)
    for module in (backends, cuda):
        monkeypatch.setattr(module, "gpu_of", lambda device: gpu)
    return made


@pytest.fixture(autouse=True)
def forgetful() -> Iterator[None]:
    for _ in range(2):
        backends.choose.cache_clear()
        xqa.at_once.cache_clear()
        replay.clear()
        self_check.clear()
        if _ == 0:
            yield


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Made:
    return with_card(monkeypatch, H200)


def inputs_of(problem: Problem, *features: str, seed: int = 1) -> DecodeInputs:
    return make_inputs(problem, seed, features, workspace_bytes=WORKSPACE)


def native(inputs: DecodeInputs, **more: Any) -> Any:
    return decode.decode(**{**inputs.contract_args(), "backend": "cuda", **more})


SUPPORTED: list[tuple[Problem, list[str]]] = [
    (PLAIN, []),
    (PLAIN, ["lse", "scales", "cache_4d", "page_gap"]),
    (PLAIN, ["ragged", "lse", "sinks"]),
    (RAGGED, ["lse", "max_q_len"]),
    (RAGGED, []),
    (LONG, ["lse", "sinks", "device_scales"]),
    (Problem.uniform(2, 4, 130, 16, page_size=16), ["lse", "tree_mask", "sinks"]),
    (RAGGED, ["tree_mask", "max_q_len"]),
    (PLAIN, ["separate_tables", "lse"]),
    (Problem((2, 2), (1, 500), 7, q_dtype="fp16", kv_format="fp16"), ["lse"]),
    (Problem.uniform(2, 1, 130, 16, q_dtype="e4m3", kv_format="e4m3"), ["lse"]),
    (Problem.uniform(2, 1, 130, 16, kv_format="e4m3"), ["lse"]),
]


@pytest.mark.parametrize("features", [[], ["tree_mask", "max_q_len"], ["separate_tables"]])
def test_context_parallel_is_a_mask(kernels: Made, features: list[str]) -> None:
    inputs = inputs_of(RAGGED if "max_q_len" in features else DRAFTS, *features)
    if "separate_tables" in features:  # of one rank of two whose other half is elsewhere
        lengths = inputs.seq_lens
        more = {"enable_dcp": True, "cp_world": 2, "cp_rank": 1, "return_lse": True}
        ranks = [replace(inputs, causal_seqlens_kv_global=2 * lengths, **more)]
    else:
        ranks = shard(inputs, 2)
    for rank in ranks:
        for _ in range(2):
            given = replace(rank, workspace_buffer=inputs.workspace_buffer)
            check(given, native(given))


@pytest.mark.parametrize(("index", "expected"), [(0, []), (1, [1, 1, 1])])
def test_a_kernel_runs_on_the_card_of_its_tensors(
    kernels: Made, monkeypatch: pytest.MonkeyPatch, index: int, expected: list[int]
) -> None:
    """Its occupancy is asked there too, and a replay launches there."""
    entered = with_current_card(monkeypatch, index)
    inputs = inputs_of(PLAIN)
    for _ in range(2):
        check(inputs, native(inputs))
    assert entered == expected


def longest_bound(problem: Problem, features: list[str]) -> int:
    """Query tokens of a request that a form allows for."""
    if "max_q_len" in features:
        return min(max(problem.q_lens) + 3, problem.total_q)
    ragged = "ragged" in features or len(set(problem.q_lens)) > 1
    return problem.total_q if ragged else problem.q_lens[0]


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize(("problem", "features"), SUPPORTED)
def test_calls(kernels: Made, problem: Problem, features: list[str], batch_invariant: bool) -> None:
    inputs = inputs_of(problem, *features)
    for _ in range(2):  # the second time by repetition
        check(inputs, native(inputs, batch_invariant=batch_invariant))
    assert not inputs.workspace_buffer[:65536].any()
    (kernel,) = kernels.values()
    assert len(kernel.launches) == 2
    formats = (problem.q_dtype, problem.kv_format)
    separate = "separate_tables" in features
    rows = problem.heads * (1 if batch_invariant else longest_bound(problem, features))
    pairs = problem.batch * -(-rows // 32)
    wide = rows > 16 and not separate and formats[0] == formats[1]
    wide = wide and (batch_invariant or pairs >= 12)
    expected = config_for(MLA, formats, "sm_90a", separate=separate, row_tiles=1 + wide)
    assert kernel.config == expected


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn])
def test_results_in_other_types(kernels: Made, dtype: torch.dtype) -> None:
    inputs = inputs_of(Problem.uniform(2, 1, 130, 16, q_dtype="e4m3", kv_format="e4m3"))
    out = torch.empty(2, 1, 16, 512, dtype=dtype)
    check(inputs, native(inputs, out=out).float(), 0.05)


def test_a_longer_bound_of_the_same_power_of_two_is_the_same_launch(kernels: Made) -> None:
    inputs = inputs_of(LONG)
    for bound in (8192, 8100, 5000):
        native(inputs, max_seq_len=bound)
    (kernel,) = kernels.values()
    assert {launch["max_splits"] for launch in kernel.launches} == {32}
    native(inputs_of(Problem.uniform(1, 1, 4000, 16)))
    assert kernel.launches[-1]["max_splits"] == 16


def test_ragged_without_a_bound_is_never_repeated_with_another_s_grid(kernels: Made) -> None:
    inputs = inputs_of(RAGGED)
    native(inputs)
    longer = replace(inputs, cum_seq_lens_q=torch.tensor([0, 0, 0, 6, 6], dtype=torch.int32))
    native(longer)
    (kernel,) = kernels.values()
    assert [launch["q_len"] for launch in kernel.launches] == [3, 6]


@pytest.mark.parametrize("page_size", [1, 2, 8])
def test_small_pages_where_values_have_their_own(kernels: Made, page_size: int) -> None:
    problem = replace(DRAFTS, page_size=page_size)
    inputs = inputs_of(problem, "lse", "separate_tables")
    check(inputs, native(inputs))
    (config,) = kernels
    assert dict(config.options) == {"shared_kv": 0, "small_pages": 1}
    other = replace(config, options=(("shared_kv", 0),))
    large = inputs_of(DRAFTS, "separate_tables")
    native(large)
    assert other in kernels
    with pytest.raises(Unsupported, match=f"pages of {page_size}; its kernel takes"):
        native(inputs_of(problem))


@pytest.mark.parametrize("given", [1, 2])
def test_rows_past_a_bound_that_is_too_small_are_nan(kernels: Made, given: int) -> None:
    problem = Problem((1, 0, 3, 2), (70, 5, 300, 20), 16)
    inputs = inputs_of(problem, "lse", "max_q_len")
    out = torch.full((6, 16, 512), 7.0, dtype=torch.bfloat16)
    inputs = replace(inputs, out=out, lse=torch.full((6, 16), 7.0), max_q_len=given)
    for _ in range(2):  # the second time as a replay
        native(inputs)
    seen = torch.tensor([i < given for n in problem.q_lens for i in range(n)])
    expected = decode_reference(inputs)
    assert rel_error(out[seen], expected.out[seen]) < 4e-3
    assert out[~seen].isnan().all() and inputs.lse is not None and inputs.lse[~seen].isnan().all()
    assert (~inputs.lse[seen].isnan()).all()


def test_programmatic_launch_is_the_callers_and_the_cards(
    kernels: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = inputs_of(PLAIN)
    for pdl in (None, True, False):
        native(inputs, enable_pdl=pdl)
    (kernel,) = kernels.values()
    assert [launch["pdl"] for launch in kernel.launches] == [True, True, False]


def test_xqa_s_name_runs_this_backend(kernels: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = inputs_of(PLAIN, "sinks")
    arguments = inputs.contract_args()
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))
    check(inputs, xqa_batch_decode_with_kv_cache_mla(**arguments))
    assert len(kernels) == 1
    native(inputs, backend="xqa")
    (kernel,) = kernels.values()
    assert len(kernel.launches) == 2


def verdict(inputs: DecodeInputs, **more: Any) -> backends.Verdict:
    """What `explain` says of this backend."""
    found = backends.explain(validate.form_of(replace(inputs, **more)))
    return next(v for v in found if v.name == "cuda")


@pytest.mark.parametrize("backend", ["cuda", "auto"])
def test_a_caller_s_plan_changes_nothing_and_explain_says_so(kernels: Made, backend: str) -> None:
    inputs = inputs_of(Problem.uniform(2, 1, 130, 16), "separate_tables", "lse")
    plain = native(inputs, backend=backend)
    check(inputs, plain)
    plan = make_plan(inputs.problem, policy="fixed", num_splits=3)
    given = native(inputs, plan=plan, backend=backend)
    assert all(torch.equal(a, b) for a, b in zip(plain, given, strict=True))
    (kernel,) = kernels.values()
    assert len(kernel.launches) == 2
    said = verdict(inputs, plan=plan)
    assert said.taken and said.note == cuda.OWN_CUTS
    with pytest.raises(InvalidInput, match=r"plan: got one for heads 7"):
        native(inputs, plan=make_plan(Problem.uniform(2, 1, 130, 7)), backend=backend)


def test_where_no_kernel_skips_tiles_the_result_is_exact_and_explain_says_so(kernels: Made) -> None:
    inputs = inputs_of(Problem.uniform(2, 1, 300, 16), "separate_tables", "lse")
    factor = {"skip_softmax_threshold_scale_factor": 1e3}
    plain, given = native(inputs), native(inputs, **factor, backend="auto")
    assert all(torch.equal(a, b) for a, b in zip(plain, given, strict=True))
    said = verdict(inputs, **factor)
    assert said.taken and said.note == SKIPS_NOTHING and SKIPS_NOTHING in str(said)


def test_a_tensor_at_a_wrong_place_is_named(kernels: Made) -> None:
    inputs = inputs_of(PLAIN)
    shifted = torch.empty(inputs.query.numel() + 1, dtype=torch.bfloat16)[1:]
    query = shifted.view(inputs.query.shape).copy_(inputs.query)
    with pytest.raises(InvalidInput, match="multiples of 16 bytes"):
        native(replace(inputs, query=query))


# --- reasons -----------------------------------------------------------------------------------

REASONS: list[tuple[Problem, Features, Gpu | None, str]] = [
    (PLAIN, Features(), None, "the tensors are on a CPU"),
    (PLAIN, Features(), replace(H200, arch="sm_80"), "the GPU is sm_80; its kernel is for"),
    (PLAIN, Features(sparse=True), H200, "no sparse_mla_top_k"),
    (PLAIN, Features(pdl=True), L40S, "sm_89 has no programmatic dependent launch"),
    (replace(PLAIN, latent_dim=256), Features(), H200, r"latent and rope dims \(256, 64\)"),
    (replace(PLAIN, kv_format="fp8_656"), Features(), H200, "query bf16 over cache fp8_656"),
    (replace(PLAIN, q_dtype="fp32", kv_format="fp32"), Features(), H200, "query fp32 over cache"),
    (replace(PLAIN, page_size=8), Features(), H200, "pages of 8"),
    (replace(PLAIN, page_size=48), Features(), H200, "pages of 48"),
    (Problem.uniform(70_000, 1, 1, 16), Features(), H200, "a batch of 70000"),
]


@pytest.mark.parametrize(("problem", "features", "gpu", "words"), REASONS)
def test_reasons(problem: Problem, features: Features, gpu: Gpu | None, words: str) -> None:
    reason = CudaBackend().supports(features, problem, gpu)
    assert reason is not None
    assert re.search(words, reason)


def test_without_a_compiler_or_a_build_it_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none_here(kernel: str) -> dict[str, str]:
        raise BuildError("nvcc: not found")

    monkeypatch.setattr(jit, "find", lambda config, arch: None)
    monkeypatch.setattr(toolchain, "versions", none_here)
    reason = CudaBackend().supports(Features(), PLAIN, H200)
    assert reason == "cuda_xqa_row_tiles2 is not compiled here, and cannot be: nvcc: not found"


@pytest.mark.parametrize("gpu", [L40S, B200, replace(H200, name="RTX 5090", arch="sm_120")])
def test_other_cards_are_taken(gpu: Gpu) -> None:
    assert CudaBackend().supports(Features(), PLAIN, gpu) is None


def test_auto_takes_it_where_the_cute_kernels_do_not(kernels: Made) -> None:
    inputs = inputs_of(Problem.uniform(2, 1, 130, 16, kv_format="e4m3"))
    arguments = inputs.contract_args()
    del arguments["workspace_buffer"]
    given = validate.form_of(native_args(**arguments))
    taken = [v.name for v in backends.explain(given) if v.taken]
    assert taken in (["cute"], ["cuda"])
    assert backends.explain(given)[1].reason is None


# --- builds and cuts ---------------------------------------------------------------------------


def test_builds_leave_defaults_out() -> None:
    assert config_for(MLA, ("bf16", "bf16"), "sm_100a") == KernelConfig("cuda/xqa")
    names = {
        config_for((128, 128), ("bf16", "e4m3"), "sm_90a").name(),
        config_for(MLA, ("e4m3", "e4m3"), "sm_90a").name(),
        config_for(MLA, ("e4m3", "e4m3"), "sm_100a").name(),
        config_for(MLA, ("e4m3", "e4m3"), "sm_120a").name(),
        config_for(MLA, ("bf16", "bf16"), "sm_90a", separate=True, row_tiles=2).name(),
    }
    assert names == {
        "cuda_xqa_kv_type2_qk_dim128",
        "cuda_xqa_kv_type2_q_type2_whole_sm1",
        "cuda_xqa_kv_type2_q_type2",
        "cuda_xqa_kv_type2_mma81_q_type2",
        "cuda_xqa_row_tiles2_shared_kv0",
    }
    assert common("sm_100a")[0] == KernelConfig("cuda/xqa")


def cuts_of(batch: int, rows: int, longest: int, invariant: bool = False) -> Cuts:
    config = KernelConfig("cuda/xqa")
    return cut(config, Rows(batch, 1, rows, longest), 512, 264, invariant)


def test_two_row_tiles_where_they_fit() -> None:
    same, mixed = ("bf16", "bf16"), ("bf16", "e4m3")
    assert [row_tiles_for(rows, same, "sm_90a") for rows in (0, 1, 16, 17, 128)] == [1, 1, 1, 2, 2]
    assert row_tiles_for(128, mixed, "sm_90a") == 1
    assert row_tiles_for(128, same, "sm_120a") == 1
    assert row_tiles_for(128, same, "sm_90a", separate=True) == 1
    assert [row_tiles_for(128, same, "sm_90a", requests=n) for n in (1, 2, 3)] == [1, 1, 2]
    assert len(common("sm_90a")) == 16 and len(common("sm_120a")) == 13


def test_one_request_is_cut_and_a_full_card_is_not() -> None:
    assert cuts_of(1, 16, 8192).max_splits == 32
    full = cuts_of(264, 16, 8192)
    assert (full.max_splits, full.workspace.nbytes) == (1, 0)
    assert cuts_of(1, 16, 100).max_splits == 1
    assert cuts_of(1, 16, 0).split_tokens > 0


@pytest.mark.parametrize("batch", [1, 3, 64])
@pytest.mark.parametrize("longest", [1, 1000, 8192, 131_072])
def test_pieces_cover_the_longest_request(batch: int, longest: int) -> None:
    cuts = cuts_of(batch, 128, longest)
    assert cuts.max_splits * cuts.split_tokens >= longest
    assert (cuts.max_splits - 1) * cuts.split_tokens < longest + 64 * cuts.max_splits
    slots = cuts.groups * cuts.max_splits
    if cuts.max_splits > 1:
        assert cuts.workspace["partial_out"].shape == (slots, 16, 512)


def test_invariant_cuts_know_a_request_s_own_length_alone() -> None:
    """Pieces of every length up to the bound are the same whatever the batch and its bounds."""

    def pieces(cuts: Cuts, length: int) -> int:
        return min(cuts.max_splits, -(-length // cuts.split_tokens))

    for length in (1, 1024, 1025, 5000, 32_768, 131_072):
        found = {
            pieces(cuts_of(batch, rows, longest, True), -(-length // tile) * tile)
            for batch, rows in ((1, 16), (64, 16), (7, 128))
            for longest in (length, length + 1, 2 * length, 131_072)
            for tile in (16, 32, 64)
        }
        assert len(found) == 1


def test_more_row_tiles_than_counters() -> None:
    assert cuts_of(17_000, 16, 8192).max_splits == 1
    with pytest.raises(Unsupported, match="batch_invariant: got True with 17000 row tiles"):
        cuts_of(17_000, 16, 8192, True)
    with pytest.raises(Unsupported, match="query: got 1 requests of 65536 row tiles"):
        cuts_of(1, 16 * 65536, 8192)


def test_a_workspace_that_is_too_small_is_told_both_sizes(kernels: Made) -> None:
    inputs = replace(inputs_of(LONG), workspace_buffer=torch.zeros(64, dtype=torch.uint8))
    with pytest.raises(InvalidInput, match=r"workspace_buffer: got 64 bytes; supported: \d+ bytes"):
        native(inputs)


# --- self-checks -------------------------------------------------------------------------------


@pytest.mark.parametrize(("problem", "features"), SUPPORTED)
def test_an_unproved_card_checks_itself_once_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    problem: Problem,
    features: list[str],
) -> None:
    with_card(monkeypatch, L40S)
    inputs = inputs_of(problem, *features)
    with caplog.at_level(logging.WARNING, "mla_lab"):
        for _ in range(3):
            check(inputs, native(inputs))
    (record,) = caplog.records
    cards = " and ".join(self_check.PROVED)
    assert f" on L40S: compiled for this card, tested on {cards} alone" in record.getMessage()
    if problem.kv_format == "e4m3" == problem.q_dtype:
        assert "mma81" in record.getMessage()


def test_an_unproved_card_that_is_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    made = with_card(monkeypatch, B200, wrong_by=0.05)
    inputs = inputs_of(PLAIN, "lse")
    for _ in range(2):
        with pytest.raises(BuildError, match=r"on B200: got results that differ .* out off by 5"):
            native(inputs)
    (kernel,) = made.values()
    assert len(kernel.launches) == 1


def test_the_proved_card_is_not_checked(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with_card(monkeypatch, H200, wrong_by=0.05)
    native(inputs_of(PLAIN))
    assert not caplog.records


def test_each_kind_of_call_is_checked(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with_card(monkeypatch, B200)
    for features in ((), ("sinks",), ("lse",), ()):
        native(inputs_of(PLAIN, *features))
    assert len(caplog.records) == 3


def test_a_first_call_inside_a_capture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with_card(monkeypatch, B200)

    def refuse(name: str, what: str, device: torch.device) -> None:
        raise InvalidInput(f"{name}: {what}")

    monkeypatch.setattr(self_check, "refuse_capture", refuse)
    with pytest.raises(InvalidInput, match="the self-check of cuda_xqa on B200"):
        native(inputs_of(PLAIN))
