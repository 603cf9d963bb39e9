"""Two split policies over one batch: lanes over time, and what each costs."""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go

from ...core.problem import Problem
from ...plan import POLICIES, Plan
from ...simulate import Timeline
from .. import explorer
from ..gantt import side_by_side
from ..lengths import PRESETS, preset_lengths, trace_lengths
from ..measuring import measured_card
from ..predicted import MERGES, PLAIN, partial_mb, planned
from ..source import PREDICTED

HEADS = (16, 32, 64, 128)
SMS = (66, 78, 114, 132, 148)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256)
LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
PAGES = (16, 32, 64, 128)


def summary(plan: Plan, timeline: Timeline) -> str:
    """Two short lines for the head of a Gantt."""
    return (
        f"<b>{plan.policy}</b>: {timeline.makespan:.1f} us, {plan.num_tiles} tiles<br>"
        f"{partial_mb(plan):.1f} MB of partials in fp32, tail {max(0.0, timeline.tail()):.1f} us, "
        f"SMs busy {timeline.utilisation():.0%}"
    )


class PlanExplorer(explorer.Explorer):
    """Lengths, heads, card and two policies; the picture is both Gantt charts on one axis."""

    source = PREDICTED
    frames_over = "batch"

    knobs = explorer.knobs(
        left=explorer.choice("left policy", [*POLICIES, PLAIN], "fa3", "240px"),
        right=explorer.choice("right policy", [*POLICIES, PLAIN], "cost", "240px"),
        lengths=explorer.choice("lengths", list(PRESETS), "ragged", "210px"),
        heads=explorer.steps("heads", HEADS, 128, "220px"),
        batch=explorer.steps("batch", BATCHES, 16, "290px"),
        kv_len=explorer.steps("mean KV tokens", LENGTHS, 4096, "300px"),
        sms=explorer.steps("SMs", SMS, 132, "220px"),
        merge=explorer.choice("merge", MERGES, MERGES[0], "200px"),
        page=explorer.steps("page size", PAGES, 64, "240px"),
        trace=explorer.field("or a trace file (CSV, JSONL)", "", "560px"),
    )

    def lengths(self, state: dict[str, Any]) -> tuple[int, ...]:
        """KV lengths of `state`: the trace's where a file is named, else the preset's."""
        path = state["trace"].strip()
        if path:
            return trace_lengths(path, state["batch"])
        return preset_lengths(state["lengths"], state["batch"], state["kv_len"])

    def problem(self, state: dict[str, Any]) -> Problem:
        """The decode step of `state`, one new token a request."""
        lengths = self.lengths(state)
        return Problem((1,) * len(lengths), lengths, state["heads"], page_size=state["page"])

    def figure(self, state: dict[str, Any]) -> go.Figure:
        problem = self.problem(state)
        sides = [
            planned(problem, state[side], state["sms"], state["merge"])
            for side in ("left", "right")
        ]
        plans, timelines = zip(*sides, strict=True)
        return side_by_side(
            timelines,
            plans,
            [summary(plan, timeline) for plan, timeline in sides],
            finding(plans, timelines),
        )

    def note(self, state: dict[str, Any]) -> str:
        problem = self.problem(state)
        pages = sum(-(-n // problem.page_size) for n in problem.kv_lens)
        spare = 1 - problem.total_kv / (pages * problem.page_size)
        card = measured_card()
        read_tbps = card.read_tbps * state["sms"] / card.sms
        floor = problem.total_kv * problem.kv_token_bytes / 1e6 / read_tbps
        return (
            f"<div>{problem.batch} requests, {problem.total_kv:,} cached tokens on {pages:,} pages "
            f"({spare:.1%} of their slots unused), {problem.intensity():.0f} operations a byte; "
            f"reading them once takes {floor:.1f} us.</div>"
        )


def finding(plans: tuple[Plan, ...], timelines: tuple[Timeline, ...]) -> str:
    """The comparison as a sentence."""
    (left, right), (a, b) = (p.policy for p in plans), (t.makespan for t in timelines)
    if left == right:
        return f"{left}: {a:.1f} us predicted"
    if abs(a - b) < 0.01 * max(a, b):
        return f"{left} and {right} are within 1 % of each other"
    fast, slow = (left, right) if a < b else (right, left)
    return f"{fast} is predicted {max(a, b) / min(a, b):.3g}x as fast as {slow}"
