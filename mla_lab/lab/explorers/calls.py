"""Calls beyond the anchor cases: Blackwell's published times beside our twins, the XQA port, GQA.

Times from two cards and two methods share a chart, so no title compares their speed.
"""

from __future__ import annotations

import math
from statistics import median
from typing import Any

import plotly.graph_objects as go

from ...bench.records import medians
from ...bench.rotation import rotation_words
from .. import explorer
from ..measuring import OURS, runs
from ..source import Source
from ..style import LOG_TICKS, PALETTE, add_bars, new_figure
from ..tables import lines

PUBLISHED = "published/published_blackwell.jsonl"
TWINS, XQA, GQA = "h200_eight_bits.jsonl", "h200_cuda.jsonl", "records/h200_gqa.jsonl"
#: the four tables of pull request 2743: (words that a case's name has, words that it has not)
TABLES = {
    "e4m3, equal lengths": (("e4m3",), ("var",)),
    "e4m3, varied lengths": (("e4m3", "var"), ()),
    "bf16, equal lengths": ((), ("e4m3", "var")),
    "bf16, varied lengths": (("var",), ("e4m3",)),
}
MLA, GROUPED = "XQA port, MLA", "XQA port, GQA"

#: us by case, one dictionary a series
Series = dict[str, dict[str, float]]


def ours(file: str, peer: str) -> dict[str, float]:
    """us by case of one peer in a benchmark record; of several runs the last counts."""
    found: dict[str, float] = {}
    for run in runs(file):
        found |= {case: us for (case, who), us in medians(run.rows).items() if who == peer}
    return found


def published_series(table: str) -> Series:
    """One table of the pull request, and our calls of the same shapes."""
    having, lacking = TABLES[table]
    series: Series = {}
    for row in lines(PUBLISHED):
        name = row["case"]
        if all(part in name for part in having) and not any(part in name for part in lacking):
            series.setdefault(f"{row['peer']}, {row['card']}", {})[name] = row["us"]
    cases = next(iter(series.values()))
    twins = {case: us for case, us in ours(TWINS, OURS).items() if case in cases}
    return {"mla-lab, H200": twins, **series}


def xqa_series() -> Series:
    """The CUDA backend's MLA calls, and the default backend's where the same shape is recorded."""
    port = ours(XQA, "mla-lab-cuda")
    default = ours("h200_eight_bits.jsonl", OURS) | ours("h200_anchor.jsonl", OURS)
    return {"XQA port": port, "default backend": {c: us for c, us in default.items() if c in port}}


def gqa_series() -> Series:
    """Grouped-query calls of the CUDA backend."""
    return {"XQA port": {row["case"]: median(row["rounds"]) for row in lines(GQA)}}


def methods(table: str) -> str:
    """Where the times of a table come from, one sentence a source."""
    if table == GROUPED:
        row = lines(GQA)[0]
        card, day = row["environment"]["card"]["name"], row["time"][:10]
        chip = Source("recorded", card=card, date=day).chip()
        method = f"whole calls, CUDA graph, events, median of {len(row['rounds'])} rounds"
        return f"XQA port: {method} {chip}"
    file = XQA if table == MLA else TWINS
    if not runs(file):
        return f"<b>Not recorded</b>: no {file} in data/."
    run = runs(file)[-1]
    method = run.rows[0]["method"]
    words = (
        f"mla-lab: whole calls, {method['timer']}, median of {method['rounds']} rounds, "
        f"{rotation_words(method['rotation_bytes'])} {run.source.chip()}"
    )
    if table in TABLES:
        row = lines(PUBLISHED)[0]
        words += (
            f"<br>trtllm-gen, cute-dsl: {row['method']}; {row['card']}, published "
            f"{row['published']} in {row['source'].removeprefix('https://')}. Another card and "
            "another method: compare shapes, not bars."
        )
    return words


#: pixels of a bar that has its number beside it
BAR = 14


class CallsExplorer(explorer.Explorer):
    """One table of calls as bars, a series a kernel and card; the note has both methods."""

    frames_over = "table"

    knobs = explorer.knobs(
        table=explorer.choice("table", [*TABLES, MLA, GROUPED], [*TABLES, MLA, GROUPED][0], "320px")
    )

    def series(self, table: str) -> Series:
        """us by series and case."""
        if table in TABLES:
            return published_series(table)
        return xqa_series() if table == MLA else gqa_series()

    def figure(self, state: dict[str, Any]) -> go.Figure:
        series = self.series(state["table"])
        cases = list(dict.fromkeys(case for times in series.values() for case in times))
        figure = new_figure(
            f"{state['table']}: {len(cases)} calls",
            x="us a call",
            height=150 + (8 + BAR * len(series)) * len(cases),
        )
        for number, (name, times) in enumerate(series.items()):
            us = [times.get(case) for case in cases]
            color = PALETTE[number]
            add_bars(figure, cases, us, ".1f", lying=True, name=name, marker_color=color)
        figure.update_yaxes(autorange="reversed")
        every = [us for times in series.values() for us in times.values() if us]
        # room for the shortest bar, and for the number beside the longest
        spread = [math.log10(min(every) / 1.6), math.log10(max(every) * 1.8)]
        figure.update_xaxes(type="log", tickvals=LOG_TICKS, range=spread)
        return figure

    def note(self, state: dict[str, Any]) -> str:
        return f"<div>{methods(state['table'])}</div>"
