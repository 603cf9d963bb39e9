"""Choices for a cache of eight bits on a card: small pages, long pieces, what the command says."""

from __future__ import annotations

import json

import pytest
import torch

from mla_lab import cli
from mla_lab.backends.cute.catalogue import able
from mla_lab.backends.cute.families import costs
from mla_lab.call.form import Features
from mla_lab.core.gpu import H200
from mla_lab.core.problem import Problem
from mla_lab.plan import Plan, choose
from mla_lab.plan.promotion import PROMOTED_KEYS
from mla_lab.reference.mla import decode_reference

from .calls import check, counters_are_zero, inputs_of, native

pytestmark = pytest.mark.gpu

E4M3 = {"q_dtype": "e4m3", "kv_format": "e4m3"}
FORMATS = [E4M3, {"kv_format": "e4m3"}, {"kv_format": "fp8_656"}]


def plan_of(problem: Problem) -> Plan:
    """The choice among builds that are here."""
    here = able(problem, Features(planned=True))
    return choose(problem, H200, costs=costs(), able=here).plan(problem)


@pytest.mark.parametrize("page_size", [16, 32, 128])
@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize("formats", FORMATS, ids=lambda f: "-".join(f.values()))
def test_pages_of_other_sizes(
    formats: dict[str, str], heads: int, page_size: int, workspace: torch.Tensor
) -> None:
    """Few requests, and as many as fill the card with whole ones."""
    for lengths in ((1000, 65, 3, 8, 4097), (700,) * 70):
        named = {**formats, "page_size": page_size}
        problem = Problem((2,) * len(lengths), lengths, heads, **named)  # type: ignore[arg-type]
        inputs = inputs_of(problem, "lse", "page_gap")
        expected = decode_reference(inputs)
        for plan in (None, plan_of(problem)):
            check(inputs, native(inputs, workspace, plan=plan), expected)
    assert counters_are_zero(workspace)


@pytest.mark.parametrize("extra", [-1, 1, PROMOTED_KEYS + 65])
@pytest.mark.parametrize("heads", [64, 128])
def test_long_pieces_of_e4m3_are_promoted(heads: int, extra: int, workspace: torch.Tensor) -> None:
    """By a plan and without one, with a short request among long ones."""
    lengths = (PROMOTED_KEYS + extra,) * 63 + (100,)
    problem = Problem((1,) * 64, lengths, heads, **E4M3)  # type: ignore[arg-type]
    plan = plan_of(problem)
    assert plan.config is not None and plan.config.kernel == "cute/keep_ab_sm90"
    inputs = inputs_of(problem, "lse")
    expected = decode_reference(inputs)
    for given in (plan, None):
        check(inputs, native(inputs, workspace, plan=given), expected)
    assert counters_are_zero(workspace)


@pytest.mark.parametrize("formats", FORMATS, ids=lambda f: "-".join(f.values()))
def test_the_command_judges_a_kernel_s_result(
    formats: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--kv-format", formats["kv_format"], "--dtype", formats.get("q_dtype", "bf16")]
    shape = ["--heads", "128", "--kv-len", "4097,65", "--calls", "1", "--device", "cuda"]
    assert cli.main(["decode", *shape, *flags, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["time"]["backend"] == "cute" and said["error"]["good"]
