"""The tuple of feature operands: the host's order, the kernels' own, and the emulator's calls."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from mla_lab.call.feature_operands import Empty, feature_operands
from mla_lab.emulate.calls import make_call, problem_for
from mla_lab.jit.shipped import CUTE, SM100, with_settings
from mla_lab.plan.config import KernelConfig

pytest.importorskip("cutlass")
from mla_lab.cute import registry

EMPTY = Empty.on(torch.device("cpu"))
KEEP_AB = KernelConfig("cute/keep_ab_sm90")
BUILDS = [c for c in (*CUTE, *SM100) if feature_operands(c)]
PLAIN = [c for c in (*CUTE, *SM100) if not feature_operands(c)]


def declared(config: KernelConfig) -> tuple[Any, ...]:
    """The tuple that a build declares, or none."""
    (found, *more) = [a for a in registry.entry(config).args if isinstance(a, tuple)] or [()]
    assert not more
    return found


def given(config: KernelConfig) -> tuple[Any, ...]:
    """The tuple of a call of the build, of shaped builds as callers have it."""
    problem = problem_for(config, (70,), page_size=64)
    splits = 0 if config.option("pieces") else 1
    return make_call(config, problem, splits).args[-1] if feature_operands(config) else ()


def test_plain_builds_declare_none() -> None:
    assert len(PLAIN) > 20 and len(BUILDS) > 20
    assert [c.name() for c in PLAIN[:20] if declared(c)] == []


@pytest.mark.parametrize("config", BUILDS[::5], ids=lambda c: c.name())
def test_a_build_declares_what_a_call_gives(config: KernelConfig) -> None:
    said, got = declared(config), given(config)
    assert len(said) == len(got) == len(feature_operands(config))
    for one, other in zip(said, got, strict=True):
        assert isinstance(other, float) or len(one.shape) == other.dim()


def test_operands_of_a_plain_call_are_empty() -> None:
    call = make_call(replace(KEEP_AB, options=(("shaped", 1),)), problem_for(KEEP_AB, (70,)))
    full = replace(KEEP_AB, mask="tree", options=(("skip", 1),))
    *tensors, factor = [take(call.inputs, EMPTY) for take in feature_operands(full)]
    assert [t.numel() for t in tensors] == [0, 0, 0, 0] and factor == 0.0
    assert [str(t.dtype) for t in tensors] == ["torch.float32"] * 3 + ["torch.uint16"]


@pytest.mark.parametrize("mask", ["none", "tree"])
def test_a_build_without_the_option_shaped_is_called_with_rows(mask: str) -> None:
    """Views of the same memory: a launch writes what the comparison reads."""
    config = replace(KEEP_AB, mask=mask)
    call = make_call(config, problem_for(config, (70, 3), q_len=2, heads=8))
    query, _, out, lse = call.args[:4]
    assert (query.shape, out.shape, lse.shape) == ((32, 576), (32, 512), (32,))
    out.fill_(3.0)
    lse.fill_(4.0)
    assert (call.out == 3).all() and (call.lse == 4).all()
    if mask == "tree":
        assert call.args[-1][3].dim() == 2


def test_the_last_of_equal_settings_holds() -> None:
    config = with_settings("cute/keep_ab_sm90", ["stages=3", "page_size=32", "stages=2"])
    assert (config.options, config.page_size) == ((("stages", 2),), 32)
