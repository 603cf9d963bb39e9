"""The record of rounding errors: both kinds of calls on a CPU, a wrong result is seen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mla_lab.api import decode
from mla_lab.api.contract_gqa import trtllm_batch_decode_with_kv_cache
from mla_lab.core.problem import Problem
from mla_lab.core.resources import data_dir
from mla_lab.reference.inputs_gqa import GqaInputs, GqaShape
from mla_lab.studies import xqa_rounding as rounding
from mla_lab.studies.xqa_rounding import CASES, DISTRIBUTIONS, WEIGHTS, Shape, name_of

MLA = Problem.uniform(2, 1, 200, 4)
GQA = GqaShape.uniform(2, 3, 200, 8, 2, head_dim=64)


def by_backend(inputs: rounding.Inputs) -> Tensor:
    """The torch backend's float32 arithmetic, rounded to bf16."""
    given = inputs.contract_args()
    if isinstance(inputs, GqaInputs):
        result = trtllm_batch_decode_with_kv_cache(**given, backend="torch")
    else:
        result = decode.decode(**given, backend="torch")
    return (result[0] if isinstance(result, tuple) else result).bfloat16()


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("formats", [f for f in WEIGHTS if f[0] != "e4m3"])
@pytest.mark.parametrize("case", [MLA, GQA], ids=name_of)
def test_float32_is_within(case: Shape, formats: tuple[str, str], distribution: str) -> None:
    row = rounding.judge(case, formats, distribution, device="cpu", run=by_backend)
    assert row["within"] and max(row["times_torch"]) <= 2
    assert row["torch_error"]["relative"] > 0


def test_one_wrong_element_is_not() -> None:
    def wrong(inputs: rounding.Inputs) -> Tensor:
        out = by_backend(inputs)
        out.view(-1)[7] += 0.05
        return out

    row = rounding.judge(GQA, ("bf16", "bf16"), "gauss", device="cpu", run=wrong)
    assert not row["within"]


def test_cases_have_names_of_their_own() -> None:
    assert len({name_of(case) for case in CASES}) == len(CASES)
    assert name_of(GQA) == "b2_q3_h8x2_d64_kv200" and name_of(MLA) == "b2_q1_h4_kv200"


def test_the_record_is_within() -> None:
    path: Path = data_dir() / "records/h200_rounding.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert {(r["query"], r["cache"]) for r in rows} == set(WEIGHTS)
    assert {r["inputs"] for r in rows} == set(DISTRIBUTIONS)
    assert {r["case"] for r in rows} == {name_of(case) for case in CASES}
    assert all(r["within"] for r in rows)
    assert torch.tensor([r["times_torch"] for r in rows]).max() <= 2
