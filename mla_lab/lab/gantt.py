"""Pictures of a Timeline: lanes over time, one bar trace a role, whatever the number of tiles."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from ..plan.tile import Plan
from ..simulate import Timeline
from .style import INK, PALETTE, ROLE_COLORS, TEMPLATE, hatch

#: hatching doubles the browser's time for a bar (0.2 s for 1,100): with more bars than this only
#: the source chip shows that they are predicted
MAX_HATCHED = 1500
#: requests cycle through these fills of the attend bars, so that neighbours differ
_ATTEND = (PALETTE[0], "#6BAED6", "#08519C", "#4292C6")


def bars(timeline: Timeline, plan: Plan | None = None, *, kind: str = "measured") -> list[go.Bar]:
    """A trace of horizontal bars for each role that occurs; with `plan`, hover texts name tiles."""
    traces = []
    for role, color in ROLE_COLORS.items():
        at = timeline.only(role)
        if not len(at):
            continue
        tile = timeline.tile[at]
        marker = {"color": color, "line": {"width": 0}, "pattern": hatch(kind)}
        if role == "attend" and plan is not None:
            request = plan.tiles[tile, 0]
            marker["color"] = np.asarray(_ATTEND)[request % len(_ATTEND)]
            marker["line"] = {"width": 0.6, "color": "#FFFFFF"}
        details, hover = _details(tile, plan)
        traces.append(
            go.Bar(
                orientation="h",
                name=role,
                y=timeline.sm[at],
                base=np.round(timeline.start[at], 3),
                x=np.round(timeline.end[at] - timeline.start[at], 3),
                marker=marker,
                customdata=details,
                hovertemplate=f"SM %{{y}} · {role} %{{x:.2f}} us{hover}<extra></extra>",
                legendgroup=role,
            )
        )
    return traces


def _details(tile: np.ndarray, plan: Plan | None) -> tuple[np.ndarray | None, str]:
    """Columns that describe a tile, and their hover text; tile -1 has zeros."""
    if plan is None or not (tile >= 0).all():
        return None, ""
    columns = plan.tiles[tile, :6] + np.asarray([0, 0, 0, 0, 1, 0], np.int32)
    names = ("request", "row tile", "blocks", "to", "split", "of")
    return columns, "<br>" + " ".join(f"{n} %{{customdata[{i}]}}" for i, n in enumerate(names))


def side_by_side(
    timelines: Sequence[Timeline],
    plans: Sequence[Plan | None],
    titles: Sequence[str],
    title: str,
    *,
    height: int = 440,
    kinds: Sequence[str] = (),
) -> go.Figure:
    """Lanes of several plans over one time axis. `kinds`: source of each, default predicted."""
    figure = make_subplots(
        cols=len(timelines), rows=1, subplot_titles=list(titles), horizontal_spacing=0.07
    )
    end = max(t.makespan for t in timelines)
    kind = "predicted" if sum(map(len, timelines)) <= MAX_HATCHED else "measured"
    seen: set[str] = set()
    for column, (timeline, plan) in enumerate(zip(timelines, plans, strict=True), 1):
        for bar in bars(timeline, plan, kind=kinds[column - 1] if kinds else kind):
            bar.showlegend = bar.name not in seen
            seen.add(bar.name)
            figure.add_trace(bar, row=1, col=column)
        figure.add_vline(
            x=timeline.makespan, line={"color": INK, "dash": "dot", "width": 1.5}, col=column
        )
        figure.update_xaxes(range=[0, end * 1.04], title_text="us from the launch", col=column)
        figure.update_yaxes(
            range=[timeline.lanes - 0.5, -0.5], title_text="SM" if column == 1 else "", col=column
        )
    figure.update_layout(
        template=TEMPLATE,
        title_text=title,
        height=height,
        barmode="overlay",
        bargap=0.0,
        margin={"l": 60, "r": 16, "t": 84, "b": 80},
        legend={"y": -0.19},
    )
    figure.update_annotations(font={"size": 13, "color": INK})
    return figure
