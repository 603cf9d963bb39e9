"""Split policies side by side: a table, curves over the batch, FA3's efficiency rule drawn."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go

from ..bench.records import medians
from ..core.problem import Problem
from ..plan import POLICIES, RULES, Plan
from .measuring import runs
from .predicted import MERGES, partial_mb, planned
from .source import PREDICTED
from .style import GREY, INK, PALETTE, RED, SYMBOLS, Line, add_lines, log_ticks, new_figure
from .tables import Table, table

#: variants of our kernels, each timed on the anchor cases
SWEEP = "h200_sweep.jsonl"
#: FlashAttention-3 takes the fewest splits that reach this share of the best efficiency
FA3_SHARE = 0.85
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")


def most_splits(plan: Plan) -> int:
    """Pieces of the request that is split most."""
    return int(plan.tiles[:, 5].max())


def policy_table(problem: Problem, sms: int = 132) -> Table:
    """Every policy, the plain call's rule and that of a batch-invariant one on one problem, both
    ways to merge, the quickest first by the simulator.
    """
    rows = []
    for policy in (*POLICIES, *RULES):
        plan, timeline = planned(problem, policy, sms)
        # a call without a plan merges in its own launch
        second = None if policy in RULES else planned(problem, policy, sms, MERGES[1])[1].makespan
        rows.append(
            (policy, most_splits(plan), plan.num_tiles, partial_mb(plan), timeline.makespan, second)
        )
    rows.sort(key=lambda row: min(filter(None, row[-2:])))
    counts = ("policy", "splits", "work tiles", "partials in fp32, MB")
    columns = (*counts, *(f"{m}, us" for m in MERGES))
    return table(columns, rows, source=PREDICTED)


def recorded_policies(heads: int = 128, kernel: str = "keep_ab-64x1") -> Table:
    """One kernel under different plans on an H200, us: the calls of one new token and equal lengths
    of the recorded sweep that were planned by `cost`. `fixed` is the best of its counts there.
    """
    (run,) = runs(SWEEP)
    by_case: dict[str, dict[str, float]] = {}
    for (case, peer), us in medians(run.rows).items():
        problem = _shape(case)
        if problem and problem[1] == heads and peer.startswith(f"{kernel}-"):
            by_case.setdefault(case, {})[peer.removeprefix(f"{kernel}-")] = us
    rows = []
    for case, times in by_case.items():
        fixed = {name: us for name, us in times.items() if name.startswith("fixed-")}
        if "cost" in times and fixed:
            best = min(fixed, key=fixed.__getitem__)
            rows.append((case, times["cost"], times.get("greedy"), fixed[best], best[6:]))
    columns = ("call", "cost, us", "greedy, us", "fixed, us", "splits of fixed")
    return table(columns, rows, source=run.source)


def _shape(case: str) -> tuple[int, int, int] | None:
    """(batch, heads, kv length) of a plain case of one new token, by its name."""
    found = re.fullmatch(r"b(\d+)_q1_h(\d+)_kv(\d+)", case)
    return (int(found[1]), int(found[2]), int(found[3])) if found else None


def policy_curves(
    policies: Sequence[str], batches: Sequence[int], kv_len: int, heads: int
) -> go.Figure:
    """Time of each policy over the best one's, by batch size, each with its faster merge."""

    def quickest(policy: str, batch: int) -> float:
        problem = Problem.uniform(batch, 1, kv_len, heads)
        return min(planned(problem, policy, merge=merge)[1].makespan for merge in MERGES)

    times = np.array([[quickest(policy, b) for b in batches] for policy in policies])
    ratio = times / times.min(axis=0)
    worst = policies[int(ratio.max(axis=1).argmin())]
    behind = ratio.max(axis=1).min()
    figure = new_figure(
        f"{worst} is the best policy at every one of these sizes"
        if behind < 1.005
        else f"{worst} is never more than {behind:.2f}x behind the best policy",
        x="requests in the batch",
        y="time over the best policy's (predicted)",
        height=420,
    )
    for i, policy in enumerate(policies):
        add_lines(
            figure,
            batches,
            [Line(policy, ratio[i], PALETTE[i % 8], _DASHES[i % len(_DASHES)], SYMBOLS[i])],
            customdata=times[i],
            hovertemplate=f"{policy}, batch %{{x}}: %{{customdata:.1f}} us<extra></extra>",
        )
    log_ticks(figure, batches)
    return figure


def efficiency_chart(row_tiles: int, max_blocks: int, sms: int = 132) -> go.Figure:
    """FA3's rule as a picture: how full the last wave is by the number of splits."""
    counts = np.arange(1, min(128, sms, max_blocks) + 1)
    waves = row_tiles * counts / sms
    efficiency = waves / np.ceil(waves)
    bar = FA3_SHARE * efficiency.max()
    chosen = int(counts[np.argmax(efficiency >= bar)])
    figure = new_figure(
        f"{row_tiles} row tiles on {sms} SMs: FA3's rule stops at {chosen} splits",
        x="splits of each request",
        y="share of the SMs in use, waves rounded up",
    )
    figure.add_scatter(
        x=counts, y=efficiency, mode="lines", line={"color": PALETTE[0]}, name="efficiency"
    )
    figure.add_hline(
        y=bar,
        line={"color": GREY, "dash": "dash"},
        annotation_text=f"{FA3_SHARE:.0%} of the best",
        annotation_position="bottom right",
    )
    figure.add_scatter(
        x=[chosen],
        y=[efficiency[chosen - 1]],
        mode="markers+text",
        text=[f"  {chosen}"],
        textposition="middle right",
        textfont={"color": INK, "size": 16},
        marker={"color": RED, "size": 13, "symbol": "diamond"},
        name="the first that passes",
    )
    return figure
