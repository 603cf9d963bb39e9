"""The plain call of one request, whose kernel holds two mainloops, on both sides of its gate."""

from __future__ import annotations

import pytest
import torch

from mla_lab.core.problem import Problem
from mla_lab.plan.gate import DUAL_ROWS, dual_gate
from mla_lab.reference.mla import decode_reference

from .calls import check, counters_are_zero, inputs_of, native

pytestmark = pytest.mark.gpu

#: (query tokens, heads) of more than 64 rows and up to 512
ROWS = [(1, 128), (1, 97), (2, 128), (3, 40), (4, 128), (7, 16)]


@pytest.mark.parametrize(("q_len", "heads"), ROWS)
def test_lengths_around_the_gate(q_len: int, heads: int, workspace: torch.Tensor) -> None:
    gate = 64 * (dual_gate(1 if q_len == 1 else 2, q_len * heads, 132) - 1)
    for kv_len in (q_len, 63, 64, 257, gate - 1, gate, gate + 1, gate + 64, 20_000, 300, 70_000):
        inputs = inputs_of(Problem((q_len,), (max(kv_len, q_len),), heads), "lse")
        expected = decode_reference(inputs)
        for _ in range(2):
            check(inputs, native(inputs, workspace, backend="cute"), expected)
    assert counters_are_zero(workspace)


def test_every_short_length(workspace: torch.Tensor) -> None:
    for kv_len in range(1, 66 * DUAL_ROWS, 37):
        inputs = inputs_of(Problem((1,), (kv_len,), 128), "lse")
        check(inputs, native(inputs, workspace, backend="cute"), decode_reference(inputs))
