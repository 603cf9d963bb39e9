"""Calls whose tokens are fetched one by one: under batch invariance kernel and pieces of a request
are those that it has alone.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mla_lab.backends.cute import backend as cute
from mla_lab.backends.cute.device_plan import Formula
from mla_lab.backends.cute.token_gather import formula_for
from mla_lab.call.form import Features
from mla_lab.core.errors import BuildError
from mla_lab.core.gpu import H200
from mla_lab.core.problem import Problem
from mla_lab.jit.build import canonical
from mla_lab.jit.shipped import shipped
from mla_lab.plan.config import KernelConfig
from mla_lab.plan.formula import WHOLE_BLOCKS

FORMATS = [("bf16", "bf16"), ("fp16", "fp16"), ("bf16", "e4m3"), ("bf16", "fp8_656"),
           ("e4m3", "e4m3")]  # fmt: skip
LENGTHS = st.one_of(st.integers(0, 700), st.integers(0, 70_000))


def pieces(formula: Formula, tokens: int) -> list[tuple[int, int]]:
    """Blocks [begin, end) of each piece of a request, as the kernel cuts them (tile_scheduler)."""
    blocks = max(1, -(-tokens // 64))
    if blocks <= WHOLE_BLOCKS:
        return [(0, blocks)]
    n = min(formula.num_splits, blocks)
    ends = [blocks * i // formula.num_splits if blocks > n else i for i in range(n + 1)]
    return list(pairwise(ends))


def run_of(
    problem: Problem, request: int, invariant: bool
) -> tuple[KernelConfig, list[tuple[int, int]]]:
    """The build and the pieces of a request in its batch."""
    formula = formula_for(problem, problem.total_q, H200, invariant)
    return formula.config, pieces(formula, problem.top_k or problem.kv_lens[request])


def alone(problem: Problem, request: int) -> Problem:
    lengths = {
        name: getattr(problem, name)[request : request + 1] for name in ("q_lens", "kv_lens")
    }
    return replace(problem, **lengths)


@st.composite
def gathered(draw: st.DrawFn) -> Problem:
    """A batch of 2 to 200 requests over a sparse list, or in pages that no TMA box fits."""
    batch = draw(st.integers(2, 200))
    q_len = draw(st.sampled_from([1, 2, 5]))
    one = st.tuples(st.integers(1, q_len), LENGTHS)
    few = draw(st.lists(one, min_size=1, max_size=6))
    q_lens, kv_lens = zip(*(few[i % len(few)] for i in range(batch)), strict=True)
    q_dtype, kv_format = draw(st.sampled_from(FORMATS))
    return Problem(
        q_lens,
        kv_lens,
        heads=draw(st.sampled_from([1, 7, 16, 24, 64, 128])),
        q_dtype=q_dtype,
        kv_format=kv_format,
        page_size=draw(st.sampled_from([1, 2, 8, 24, 256])),
        top_k=draw(st.sampled_from([0, 5, 70, 700, 2048])),
    )


@settings(max_examples=200, deadline=None)
@given(gathered(), st.randoms())
def test_a_request_runs_as_it_does_alone(problem, random):
    request = random.randrange(problem.batch)
    together = run_of(problem, request, True)
    assert together == run_of(alone(problem, request), 0, True)
    fewer = replace(problem, q_lens=problem.q_lens[:2], kv_lens=problem.kv_lens[:2])
    assert run_of(fewer, request % 2, True) == run_of(problem, request % 2, True)


@pytest.mark.parametrize(
    ("heads", "batch", "formats"), [(16, 17, FORMATS[0]), (128, 7, FORMATS[3])]
)
def test_the_default_does_not(heads: int, batch: int, formats: tuple[str, str]) -> None:
    """The negative control: 17 requests of 16 heads, or 7 of 128 over 656 bytes."""
    one = Problem((1,), (4096,), heads, q_dtype=formats[0], kv_format=formats[1], top_k=700)
    many = replace(one, q_lens=(1,) * batch, kv_lens=(4096,) * batch)
    assert run_of(many, 0, True) == run_of(one, 0, True)
    assert run_of(many, 0, False) != run_of(one, 0, False)


@pytest.mark.parametrize("top_k", [0, 700])
def test_bounds_do_not_matter(top_k: int) -> None:
    own = Problem((1,), (700,), 16, page_size=2, top_k=top_k)
    loose = replace(own, kv_lens=(1 << 20,))
    short, long = (formula_for(p, 1, H200, True) for p in (own, loose))
    assert short.config == long.config and pieces(short, 700) == pieces(long, 700)


def test_more_row_tiles_than_counters_are_refused_before_a_launch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mla_lab.jit.find", lambda *_: object())
    many = Problem((2,) * 4096, (4096,) * 4096, 128, page_size=2)
    backend = cute.CuteBackend()
    found = backend.supports(Features(batch_invariant=True), many, H200)
    assert found is not None and "batch_invariant: got True with 32768 row tiles" in found
    assert backend.supports(Features(), many, H200) is None
    lists = replace(many, q_lens=(17,) * 4096, top_k=70)
    found = backend.supports(Features(sparse=True), lists, H200)
    assert found is not None and "69632 lists of keys" in found


def test_missing_builds_decide_for_every_request_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """fp16 with sinks ships token by token alone, so that a request of one query token goes that
    way whether or not longer ones are with it.
    """

    def absent(kernel: str) -> None:
        raise BuildError("no compiler")

    walk = KernelConfig("cute/swap_ab_sm90", "fp16", "fp16", "fp16", tile_rows=16, mask="tree",
                        options=(("fused_merge", 2), ("shaped", 1)))  # fmt: skip
    there = {canonical(config) for config in [*shipped(), walk]}
    monkeypatch.setattr("mla_lab.jit.find", lambda c, _: canonical(c) in there or None)
    monkeypatch.setattr("mla_lab.jit.toolchain.versions", absent)
    for cached in (cute._by_token, cute._plan):
        cached.cache_clear()
    formats = {"q_dtype": "fp16", "kv_format": "fp16", "out_dtype": "fp16"}
    one = Problem((1,), (4096,), 16, **formats)
    mixed = replace(one, q_lens=(5, 5), kv_lens=(4096,) * 2)
    found = []
    for made, ragged in ((one, False), (mixed, True)):
        features = Features(sinks=True, batch_invariant=True, ragged=ragged)
        found.append(cute._plan(made, made.total_q, H200, features).config)
    assert found[0].option("gather") == 1 and found[0] == found[1]
    for cached in (cute._by_token, cute._plan):
        cached.cache_clear()
