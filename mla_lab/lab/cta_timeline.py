"""One launch, CTA by CTA: the prediction of the simulator beside clocks read inside the kernel."""

from __future__ import annotations

import plotly.graph_objects as go

from ..bench.cases import Case, anchor_cases
from ..core.errors import invalid
from ..simulate import Timeline
from ..simulate.anatomy import chosen
from .explorers import anatomy as anatomy_explorer
from .explorers.anatomy import from_zero
from .gantt import side_by_side
from .source import Source


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
    spans = [s for s in anatomy_explorer.recorded_rows()[1] if s.lanes == "CTA" and s.case == name]
    words = "its CTAs are not recorded yet"
    for found in spans[:1]:
        timeline = from_zero(found.timeline)
        shown.append(timeline)
        label = Source("recorded", card=found.card, date=found.date).label
        titles.append(f"{label}: {timeline.makespan:.1f} us, {timeline.lanes} CTAs")
        kinds.append("recorded")
        words = (
            f"keys are attended after {attended(guess):.1f} us predicted, "
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
