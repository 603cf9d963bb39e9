"""One plan's lanes over time, with the bounds that no schedule can beat."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import plotly.graph_objects as go

from ...core.problem import Problem
from ...plan import POLICIES, Plan, make_plan
from ...simulate import Constants, Timeline, bounds, constants_for, simulate
from .. import explorer
from ..gantt import side_by_side
from ..lengths import PRESETS, preset_lengths
from ..source import PREDICTED
from ..style import GREEN, ORANGE, RED

_BOUND_COLORS = {"matrix": GREEN, "read": ORANGE, "longest": RED}
_BOUND_NAMES = {
    "matrix": "all work, spread evenly",
    "read": "cache read once",
    "longest": "longest tile alone",
}


@lru_cache(maxsize=64)
def scheduled(problem: Problem, schedule: str, policy: str, sms: int) -> tuple[Plan, Timeline]:
    """A plan and its predicted timeline on `sms` SMs."""
    plan = make_plan(
        problem, tile_rows=min(64, problem.heads), num_workers=sms, policy=policy, schedule=schedule
    )
    return plan, simulate(plan, card_of(plan, sms))


def card_of(plan: Plan, sms: int) -> Constants:
    """The fitted card with so many SMs, at one clock: waves alone make a difference."""
    return replace(constants_for(plan.tile_rows).at_full_load(), sms=sms)


class WaveExplorer(explorer.Explorer):
    """Requests on SMs: whole tiles or split ones, one CTA a tile or persistent workers."""

    source = PREDICTED
    frames_over = "batch"

    knobs = explorer.knobs(
        batch=explorer.steps(
            "requests",
            (16, 32, 48, 60, 64, 66, 67, 72, 80, 96, 112, 128, 132, 133, 160, 198, 199),
            67,
            "330px",
        ),
        kv_len=explorer.steps("mean KV tokens", (512, 1024, 2048, 4096, 8192), 2048, "320px"),
        lengths=explorer.choice("lengths", list(PRESETS), "all equal", "220px"),
        heads=explorer.steps("heads", (16, 64, 128), 128, "210px"),
        schedule=explorer.choice("schedule", ["grid", "persistent"], "grid", "220px"),
        policy=explorer.choice("policy", list(POLICIES), "none", "200px"),
        sms=explorer.steps("SMs", (66, 114, 132, 148), 132, "210px"),
    )

    def run(self, state: dict[str, Any]) -> tuple[Plan, Timeline]:
        """The plan of `state` and its timeline."""
        lengths = preset_lengths(state["lengths"], state["batch"], state["kv_len"])
        problem = Problem((1,) * len(lengths), lengths, state["heads"])
        return scheduled(problem, state["schedule"], state["policy"], state["sms"])

    def figure(self, state: dict[str, Any]) -> go.Figure:
        plan, timeline = self.run(state)
        share = max(0.0, timeline.tail() / timeline.makespan)  # no -0 %
        subtitle = (
            f"{plan.num_tiles} work tiles, {plan.num_workers} workers on {timeline.lanes} SMs; "
            f"SMs attend {timeline.utilisation():.0%} of the time"
        )
        title = f"{timeline.makespan:.1f} us, of which the mean SM waits {share:.0%} at the end"
        figure = side_by_side([timeline], [plan], [subtitle], title)
        for name, value in bounds(plan, card_of(plan, state["sms"])).items():
            line = {"color": _BOUND_COLORS[name], "dash": "dash", "width": 2}
            figure.add_scatter(
                x=[value, value],
                y=[-0.5, timeline.lanes - 0.5],
                mode="lines",
                line=line,
                name=f"{_BOUND_NAMES[name]}: {value:.1f}",
            )
        return figure

    def note(self, state: dict[str, Any]) -> str:
        _, timeline = self.run(state)
        steps = " → ".join(
            f"{e.role} {e.end - e.start:.1f}"
            for e in timeline.critical_path()
            if e.role != "launch"
        )
        return f"<div>Critical path, us: {steps[:400]}</div>"
