"""One call in each cache format: recorded time, measured time, floor."""

from __future__ import annotations

from statistics import median
from typing import Any, NamedTuple

import plotly.graph_objects as go

from ...bench.cases import Case, uniform_case
from ...bench.records import problem_of, results
from ...core.gpu import H200
from ...core.problem import Problem
from .. import explorer
from ..measuring import OURS, live_us, measured_card, runs
from ..session import gpu_name
from ..source import Source, formula
from ..style import BLUE, GREEN, INK, hatch, new_figure
from ..tables import Table, table

RECORD = "h200_eight_bits.jsonl"
KV_LEN = 8192
#: (query, cache) of each way to store a cache, by what a reader calls it
FORMATS = {
    "bf16 throughout": ("bf16", "bf16"),
    "bf16 query, 656 bytes": ("bf16", "fp8_656"),
    "bf16 query, e4m3 cache": ("bf16", "e4m3"),
    "e4m3 throughout": ("e4m3", "e4m3"),
}


class Time(NamedTuple):
    """Microseconds of a call, its error against the oracle, where both come from, and the floor
    by the ceilings that the record has.
    """

    us: float
    error: float
    source: Source
    floor: float


def format_case(name: str, batch: int, heads: int) -> Case:
    """The benchmark's case of a format: one query token, `KV_LEN` cached ones."""
    q_dtype, kv_format = FORMATS[name]
    return uniform_case(batch, 1, heads, KV_LEN, q_dtype=q_dtype, kv_format=kv_format)


def floor_us(problem: Problem, ceilings: dict[str, float] | None = None) -> float:
    """Least microseconds on the card, by the ceilings of a run, else by those of the preset.

    Under a bf16 query products run at the rate of bf16, or are twice as many.
    """
    if not ceilings:
        return measured_card().roofline_time(problem) * 1e6
    both = problem.q_dtype == problem.kv_format == "e4m3"
    tflops = ceilings["gemm_tflops"] * (H200.fp8_tflops / H200.bf16_tflops if both else 1.0)
    return max(problem.bytes() / ceilings["read_tbps"], problem.flops() / tflops) / 1e6


def recorded_times() -> dict[Problem, Time]:
    """Our figures of the record by what was called, not by name; of several runs the last."""
    found: dict[Problem, Time] = {}
    ceilings = None
    for run in runs(RECORD):
        parts: dict[Problem, list[Any]] = {}
        for row in results(run.rows, "ok"):
            if row["peer"] == OURS and not row["features"]:
                parts.setdefault(problem_of(row), []).append(row)
        ceilings = run.rows[0]["ceilings"] or ceilings
        for problem, rows in parts.items():
            us = median(row["us"] for row in rows)
            error = max(row["rel_error"] for row in rows)
            found[problem] = Time(us, error, run.source, floor_us(problem, ceilings))
    return found


def live_times(batch: int, heads: int) -> dict[str, float]:
    """Each format measured on this machine's GPU; nothing where there is none."""
    times = {name: live_us(format_case(name, batch, heads)) for name in FORMATS}
    return {name: us for name, us in times.items() if us is not None}


def format_table(batch: int = 64) -> Table:
    """Floors, recorded times, speed against bf16 and error, at 16 and 128 heads.

    A format without a record is listed as such.
    """
    known = recorded_times()
    rows: list[tuple[Any, ...]] = []
    for heads in (16, 128):
        base = known.get(format_case("bf16 throughout", batch, heads).problem)
        for name in FORMATS:
            problem = format_case(name, batch, heads).problem
            time = known.get(problem)
            if time is None:
                rows.append((heads, name, floor_us(problem), "not recorded", "", ""))
                continue
            faster = f"{base.us / time.us:.2f}x" if base else ""
            rows.append((heads, name, time.floor, time.us, faster, f"{time.error:.2%}"))
    source = next((time.source for time in known.values()), formula("floors"))
    columns = ("heads", "format", "floor, us", "us", "speed over bf16", "error")
    return table(columns, rows, source=source)


class FormatExplorer(explorer.Explorer):
    """A bar a format: the card's floor hatched, the recorded time solid, a live one beside it."""

    source = formula("floors: bytes and operations")
    frames_over = "heads"

    knobs = explorer.knobs(
        heads=explorer.steps("heads", (16, 128), 16, "200px"),
        batch=explorer.steps("requests", (1, 4, 64, 128), 64, "240px"),
        live=explorer.tick("measure here", False),
    )

    def figure(self, state: dict[str, Any]) -> go.Figure:
        batch, heads = state["batch"], state["heads"]
        problems = {name: format_case(name, batch, heads).problem for name in FORMATS}
        known = recorded_times()
        times = {name: known[p].us for name, p in problems.items() if p in known}
        figure = new_figure(_finding(times, batch, heads), x="us a call", height=360)
        floors = {n: known[p].floor if p in known else floor_us(p) for n, p in problems.items()}
        _bars(figure, "floor of the card", floors, "predicted")
        if times:
            label = next(known[p].source.label for p in problems.values() if p in known)
            _bars(figure, label, times, "recorded")
        live = live_times(batch, heads) if state["live"] else {}
        if live:
            _bars(figure, "measured here, now", live, "measured")
        figure.update_yaxes(autorange="reversed", categoryarray=list(FORMATS))
        figure.update_xaxes(rangemode="tozero")
        return figure

    def note(self, state: dict[str, Any]) -> str:
        chips = dict.fromkeys(time.source.chip() for time in recorded_times().values())
        words = " ".join(chips) or f"<b>Not recorded</b>: no {RECORD} in data/."
        if state["live"] and not gpu_name():
            words += " No GPU here: <b>nothing to measure</b>, recorded rows stand in."
        return f"<div>{words}</div>"


def _finding(times: dict[str, float], batch: int, heads: int) -> str:
    base, *others = FORMATS
    where = f"{batch} request{'s' * (batch > 1)}, {heads} heads"
    there = [name for name in others if name in times]
    if base not in times or not there:
        return f"{where}: not recorded"
    best = min(there, key=times.__getitem__)
    return f"{where}: {best} {times[base] / times[best]:.2f}x as fast as bf16"


def _bars(figure: go.Figure, name: str, times: dict[str, float], kind: str) -> None:
    color = {"predicted": "#C9CDD6", "recorded": BLUE, "measured": GREEN}[kind]
    figure.add_bar(
        y=list(times),
        x=list(times.values()),
        orientation="h",
        name=name,
        marker={"color": color, "pattern": hatch(kind), "line": {"width": 1, "color": INK}},
        text=[f"{us:.1f}" for us in times.values()],
        hovertemplate=f"%{{y}}: %{{x:.1f}} us, {name}<extra></extra>",
    )
