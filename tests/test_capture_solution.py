"""A recorded call's solution computes what the call computed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mla_lab import trtllm_batch_decode_with_kv_cache_mla as call
from mla_lab.core.problem import Problem
from mla_lab.interop.capture import recording
from mla_lab.reference.inputs import make_inputs

CASES = [
    (Problem((1, 1), (70, 9), 4), []),
    (Problem((2, 1), (70, 9), 4), ["lse", "sinks", "device_scales"]),
    (Problem((2, 2), (70, 9), 4), ["tree_mask", "lse"]),
    (Problem((1, 1), (70, 9), 4, kv_format="fp8_656"), []),
    (Problem((1, 1), (70, 40), 4, top_k=32), []),
]


@pytest.mark.parametrize(("problem", "features"), CASES)
def test_it_computes_the_call(problem: Problem, features: list[str], tmp_path: Path) -> None:
    named = make_inputs(problem, 1, features).contract_args()
    with recording(tmp_path):
        expected: Any = call(**named)
    (path,) = tmp_path.glob("solutions/mla_paged/*/*.json")
    (described,) = tmp_path.glob("definitions/mla_paged/*.json")
    solution, definition = (json.loads(p.read_text()) for p in (path, described))
    assert solution["definition"] == definition["name"] == path.parent.name
    scope: dict[str, Any] = {}
    exec(solution["sources"][0]["content"], scope)
    defaults = {"bmm2_scale": 1.0}
    given = [named.get(name, defaults.get(name)) for name in definition["inputs"]]
    views = {torch.uint8: torch.int8, torch.uint16: torch.int16}
    given = [v.view(views.get(v.dtype, v.dtype)) if torch.is_tensor(v) else v for v in given]
    found = scope["run"](*given)
    pairs = zip(*((r if isinstance(r, tuple) else (r,)) for r in (found, expected)), strict=True)
    assert all(torch.equal(a, b.reshape(a.shape)) for a, b in pairs)
    (listed,) = tmp_path.glob("workloads/mla_paged/*.jsonl")
    workloads = [json.loads(line) for line in listed.read_text().splitlines()]
    assert workloads
    _check_schema(solution, definition, workloads)


def _check_schema(
    solution: dict[str, Any], definition: dict[str, Any], workloads: list[dict[str, Any]]
) -> None:
    """FlashInfer-Bench's own models, where it is installed."""
    try:
        from flashinfer_bench.data.definition import Definition
        from flashinfer_bench.data.solution import Solution
        from flashinfer_bench.data.trace import Trace
    except ImportError:
        return
    made = Solution.model_validate(solution)
    assert made.get_entry_symbol() == "run" and made.get_entry_source() is not None
    assert Definition.model_validate(definition).name == made.definition
    for workload in workloads:
        assert Trace.model_validate(workload).is_workload_trace()
