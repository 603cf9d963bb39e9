"""Time of each kernel of a call, by torch's profiler (CUPTI on an NVIDIA GPU)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.profiler import ProfilerActivity, profile

from .timers import Launch


def kernel_times(launches: Sequence[Launch], device: torch.device) -> dict[str, float] | None:
    """Mean microseconds a call of each kernel, by its name; None without a GPU.

    Launches run one after the other without a graph, so gaps between kernels do not show here.
    """
    if device.type != "cuda":
        return None
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for launch in launches:
            launch()
        torch.cuda.synchronize(device)
    averages = profiler.key_averages()
    return {e.key: e.device_time_total / len(launches) for e in averages if e.device_time_total}
