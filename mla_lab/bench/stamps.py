"""Profiling stamps of a build, as phases of a call and as spans of one CTA's roles.

Stamps are int64, a row a CTA: nanoseconds of the card's global timer (steps of 32 ns), in the order
that the kernels give (`CTA_EVENTS` of `cute/rows_on_m/profile`, `CtaEvent` of
`cute/split_merge/swap_ab_fragments`). Calls follow each other in a CUDA graph: a call
begins at the end of the last CTA of the previous call, and ends with its own last CTA. So the
phases of a CTA from the begin to the end of the call add up to the call by construction, and so do
their means over CTAs and calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

#: KV tiles of CTA 0 that a build with stamps = 2 records, and those of them in steady state
ROUNDS, STEADY = 48, slice(8, 40)
#: words of a row of `rounds`: SM clocks, the last word in nanoseconds
ASKING, ASKED, QK_BEGUN, QK_DONE, P_STORED, PV_BEGUN, PV_DONE, PV_DONE_NS = range(8)


@dataclass(frozen=True)
class Marks:
    """Places and meanings of one kernel's stamps."""

    words: int
    #: (index, phase that ends there) in order of time; events that a CTA did not reach are skipped
    path: tuple[tuple[int, str], ...]
    #: the same for a CTA without a partial: end of the loop, then `write`
    alone: tuple[int, int]
    #: words that only a CTA with work writes
    loop: tuple[int, int]
    #: index of the event "all partials of a row tile have arrived"; not reached without partials
    merged: int


KEEP_AB = Marks(
    words=8,
    path=(
        (0, "launch"),
        (1, "setup"),
        (2, "first_byte"),
        (3, "loop"),
        (4, "exchange"),
        (5, "wait"),
        (6, "merge"),
    ),
    alone=(4, 6),
    loop=(2, 3),
    merged=5,
)
SWAP_AB = Marks(
    words=10,
    path=(
        (0, "launch"),
        (1, "setup"),
        (8, "setup"),
        (2, "first_byte"),
        (3, "loop"),
        (4, "exchange"),
        (5, "merge"),
        (6, "exchange"),
        (9, "wait"),
        (7, "merge"),
    ),
    alone=(6, 7),
    loop=(2, 3),
    merged=9,
)
MARKS = {"cute/keep_ab_sm90": KEEP_AB, "cute/swap_ab_sm90": SWAP_AB}


def ends(stamps: np.ndarray, marks: Marks) -> int:
    """When the last CTA of a call has ended; `stamps` [CTAs, words]."""
    return int(stamps[:, marks.path[-1][0]].max())


def path_of(row: np.ndarray, marks: Marks, begin: int) -> list[tuple[str, int]]:
    """(phase, its end) of one CTA, from `begin` on; empty for a CTA without work.

    A word that the CTA did not write has an arbitrary value: it counts if it lies between the CTA's
    start and end, and not before the preceding word.
    """
    first, last = int(row[marks.path[0][0]]), int(row[marks.path[-1][0]])
    if not all(first < int(row[i]) <= last for i in marks.loop):
        return []
    split = first < int(row[marks.merged]) <= last
    found, now = [], max(begin, first)
    for index, phase in marks.path:
        at = int(row[index])
        if index != marks.path[0][0] and not first <= at <= last:
            continue
        if at < now and phase not in ("launch", "setup"):
            continue
        now = max(now, at)
        found.append(("write" if index in marks.alone and not split else phase, now))
    return found


def call_phases(stamps: np.ndarray, marks: Marks, begin: int) -> dict[str, float]:
    """Nanoseconds of each phase, mean over the CTAs that had work; `idle` until the last ends."""
    end, total, count = ends(stamps, marks), dict[str, float](), 0
    for row in stamps:
        path = path_of(row, marks, begin)
        count += bool(path)
        now = begin
        for phase, at in path:
            total[phase] = total.get(phase, 0.0) + at - now
            now = at
        if path:
            total["idle"] = total.get("idle", 0.0) + end - now
    return {phase: ns / count for phase, ns in total.items()}


def mean_phases(calls: Sequence[np.ndarray], marks: Marks) -> tuple[float, dict[str, float]]:
    """ns of a call and of its phases: means over the middle half of `calls`, in order of time.

    `calls` ran back to back; the first one only gives the begin of the second.
    """
    begins = [ends(before, marks) for before in calls[:-1]]
    took = np.array([ends(c, marks) - b for c, b in zip(calls[1:], begins, strict=True)])
    middle = np.argsort(took, kind="stable")[len(took) // 4 : len(took) - len(took) // 4]
    parts = [call_phases(calls[1 + i], marks, begins[i]) for i in middle]
    names = list(dict.fromkeys([phase for _, phase in marks.path] + ["write", "idle"]))
    phases = {n: float(np.mean([p.get(n, 0.0) for p in parts])) for n in names}
    return float(took[middle].mean()), {name: ns for name, ns in phases.items() if ns}


#: phase -> role in a timeline
_SPANS = {"first_byte": "load", "loop": "attend", "exchange": "write"}


def cta_spans(stamps: np.ndarray, marks: Marks) -> list[list[Any]]:
    """[lane, role, start, end, -1] of every CTA with work, ns since the first one's start."""
    starts = stamps[:, marks.path[0][0]]
    zero = int(starts[starts > 0].min())
    rows: list[list[Any]] = []
    for lane, row in enumerate(stamps):
        now = int(row[marks.path[0][0]])
        for phase, at in path_of(row, marks, now):
            if at > now:
                rows.append([lane, _SPANS.get(phase, phase), now - zero, at - zero, -1])
            now = at
    return rows


def role_spans(rounds: np.ndarray) -> tuple[float, list[list[Any]]]:
    """Clock in GHz and [lane, role, start, end, block] of four roles, ns; `rounds` [ROUNDS, 8].

    Row i is the KV tile with i tiles after it, so that later rows are earlier in time.
    """
    steady = rounds[STEADY][::-1]
    clocks, ns = steady[:, PV_DONE], steady[:, PV_DONE_NS]
    ghz = float(clocks[-1] - clocks[0]) / float(ns[-1] - ns[0])
    zero = int(steady[0, :PV_DONE_NS].min())
    found: list[list[Any]] = []
    for lane, role, first, last in (
        (0, "load", ASKING, ASKED),
        (1, "qk", QK_BEGUN, QK_DONE),
        (2, "softmax", QK_DONE, P_STORED),
        (3, "pv", PV_BEGUN, PV_DONE),
    ):
        for block, row in enumerate(steady):
            start, end = ((int(row[i]) - zero) / ghz for i in (first, last))
            found.append([lane, role, round(start), round(end), block])
    return ghz, found
