"""Partials are fp16 times a scale of their rows: right whatever the range of V, and of a V of 0."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from torch import Tensor

from mla_lab import jit
from mla_lab.emulate import EmulatedKernel
from mla_lab.emulate.calls import Call, call_of, is_right, problem_for
from mla_lab.plan.config import KernelConfig
from mla_lab.reference.inputs import make_inputs
from mla_lab.reference.tolerance import error

from .needs import needs_cxx
from .shared_builds import KEEP_AB, SWAP_AB_CLUSTER, SWAP_AB_LL

pytestmark = needs_cxx
LATENT, SPLITS = 512, 6


def ran(config: KernelConfig, change: Callable[[Tensor, Tensor], None]) -> Call:
    """The call after its launch, with what `change` makes of the query and the cache."""
    problem = problem_for(config, (64 * SPLITS - 5,))
    inputs = make_inputs(problem, 0, ["lse"], workspace_bytes=64)
    query, cache = inputs.query.clone(), inputs.kv_cache.clone()
    change(query, cache)
    call = call_of(config, replace(inputs, query=query, kv_cache=cache), SPLITS)
    EmulatedKernel.of(jit.compile(config))(*call.args)
    if config == SWAP_AB_LL:
        assert not any(words.any() for words in call.args[4:6]), "LL words are left 0"
    return call


#: keep_ab stores rows as they are that are in the range of fp16: all of them, some, none
FACTORS = {
    SWAP_AB_LL: (2.0**90, 2.0**20, 2.0**-60, 2.0**-100),
    KEEP_AB: (2.0**90, 2.0**12, 2.0**9, 1.0, 2.0**-3, 2.0**-5, 2.0**-100),
}


@pytest.mark.parametrize(
    ("config", "factor"),
    [(config, factor) for config, factors in FACTORS.items() for factor in factors],
    ids=lambda value: (
        value.kernel.split("/")[1] if isinstance(value, KernelConfig) else f"{value:g}"
    ),
)
def test_of_any_range(config: KernelConfig, factor: float) -> None:
    def change(query: Tensor, cache: Tensor) -> None:
        """V is multiplied, the query divided: scores stay as they are."""
        query[..., :LATENT] /= factor
        cache[..., :LATENT] *= factor

    call = ran(config, change)
    assert is_right(call), call.errors()


@pytest.mark.parametrize("config", FACTORS, ids=lambda config: config.kernel.split("/")[1])
def test_of_zeros(config: KernelConfig) -> None:
    call = ran(config, lambda query, cache: cache[..., :LATENT].mul_(0.0))
    assert not call.out.any()
    assert call.errors()[1] < 1e-5


def test_beside_a_column_that_overflows() -> None:
    """Its sums are beyond fp32; the bound is that of the others."""
    column = 7

    def change(query: Tensor, cache: Tensor) -> None:
        query[..., column] = 0.0
        cache[..., column] = cache[..., column] * 0.0 + 3e38

    call = ran(SWAP_AB_LL, change)
    others = [c for c in range(LATENT) if c != column]
    expected = call.expected.out.reshape(call.out.shape)[..., others]
    assert call.out[..., column].isinf().all()
    assert error(call.out[..., others], expected).relative < 0.008


@pytest.mark.parametrize("config", [SWAP_AB_LL, SWAP_AB_CLUSTER], ids=KernelConfig.name)
def test_scores_beyond_the_integers_are_merged(config: KernelConfig) -> None:
    """Row maxes of 2**31 and more, of either sign: all keys of a row have one score."""

    def change(query: Tensor, cache: Tensor) -> None:
        query *= 2.0**30
        cache[:] = cache[int(cache.flatten(1).isfinite().all(1).nonzero()[0]), 0]

    call = ran(config, change)
    assert (call.expected.lse.abs() > 2.0**31).any()
    assert error(call.out, call.expected.out.reshape(call.out.shape)).relative < 0.008
    assert call.lse.allclose(call.expected.lse.float(), rtol=1e-4)
