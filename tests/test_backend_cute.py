"""The CuTe backend on a CPU: reasons, plans, and calls through a stand-in for the kernel."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from mla_lab import backends
from mla_lab.api import decode, replay
from mla_lab.api.context_parallel import shard
from mla_lab.backends.cute import backend as cute
from mla_lab.backends.cute import launch
from mla_lab.backends.cute.backend import CuteBackend
from mla_lab.backends.cute.device_plan import Formula, PlanOnDevice, SelfScheduled
from mla_lab.backends.cute.families import complete, config_for, config_for_plan, costs
from mla_lab.call.form import Features
from mla_lab.core.errors import InvalidInput, Unsupported
from mla_lab.core.gpu import B200, H200, Gpu
from mla_lab.core.problem import Problem
from mla_lab.jit.shipped import shipped
from mla_lab.plan import KernelConfig, choose, make_plan
from mla_lab.plan.choose import invariant_kinds
from mla_lab.plan.formula import ll_words
from mla_lab.plan.launch_modes import SWAP_AB_CLUSTER, SWAP_AB_LL, SWAP_AB_LL_MULTICAST
from mla_lab.plan.workspace import LL_WORDS
from mla_lab.reference.inputs import DecodeInputs, make_inputs, zero_bytes
from mla_lab.reference.mla import decode_reference
from mla_lab.reference.tolerance import lse_error, rel_error

from .attention_abi import AbiKernel

WORKSPACE = 128 << 20
PLAIN = Problem.uniform(4, 1, 300, 128)
DRAFTS = Problem.uniform(2, 3, 700, 16)
RAGGED = Problem((1, 0, 3, 2), (70, 5, 300, 0), 24)
#: work by a formula in several pieces, and by a planner kernel
PIECES = Problem.uniform(1, 1, 4096, 16)
PLANNED = Problem.uniform(40, 1, 200, 128)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[KernelConfig, AbiKernel]]:
    """Lets CPU tensors pass for a GPU's, and torch for its kernels; what was "compiled"."""
    made: dict[KernelConfig, AbiKernel] = {}

    def kernel(config: KernelConfig, device: torch.device) -> AbiKernel:
        return made.setdefault(config, AbiKernel(config))

    monkeypatch.setattr(launch, "kernel", kernel)
    monkeypatch.delitem(backends.MODULES, "cuda")  # there is no stand-in for its kernels here
    for module in (backends, cute):
        monkeypatch.setattr(module, "gpu_of", lambda device: H200)
    backends.choose.cache_clear()
    replay.clear()
    yield made
    backends.choose.cache_clear()
    replay.clear()


def inputs_of(problem: Problem, *features: str, seed: int = 1) -> DecodeInputs:
    return make_inputs(problem, seed, features, workspace_bytes=WORKSPACE)


def native(inputs: DecodeInputs, **more: Any) -> Any:
    return decode.decode(**{**inputs.contract_args(), "backend": "cute", **more})


def check(inputs: DecodeInputs, result: Any, limit: float = 4e-3) -> None:
    expected = decode_reference(inputs)
    out, lse = result if inputs.return_lse else (result, None)
    assert rel_error(out, expected.out) < limit
    if lse is not None:
        assert lse_error(lse, expected.lse) < 1e-5


