"""Calls on a GPU that is not the current one give the bits of the same calls on the current one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from mla_lab.api.decode import decode
from mla_lab.backends.cuda.ladder import Ladder
from mla_lab.backends.cuda.ops import DevicePlan, DevicePlanner
from mla_lab.core.problem import Problem
from mla_lab.flash_mla_names import flash_mla_with_kvcache, get_mla_metadata
from mla_lab.plan import make_plan
from mla_lab.reference.inputs import make_inputs
from mla_lab.reference.mla import decode_reference
from mla_lab.reference.tolerance import error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a second GPU"),
]
HERE, ELSEWHERE = torch.device("cuda:0"), torch.device("cuda:1")
LENGTHS = (3000, 77, 129)
E4M3: dict[str, Any] = {"q_dtype": "e4m3", "kv_format": "e4m3"}


@pytest.fixture(autouse=True)
def the_current_gpu_stays() -> Any:
    torch.cuda.set_device(HERE)
    yield
    assert torch.cuda.current_device() == 0
    torch.cuda.synchronize(ELSEWHERE)


@pytest.mark.parametrize(
    ("problem", "features", "more"),
    [
        (Problem((1,) * 3, (300, 77, 0), 16), (), {}),
        (Problem((1,) * 3, LENGTHS, 128), (), {}),
        (Problem((2, 1, 3), (400, 129, 300), 16), ("ragged",), {}),
        (Problem((1,) * 3, LENGTHS, 128, **E4M3), (), {}),
        (Problem((1,) * 3, LENGTHS, 128, kv_format="fp8_656"), (), {}),
        (Problem((1, 1), (3000, 500), 64, kv_format="fp8_656", top_k=200), (), {}),
        (Problem((1,) * 3, LENGTHS, 128), (), {"batch_invariant": True}),
        (Problem((2, 1, 3), (4000, 129, 300), 16), ("ragged",), {"batch_invariant": True}),
        (Problem((1,) * 3, LENGTHS, 16), (), {"backend": "cuda"}),
        (Problem((1,) * 3, LENGTHS, 16, **E4M3), (), {"backend": "cuda"}),
        (Problem((1,) * 3, LENGTHS, 16), (), {"backend": "torch"}),
        (Problem((1,) * 3, LENGTHS, 16), ("separate_tables",), {}),
    ],
)
def test_the_same_bits(problem: Problem, features: tuple[str, ...], more: dict[str, Any]) -> None:
    results = []
    for device in (HERE, ELSEWHERE):
        inputs = make_inputs(problem, 1, ("lse", *features), device=str(device))
        workspace = torch.zeros(128 << 20, dtype=torch.uint8, device=device)
        named = inputs.contract_args() | {"backend": "auto", "workspace_buffer": workspace} | more
        for _ in range(2):  # the second call is a replay
            out, lse = decode(**named)
        results.append((out.cpu(), lse.cpu()))
    (out, lse), (same, same_lse) = results
    assert torch.equal(out.view(torch.uint8), same.view(torch.uint8))
    assert torch.equal(lse, same_lse)
    limit = 0.03 if problem.q_dtype == "e4m3" else 0.008
    assert error(same, decode_reference(inputs).out.cpu().reshape(same.shape)).relative < limit


def test_a_graph_replays() -> None:
    problem = Problem((1,) * 4, (3000, 1200, 77, 900), 128)
    inputs = make_inputs(problem, 1, device=str(ELSEWHERE), workspace_bytes=128 << 20)
    named = inputs.contract_args()
    decode(**named)
    torch.cuda.synchronize(ELSEWHERE)
    graph = torch.cuda.CUDAGraph()
    # torch's own stream for captures is one of the GPU of its first capture
    stream = torch.cuda.Stream(ELSEWHERE)
    with torch.cuda.device(ELSEWHERE), torch.cuda.graph(graph, stream=stream):
        out = decode(**named)
    out.zero_()
    graph.replay()
    assert error(out, decode_reference(inputs).out.reshape(out.shape)).relative < 0.008


@pytest.mark.parametrize("step", [0, 4, 7, 9])
def test_steps_of_the_ladder(step: int) -> None:
    inputs = make_inputs(Problem((1,) * 3, (300, 77, 129), 64), 1, device=str(ELSEWHERE))
    out = Ladder(step, inputs)()
    assert error(out, decode_reference(inputs).out.reshape(out.shape)).relative < 0.008


def test_the_planner() -> None:
    lengths = (65, 3000, 0, 130, 1)
    planner = DevicePlanner(16, 5, 1, 3000, tile_rows=16, num_workers=24)
    plan = DevicePlan.empty(planner, str(ELSEWHERE))
    numbers: dict[str, Any] = {"dtype": torch.int32, "device": ELSEWHERE}
    planner(torch.tensor(lengths, **numbers), torch.arange(6, **numbers), plan)
    problem = Problem((1,) * 5, lengths, 16)
    host = make_plan(problem, tile_rows=16, num_workers=24, policy="fixed_size")
    assert np.array_equal(plan.tiles[: int(plan.counts[0])].cpu().numpy(), host.tiles)


def test_flash_mla_s_names() -> None:
    inputs = make_inputs(Problem((2, 2), (700, 129), 64), 1, ["lse"], device=str(ELSEWHERE))
    cache, metadata = inputs.kv_cache.unsqueeze(2), get_mla_metadata()[0]
    tables = (inputs.block_tables, inputs.seq_lens, 512, metadata, None, inputs.bmm1_scale)
    out, _ = flash_mla_with_kvcache(inputs.query, cache, *tables, causal=True)
    assert error(out, decode_reference(inputs).out.reshape(out.shape)).relative < 0.008
