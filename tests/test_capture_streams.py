"""Debug mode sees a workspace that two streams of one captured graph share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from mla_lab.call.bind import bind
from mla_lab.call.checks import capture, form_of
from mla_lab.core.errors import InvalidInput
from mla_lab.core.problem import Problem
from mla_lab.reference.inputs import DecodeInputs, make_inputs


class Streams:
    """In place of torch's: which one is current, and which of them are in a capture."""

    def __init__(self) -> None:
        self.current = "main"
        self.captured: set[str] = set()

    @contextmanager
    def on(self, name: str) -> Iterator[None]:
        before, self.current = self.current, name
        yield
        self.current = before


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    made = Streams()
    monkeypatch.setattr("torch.cuda.stream", made.on)
    monkeypatch.setattr("torch.cuda.current_stream", lambda device: made.current)
    monkeypatch.setattr(
        "torch.cuda.is_current_stream_capturing", lambda: made.current in made.captured
    )
    monkeypatch.setattr(capture, "_USES", [])
    return made


def call(inputs: DecodeInputs, debug: bool = True) -> None:
    """The checks of a call on a GPU that plans on the device."""
    form = replace(form_of(inputs), on_host=False, device=torch.device("cuda"))
    given = replace(inputs, out=torch.empty(form.out_shape, dtype=form.out_dtype))
    bind(given, form, reads_lengths=False, debug=debug)


def inputs_of(workspace_bytes: int = 4096) -> DecodeInputs:
    return make_inputs(Problem((1, 1), (70, 9), 4), 1, workspace_bytes=workspace_bytes)


def test_two_streams_of_one_capture(streams: Streams) -> None:
    inputs = inputs_of()
    streams.captured = {"main", "side"}
    for _ in range(2):
        call(inputs)
    with streams.on("side"):
        with pytest.raises(InvalidInput, match="workspace_buffer: got bytes that another stream"):
            call(inputs)
        with pytest.raises(InvalidInput, match="a buffer for each stream"):
            call(replace(inputs, workspace_buffer=inputs.workspace_buffer[64:]))
        call(inputs, debug=False)
        call(inputs_of())
        call(replace(inputs, workspace_buffer=inputs.workspace_buffer[:0]))


def test_captures_one_after_the_other_may_share(streams: Streams) -> None:
    inputs = inputs_of()
    for name in ("main", "side", "main"):
        streams.captured = {name}
        with streams.on(name):
            call(inputs)


def test_outside_of_a_capture_values_are_checked_as_before(streams: Streams) -> None:
    inputs = replace(inputs_of(), max_seq_len=9)
    streams.captured = {"side"}
    with pytest.raises(InvalidInput, match="max_seq_len: got 9; supported: at least the longest"):
        call(inputs)
    with streams.on("side"):
        call(inputs)


def test_a_ragged_call_without_a_bound_reads_nothing_in_a_capture(streams: Streams) -> None:
    inputs = make_inputs(Problem((1, 3), (70, 9), 4), 1, workspace_bytes=64)
    call(inputs, debug=False)
    streams.captured = {"main"}
    call(replace(inputs, max_q_len=3), debug=False)
    with pytest.raises(InvalidInput, match="max_q_len: got None during the capture"):
        call(inputs, debug=False)
