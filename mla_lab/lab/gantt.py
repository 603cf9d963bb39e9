"""Pictures of a Timeline: lanes over time, one bar trace a role, whatever the number of tiles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from ..plan.tile import Plan
from ..simulate import Timeline
from .style import HATCH, INK, PALETTE, PAPER, ROLE_COLORS, TEMPLATE, hatch, ink_on, panels

#: hatching doubles the browser's time for a bar (0.2 s for 440): with more bars than this only the
#: source chip shows that they are predicted
MAX_HATCHED = 300
#: lanes of the roles of a CTA
ROLE_LANES = ("load", "qk", "softmax", "pv")
#: how a role is written, where not by its name
WRITTEN = {"qk": "QK", "pv": "PV"}
#: share of a figure's width between two charts
GAP = 0.07
#: requests cycle through these fills of the attend bars, so that neighbours differ
_ATTEND = (PALETTE[0], "#6BAED6", "#08519C", "#4292C6")


def bars(timeline: Timeline, plan: Plan | None = None, *, kind: str = "measured") -> list[go.Bar]:
    """Traces of horizontal bars for each role that occurs. With `plan`, neighbouring SMs that do
    the same for one request at the same time share a bar, whose hover text names the blocks.
    """
    traces = []
    for role, color in ROLE_COLORS.items():
        at = timeline.only(role)
        if not len(at):
            continue
        if plan is None:
            traces.append(_bar(timeline, role, at, color, kind))
        elif role != "attend":
            traces.append(_joined(timeline, None, role, at, color, kind))
        else:
            traces += _attended(timeline, plan, at, kind)
    return traces


def _attended(timeline: Timeline, plan: Plan, at: np.ndarray, kind: str) -> list[go.Bar]:
    """The attend bars at the positions `at`, neighbouring requests in different fills."""
    fills = plan.tiles[timeline.tile[at], 0] % len(_ATTEND)
    if not HATCH[kind]:
        return [_joined(timeline, plan, "attend", at, np.asarray(_ATTEND)[fills], kind)]
    # one trace a fill: a hatch of its own for every bar costs the browser 0.2 s for 400
    groups = [at[fills == i] for i in range(len(_ATTEND))]
    return [
        _joined(timeline, plan, "attend", some, fill, kind)
        for some, fill in zip(groups, _ATTEND, strict=True)
        if len(some)
    ]


def _bar(timeline: Timeline, role: str, at: np.ndarray, color: str, kind: str) -> go.Bar:
    """The bars of `role` at the positions `at`, one an event."""
    return go.Bar(
        orientation="h",
        name=WRITTEN.get(role, role),
        y=timeline.sm[at],
        base=np.round(timeline.start[at], 3),
        x=np.round(timeline.end[at] - timeline.start[at], 3),
        marker={"color": color, "line": {"width": 0}, "pattern": hatch(kind)},
        insidetextfont={"color": ink_on(color)},
        hovertemplate=f"SM %{{y}} · {WRITTEN.get(role, role)} %{{x:.2f}} us<extra></extra>",
        legendgroup=role,
    )


def _joined(
    timeline: Timeline,
    plan: Plan | None,
    role: str,
    at: np.ndarray,
    color: str | np.ndarray,
    kind: str,
) -> go.Bar:
    """The bars of `role` at the positions `at`, equal ones of neighbouring SMs as one; with `plan`
    those of one request alone. `color` is one fill, or one for each position.
    """
    sm, start, end = timeline.sm[at], timeline.start[at].round(3), timeline.end[at].round(3)
    tiles = np.zeros((len(at), 4), np.int32) if plan is None else plan.tiles[timeline.tile[at], :4]
    order = np.lexsort((sm, tiles[:, 0], end, start))
    sm, start, end, tiles = sm[order], start[order], end[order], tiles[order]
    fresh = (np.diff(sm) != 1) | (np.diff(start) != 0) | (np.diff(end) != 0)
    fresh |= np.diff(tiles[:, 0]) != 0
    first = np.flatnonzero(np.concatenate(([True], fresh)))
    count = np.diff(np.concatenate((first, [len(at)])))
    lowest, highest = sm[first], sm[first] + count - 1
    blocks = np.minimum.reduceat(tiles[:, 2], first), np.maximum.reduceat(tiles[:, 3], first)
    named = "" if plan is None else "<br>request %{customdata[2]}, its blocks %{customdata[3]} to "
    return go.Bar(
        orientation="h",
        name=role,
        y=(lowest + highest) / 2,
        width=count,
        base=start[first],
        x=(end - start)[first].round(3),
        marker={
            "color": color if isinstance(color, str) else color[order][first],
            "line": {"width": 0} if plan is None else {"width": 0.6, "color": PAPER},
            "pattern": hatch(kind),
        },
        customdata=np.stack((lowest, highest, tiles[first, 0], *blocks), 1),
        hovertemplate=f"SM %{{customdata[0]}} to %{{customdata[1]}} · {role} %{{x:.2f}} us"
        f"{named and named + '%{customdata[4]}'}<extra></extra>",
        legendgroup=role,
    )


def side_by_side(
    timelines: Sequence[Timeline],
    plans: Sequence[Plan | None],
    titles: Sequence[str],
    title: str,
    *,
    kinds: Sequence[str] = (),
) -> go.Figure:
    """Lanes of several plans over one time axis. `kinds`: source of each, default predicted."""
    end = max(t.makespan for t in timelines)
    kind = "predicted" if sum(map(len, timelines)) <= MAX_HATCHED else "measured"
    traces: list[go.Bar] = []
    layout: dict[str, Any] = {"annotations": [], "shapes": []}
    seen: set[str] = set()
    for i, (timeline, plan) in enumerate(zip(timelines, plans, strict=True)):
        number = str(i + 1) if i else ""
        for bar in bars(timeline, plan, kind=kinds[i] if kinds else kind):
            bar.update(xaxis=f"x{number}", yaxis=f"y{number}", showlegend=bar.name not in seen)
            seen.add(bar.name)
            traces.append(bar)
        domain = _domain(i, len(timelines))
        layout |= _axes(number, domain, end, timeline.lanes)
        layout["annotations"].append(_heading(titles[i], domain))
        layout["shapes"].append(_mark(timeline.makespan, number))
    return go.Figure(
        traces,
        {
            **layout,
            "template": TEMPLATE,
            "title": {"text": title},
            "height": 440,
            "barmode": "overlay",
            "bargap": 0.0,
            "margin": {"l": 60, "r": 16, "t": 84, "b": 80},
        },
    )


def role_lanes(
    shown: Sequence[tuple[str, str, Timeline]],
    title: str,
    height: int,
    *,
    numbered: bool = False,
    **grid: Any,
) -> go.Figure:
    """The roles of a CTA over time, a chart below the other for each (heading, kind, timeline).
    `numbered`: a bar has the number of its tile. `grid` goes to `make_subplots`.
    """
    headings = [heading for heading, _, _ in shown]
    margin = {"l": 70, "r": 20, "t": 80, "b": 60}
    figure = panels(title, headings, height=height, margin=margin, rows=len(shown), cols=1, **grid)
    for row, (_, kind, timeline) in enumerate(shown, 1):
        for bar in bars(timeline, kind=kind):
            bar.showlegend = False
            # a gap round a bar of two pixels or fewer would hide it
            thin = max(bar.x) < timeline.makespan / 400
            bar.marker.line = {"width": 1, "color": bar.marker.color if thin else PAPER}
            if numbered:
                at = timeline.only(str(bar.legendgroup))
                bar.text = [str(tile) for tile in timeline.tile[at]]
                narrow = max(bar.x) < timeline.makespan / 100
                bar.textposition = "none" if narrow else "inside"
                bar.insidetextanchor, bar.textangle = "middle", 0
                bar.hovertemplate = f"{bar.name} of tile %{{text}}<extra></extra>"
            figure.add_trace(bar, row=row, col=1)
    names = [WRITTEN.get(role, role) for role in ROLE_LANES]
    figure.update_yaxes(tickvals=list(range(4)), ticktext=names, range=[3.6, -0.6])
    figure.update_layout(barmode="overlay", bargap=0.25)
    return figure


def _domain(index: int, count: int) -> tuple[float, float]:
    """Where the chart `index` of `count` lies in the figure's width."""
    width = (1 - GAP * (count - 1)) / count
    return index * (width + GAP), index * (width + GAP) + width


