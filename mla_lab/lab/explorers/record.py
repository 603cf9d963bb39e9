"""Floor, simulator, recorded and live figures of a family of cases on one axis."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import plotly.graph_objects as go

from ...bench.cases import Case, uniform_case
from ...bench.records import medians
from ...bench.report import HEADLINES, find_headline
from ...core.problem import Problem
from ...simulate.anatomy import chosen
from ...simulate.recorded import recorded
from .. import explorer
from ..measuring import ANCHOR, OURS, anchor_rows, headline_run, live_us, measured_card, runs
from ..session import gpu_name
from ..source import PREDICTED
from ..style import (
    BLUE,
    GREEN,
    GREY,
    LOG_TICKS,
    ORANGE,
    PALETTE,
    PINK,
    RED,
    Line,
    add_lines,
    log_ticks,
    new_figure,
)
from ..tables import Table, table

BATCHES = (1, 4, 16, 64, 128)
#: microseconds by (case, peer)
Medians = dict[tuple[str, str], float]
#: batches that are measured where *measure here* is ticked
LIVE = (1, 16, 64)
#: peers by the name of a record, and how they are drawn
PEERS = {
    OURS: ("ours", BLUE, "circle"),
    "flashmla": ("FlashMLA", ORANGE, "square"),
    "flashinfer-fa3": ("FlashInfer fa3", GREEN, "diamond"),
    "fa3-qv": ("FA3 with qv", PINK, "cross"),
    "triton-split-kv": ("Triton baseline", PALETTE[4], "x"),
}


@lru_cache(maxsize=256)
def predicted_us(problem: Problem) -> float:
    """What the simulator expects of the kernel that the package would choose."""
    return chosen(problem)[-1].makespan


def simulator_errors() -> Table:
    """How far the simulator is off where it was not fitted; beside it a model of two numbers."""
    rows = [
        (
            j.held_out,
            j.cases,
            f"{j.median:.1%}",
            f"{j.worst:.1%}",
            j.worst_case,
            f"{j.baseline_median:.1%}",
        )
        for j in recorded().judgements
    ]
    columns = ("held out", "cases", "median error", "worst", "worst case", "two numbers: median")
    found = runs(ANCHOR)
    return table(columns, rows, source=found[-1].source if found else None)


def _recorded() -> tuple[Medians, str]:
    """Medians of the plain call's run, and its label; every peer from the same run, ours by the
    name `OURS`.
    """
    run = headline_run()
    if run is None:
        return {}, ""
    us, ours = medians(run.rows), find_headline(run.rows)
    return us | {(c, OURS): t for (c, peer), t in us.items() if peer == ours}, run.source.label


def _planned() -> tuple[Medians, str]:
    """Medians of our calls with a host plan, and the label of their run."""
    found = runs(ANCHOR)
    return (medians(found[-1].rows), found[-1].source.label) if found else ({}, "")


def _other_ceilings() -> str:
    """How fast the card with a host plan read, beside the one whose floor is drawn."""
    reads = [row["ceilings"]["read_tbps"] for row in anchor_rows() if row.get("ceilings")]
    if not reads:
        return ""
    return (
        f" The run with a host plan read {max(reads):.2f} TB/s at best, the floor is of "
        f"{measured_card().read_tbps:.2f}."
    )


def _known(us: Medians, cases: dict[int, tuple[str, str]]) -> dict[int, float]:
    """Medians that a record has, by batch."""
    return {b: us[key] for b, key in cases.items() if key in us}


class RecordExplorer(explorer.Explorer):
    """Microseconds over the batch: the card's floor, the prediction, and every recorded peer."""

    source = PREDICTED
    frames_over = "kv_len"

    knobs = explorer.knobs(
        heads=explorer.steps("heads", (16, 64, 128), 128, "220px"),
        q_len=explorer.steps("new tokens", (1, 2, 4), 1, "230px"),
        kv_len=explorer.steps("cached", (1024, 4096, 8192), 8192, "260px"),
        over_floor=explorer.tick("as multiples of the floor", False),
        planned=explorer.tick("ours with a host plan", False),
        live=explorer.tick("measure here", False),
    )

    def figure(self, state: dict[str, Any]) -> go.Figure:
        problems = {
            b: Problem.uniform(b, state["q_len"], state["kv_len"], state["heads"]) for b in BATCHES
        }
        card = measured_card()
        floors = {b: card.roofline_time(p) * 1e6 for b, p in problems.items()}
        unit = floors if state["over_floor"] else dict.fromkeys(BATCHES, 1.0)
        predictions = {b: predicted_us(p) for b, p in problems.items()}
        furthest = max(BATCHES, key=lambda b: predictions[b] / floors[b])
        recorded_us = _recorded()[0].get((self.case(state, furthest).name, OURS))
        times = f"{predictions[furthest] / floors[furthest]:.1f}x predicted"
        if recorded_us:
            times += f", {recorded_us / floors[furthest]:.1f}x recorded"
        figure = new_figure(
            f"Furthest from the floor at batch {furthest}: {times}",
            x="requests",
            y="times the floor" if state["over_floor"] else "us a call",
            height=430,
        )
        self._add(figure, floors, unit, ("floor of the card", GREY, "dot", "line-ew"))
        self._add(figure, predictions, unit, ("simulator", RED, "dash", "triangle-up"))
        self._add_recorded(figure, state, unit)
        if state["live"]:
            live = {b: live_us(self.case(state, b)) for b in LIVE}
            here = {b: us for b, us in live.items() if us is not None}
            if here:
                self._add(figure, here, unit, ("ours, measured here, now", BLUE, "solid", "star"))
        log_ticks(figure, BATCHES)
        if not state["over_floor"]:
            figure.update_yaxes(type="log", tickvals=LOG_TICKS)
        return figure

    def _add_recorded(
        self, figure: go.Figure, state: dict[str, Any], unit: dict[int, float]
    ) -> None:
        """Adds every peer of the plain call's run; ours with a host plan where it is ticked."""
        us, label = _recorded()
        drawn = [(us, peer, (f"{p[0]}, {label}", p[1], "solid", p[2])) for peer, p in PEERS.items()]
        if state["planned"]:
            us, label = _planned()
            line = (f"ours with a host plan, {label}", BLUE, "dot", "circle-open")
            drawn.append((us, OURS, line))
        for us, peer, line in drawn:
            if known := _known(us, self._cases(state, peer)):
                self._add(figure, known, unit, line)

    def _cases(self, state: dict[str, Any], peer: str) -> dict[int, tuple[str, str]]:
        """What a record calls each batch of a peer."""
        return {b: (self.case(state, b).name, peer) for b in BATCHES}

    def case(self, state: dict[str, Any], batch: int) -> Case:
        """The benchmark's case of a batch."""
        return uniform_case(batch, state["q_len"], state["heads"], state["kv_len"])

    def _add(
        self,
        figure: go.Figure,
        points: dict[int, float],
        unit: dict[int, float],
        line: tuple[str, str, str, str],
    ) -> None:
        """Adds `points` by batch in `unit`; `line` is its name, colour, dash and symbol."""
        name, color, dash, symbol = line
        add_lines(
            figure,
            list(points),
            [Line(name, [us / unit[b] for b, us in points.items()], color, dash, symbol)],
            customdata=list(points.values()),
            hovertemplate=f"{name}, batch %{{x}}: %{{customdata:.1f}} us<extra></extra>",
        )

    def note(self, state: dict[str, Any]) -> str:
        run = headline_run()
        words = "Recorded rows: <b>none in data/ yet</b>."
        known = bool(_known(_recorded()[0], self._cases(state, OURS)))
        if run and known:
            call = HEADLINES.get(find_headline(run.rows) or "", "not in this record")
            words = f"{run.source.chip()} ours: {call}."
        elif run:
            words = "No call of this shape is recorded."
        if state["planned"] and known:
            words += _other_ceilings()
        if state["live"] and not gpu_name():
            words += " No GPU here: <b>nothing to measure</b>"
            words += ", recorded rows stand in." if known else "."
        return f"<div>{words}</div>"
