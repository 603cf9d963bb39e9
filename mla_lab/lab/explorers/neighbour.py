"""Splits of a request by policy and batch, and under `batch_invariant`."""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go

from ...bench.records import medians
from ...core.problem import Problem
from ...plan import Plan, make_plan
from ...plan.choose import INVARIANT_CUTS
from .. import explorer
from ..measuring import runs
from ..source import formula
from ..style import add_bars, new_figure
from ..svg import Cell, Svg, box, document, label, tint

#: the request whose splits are shown, first in its batch
KV_LEN = 8192
TILE_KV = 64
#: workers of a 128-head step on 132 SMs: one bundle of two row tiles each
PARTS = 66
OVERHEAD = 5
#: the policy of `batch_invariant`, its record of calls with a host plan, and that of plain calls,
#: which has batches from 64 on
INVARIANT, RECORD = "fixed_size", "h200_invariant.jsonl"
PLAIN_RECORD, PLAIN_FROM = "h200_plain_invariant.jsonl", 64
#: how notebook 31 calls it: its `fixed_size` has smaller pieces
SHOWN_AS = {INVARIANT: "batch invariant"}
_STRIP = (980.0, 40.0)


def first_request_plan(policy: str, neighbours: int, length: int) -> Plan:
    """The plan of one 8192-token request beside `neighbours` others of `length` tokens."""
    problem = Problem((1,) * (1 + neighbours), (KV_LEN,) + (length,) * neighbours, heads=64)
    knobs: dict[str, Any] = {"parts": PARTS, "overhead": OVERHEAD} if policy == "greedy" else {}
    if policy == INVARIANT:  # as in the kernels
        knobs = INVARIANT_CUTS[problem.heads]
    return make_plan(problem, num_workers=PARTS, tile_kv=TILE_KV, policy=policy, **knobs)


def pieces(plan: Plan) -> list[tuple[int, int]]:
    """Block ranges of request 0, in split order."""
    mine = plan.tiles[(plan.tiles[:, 0] == 0) & (plan.tiles[:, 1] == 0)]
    return [(int(t[2]), int(t[3])) for t in sorted(mine.tolist(), key=lambda t: t[4])]


class NeighbourExplorer(explorer.Explorer):
    """The splits of one request as coloured strips, one strip a policy."""

    source = formula("plan")
    frames_over = "neighbours"

    knobs = explorer.knobs(
        neighbours=explorer.steps("neighbours", (0, 1, 2, 3, 7, 15, 31, 63, 127), 0, "300px"),
        length=explorer.steps("of length", (512, 1024, 2048, 4096, 8192), 8192, "280px"),
        policy=explorer.choice("policy", ["greedy", "fa3", "uniform", "cost"], "greedy"),
    )

    def figure(self, state: dict[str, Any]) -> Svg:
        policies = (state["policy"], INVARIANT)
        plans = [first_request_plan(p, state["neighbours"], state["length"]) for p in policies]
        parts, counts = [], []
        for row, (policy, plan) in enumerate(zip(policies, plans, strict=True)):
            cuts = pieces(plan)
            name = SHOWN_AS.get(policy, policy)
            counts.append(f"{name} {len(cuts)}")
            parts.append(_strip(20 + row * 92, name, cuts))
        finding = f"8192 tokens beside {state['neighbours']} others: splits " + ", ".join(counts)
        parts.insert(0, label(0, 10, finding, size=16, anchor="start"))
        return document(_STRIP[0] + 10, 210, "".join(parts), finding)


def _strip(y: float, policy: str, cuts: list[tuple[int, int]]) -> str:
    """One request as a bar of 128 blocks, one fill a split."""
    scale = _STRIP[0] / (KV_LEN // TILE_KV)
    heading = f"{policy}: {len(cuts)} split{'s' * (len(cuts) > 1)}"
    parts = [label(0, y + 20, heading, size=14, anchor="start")]
    for i, (begin, end) in enumerate(cuts):
        width = (end - begin) * scale
        title = f"split {i}: blocks {begin} to {end - 1}"
        cell = Cell(str(i) if width > 20 else "", tint(i), title)
        parts.append(box(begin * scale, y + 34, width, _STRIP[1], cell))
    return "".join(parts)


def invariance_costs(record: str = RECORD) -> dict[str, float]:
    """Time of a batch-invariant call over the default one by case, as recorded in one run each."""
    found: dict[str, float] = {}
    for run in runs(record):
        us = {case: value for (case, _), value in medians(run.rows).items()}
        found |= {c: us[f"{c}_invariant"] / us[c] for c in us if f"{c}_invariant" in us}
    return found


def invariance_chart(kv_len: int = 8192) -> go.Figure:
    """The recorded price of batch invariance over the batch, for 16 and 128 heads; the axis names
    card and dates.
    """
    planned, plain, batches = invariance_costs(), invariance_costs(PLAIN_RECORD), (1, 16, 64, 128)
    series = {
        heads: [
            (plain if batch >= PLAIN_FROM else planned).get(f"b{batch}_q1_h{heads}_kv{kv_len}")
            for batch in batches
        ]
        for heads in (16, 128)
    }
    small, large = (max(filter(None, (row[i] for row in series.values()))) for i in (0, 2))
    figure = new_figure(
        f"Batch invariance costs up to {small:.1f}x alone, {large:.2f}x among 64",
        x=f"requests of {kv_len} tokens<br>{_sources()}",
        y="recorded time over the default's",
        height=360,
    )
    for heads, ratios in series.items():
        add_bars(figure, list(map(str, batches)), ratios, ".2f", name=f"{heads} heads")
    figure.add_hline(y=1)
    figure.update_xaxes(type="category")
    figure.update_yaxes(range=[0, 1.15 * small])
    return figure


def _sources() -> str:
    """Card and date of each half of the chart."""
    words = []
    for record, call in (
        (RECORD, f"below {PLAIN_FROM} planned on the host"),
        (PLAIN_RECORD, f"from {PLAIN_FROM} on plain calls"),
    ):
        if found := runs(record):
            words.append(f"{call}: {found[-1].source.label}")
    return "<br>".join(words) or "not recorded"
