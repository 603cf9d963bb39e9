"""Anatomy of one call: phases that add up to its time, predicted and recorded, on one axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import plotly.graph_objects as go

from ...bench.cases import Case, anchor_cases, uniform_case
from ...core.errors import invalid
from ...simulate import H200, Pipeline, Timeline, run_pipeline
from ...simulate.anatomy import PHASES, Anatomy, Spans, chosen, predicted, read, summed
from .. import explorer
from ..gantt import role_lanes, side_by_side
from ..source import PREDICTED, Source
from ..style import PALETTE, PAPER, hatch, ink_on, new_figure
from ..tables import Table, table

#: (batch, heads, cached tokens) of the predicted calls
SHAPES = ((1, 16, 1024), (1, 16, 8192), (1, 128, 1024), (1, 128, 8192), (4, 128, 4096))
#: label and colour of a phase; waits are grey
DRAWN = {
    "launch": ("launch", "#C9CDD6"),
    "setup": ("set-up", PALETTE[6]),
    "first_byte": ("first byte", PALETTE[4]),
    "qk": ("QK", "#08519C"),
    "softmax": ("softmax", PALETTE[1]),
    "pv": ("PV", "#6BAED6"),
    "loop": ("loop over blocks", PALETTE[0]),
    "exchange": ("leave a partial", PALETTE[2]),
    "wait": ("wait for others", "#8A8A8A"),
    "merge": ("merge", PALETTE[5]),
    "write": ("write the result", PALETTE[3]),
    "gap": ("between launches", "#B9BEC8"),
    "idle": ("done, others are not", "#D3C6DA"),
    "other": ("not explained", "#E3E6EC"),
}
OURS = "mla-lab"


@cache
def recorded_rows() -> tuple[tuple[Anatomy, ...], tuple[Spans, ...]]:
    """`data/records/h200_anatomy.jsonl`, once a process; empty where there is none."""
    phases, spans = read()
    return tuple(phases), tuple(spans)


@cache
def predictions() -> dict[str, Anatomy]:
    """The simulator's phases by case, once a process."""
    cases = [uniform_case(batch, 1, heads, kv_len) for batch, heads, kv_len in SHAPES]
    return {case.name: predicted(case.name, case.problem) for case in cases}


def source_of(anatomy: Anatomy) -> Source:
    """Predicted, or recorded with card and date."""
    if not anatomy.date:
        return PREDICTED
    return Source("recorded", card=anatomy.card, date=anatomy.date)


class AnatomyExplorer(explorer.Explorer):
    """One call as a bar of phases, one bar a kernel: simulator, ours, peers."""

    frames_over = "case"

    def controls(self) -> explorer.Knobs:
        recorded = [a.case for a in recorded_rows()[0]]
        cases = list(dict.fromkeys([*recorded, *predictions()]))
        first = "b1_q1_h16_kv8192"
        return explorer.knobs(
            case=explorer.choice("call", cases, first if first in cases else cases[0], "300px"),
            share=explorer.tick("as shares of the call", False),
        )

    def calls(self, case: str) -> list[Anatomy]:
        """Recorded calls of `case`, ours first, then the prediction."""
        found = [a for a in recorded_rows()[0] if a.case == case]
        found.sort(key=lambda a: (a.peer != OURS, a.call_us))
        guess = predictions().get(case)
        return [*found, guess] if guess else found

    def figure(self, state: dict[str, Any]) -> go.Figure:
        calls = self.calls(state["case"])
        figure = new_figure(finding(calls), height=230 + 54 * len(calls))
        lanes = [f"{c.peer}, {c.call_us:.1f} us" for c in calls]
        sums = [summed(c.phases) for c in calls]
        for phase in PHASES:
            us = [s.get(phase, 0.0) for s in sums]
            if not any(us):
                continue
            name, color = DRAWN[phase]
            shown = [u / c.call_us if state["share"] else u for u, c in zip(us, calls, strict=True)]
            kinds = [source_of(c).kind for c in calls]
            marker = {"color": color, "line": {"width": 1, "color": PAPER}}
            marker["pattern"] = {
                **hatch("predicted"),
                "shape": [hatch(kind)["shape"] for kind in kinds],
            }
            figure.add_bar(
                orientation="h",
                y=lanes,
                x=shown,
                name=name,
                marker=marker,
                text=[
                    f"{u:.1f}" if u > 0.05 * c.call_us else ""
                    for u, c in zip(us, calls, strict=True)
                ],
                textposition="inside",
                textangle=0,
                insidetextfont={"color": ink_on(color)},
                insidetextanchor="middle",
                customdata=us,
                hovertemplate=f"%{{y}}<br>{name} %{{customdata:.2f}} us<extra></extra>",
            )
        figure.update_layout(
            barmode="stack",
            # a number that does not fit is left to the hover text
            uniformtext={"minsize": 11, "mode": "hide"},
            margin={"l": 70, "r": 20, "t": 56, "b": 110},
            legend={"traceorder": "normal"},
        )
        figure.update_xaxes(
            title_text="share of the call" if state["share"] else "us",
            tickformat=".0%" if state["share"] else None,
        )
        figure.update_yaxes(autorange="reversed")
        return figure

    def note(self, state: dict[str, Any]) -> str:
        calls = self.calls(state["case"])
        chips = {source_of(c).chip() for c in calls}
        recorded = any(c.date for c in calls)
        missing = "" if recorded else " Stamps of this call: <b>not recorded</b>."
        methods = [f"<b>{c.peer}</b>: {c.method}.{_plain(c)}" for c in calls if c.date]
        return f"<div>{' '.join(sorted(chips))}{missing}<br>{'<br>'.join(methods)}</div>"


