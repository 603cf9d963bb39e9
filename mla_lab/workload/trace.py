"""A serving trace: arrival, input length and output length of each request."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..core.errors import invalid


@dataclass(frozen=True, eq=False, repr=False)
class Trace:
    """Requests in the order of their file.

    `arrival_s` float64 [n] counts seconds from the earliest arrival; `input_lens` and
    `output_lens` int64 [n] count tokens.
    """

    name: str
    arrival_s: np.ndarray
    input_lens: np.ndarray
    output_lens: np.ndarray

    def __post_init__(self) -> None:
        sizes = {array.shape for array in (self.arrival_s, self.input_lens, self.output_lens)}
        if len(sizes) != 1 or not self.arrival_s.size or self.arrival_s.ndim != 1:
            raise invalid("trace", f"arrays of shapes {sorted(sizes)}", "equal shapes [n], n >= 1")
        for array in (self.arrival_s, self.input_lens, self.output_lens):
            array.flags.writeable = False

    def __repr__(self) -> str:
        return f"<Trace {self.summary()}>"

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def duration_s(self) -> float:
        """Seconds from the first arrival to the last."""
        return float(self.arrival_s.max())

    def summary(self) -> str:
        """One line: requests, time, median and longest lengths."""
        inputs, outputs = self.input_lens, self.output_lens
        time = f"{self.duration_s:.0f}" if self.duration_s >= 10 else f"{self.duration_s:.3g}"
        when = f"in {time} s" if self.duration_s else "at one moment"
        return (
            f"{self.name}: {len(self)} request{'s' * (len(self) > 1)} {when}; tokens in "
            f"{np.median(inputs):.0f} median, {inputs.max()} most; out "
            f"{np.median(outputs):.0f} median, {outputs.max()} most"
        )