SUPPORTED: list[tuple[Problem, list[str]]] = [
    (PLAIN, []),
    (PLAIN, ["lse", "scales", "cache_4d"]),
    (PLAIN, ["ragged", "lse", "page_gap"]),
    (RAGGED, ["lse", "max_q_len"]),
    (RAGGED, []),
    (Problem.uniform(2, 4, 130, 16, page_size=16), ["lse"]),
    (Problem((2, 2), (1, 500), 7, q_dtype="fp16", kv_format="fp16"), ["lse"]),
    (PIECES, ["lse"]),
    (PLANNED, ["lse"]),
    (PIECES, ["sinks", "lse", "device_scales"]),
    (PLANNED, ["sinks", "device_scales"]),
    (Problem.uniform(2, 5, 130, 16), ["tree_mask", "sinks", "lse"]),
    (RAGGED, ["tree_mask", "max_q_len"]),
]
#: tokens fetched one by one
GATHERED: list[tuple[Problem, list[str]]] = [
    (replace(PIECES, page_size=1), ["lse"]),
    (replace(RAGGED, page_size=8), ["lse", "tree_mask", "page_gap"]),
    (replace(PLAIN, page_size=5, kv_lens=(3, 0, 70, 300)), ["sinks", "cache_4d"]),
    (Problem.uniform(3, 2, 300, 16, top_k=130), ["lse", "device_scales"]),
    (replace(RAGGED, top_k=70, heads=24), ["lse", "sinks"]),
    (Problem.uniform(3, 2, 300, 16, top_k=130), ["lse", "top_k_lens"]),
    (replace(RAGGED, top_k=70, heads=24), ["lse", "top_k_lens"]),
]


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize(("problem", "features"), [*SUPPORTED, *GATHERED])
def test_without_a_plan_the_device_makes_it(
    kernels: dict[KernelConfig, AbiKernel],
    problem: Problem,
    features: list[str],
    batch_invariant: bool,
) -> None:
    inputs = inputs_of(problem, *features)
    for _ in range(2):  # the second time by repetition
        check(inputs, native(inputs, batch_invariant=batch_invariant))
    assert not inputs.workspace_buffer[:65536].any()
    assert [len(kernel.launches) for kernel in kernels.values()] in ([2], [2, 2])


@pytest.mark.parametrize(("problem", "features"), SUPPORTED)
def test_with_a_plan(
    kernels: dict[KernelConfig, AbiKernel], problem: Problem, features: list[str]
) -> None:
    inputs = inputs_of(problem, *features)
    for plan in (
        make_plan(problem, tile_rows=64, policy="fixed", num_splits=3, num_workers=5),
        make_plan(problem, tile_rows=128, num_workers=66),
        make_plan(problem, tile_rows=64, policy="none", schedule="grid"),
        choose(problem, H200, costs=backends_costs()).plan(problem),
        make_plan(problem, tile_rows=16, policy="none", schedule="grid"),
        make_plan(problem, tile_rows=16, policy="greedy", num_workers=40),
        make_plan(problem, tile_rows=32, policy="fixed", schedule="grid", num_splits=2),
    ):
        config = plan.config or config_for_plan(plan)
        if config and config.option("grid") and plan.num_workers > H200.workers(config.cluster):
            continue  # more than run at once
        for _ in range(2):
            check(inputs, native(inputs, plan=plan))


def test_an_invariant_call_launches_once_for_each_kind_of_request(
    kernels: dict[KernelConfig, AbiKernel],
) -> None:
    """Few rows with KV on M, more with rows on M; the launches leave each other's rows alone."""
    mixed = Problem((1, 4, 0, 1, 2), (700, 300, 9, 0, 4500), 16)
    inputs = inputs_of(mixed, "ragged", "lse")
    for _ in range(2):
        out, lse = native(inputs, batch_invariant=True, return_lse_base="base2")
        check(inputs, (out, lse / math.log2(math.e)))
    assert [kernel.config.tile_rows for kernel in kernels.values()] == [16, 64]
    assert [len(kernel.launches) for kernel in kernels.values()] == [2, 2]
    assert not inputs.workspace_buffer[: 65536 + 4 * LL_WORDS].any()
    few, more = (kernel.launches[-1] for kernel in kernels.values())
    places = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in (*few[4:6], *more[4:6])]
    places.sort()
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(places))


def backends_costs() -> Any:
    from mla_lab.backends.cute.families import costs

    return costs()


def test_base_2_and_a_callers_results(kernels: dict[KernelConfig, AbiKernel]) -> None:
    inputs = replace(inputs_of(PLAIN, "lse"), return_lse_base="base2")
    lse = torch.full((4, 1, 128), torch.nan)
    out = torch.full((4, 1, 128, 512), torch.nan, dtype=torch.float16)
    plan = make_plan(PLAIN, policy="fixed", num_splits=3)
    for chosen in (plan, None, plan):
        result = native(inputs, out=out, lse=lse, plan=chosen)
        assert result[0] is out and result[1] is lse
        check(inputs, result)
        lse.fill_(torch.nan)
    config = next(iter(kernels))
    assert (config.q_dtype, config.out_dtype) == ("bf16", "fp16")


