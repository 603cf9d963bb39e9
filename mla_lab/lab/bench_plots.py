"""Pictures of benchmark records: pure functions of rows, for the measuring notebook.

Rows are those of `mla_lab.bench.records`; each function returns a new figure and shows nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go

from ..bench.gate import Verdict
from ..bench.records import Row, problem_of, results
from ..bench.report import OURS, PUBLIC, best_times
from .style import BLUE, GREY, PALETTE, RED, new_figure

#: a case needs this much room in a chart of bars
BAR_PX = 22
MARKERS = ("circle", "square", "diamond", "cross", "x", "triangle-up", "star", "hexagon")


def speedup_bars(rows: Sequence[Row], family: str = "anchor") -> go.Figure:
    """Best public kernel over ours, a bar a case; above 1 ours is faster."""
    cases, ratios, rivals = [], [], []
    for case, times in best_times(_of(rows, family)).items():
        public = {name: times[name] for name in PUBLIC if name in times}
        if public and OURS in times:
            best = min(public, key=lambda name: public[name])
            cases.append(case)
            ratios.append(public[best] / times[OURS])
            rivals.append(f"{best} {public[best]:.1f} us, ours {times[OURS]:.1f} us")
    ahead = sum(ratio > 1 for ratio in ratios)
    figure = new_figure(
        f"Ours is faster in {ahead} of {len(cases)} cases",
        x="best public kernel / ours",
        height=120 + BAR_PX * len(cases),
    )
    colors = [BLUE if ratio > 1 else RED for ratio in ratios]
    figure.add_bar(
        x=ratios,
        y=cases,
        orientation="h",
        marker_color=colors,
        text=[f"{ratio:.2f}" for ratio in ratios],
        customdata=rivals,
        hovertemplate="%{y}<br>%{customdata}<extra></extra>",
    )
    figure.add_vline(x=1.0, line_color=GREY, line_dash="dot")
    figure.update_yaxes(autorange="reversed")
    return figure


def roofline(rows: Sequence[Row], peer: str = OURS) -> go.Figure:
    """TFLOP/s over intensity of one peer's results, under the ceilings that the run measured."""
    ok = [row for row in results(rows, "ok") if row["peer"] == peer and row["part"] == 0]
    figure = new_figure(
        f"{peer} under the ceilings of its own run", x="FLOP per byte", y="TFLOP/s", height=460
    )
    limits = _ceilings(rows)
    if limits:
        ridge = limits["gemm_tflops"] / limits["read_tbps"]
        low, high = 1.0, 1000.0
        figure.add_scatter(
            x=[low, ridge, high],
            y=[low * limits["read_tbps"], limits["gemm_tflops"], limits["gemm_tflops"]],
            mode="lines",
            line={"color": GREY, "dash": "dot"},
            name=f"{limits['read_tbps']:.2f} TB/s, {limits['gemm_tflops']:.0f} TFLOP/s",
        )
    figure.add_scatter(
        x=[row["flop"] / row["bytes"] for row in ok],
        y=[row["tflops"] for row in ok],
        mode="markers",
        marker={"color": BLUE, "size": 9},
        name=peer,
        text=[row["case"] for row in ok],
        hovertemplate="%{text}<br>%{y:.0f} TFLOP/s<extra></extra>",
    )
    figure.update_xaxes(type="log")
    figure.update_yaxes(type="log")
    return figure


def times_by_kv_len(rows: Sequence[Row], batch: int, heads: int, q_len: int = 1) -> go.Figure:
    """us over the KV length, a line a peer, for equal lengths."""
    figure = new_figure(
        f"{batch} requests, {heads} heads, {q_len} new token{'s' if q_len > 1 else ''}",
        x="KV length (tokens)",
        y="us a call",
        height=460,
    )
    lines: dict[str, dict[int, float]] = {}
    for row in results(rows, "ok"):
        problem = problem_of(row)
        equal = len(set(problem.kv_lens)) == 1 and set(problem.q_lens) == {q_len}
        if equal and (problem.batch, problem.heads) == (batch, heads):
            lines.setdefault(row["peer"], {})[problem.kv_lens[0]] = row["us"]
    for number, (peer, times) in enumerate(lines.items()):
        figure.add_scatter(
            x=sorted(times),
            y=[times[length] for length in sorted(times)],
            mode="lines+markers",
            name=peer,
            line_color=PALETTE[number % len(PALETTE)],
            marker_symbol=MARKERS[number % len(MARKERS)],
        )
    figure.update_xaxes(type="log")
    figure.update_yaxes(type="log")
    return figure


def rounds_strip(rows: Sequence[Row], case: str) -> go.Figure:
    """Every raw round of a case, a column a peer: what the median was taken over."""
    figure = new_figure(f"Raw rounds of {case}", y="us a launch")
    for row in results(rows, "ok"):
        if row["case"] == case:
            values = row["rounds"]["us"]
            figure.add_box(
                y=values,
                x=[row["peer"]] * len(values),
                boxpoints="all",
                pointpos=0,
                jitter=0.4,
                fillcolor="rgba(0,0,0,0)",
                line_color=BLUE,
                name=row["peer"],
                showlegend=False,
            )
    return figure


def gate_chart(verdicts: Sequence[Verdict]) -> go.Figure:
    """Change of each pair with its noise as an error bar; what fails the gate is red."""
    both = [v for v in verdicts if v.change is not None]
    slower = sum(v.verdict == "slower" for v in both)
    figure = new_figure(
        f"{slower} of {len(both)} slower" if slower else "Nothing is slower",
        x="change, %",
        height=120 + BAR_PX * len(both),
    )
    figure.add_scatter(
        x=[100 * (v.change or 0.0) for v in both],
        y=[f"{v.case} {v.peer}" for v in both],
        error_x={"array": [100 * (v.noise or 0.0) for v in both], "color": GREY},
        mode="markers",
        marker={
            "color": [RED if v.verdict == "slower" else BLUE for v in both],
            "symbol": ["x" if v.verdict == "slower" else "circle" for v in both],
            "size": 9,
        },
    )
    figure.update_yaxes(autorange="reversed")
    figure.add_vline(x=0.0, line_color=GREY, line_dash="dot")
    return figure


def cards_side_by_side(
    rows: Sequence[Row], published: Sequence[Mapping[str, Any]], peer: str = OURS
) -> go.Figure:
    """Twin cases on this card beside the figures that were published for Blackwell."""
    here = {r["case"]: r["us"] for r in results(rows, "ok") if r["peer"] == peer}
    cases = [case for case in dict.fromkeys(p["case"] for p in published) if case in here]
    figure = new_figure(
        "The same call on two cards", x="us a call", height=140 + 3 * BAR_PX * len(cases)
    )
    series = {peer: here}
    for row in published:
        series.setdefault(f"{row['peer']}, {row['card']}", {})[row["case"]] = row["us"]
    for number, (name, times) in enumerate(series.items()):
        figure.add_bar(
            x=[times.get(case) for case in cases],
            y=cases,
            orientation="h",
            name=name,
            marker_color=PALETTE[number % len(PALETTE)],
        )
    figure.update_yaxes(autorange="reversed")
    figure.update_xaxes(type="log")
    return figure


def _of(rows: Sequence[Row], family: str) -> list[Row]:
    return [row for row in results(rows) if row["family"] == family]


def _ceilings(rows: Sequence[Row]) -> dict[str, float] | None:
    """The first ceilings of the record, None where the run had no GPU."""
    found = (row["ceilings"] for row in rows if row["kind"] == "run")
    return next((ceilings for ceilings in found if ceilings), None)
