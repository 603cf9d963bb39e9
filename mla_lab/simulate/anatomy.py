"""Anatomy of a call: phases that add up to its time, and spans as a `Timeline`.

Measured rows are JSON lines (`data/runtime/anatomy.schema.json`), taken by stamps of the global
timer inside a kernel or by a profiler around it; a prediction of the same form comes from the
simulator's critical path.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..core import files
from ..core.errors import invalid
from ..core.problem import Problem
from ..core.resources import data_dir
from ..plan import KernelConfig, Plan, choose
from .constants import Constants
from .launch import simulate
from .recorded import recorded
from .timeline import ROLES, SAME_US, Event, Timeline

RECORD = "records/h200_anatomy.jsonl"
SCHEMA = "anatomy/1"
#: phases of a call in order of time; a row may lack some, or have `loop` in more detail
PHASES = (
    "launch",
    "setup",
    "first_byte",
    "qk",
    "softmax",
    "pv",
    "loop",
    "exchange",
    "wait",
    "merge",
    "write",
    "gap",
    "idle",
    "other",
)
LANES = ("CTA", "role")
#: keys of a row of each kind beside those of `_Measured`, and their types
CALL: files.Keys = {"call_us": (int, float), "phases": list}
SPANS: files.Keys = {"lanes": str, "ns": list}
#: largest relative difference between a call and the sum of its phases
SLACK = 0.03


@dataclass(frozen=True)
class _Measured:
    case: str
    peer: str
    kernel: str
    card: str
    date: str
    commit: str


@dataclass(frozen=True)
class Anatomy(_Measured):
    """One call of one peer: (phase, us) in order of time."""

    call_us: float
    phases: tuple[tuple[str, float], ...]
    method: str = ""
    #: the same call without profiling stamps, as the benchmark times it; 0 without a measurement
    plain_us: float = 0.0


@dataclass(frozen=True)
class Spans(_Measured):
    """Recorded spans of CTAs, or of the roles of one CTA, as a timeline."""

    lanes: str
    timeline: Timeline
    #: SM clock in GHz during the measurement; 0 if unknown
    clock_ghz: float = 0.0


def read(path: Path | None = None) -> tuple[list[Anatomy], list[Spans]]:
    """Rows of a record, both kinds; empty where the file (default: that of `data/`) is missing.

    Raises InvalidInput for a row that breaks a rule, with its line.
    """
    path = path or data_dir() / RECORD
    phases: list[Anatomy] = []
    spans: list[Spans] = []
    if not path.exists():
        return phases, spans
    for number, line in files.lines_of(path, "anatomy"):
        place = f"{path.name}:{number}"
        row = files.check(files.parse_json(line, place), {}, place)
        if row.get("kind") == "spans":
            spans.append(_spans(files.check(row, SPANS, place), place))
        else:
            phases.append(_phases(files.check(row, CALL, place), place))
    return phases, spans


def _common(row: dict[str, Any], place: str) -> dict[str, str]:
    if row.get("schema") != SCHEMA:
        raise invalid(place, row.get("schema"), SCHEMA)
    named: files.Keys = {field.name: str for field in fields(_Measured)}
    files.check(row, named, place)
    return {name: row[name] for name in named}


def _number(row: dict[str, Any], name: str, place: str) -> float:
    """A number that a row may have, else 0."""
    found = {name: row.get(name, 0.0)}
    return float(files.check(found, {name: (int, float)}, place)[name])


def _phases(row: dict[str, Any], place: str) -> Anatomy:
    common = _common(row, place)
    if not row["phases"]:
        raise invalid(f"{place}: phases", "none", "phases that add up to the call")
    try:
        us = tuple((name, ns / 1e3) for name, ns in row["phases"])
        unknown = {name for name, _ in us} - set(PHASES)
    except (TypeError, ValueError):
        got = repr(row["phases"])[:60]
        raise invalid(f"{place}: phases", got, "pairs of a phase and its ns") from None
    if unknown:
        raise invalid(f"{place}: phases", sorted(map(str, unknown)), PHASES)
    call = float(row["call_us"])
    total = sum(value for _, value in us)
    if not abs(total - call) <= SLACK * call:  # so written for what is no number
        raise invalid(
            f"{place}: phases",
            f"{total:.2f} us together, {call:.2f} us the call",
            "phases that add up to the call; the unexplained as `other`",
        )
    least = min(value for _, value in us)
    if least < -SLACK * call:
        raise invalid(f"{place}: phases", f"one of {least:.2f} us", "0 or more")
    plain = _number(row, "plain_us", place)
    return Anatomy(**common, call_us=call, phases=us, method=row.get("method", ""), plain_us=plain)


def _spans(row: dict[str, Any], place: str) -> Spans:
    common = _common(row, place)
    if row["lanes"] not in LANES:
        raise invalid(f"{place}: lanes", row["lanes"], LANES)
    one_cta = row["lanes"] == "role"
    try:
        events = [
            Event(int(lane), 0 if one_cta else int(lane), role, a / 1e3, b / 1e3, int(tile))
            for lane, role, a, b, tile in row["ns"]
        ]
        unknown = {event.role for event in events} - set(ROLES)
    except (TypeError, ValueError):
        got = repr(row["ns"])[:60]
        raise invalid(f"{place}: ns", got, "lane, role, begin and end (ns), and tile") from None
    if unknown or not events:
        raise invalid(f"{place}: ns", sorted(map(str, unknown)) or "none", f"spans of {ROLES}")
    timeline = Timeline.from_events(events, lanes=1 + max(e.sm for e in events))
    _check_lanes(timeline, place)
    clock = _number(row, "clock_ghz", place)
    return Spans(**common, lanes=row["lanes"], timeline=timeline, clock_ghz=clock)


def _check_lanes(timeline: Timeline, place: str) -> None:
    """Spans end after they begin, and those of a lane do not overlap."""
    events = list(timeline)
    for event in events:
        if event.end < event.start:
            raise invalid(f"{place}: ns", event, "spans that end after they begin")
    for before, after in itertools.pairwise(events):
        if before.sm == after.sm and after.start < before.end - 2 * SAME_US:
            raise invalid(f"{place}: ns", f"{before} and {after}", "lanes without overlap")


def chosen(problem: Problem) -> tuple[KernelConfig, Plan, Constants, Timeline]:
    """The kernel that `choose` selects for an H200, its plan, fitted constants and prediction."""
    choice = choose(problem)
    config, plan = choice.config, choice.plan(problem)
    constants = recorded().constants[config.kernel]
    return config, plan, constants, simulate(plan, constants, cluster=config.cluster)


def predicted(case: str, problem: Problem) -> Anatomy:
    """Predicted phases of the kernel that `choose` selects."""
    config, plan, constants, timeline = chosen(problem)
    parts: list[tuple[str, float]] = []
    now = 0.0
    for event in timeline.critical_path():
        if event.start > now + SAME_US:
            parts.append(("wait", event.start - now))
        if event.role == "attend":
            first = min(constants.first_byte_us, event.end - event.start)
            parts += [("first_byte", first), ("loop", event.end - event.start - first)]
        elif event.role == "write" and plan.tiles[event.tile, 6] >= 0:
            parts.append(("exchange", event.end - event.start))
        else:
            parts.append((event.role, event.end - event.start))
        now = event.end
    return Anatomy(
        case,
        "simulator",
        config.name(),
        constants.card,
        "",
        "",
        timeline.makespan,
        tuple(parts),
        recorded().origin,
    )


def summed(phases: Iterable[tuple[str, float]]) -> dict[str, float]:
    """us by phase, in the order of `PHASES`; phases of one name are added up."""
    total = dict.fromkeys(PHASES, 0.0)
    for name, us in phases:
        total[name] += us
    return {name: us for name, us in total.items() if us}