def _plain(call: Anatomy) -> str:
    """Time of the same call without clocks inside the kernel."""
    if not call.plain_us:
        return ""
    return f" Without stamps, a share of the graph's own start included: {call.plain_us:.1f} us."


def finding(calls: Sequence[Anatomy]) -> str:
    """The largest phase of the first call, as a sentence."""
    call = calls[0]
    parts = summed(call.phases)
    name = max(parts, key=lambda phase: parts[phase])
    away = (parts.get("exchange", 0) + parts.get("wait", 0) + parts.get("merge", 0)) / call.call_us
    most = f"{DRAWN[name][0]}: {parts[name] / call.call_us:.0%} of {call.call_us:.1f} us"
    return f"{most}; splitting and merging takes {away:.0%}"


def anatomy_table() -> Table:
    """Every call with its phases in us, recorded ones first; unknown phases are empty."""
    calls = [*recorded_rows()[0], *predictions().values()]
    used = [p for p in PHASES if any(summed(c.phases).get(p) for c in calls)]
    rows = [
        (c.case, c.peer, source_of(c).kind, c.call_us, *(summed(c.phases).get(p, "") for p in used))
        for c in calls
    ]
    return table(("call", "kernel of", "source", "us", *(DRAWN[p][0] for p in used)), rows)


def predicted_roles(num_blocks: int, clock_ghz: float = H200.clock_ghz) -> Timeline:
    """The four roles of one CTA over `num_blocks` blocks of 64 x 64, us."""
    spans = run_pipeline(Pipeline.of(H200, 64, 64, 1152), num_blocks)
    return spans.timeline(1 / (clock_ghz * 1e3))


def role_figure() -> go.Figure:
    """One CTA's roles over time: predicted, and below it what was recorded of a kernel of ours."""
    recorded = [s for s in recorded_rows()[1] if s.lanes == "role"]
    blocks = max((from_zero(s.timeline).tile.max() + 1 for s in recorded[:1]), default=10)
    clock = next((s.clock_ghz for s in recorded[:1] if s.clock_ghz), H200.clock_ghz)
    shown = [("predicted", "predicted", predicted_roles(int(blocks), clock))]
    for spans in recorded[:1]:
        label = Source("recorded", card=spans.card, date=spans.date).label
        shown.append((f"{spans.case}: {label}", "recorded", from_zero(spans.timeline)))
    end = "; stamps of a kernel are not recorded yet" if len(shown) == 1 else ""
    paces = " and ".join(f"{pace(t):.2f} us {kind}" for _, kind, t in shown)
    shares = " and ".join(f"{busy(t, clock):.0%}" for _, _, t in shown)
    title = f"A block takes {paces}; matrix unit busy {shares}{end}"
    figure = role_lanes(shown, title, 110 + 190 * len(shown), shared_xaxes=True)
    figure.update_xaxes(title_text="us", row=len(shown), col=1)
    return figure


def from_zero(timeline: Timeline) -> Timeline:
    """The same spans, counted from the first one's start."""
    first = timeline.start.min()
    return replace(timeline, start=timeline.start - first, end=timeline.end - first)


def pace(timeline: Timeline) -> float:
    """us a block: mean distance of the ends of PV, first and last block aside."""
    ends = np.sort(timeline.end[timeline.only("pv")])
    ends = ends[1:-1] if len(ends) > 3 else ends
    return float((ends[-1] - ends[0]) / max(1, len(ends) - 1))


def busy(timeline: Timeline, clock_ghz: float) -> float:
    """Tensor-core utilisation: MMA time of a block over `pace`."""
    needed = H200.matrix_clocks(64, 64) / (clock_ghz * 1e3)
    return needed / pace(timeline)


def case_of(name: str) -> Case:
    """The benchmark's case of that name. Raises InvalidInput without one."""
    known = {case.name: case for case in anchor_cases()}
    if name not in known:
        raise invalid("case", repr(name), "one of the benchmark's, such as b1_q1_h128_kv8192")
    return known[name]


def predicted_ctas(name: str) -> Timeline:
    """The simulator's lanes for a case, from the first instruction on."""
    timeline = chosen(case_of(name).problem)[-1]
    events = [event for event in timeline if event.role != "launch"]
    return from_zero(Timeline.from_events(events, timeline.lanes))


def cta_figure(name: str = "b1_q1_h128_kv8192") -> go.Figure:
    """Lanes over time: predicted left, recorded right if there is a record."""
    guess = predicted_ctas(name)
    shown, titles, kinds = (
        [guess],
        [f"predicted: {guess.makespan:.1f} us, {guess.lanes} workers"],
        ["predicted"],
    )
    spans = [s for s in recorded_rows()[1] if s.lanes == "CTA" and s.case == name]
    words = "its CTAs are not recorded yet"
    for found in spans[:1]:
        timeline = from_zero(found.timeline)
        shown.append(timeline)
        label = Source("recorded", card=found.card, date=found.date).label
        titles.append(f"{label}: {timeline.makespan:.1f} us, {timeline.lanes} CTAs")
        kinds.append("recorded")
        words = (
            f"the mainloop ends after {attended(guess):.1f} us predicted, "
            f"{attended(timeline):.1f} recorded"
        )
    none = [None] * len(shown)
    figure = side_by_side(shown, none, titles, f"{name}: {words}", kinds=kinds)
    figure.update_xaxes(title_text="us from the first instruction")
    figure.update_layout(yaxis_title_text="lane")
    return figure


def attended(timeline: Timeline) -> float:
    """Mean end of the mainloop over lanes, us."""
    ends = {event.sm: event.end for event in timeline if event.role == "attend"}
    return sum(ends.values()) / len(ends)
