"""Partials of the LL merge are fp16: right whatever the range of V is, and of a V that is 0."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest

from mla_lab import jit
from mla_lab.emulate import EmulatedKernel
from mla_lab.emulate.calls import Call, call_of, is_right, problem_for
from mla_lab.reference.inputs import make_inputs

from .shared_builds import SWAP_AB_LL

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
LATENT, SPLITS = 512, 6


def ran(factor: float, into_query: float) -> Call:
    """The call after its launch, latent columns of the cache times one factor, of the query times
    another."""
    problem = problem_for(SWAP_AB_LL, (64 * SPLITS - 5,))
    inputs = make_inputs(problem, 0, ["lse"], workspace_bytes=64)
    query, cache = inputs.query.clone(), inputs.kv_cache.clone()
    query[..., :LATENT] *= into_query
    cache[..., :LATENT] *= factor
    call = call_of(SWAP_AB_LL, replace(inputs, query=query, kv_cache=cache), SPLITS)
    EmulatedKernel.of(jit.compile(SWAP_AB_LL))(*call.args)
    assert not any(words.any() for words in call.args[4:6]), "LL words are left 0"
    return call


@pytest.mark.parametrize("factor", [2.0**90, 2.0**20, 2.0**-60, 2.0**-100])
def test_of_any_range(factor: float) -> None:
    """Scores stay as they are: the query is divided by what V is multiplied with."""
    call = ran(factor, 1 / factor)
    assert is_right(call), call.errors()


def test_of_zeros() -> None:
    call = ran(0.0, 1.0)
    assert not call.out.any()
    assert call.errors()[1] < 1e-5
