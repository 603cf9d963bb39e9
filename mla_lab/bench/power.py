"""Watts and joules of a launch: repeated replays while the card's power sensor is read.

A compute-bound kernel is throttled by power, so a short burst is faster than sustained load, and of
two kernels of equal time the one with fewer watts is better. The sensor lags, so readings of the
first part of the window are dropped.
"""

from __future__ import annotations

import time

from ..core.gpu import H200
from ..core.problem import Problem
from .records import Row
from .telemetry import Telemetry
from .timers import Replay

#: seconds between two readings
PERIOD_MS = 20
WINDOW_SECONDS = 0.4
#: share of the window whose readings are dropped
SETTLING = 0.3
#: seconds; shorter calls are bound by latency, not by power
MIN_FLOOR_SECONDS = 15e-6


def worthwhile(problem: Problem) -> bool:
    """True if an H200 is compute-bound by `problem` for long enough to measure power."""
    return H200.bound(problem) == "compute" and H200.roofline_time(problem) >= MIN_FLOOR_SECONDS


def sustained(replay: Replay, launches: int, readings: Telemetry) -> Row | None:
    """One peer under sustained load: watts, SM clock in MHz, microseconds and joules of each of the
    `launches` in `replay`, seconds of the window, sensor readings; None without a sensor.
    """
    if not readings.running:
        return None
    times = max(1, round(WINDOW_SECONDS * 1e6 / replay()))
    begin = time.monotonic()
    us = replay.repeat(times) / (times * launches)
    end = time.monotonic()
    begin += SETTLING * (end - begin)
    medians = readings.between(begin, end)
    if medians is None:
        return None
    return {
        "watts": medians["watts"],
        "sm_mhz": medians["sm_mhz"],
        "us": us,
        "joules": medians["watts"] * us * 1e-6,
        "seconds": times * launches * us * 1e-6,
        "readings": sum(begin <= s.at <= end for s in readings.samples),
    }
