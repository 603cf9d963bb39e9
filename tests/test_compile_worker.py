"""The compiling process: what it keeps of frames is what the DSL finds out about them."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import pytest

from mla_lab.cute.compile_worker import remember_frames

NAMES = ("_fast_frameinfo", "_is_framework_stack_frame")


def steps() -> Iterator[int]:
    """A frame that stands at one line, then at another, and there again."""
    for _ in range(2):
        yield 1
        yield 2


@pytest.mark.compiler
def test_frames_are_described_as_by_the_dsl_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    op = importlib.import_module("cutlass._mlir_helpers.op")
    alone = [getattr(op, name) for name in NAMES]
    for name, find in zip(NAMES, alone, strict=True):
        monkeypatch.setattr(op, name, find)
    remember_frames()
    assert all(getattr(op, n) is not find for n, find in zip(NAMES, alone, strict=True))
    lines, running = [], steps()
    for _ in running:
        frame = running.gi_frame  # type: ignore[attr-defined]
        assert [getattr(op, name)(frame) for name in NAMES] == [find(frame) for find in alone]
        lines.append(op._fast_frameinfo(frame).lineno)
    assert lines[:2] == lines[2:] and lines[0] + 1 == lines[1]