def test_an_lse_that_nobody_wants_has_no_element(kernels: dict[KernelConfig, AbiKernel]) -> None:
    native(inputs_of(PLAIN))
    assert kernels
    for kernel in kernels.values():  # two where lengths on the device open one of two gates
        assert kernel.launches[0][3].shape == (0, 0)


def test_pdl_is_a_matter_of_the_kernel(kernels: dict[KernelConfig, AbiKernel]) -> None:
    inputs = inputs_of(PLAIN)
    native(inputs, enable_pdl=None)
    builds = len(kernels)
    native(inputs, enable_pdl=True)
    assert [config.option("pdl", 1) for config in kernels] == [1] * builds
    native(inputs, enable_pdl=False)
    assert [config.option("pdl", 1) for config in kernels] == [1] * builds + [0] * builds


REFUSED = {
    "separate_tables": "table",
    "nonpositive_scale": "bmm1_scale",
}


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("features", [[], ["sinks", "tree_mask"]])
def test_skip_softmax_has_a_kernel_and_a_factor_of_0_the_plain_one(
    kernels: dict[KernelConfig, AbiKernel], features: list[str], ragged: bool
) -> None:
    inputs = inputs_of(RAGGED if ragged else PIECES, "lse", *features)
    for factor in (1e-4, 0.0, None):
        given = replace(inputs, skip_softmax_threshold_scale_factor=factor)
        check(replace(inputs), native(given))
    assert [config.option("skip") for config in kernels] == [1, 0]
    first = next(iter(kernels))
    assert (first.kernel, first.tile_rows, first.cluster) == ("cute/keep_ab_sm90", 64, 1)
    plan = make_plan(inputs.problem, tile_rows=128)
    with pytest.raises(Unsupported, match="64 rows"):
        native(replace(inputs, skip_softmax_threshold_scale_factor=1e-4), plan=plan)


@pytest.mark.parametrize("ragged", [False, True])
def test_invariant_skip_softmax(kernels: dict[KernelConfig, AbiKernel], ragged: bool) -> None:
    inputs = inputs_of(RAGGED if ragged else PIECES, "lse")
    given = replace(inputs, skip_softmax_threshold_scale_factor=1e-4)
    for _ in range(2):
        check(inputs, native(given, batch_invariant=True))
    assert [(config.option("skip"), config.tile_rows) for config in kernels] == [(1, 64)]


@pytest.mark.parametrize(
    "features", [[], ["tree_mask"], ["ragged"], ["tree_mask", "max_q_len"], ["page_gap"]]
)
def test_context_parallel_is_a_mask(
    kernels: dict[KernelConfig, AbiKernel], features: list[str]
) -> None:
    """Each rank's rows see what positions say, also when it is replayed for other lengths."""
    ragged = bool({"ragged", "max_q_len"} & set(features))
    page_size = 8 if "page_gap" in features else 64
    problem = replace(RAGGED if ragged else DRAFTS, page_size=page_size)
    for rank in shard(inputs_of(problem, *features), 3):
        inputs = replace(rank, workspace_buffer=inputs_of(DRAFTS).workspace_buffer)
        for _ in range(2):
            check(inputs, native(inputs))
    assert {config.mask for config in kernels} == {"tree"}


@pytest.mark.parametrize("feature", REFUSED)
def test_a_reason_for_each_missing_feature(feature: str) -> None:
    reason = CuteBackend().supports(Features(**{feature: True}), PLAIN, H200)
    assert reason is not None and REFUSED[feature] in reason


@pytest.mark.parametrize(
    ("problem", "gpu", "words"),
    [
        (PLAIN, None, "CPU"),
        (PLAIN, B200, "sm_100a"),
        (replace(PLAIN, q_dtype="e4m3", kv_format="bf16"), H200, "e4m3"),
        (replace(PLAIN, q_dtype="fp16", kv_format="fp8_656"), H200, "fp8_656"),
        (replace(PLAIN, latent_dim=256), H200, "256"),
        (Problem.uniform(5000, 1, 64, 16), H200, "4096"),
    ],
)
def test_a_reason_for_hardware_and_formats(problem: Problem, gpu: Gpu | None, words: str) -> None:
    reason = CuteBackend().supports(Features(), problem, gpu)
    assert reason is not None and words in reason


