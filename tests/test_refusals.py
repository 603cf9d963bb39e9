"""Every reason for which the CuTe backend leaves a call to others, and that there is no other."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import combinations, product
from types import ModuleType
from typing import Any

import pytest

from mla_lab import backends
from mla_lab.backends.cuda import backend as cuda_backend
from mla_lab.backends.cuda import gqa as cuda_gqa
from mla_lab.backends.cuda.backend import CudaBackend
from mla_lab.backends.cute import backend as cute_backend
from mla_lab.backends.cute import blackwell, keep_ab_gather
from mla_lab.backends.cute.backend import CuteBackend, sm100_reason
from mla_lab.backends.torch import backend as torch_backend
from mla_lab.backends.torch import gqa as torch_gqa
from mla_lab.backends.torch.backend import TorchBackend
from mla_lab.call.form import Features
from mla_lab.call.gqa_checks import check_form
from mla_lab.core.gpu import B200, H200
from mla_lab.core.problem import Problem
from mla_lab.reference.inputs_gqa import GqaShape, make_gqa_inputs

from . import test_backend_cuda

#: each reason, and one call that has it
REASONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    r"no uses_shared_paged_kv_idx=False: a table of its own for values$": (
        {"separate_tables": True},
        {},
    ),
    r"no query whose rows lie apart$": ({"strided_query": True}, {}),
    r"no bmm1_scale of 0 or less: scores are masked before": (
        {"nonpositive_scale": True},
        {},
    ),
    r"latent and rope dims \(256, 64\); its kernels have \(512, 64\)$": ({}, {"latent_dim": 256}),
    r"a batch of 5000; its kernels take up to 4096$": ({}, {"batch": 5000}),
    r"pages of 3728271 tokens; its kernels take up to 3728270$": ({}, {"page_size": 3728271}),
    r"query fp16, cache e4m3, out bf16; its kernels take .*bf16 over e4m3 \(out bf16, fp16\)": (
        {},
        {"q_dtype": "fp16", "kv_format": "e4m3"},
    ),
    r"query bf16, cache fp8_656, out e4m3; its kernels take": (
        {},
        {"kv_format": "fp8_656", "out_dtype": "e4m3"},
    ),
    r"query fp32, cache fp32, out fp32; its kernels take": (
        {},
        {"q_dtype": "fp32", "kv_format": "fp32", "out_dtype": "fp32"},
    ),
    r"query e4m3, cache e4m3, out fp32; its kernels take": (
        {},
        {"q_dtype": "e4m3", "kv_format": "e4m3", "out_dtype": "fp32"},
    ),
}
#: the lists of what each backend takes
TAKES: dict[str, tuple[ModuleType, ...]] = {
    "torch": (torch_backend,),
    "cute": (cute_backend,),
    "cuda": (cuda_backend,),
    "cute-keep-ab-gather": (cute_backend, keep_ab_gather),
    "emulate": (cute_backend,),
    "emulate_sm100": (blackwell,),
}
PDL = "enable_pdl=True: .* no programmatic dependent launch"
FORMATS = [
    ("bf16", "bf16", "bf16"),
    ("bf16", "bf16", "fp16"),
    ("fp16", "fp16", "fp16"),
    ("fp16", "fp16", "bf16"),
    ("bf16", "e4m3", "bf16"),
    ("bf16", "fp8_656", "bf16"),
    ("e4m3", "e4m3", "bf16"),
    ("e4m3", "e4m3", "e4m3"),
    ("fp32", "fp32", "fp32"),
]


@pytest.fixture(autouse=True)
def everything_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mla_lab.jit.find", lambda *_: object())


def problem(batch: int = 3, heads: int = 16, **named: Any) -> Problem:
    return Problem((2,) * batch, (1024,) * batch, heads, **named)


def reason(features: Features, made: Problem) -> str | None:
    return CuteBackend().supports(features, made, H200)


@pytest.mark.parametrize("says", REASONS)
def test_a_refusal_says_why(says: str) -> None:
    features, named = REASONS[says]
    found = reason(Features(**features), problem(**named))
    assert found is not None and re.search(says, found), found


def calls() -> Iterator[tuple[Features, Problem]]:
    """Every two features that a call can have together, by formats, page sizes and heads."""
    names = [field.name for field in fields(Features)]
    chosen = [(), *((name,) for name in names), *combinations(names, 2)]
    for features, (q, kv, out), page_size, heads in product(
        chosen, FORMATS, (1, 8, 16, 64, 128), (7, 128)
    ):
        made = Features(**dict.fromkeys(features, True))
        top_k = 70 if made.sparse else 0
        if made.sparse and (made.mask or made.skip_softmax or made.separate_tables):
            continue  # the contract has no such call
        yield (
            made,
            problem(
                heads=heads,
                q_dtype=q,
                kv_format=kv,
                out_dtype=out,
                page_size=page_size,
                top_k=top_k,
            ),
        )


@cache
def answers() -> list[tuple[Features, Problem, str | None]]:
    """What the CuTe backend says to each call, with every build there (see the fixture)."""
    return [(features, made, reason(features, made)) for features, made in calls()]


def test_there_is_no_other_reason() -> None:
    known = [re.compile(says) for says in REASONS]
    reasons = {found for _, _, found in answers() if found is not None}
    assert [found for found in reasons if not any(says.search(found) for says in known)] == []


def test_nor_have_the_other_backends() -> None:
    words = [re.compile(case[-1]) for case in test_backend_cuda.REASONS]
    words += [re.compile(r"pages of \d+"), re.compile(r"its kernel has no "), re.compile(PDL)]
    by_cuda = {CudaBackend().supports(*call, H200) for call in calls()} - {None}
    assert len(by_cuda) >= 5
    assert [r for r in by_cuda if not any(says.search(str(r)) for says in words)] == []
    by_torch = {TorchBackend().supports(*call, H200) for call in calls()} - {None}
    assert {re.search(PDL, str(r)) is not None for r in by_torch} == {True}


def test_plain_calls_and_most_pairs_are_taken() -> None:
    taken = {features.names() for features, _, found in answers() if found is None}
    refused = {"separate_tables", "strided_query", "nonpositive_scale"}
    names = {field.name for field in fields(Features)} - refused
    assert {(name,) for name in names} <= taken
    for pair in combinations([field.name for field in fields(Features) if field.name in names], 2):
        excluded = {"sparse", "skip_softmax"} <= set(pair) or {"sparse", "mask"} <= set(pair)
        assert (pair in taken) == (not excluded), pair


@pytest.mark.parametrize(("gpu", "says"), [(None, "on a CPU"), (B200, "the GPU is sm_100a")])
def test_hardware_comes_first(gpu: Any, says: str) -> None:
    found = CuteBackend().supports(Features(context_parallel=True), problem(), gpu)
    assert found is not None and says in found


def test_what_is_not_compiled_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from mla_lab.core.errors import BuildError

    def absent(kernel: str) -> None:
        raise BuildError("no compiler")

    monkeypatch.setattr("mla_lab.jit.find", lambda *_: None)
    monkeypatch.setattr("mla_lab.jit.toolchain.versions", absent)
    found = reason(Features(no_pdl=True), problem())
    assert found is not None and "pdl0" in found and "not compiled here, and cannot be" in found
    assert "pdl0" not in str(reason(Features(), problem()))


@dataclass(frozen=True)
class Imagined(Features):
    """Features with one more, which no backend takes yet."""

    imaginary: bool = True


@pytest.mark.parametrize("name", backends.MODULES)
def test_a_feature_that_a_backend_does_not_list_is_refused_by_name(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = backends.load(name)
    of_tokens = name == "cute-keep-ab-gather"
    made = problem(kv_format="fp8_656") if of_tokens else problem()
    gpu = None if name.startswith("emulate") else H200
    assert backend.supports(Features(), made, gpu) is None
    assert str(backend.supports(Imagined(), made, gpu)).endswith(" no imaginary")
    for lists in TAKES.get(name, ()):
        monkeypatch.setattr(lists, "TAKES", lists.TAKES | {"imaginary"})
    assert backend.supports(Imagined(), made, gpu) is None


@pytest.mark.parametrize("lists", [one for some in TAKES.values() for one in some])
def test_a_list_names_features_alone(lists: ModuleType) -> None:
    assert lists.TAKES.issubset(field.name for field in fields(Features))


def test_the_sm100_kernel_refuses_a_feature_that_it_does_not_list() -> None:
    assert sm100_reason(problem(), Imagined(), B200) == "its SM100 kernel has no imaginary"


@pytest.mark.parametrize("reason", [lambda form: cuda_gqa.reason(form, H200), torch_gqa.reason])
def test_gqa_calls_refuse_a_feature_that_is_not_listed(reason: Callable[[Any], str | None]) -> None:
    form = check_form(make_gqa_inputs(GqaShape((1,), (64,), 8, 1)))[0]
    assert "imaginary" not in str(reason(form))
    found = reason(replace(form, features=form.features | {"imaginary"}))
    assert str(found).endswith(" no imaginary")
