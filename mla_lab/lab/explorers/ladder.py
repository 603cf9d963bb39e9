"""The ladder as pictures: gains step by step, and the compiled code of each step."""

from __future__ import annotations

from html import escape
from typing import Any

import plotly.graph_objects as go

from ...backends.cuda.ladder import STEPS
from ...bench.ladder import CASES
from .. import explorer, ladder_facts
from ..ladder_facts import StepFacts, rungs
from ..style import BLUE, GREY, LOG_TICKS, ORANGE, hatch, instruction_bars, new_figure

LABELS = [f"{step.number} {step.name}" for step in STEPS]
#: instruction classes in reading order
CLASSES = ("matrix", "shared", "global", "barrier", "special function", "shuffle", "other")


class LadderExplorer(explorer.Explorer):
    """Microseconds of every step in one case, predicted and recorded, on a logarithmic axis."""

    frames_over = "case"

    knobs = explorer.knobs(
        case=explorer.choice("case", [case.name for case in CASES], CASES[0].name, "330px"),
        gains=explorer.tick("gains, not times", False),
    )

    def figure(self, state: dict[str, Any]) -> go.Figure:
        found = rungs(state["case"])
        gains = state["gains"]
        guessed = [r.predicted_gain if gains else r.predicted_us for r in found]
        came = [r.gain if gains else r.us for r in found]
        figure = new_figure(
            _title(state["case"]),
            y="times faster than the step before" if gains else "microseconds a call",
            height=400,
        )
        source = ladder_facts.source()
        label = source.label if source else "not recorded"
        for name, values, color, kind in (
            ("predicted, on paper", guessed, GREY, "predicted"),
            (label, came, BLUE, "recorded"),
        ):
            figure.add_bar(
                x=LABELS,
                y=values,
                name=name,
                text=[_short(v) for v in values],
                customdata=values,
                hovertemplate="%{x}: %{customdata:,.3~f}<extra></extra>",
                textposition="outside",
                marker={"color": color, "pattern": hatch(kind)},
            )
        figure.update_yaxes(type="log", dtick=1)
        if gains:
            figure.update_yaxes(tickvals=LOG_TICKS)
        return figure

    def note(self, state: dict[str, Any]) -> str:
        source = ladder_facts.source()
        return f"<div>{source.chip() if source else '<b>not recorded</b>'}</div>"


def _short(value: float | None) -> str:
    """A number above a bar, which leaves room for that of the next bar."""
    if value is None:
        return ""
    if value >= 1000:
        return f"{value / 1000:.{0 if value >= 10_000 else 1}f}k"
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"


def _title(case: str) -> str:
    """The finding: total gain, and the step with the largest one."""
    found = rungs(case)
    if found[0].us is None or found[-1].us is None:
        return f"{case}: predicted only"
    best = max((r for r in found if r.gain), key=lambda r: r.gain or 0.0)
    whole = found[0].us / found[-1].us
    steps = len(found) - 1
    return (
        f"{whole:,.0f} times faster in {steps} steps; the largest gain is step {LABELS[best.step]}"
    )


class LadderXray(explorer.Explorer):
    """Instructions of a step and of the one before, by class; the note has the idea."""

    frames_over = "step"

    knobs = explorer.knobs(step=explorer.choice("step", LABELS[1:], LABELS[4], "330px"))

    def sides(self, state: dict[str, Any]) -> tuple[StepFacts, StepFacts]:
        """The step before, and the step."""
        number = LABELS.index(state["step"])
        steps, _ = ladder_facts.facts()
        return steps[number - 1], steps[number]

    def figure(self, state: dict[str, Any]) -> go.Figure:
        before, after = self.sides(state)
        moved = [(after.classes.get(c, 0) - before.classes.get(c, 0), c) for c in CLASSES]
        change, kind = max(moved, key=lambda pair: abs(pair[0]))
        title = (
            f"{LABELS[after.step]}: {change:+,} {kind} instructions, "
            f"{after.registers - before.registers:+} registers"
        )
        pairs = ((before, GREY), (after, ORANGE))
        drawn = {LABELS[side.step]: (color, side.classes) for side, color in pairs}
        return instruction_bars(title, CLASSES, drawn, decades=4)

    def note(self, state: dict[str, Any]) -> str:
        _, source = ladder_facts.facts()
        lines = [
            f"<b>{escape(LABELS[side.step])}</b>: {escape(STEPS[side.step].idea)}. "
            f"{side.registers} registers, {side.shared_bytes / 1024:.0f} KB of shared memory, "
            f"{side.spills} spills"
            for side in self.sides(state)
        ]
        return f"<div>{source.chip()} " + "<br>".join(lines) + "</div>"
