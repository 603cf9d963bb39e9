"""The calls that a sanitizer sees: each feature is among them, each kernel, and they are right."""

from __future__ import annotations

import re

import pytest
import torch

from mla_lab.api.decode import decode
from mla_lab.backends.cute.catalogue import build_for
from mla_lab.backends.cute.device_plan import Formula
from mla_lab.backends.cute.families import FAMILIES
from mla_lab.backends.cute.launch import config_of
from mla_lab.call.checks import form_of
from mla_lab.call.decode_args import native_args
from mla_lab.call.form import Features
from mla_lab.core.errors import InvalidInput
from mla_lab.core.gpu import H200
from mla_lab.plan.launch_modes import LAUNCH_MODES
from mla_lab.verify import sanitizer_cases as cases
from mla_lab.verify import tables

from .needs import needs_time

#: what no CuTe kernel does, and what a plan is beside
NO_KERNEL = {"nonpositive_scale", "separate_tables", "context_parallel", "pdl", "no_pdl"}


def test_every_feature_and_every_launch_mode_is_used():
    seen: set[str] = set()
    for one in cases.CASES.values():
        inputs = cases.inputs_of(one)
        named = inputs.contract_args()
        named |= {"plan": cases.plan_of(one, H200.sms), "batch_invariant": one.batch_invariant}
        seen |= set(form_of(native_args(**named)).features.names())
    unused = set(Features.__dataclass_fields__) - NO_KERNEL - seen
    assert unused <= {"strided_tables", "strided_query", "top_k_lens"}
    modes = {one.mode for one in cases.CASES.values()}
    assert modes >= {mode.name for mode in LAUNCH_MODES}
    pages = {one.problem.page_size for one in cases.CASES.values()}
    assert pages >= {1, 4, *(p for family in FAMILIES.values() for p in family.page_sizes)}


def test_each_grid_plan_is_one_that_its_kernel_takes():
    grids = {mode.name: mode for mode in LAUNCH_MODES if mode.formula}
    named = [one for one in cases.CASES.values() if one.mode in grids]
    assert named
    splits = set()
    for one in named:
        plan = cases.plan_of(one, H200.sms)
        assert plan is not None
        config = build_for(config_of(plan), one.problem, False, Features())
        splits.add(Formula.of_plan(config, plan, H200).num_splits)
    assert splits == {1, 2}


#: with more requests than a card has SMs and 64 heads or 128 a call takes torch 6 to 18 s on two
#: cores; these differ from others by their launch, and their numbers come out in a long run
LARGE = re.compile("(whole items|work tiles) of 64 rows$")
SIZED = [pytest.param(n, marks=needs_time if LARGE.search(n) else ()) for n in cases.CASES]


@pytest.mark.parametrize("name", SIZED)
def test_the_calls_are_right(name, capsys):
    assert cases.main([name, "--device", "cpu", "--backend", "torch"]) == 0
    assert f"{name}: ok" in capsys.readouterr().out


def test_a_wrong_result_and_a_refusal_fail(capsys, monkeypatch):
    assert cases.main(["sinks", "--device", "cpu"]) == 1
    assert "sinks: refused: backend" in capsys.readouterr().out
    monkeypatch.setattr(
        cases, "decode", lambda **named: torch.zeros_like(named["query"])[..., :512]
    )
    assert cases.main(["sinks", "--device", "cpu", "--backend", "torch"]) == 1
    assert "sinks: wrong" in capsys.readouterr().out
    with pytest.raises(InvalidInput, match="names"):
        cases.main(["nothing"])


def test_a_wrong_lse_fails(capsys, monkeypatch):
    def spoilt(**named):
        out, lse = right(**named)
        return out, lse + 0.01

    right = decode
    monkeypatch.setattr(cases, "decode", spoilt)
    assert cases.main(["sinks", "--device", "cpu", "--backend", "torch"]) == 1
    assert "sinks: wrong, error 1." in capsys.readouterr().out


def test_the_note_says_what_each_tool_found():
    environment = {"card": {"name": "X"}, "commit": "0123456789ab", "date": "2026-01-02"}
    head = {"kind": "run", "tool": "a sanitizer", "environment": environment}
    rows = [
        {"kind": "case", "tool": "memcheck", "name": "all", "calls": 24, "errors": 0},
        {"kind": "case", "tool": "racecheck", "name": "sinks", "calls": 1, "errors": 0},
        {"kind": "case", "tool": "racecheck", "name": "sparse", "calls": 1, "errors": 2},
    ]
    note = tables.sanitizer_note([head, *rows])
    assert note.startswith("a sanitizer on X, commit 012345678, 2026-01-02. Errors in calls")
    assert "memcheck 0 in 24, racecheck 2 in 2. With errors: sparse." in note
    assert "With errors" not in tables.sanitizer_note([head, *rows[:2]])
    rows[1]["calls"] = 0
    note = tables.sanitizer_note([head, *rows])
    assert note.endswith("Ended ahead of the call, and so not seen: sinks.")
