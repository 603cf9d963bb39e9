"""What a captured CUDA graph reads at each replay stays for as long as the process lives."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mla_lab.backends.cute import device_plan, launch
from mla_lab.core.problem import Problem
from mla_lab.plan import make_plan


def test_what_a_captured_graph_reads_stays_however_many_shapes_follow() -> None:
    device = torch.device("cpu")
    first = device_plan.uniform_q_begin(3, 1, device)
    lengths = device_plan.equal_lengths(3, 70, device)
    for batch in range(4, 700):
        device_plan.uniform_q_begin(batch, 1, device)
        device_plan.equal_lengths(batch, 70, device)
    assert device_plan.uniform_q_begin(3, 1, device) is first
    assert device_plan.equal_lengths(3, 70, device) is lengths


def test_words_of_a_plan_are_kept_where_a_graph_is_captured_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept: list[Any] = []
    monkeypatch.setattr(launch, "_CAPTURED", kept)
    plan = make_plan(Problem.uniform(4, 1, 300, 128))
    words = device_plan.on_device(plan, torch.device("cpu"), 132)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    launch.keep_for_graph(words)
    assert kept == []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    launch.keep_for_graph(words)
    assert kept[0] is words