@pytest.mark.parametrize("sms", [15, 14])
def test_a_card_with_few_workers_runs_no_invariant_call_in_pieces(
    kernels: dict[KernelConfig, AbiKernel], monkeypatch: pytest.MonkeyPatch, sms: int
) -> None:
    """Fewer than 16 bundles would wait for each other for ever."""
    slice_ = replace(H200, name="H200 slice", sms=sms, resident_clusters=())
    words = f"batch_invariant: got True on H200 slice with {sms} workers on {sms} SMs; .*16 workers"
    reason = CuteBackend().supports(Features(batch_invariant=True), PLAIN, slice_)
    assert reason is not None and re.search(words, reason)
    for features in (Features(), Features(batch_invariant=True, planned=True)):
        assert CuteBackend().supports(features, PLAIN, slice_) is None
    whole = replace(slice_, sms=16)
    assert CuteBackend().supports(Features(batch_invariant=True), PLAIN, whole) is None
    for module in (backends, cute):
        monkeypatch.setattr(module, "gpu_of", lambda device: slice_)
    with pytest.raises(Unsupported, match=words):
        native(inputs_of(PLAIN), batch_invariant=True)
    assert not kernels
    kinds = invariant_kinds(PLAIN, slice_, costs(), False)
    with pytest.raises(Unsupported, match=words):
        SelfScheduled.of_kinds(kinds, slice_, PLAIN, PLAIN.total_q)


def test_a_named_backend_raises_its_reason(kernels: dict[KernelConfig, AbiKernel]) -> None:
    with pytest.raises(Unsupported, match=r"for values; .*can run this call"):
        native(inputs_of(PLAIN, "separate_tables"))
    assert not kernels


def test_auto_takes_another_backend_where_a_scale_is_not_positive(
    kernels: dict[KernelConfig, AbiKernel],
) -> None:
    inputs = inputs_of(PLAIN, "lse")
    check(inputs, native(inputs, backend="auto"))
    assert kernels
    kernels.clear()
    for scale in (0.0, -0.5):
        odd = replace(inputs, bmm1_scale=scale)
        check(odd, native(odd, backend="auto"))
        with pytest.raises(Unsupported, match="bmm1_scale"):
            native(odd)
    assert not kernels


@pytest.mark.parametrize("lens", [(1, 1, 1, 1), (0, 64, 3000, 129), (2900, 40, 65, 8)])
def test_a_plan_for_other_lengths_gives_right_results(
    kernels: dict[KernelConfig, AbiKernel], lens: tuple[int, ...]
) -> None:
    made = replace(PLAIN, kv_lens=(500, 64, 1, 1900))
    inputs = inputs_of(replace(PLAIN, kv_lens=lens), "lse")
    for how in (
        {"tile_rows": 64, "num_workers": 7},
        {"tile_rows": 64, "policy": "fixed", "num_splits": 3, "num_workers": 9},
        {"tile_rows": 16, "policy": "fixed", "num_splits": 2, "schedule": "grid"},
    ):
        check(inputs, native(inputs, plan=make_plan(made, **how)))
        assert not inputs.workspace_buffer[:65536].any()
    other = make_plan(Problem.uniform(3, 1, 100, PLAIN.heads), tile_rows=64)
    with pytest.raises(InvalidInput, match="one for batch 3; supported: 4"):
        native(inputs, plan=other)


def test_plans_that_no_kernel_walks(kernels: dict[KernelConfig, AbiKernel]) -> None:
    inputs = inputs_of(PLAIN)
    for plan, words in (
        (make_plan(PLAIN, tile_rows=48), "48 x 64"),
        (make_plan(PLAIN, tile_kv=32), "64 x 32"),
    ):
        with pytest.raises(Unsupported, match=words):
            native(inputs, plan=plan)


