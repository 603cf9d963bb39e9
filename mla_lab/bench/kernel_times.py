"""Time of each kernel of a call, by torch's profiler (CUPTI on an NVIDIA GPU)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

from ..core.errors import unsupported
from .timers import Launch, Replay


def kernel_times(launches: Sequence[Launch], device: torch.device) -> dict[str, float] | None:
    """Mean microseconds a call of each kernel, by its name; None without a GPU.

    Launches run one by one without a graph, so gaps between kernels are not included.
    """
    if device.type != "cuda":
        return None
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        for launch in launches:
            launch()
        torch.cuda.synchronize(device)
    averages = profiler.key_averages()
    return {e.key: e.device_time_total / len(launches) for e in averages if e.device_time_total}


@dataclass(frozen=True)
class KernelSpans:
    """The kernels of a call in order of time, and the pauses between them, mean microseconds."""

    names: tuple[str, ...]
    kernels_us: tuple[float, ...]
    gaps_us: tuple[float, ...]

    @classmethod
    def of(cls, events: Sequence[tuple[str, float, float]], calls: int) -> KernelSpans:
        """Spans from (name, start, end) of all kernels of `calls` calls, sorted by start."""
        each = len(events) // calls
        if not events or len(events) != each * calls:
            raise unsupported("kernels", f"{len(events)} of {calls} calls", "as many in each call")
        rows = [events[i : i + each] for i in range(0, len(events), each)]
        kernels = tuple(sum(row[i][2] - row[i][1] for row in rows) / calls for i in range(each))
        gaps = tuple(
            sum(max(0.0, row[i + 1][1] - row[i][2]) for row in rows) / calls
            for i in range(each - 1)
        )
        return cls(tuple(name for name, _, _ in rows[0]), kernels, gaps)


def kernel_spans(replay: Replay, calls: int) -> KernelSpans:
    """Profiled kernels of one replay of `calls` calls. Raises Unsupported where calls differ or
    the profiler records none.
    """
    replay()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        replay()
        torch.cuda.synchronize()
    events = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type.name == "CUDA"
    ]
    return KernelSpans.of(sorted(events, key=lambda event: event[1]), calls)
