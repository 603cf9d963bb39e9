"""KV lengths to plan with: presets with a story each, seeded, and requests from a trace file."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from ..core.errors import invalid
from ..workload import Trace, load_trace, sample, shipped_trace

#: the preset that draws from a serving trace
SERVING = "serving trace"
PRESETS = {
    SERVING: "decode steps of a serving trace, each equally likely",
    "all equal": "every request has the same length",
    "one long": "one request eight times as long as the rest",
    "ragged": "lengths spread evenly from a tenth to nearly twice the mean",
    "heavy tail": "many short conversations, a few very long ones (log-normal)",
}


def preset_lengths(preset: str, batch: int, mean: int) -> tuple[int, ...]:
    """`batch` KV lengths around `mean`, the long request first; 1 at least."""
    rng = np.random.default_rng(0)
    if preset == "all equal":
        lengths = np.full(batch, mean)
    elif preset == "one long":
        lengths = np.full(batch, mean)
        lengths[0] = 8 * mean
    elif preset == "ragged":
        lengths = rng.uniform(0.1 * mean, 1.9 * mean, batch)
    elif preset == "heavy tail":
        lengths = rng.lognormal(np.log(mean) - 0.5, 1.0, batch)
    elif preset == SERVING:
        return trace_lengths("", batch)
    else:
        raise invalid("preset", repr(preset), tuple(PRESETS))
    return tuple(int(n) for n in np.maximum(1, np.round(lengths)))


@lru_cache(maxsize=4)
def open_trace(path: str) -> Trace:
    """The trace in a file (Azure CSV or Mooncake JSONL); "" is the one that ships."""
    return load_trace(path) if path else shipped_trace()


def trace_lengths(path: str, batch: int, seed: int = 0) -> tuple[int, ...]:
    """KV lengths of `batch` decode steps drawn from the trace in `path`."""
    return sample(open_trace(path), batch, seed).kv_lens