@pytest.mark.parametrize(
    ("tile_rows", "most"), [(16, 132), (64, 132), (128, 66)], ids=["swap_ab", "keep_ab", "cluster"]
)
def test_workers_that_cannot_all_run_at_once_are_folded(
    kernels: dict[KernelConfig, AbiKernel], tile_rows: int, most: int
) -> None:
    problem = Problem((1, 2, 1), (700, 300, 0), 32)
    for workers in (most - 1, most, most + 1, 3 * most):
        inputs = inputs_of(problem, "lse")
        plan = make_plan(
            problem, tile_rows=tile_rows, num_workers=workers, policy="fixed", num_splits=3
        )
        check(inputs, native(inputs, plan=plan))
        (kernel,) = kernels.values()
        tiles, worker_begin = kernel.launches[-1][10:12]
        assert kernel.launches[-1][-3] == len(worker_begin) - 1 == min(workers, most)
        assert torch.equal(tiles, torch.tensor(plan.tiles))
        assert not inputs.workspace_buffer[:65536].any()


def test_a_formula_is_three_numbers_and_one_launch(
    kernels: dict[KernelConfig, AbiKernel],
) -> None:
    inputs = inputs_of(PIECES, "lse")
    plan = make_plan(PIECES, tile_rows=16, policy="fixed", schedule="grid", num_splits=9)
    check(inputs, native(inputs, plan=plan))
    check(inputs, native(inputs))
    by_plan, chosen = (launch for kernel in kernels.values() for launch in kernel.launches)
    assert len(by_plan) == len(chosen) == 16
    assert by_plan[-3:] == (9, 1, 1)
    choice = choose(PIECES, H200, costs=backends_costs())
    row_tiles = -(-PIECES.heads // choice.config.tile_rows)
    assert chosen[-3:] == (dict(choice.knobs)["num_splits"], row_tiles, 1)
    assert by_plan[4].shape == (9, 16, 512)


def test_a_formula_of_a_ragged_call_reads_query_lengths_on_the_device(
    kernels: dict[KernelConfig, AbiKernel],
) -> None:
    inputs = inputs_of(RAGGED)
    plan = make_plan(RAGGED, tile_rows=16, policy="fixed", schedule="grid", num_splits=3)
    check(inputs, native(inputs, plan=plan))
    (kernel,) = kernels.values()
    assert kernel.launches[0][-3:] == (3, 5, 0)
    assert kernel.launches[0][9] is inputs.cum_seq_lens_q


def test_a_formula_follows_lengths_that_change(kernels: dict[KernelConfig, AbiKernel]) -> None:
    inputs = inputs_of(replace(PIECES, q_lens=(1,) * 3, kv_lens=(700,) * 3), "lse")
    plan = make_plan(inputs.problem, tile_rows=16, policy="fixed", schedule="grid", num_splits=4)
    native(inputs, plan=plan)
    (kernel,) = kernels.values()
    (launch,) = kernel.launches
    for lengths in ((700, 1, 300), (0, 64, 129)):
        inputs.seq_lens.copy_(torch.tensor(lengths))
        kernel(*launch)
        check(inputs, (launch[2], launch[3]))
    assert launch[4].shape == (3 * 4, 16, 512)


NO_FORMULA: list[tuple[dict[str, Any], str]] = [
    ({"policy": "greedy", "num_workers": 132}, "policy 'greedy'"),
    ({"policy": "fixed", "num_splits": 2}, "'persistent'"),
    ({"policy": "fixed", "num_splits": 5, "schedule": "grid"}, "160 workers of 16 rows x 1 CTAs"),
]


@pytest.mark.parametrize(("how", "words"), NO_FORMULA)
def test_plans_that_no_formula_gives(
    kernels: dict[KernelConfig, AbiKernel], how: dict[str, Any], words: str
) -> None:
    plan = replace(make_plan(PLAIN, tile_rows=16, **how), config=config_for(SWAP_AB_LL, (16, 1)))
    with pytest.raises(Unsupported, match=words):
        native(inputs_of(PLAIN), plan=plan)
    assert not kernels


def test_a_formula_in_pairs_wants_workers_for_the_last_row_tile_s_neighbour() -> None:
    config, bounds = config_for(SWAP_AB_LL_MULTICAST, (16, 1)), Problem.uniform(4, 1, 8192, 48)
    assert Formula.of(config, 8, bounds, H200).slots == 4 * 3 * 8
    with pytest.raises(Unsupported, match="144 workers"):
        Formula.of(config, 9, bounds, H200)


def test_mail_lies_behind_the_counters_whatever_else_uses_the_buffer(
    kernels: dict[KernelConfig, AbiKernel],
) -> None:
    """One buffer, zeroed once, through plans of all kinds: the stand-in refuses old letters."""
    buffer = zero_bytes(WORKSPACE)
    shapes = [
        (PIECES, {"tile_rows": 16, "policy": "fixed", "schedule": "grid", "num_splits": 31}),
        (PLAIN, {"tile_rows": 64, "policy": "fixed", "num_splits": 4, "num_workers": 132}),
        (PLAIN, {"tile_rows": 16, "policy": "fixed", "num_splits": 4, "num_workers": 132}),
        (PIECES, {"tile_rows": 8, "policy": "fixed", "schedule": "grid", "num_splits": 40}),
        (PLAIN, {"tile_rows": 32, "policy": "fixed", "schedule": "grid", "num_splits": 5}),
    ]
    for problem, how in shapes:
        inputs = inputs_of(problem)
        check(inputs, native(inputs, plan=make_plan(problem, **how), workspace_buffer=buffer))
    ll = PlanOnDevice.of(choose(PLANNED, H200, True), PLANNED, 17).workspace["ll_partials"]
    letters = buffer[ll.offset : ll.offset + ll.nbytes].view(torch.float32)
    assert ll.offset == 65536
    assert not letters.any()
    most = sum(ll_words(132, 32, 132, 512))
    assert most <= LL_WORDS


def test_a_formula_has_a_counter_for_each_cta_of_a_group() -> None:
    bounds = Problem.uniform(2000, 1, 64, 16)
    large = replace(H200, sms=1 << 20, resident_clusters=())
    config = config_for(SWAP_AB_CLUSTER, (8, 8))
    with pytest.raises(Unsupported, match="4000 split row tiles"):
        Formula.of(config, 1, bounds, large)
    with pytest.raises(Unsupported, match="161 splits"):
        Formula.of(config, 161, Problem.uniform(1, 1, 20000, 8), large)


def test_too_many_groups_for_the_counters() -> None:
    bounds = Problem.uniform(4096, 8, 131072, 128)
    with pytest.raises(Unsupported, match="split row tiles"):
        PlanOnDevice.of(choose(bounds, H200, True, backends_costs()), bounds, 4096 * 8)


def test_a_workspace_that_is_too_small_names_both_sizes(
    kernels: dict[KernelConfig, AbiKernel],
) -> None:
    inputs = inputs_of(PIECES)
    with pytest.raises(InvalidInput, match=r"got 1000 bytes; supported: \d+ bytes"):
        native(inputs, workspace_buffer=torch.zeros(1000, dtype=torch.uint8))
    assert not kernels


def test_a_bound_that_grows_keeps_kernel_and_workspace(
    kernels: dict[KernelConfig, AbiKernel],
) -> None:
    inputs = inputs_of(PLAIN)
    native(inputs, max_seq_len=1001)
    builds = list(kernels)
    for bound in (1002, 1024, 131072):
        native(inputs, max_seq_len=bound)
    assert list(kernels) == builds


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_what_is_chosen_ships(batch_invariant: bool) -> None:
    ready = set(shipped("sm_90a"))
    for heads in (1, 16, 24, 64, 100, 128, 200):
        for batch, kv_len, q_len in ((1, 1024, 1), (1, 131072, 1), (64, 4096, 2), (256, 8192, 1)):
            problem = Problem.uniform(batch, q_len, kv_len, heads)
            choice = choose(problem, H200, batch_invariant, backends_costs())
            used = [Features(), Features(sinks=True), Features(mask=True, tensor_scales=True)]
            for features in used:
                wanted = complete(choice.config, problem, None, features)
                assert wanted in {
                    config if config.mask == "tree" else replace(config, mask=choice.config.mask)
                    for config in ready
                }