def _axes(number: str, domain: tuple[float, float], end: float, lanes: int) -> dict[str, Any]:
    """The two axes of a chart: time, and SMs from the top down."""
    across = {"range": [0, end * 1.04], "title": {"text": "us from the launch"}, "domain": domain}
    down = {"range": [lanes - 0.5, -0.5], "title": {"text": "" if number else "SM"}}
    return {
        f"xaxis{number}": {"anchor": f"y{number}", **across},
        f"yaxis{number}": {"anchor": f"x{number}", **down},
    }


def _heading(text: str, domain: tuple[float, float]) -> dict[str, Any]:
    """Text above a chart."""
    place = {"x": sum(domain) / 2, "y": 1.0, "xref": "paper", "yref": "paper"}
    anchor = {"xanchor": "center", "yanchor": "bottom", "showarrow": False}
    return {"text": text, "font": {"size": 13, "color": INK}, **place, **anchor}


def _mark(makespan: float, number: str) -> dict[str, Any]:
    """A dotted line where the last SM is done."""
    place = {"x0": makespan, "x1": makespan, "xref": f"x{number}", "y0": 0, "y1": 1}
    line = {"color": INK, "dash": "dot", "width": 1.5}
    return {"type": "line", "yref": f"y{number} domain", "line": line, **place}
