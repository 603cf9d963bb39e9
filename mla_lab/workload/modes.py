"""Lengths of one decode step from a trace, by replay or by sampling; both are deterministic.

A request with i input and o output tokens takes o decode steps. Step p (1 to o) reads a cache of
i + p tokens, its own new token among them.

- `replay`: a clock runs; each request begins to decode when it arrives and makes one token every
  `step_time` seconds, independent of the load. The batch is the requests that decode at time t. It
  keeps the trace's load with its lulls and bursts.
- `sample`: n steps drawn at random, with replacement, from all decode steps of the trace, each
  equally likely. So a request is drawn with weight o at a position uniform in its output: what a
  scheduler that keeps n requests decoding sees on average, whatever the load was.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral

import numpy as np

from ..core.errors import invalid
from ..core.models import Model
from ..core.problem import Problem
from .trace import Trace

#: tolerance of the clock, in steps: (3 * 0.1) / 0.1 is just below 3 in binary
CLOCK_SLACK = 1e-9


@dataclass(frozen=True, eq=False)
class DecodeStep:
    """The requests of one decode step: index into the trace, and output tokens so far.

    `position` counts the token that this step appends, from 1. int64 [n] each.
    """

    trace: Trace
    request: np.ndarray
    position: np.ndarray

    def __len__(self) -> int:
        return len(self.request)

    @property
    def kv_lens(self) -> tuple[int, ...]:
        """Cached tokens of each request, the new one counted."""
        return tuple((self.trace.input_lens[self.request] + self.position).tolist())

    def problem(
        self, model: Model, q_len: int = 1, *, tensor_parallel: int = 1, **fields: object
    ) -> Problem:
        """One layer's call for `model`. With `q_len` > 1 each request brings q_len - 1 draft
        tokens more, which its KV length counts as well; further `fields` go to `Problem`.
        """
        if not len(self):
            raise invalid("trace", "a moment when no request is decoding", "another time t")
        if q_len < 1:
            raise invalid("q_len", q_len, "1 or more")
        lens = [length + q_len - 1 for length in self.kv_lens]
        return model.problem(lens, q_len, tensor_parallel=tensor_parallel, **fields)


def replay(trace: Trace, t: float, step_time: float) -> DecodeStep:
    """Requests that decode `t` seconds after the first arrival, at `step_time` seconds a token.

    In the order of the trace; empty where no request decodes.
    """
    if not 0 < step_time < float("inf"):
        raise invalid("step_time", step_time, "seconds above 0")
    if not -float("inf") < t < float("inf"):
        raise invalid("t", t, "a finite time in seconds")
    elapsed = (t - trace.arrival_s) / step_time
    done = np.floor(elapsed + CLOCK_SLACK)
    active = np.flatnonzero((done >= 0) & (done < trace.output_lens))
    return DecodeStep(trace, active, done[active].astype(np.int64) + 1)


def sample(trace: Trace, n: int, seed: int) -> DecodeStep:
    """`n` decode steps of the trace, each equally likely, by NumPy's default generator."""
    if isinstance(n, bool) or not isinstance(n, Integral) or n < 1:
        raise invalid("n", n, "1 or more requests")
    if isinstance(seed, bool) or not isinstance(seed, Integral) or seed < 0:
        raise invalid("seed", seed, "an int, 0 or more")
    ends = np.cumsum(trace.output_lens)
    if not ends[-1]:
        raise invalid("trace", f"{trace.name} without output tokens", "at least one decode step")
    drawn = np.random.default_rng(seed).integers(0, ends[-1], size=n)
    request = np.searchsorted(ends, drawn, side="right")
    return DecodeStep(trace, request, drawn - (ends - trace.output_lens)[request] + 1)
