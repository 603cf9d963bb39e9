"""Partials of the LL merge are fp16: right whatever the range of V is, and of a V that is 0."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace

import pytest
from torch import Tensor

from mla_lab import jit
from mla_lab.emulate import EmulatedKernel
from mla_lab.emulate.calls import Call, call_of, is_right, problem_for
from mla_lab.reference.inputs import make_inputs
from mla_lab.reference.tolerance import error

from .shared_builds import SWAP_AB_LL

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
LATENT, SPLITS = 512, 6


def ran(change: Callable[[Tensor, Tensor], None]) -> Call:
    """The call after its launch, with what `change` makes of the query and the cache."""
    problem = problem_for(SWAP_AB_LL, (64 * SPLITS - 5,))
    inputs = make_inputs(problem, 0, ["lse"], workspace_bytes=64)
    query, cache = inputs.query.clone(), inputs.kv_cache.clone()
    change(query, cache)
    call = call_of(SWAP_AB_LL, replace(inputs, query=query, kv_cache=cache), SPLITS)
    EmulatedKernel.of(jit.compile(SWAP_AB_LL))(*call.args)
    assert not any(words.any() for words in call.args[4:6]), "LL words are left 0"
    return call


@pytest.mark.parametrize("factor", [2.0**90, 2.0**20, 2.0**-60, 2.0**-100])
def test_of_any_range(factor: float) -> None:
    def change(query: Tensor, cache: Tensor) -> None:
        """V is multiplied, the query divided: scores stay as they are."""
        query[..., :LATENT] /= factor
        cache[..., :LATENT] *= factor

    call = ran(change)
    assert is_right(call), call.errors()


def test_of_zeros() -> None:
    call = ran(lambda query, cache: cache[..., :LATENT].mul_(0.0))
    assert not call.out.any()
    assert call.errors()[1] < 1e-5


def test_beside_a_column_that_overflows() -> None:
    """Its sums are beyond fp32; the bound is that of the others."""
    column = 7

    def change(query: Tensor, cache: Tensor) -> None:
        query[..., column] = 0.0
        cache[..., column] = cache[..., column] * 0.0 + 3e38

    call = ran(change)
    others = [c for c in range(LATENT) if c != column]
    expected = call.expected.out.reshape(call.out.shape)[..., others]
    assert call.out[..., column].isinf().all()
    assert error(call.out[..., others], expected).relative < 0.008
