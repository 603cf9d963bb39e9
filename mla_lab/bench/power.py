"""Watts and joules of a step: a peer's replay, over and over, while the card's sensor is read.

A compute-bound kernel is throttled by power, so a short burst flatters it, and of two equal times
the one with fewer watts is the better kernel. The sensor answers late: readings of the first part
of the window are left out.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from ..core.gpu import H200, Gpu
from ..core.problem import Problem
from .records import Row
from .telemetry import Telemetry
from .timers import Replay

#: between two readings
PERIOD_MS = 20
WINDOW_SECONDS = 0.4
#: share of the window whose readings are left out
SETTLING = 0.3
#: below this a case is bound by latency, and power is not what limits it
MIN_FLOOR_SECONDS = 15e-6


@dataclass(frozen=True)
class Power:
    """A window of one peer; microseconds and joules a launch."""

    watts: float
    sm_mhz: float
    us: float
    joules: float
    seconds: float
    readings: int


def worthwhile(problem: Problem, gpu: Gpu | None = None) -> bool:
    """True if the matrix units limit `problem` for long enough to read watts."""
    gpu = gpu or H200
    return gpu.bound(problem) == "compute" and gpu.roofline_time(problem) >= MIN_FLOOR_SECONDS


def sustained(
    replay: Replay, launches: int, readings: Telemetry, seconds: float = WINDOW_SECONDS
) -> Row | None:
    """`Power` of `replay`, which holds `launches`, as plain values; None without a sensor."""
    if not readings.running:
        return None
    times = max(1, round(seconds * 1e6 / replay()))
    begin = time.monotonic()
    us = replay.repeat(times) / (times * launches)
    end = time.monotonic()
    begin += SETTLING * (end - begin)
    medians = readings.between(begin, end)
    if medians is None:
        return None
    power = Power(
        watts=medians["watts"],
        sm_mhz=medians["sm_mhz"],
        us=us,
        joules=medians["watts"] * us * 1e-6,
        seconds=times * launches * us * 1e-6,
        readings=sum(begin <= s.at <= end for s in readings.samples),
    )
    return vars(power).copy()
