"""A CUDA graph of the plain call, captured at one token a request, replayed while requests grow."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mla_lab.api.decode import decode
from mla_lab.core.problem import Problem
from mla_lab.reference.inputs import DecodeInputs, make_inputs
from mla_lab.reference.mla import decode_reference

pytestmark = pytest.mark.gpu

STEPS, CHECKED, PAGE = 2000, 100, 64
BOUND = 131_072
#: relative error (Frobenius) of a bf16 result, as `bench.checks`
LIMIT = 5e-3


def lengths_at(step: int, batch: int) -> list[int]:
    """One token more every step; a request ends after its own number of steps and begins anew."""
    return [1 + (step + 97 * b) % (300 + 150 * b) for b in range(batch)]


@pytest.mark.parametrize(("batch", "heads"), [(1, 16), (3, 128), (9, 16), (9, 128)])
def test_growth_under_one_graph(batch: int, heads: int) -> None:
    most = max(max(lengths_at(step, batch)) for step in range(STEPS))
    made = make_inputs(
        Problem.uniform(batch, 1, most, heads), 3, device="cuda", workspace_bytes=64 << 20
    )
    lengths = torch.ones(batch, dtype=torch.int32, device="cuda")
    table = made.block_tables.new_full((batch, BOUND // PAGE), 2**31 - 1)
    table[:, : made.block_tables.shape[1]] = made.block_tables
    out = torch.empty(batch, 1, heads, 512, dtype=torch.bfloat16, device="cuda")
    arguments = made.contract_args() | {
        "seq_lens": lengths, "block_tables": table, "max_seq_len": BOUND, "out": out,
    }  # fmt: skip
    decode(**arguments, backend="cute")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode(**arguments, backend="cute")
    decode_reference(make_call(made, [1] * batch))  # libraries allocate at their first use
    torch.cuda.synchronize()
    allocated = torch.cuda.memory_allocated()
    for step in range(STEPS):
        now = lengths_at(step, batch)
        lengths.copy_(torch.tensor(now, dtype=torch.int32))
        out.fill_(float("nan"))
        graph.replay()
        if step % CHECKED == 0:
            call = make_call(made, now)
            expected = decode_reference(call).out.to(torch.float64).view(-1)
            found = out.to(torch.float64).view(-1)
            assert torch.linalg.norm(found - expected) <= LIMIT * torch.linalg.norm(expected), step
            del call, expected, found
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= allocated + (1 << 20)


def make_call(made: DecodeInputs, lengths: list[int]) -> DecodeInputs:
    """`made` at other lengths, for the oracle."""
    return replace(made, seq_lens=torch.tensor(lengths, dtype=torch.int32, device="cuda"))
