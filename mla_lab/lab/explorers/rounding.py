"""Error of eight bits: by the scales of the cache, by how weights are rounded, by length."""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go

from .. import explorer
from ..eight_bits import spread_errors
from ..source import formula
from ..style import LOG_TICKS, PALETTE, SYMBOLS, Line, add_lines, log_ticks, new_figure
from ..tables import lines

RECORD = "runtime/quantised.jsonl"
#: granularities of the record, and what a reader calls them
SCALES = {
    "none": "bf16 cache",
    "tensor": "one scale",
    "token": "a scale a token",
    "128": "656 bytes: a scale for 128 columns",
}
INPUTS = {
    "Gaussian": "gauss",
    "a sink token, outlier columns": "heavy_tailed",
    "weight on a few tokens": "concentrated",
}
QUESTIONS = {"scales of the cache": "scales", "rounding of the weights": "weights"}

#: error by kv length, a line a choice
Lines = dict[str, dict[int, float]]


def rounding_lines(inputs: str, question: str) -> Lines:
    """Scales: the error that a model sees, weights in bf16. Weights: the error of the arithmetic
    over an e4m3 cache of one scale.
    """
    field, fixed = {
        "scales": ("error", ("weights", "bf16")),
        "weights": ("arithmetic", ("scales", "tensor")),
    }[question]
    found: Lines = {}
    for row in lines(RECORD):
        if row["inputs"] == inputs and row[fixed[0]] == fixed[1]:
            found.setdefault(row[question], {})[row["kv_len"]] = row[field]
    return found


class RoundingExplorer(explorer.Explorer):
    """Error over the kv length, a line for each granularity or way to round weights."""

    source = formula("a kernel's roundings in float64")
    frames_over = "inputs"

    knobs = explorer.knobs(
        question=explorer.choice("compare", tuple(QUESTIONS), "scales of the cache"),
        inputs=explorer.choice("inputs", tuple(INPUTS), "Gaussian", "290px"),
    )

    def figure(self, state: dict[str, Any]) -> go.Figure:
        question = QUESTIONS[state["question"]]
        found = rounding_lines(INPUTS[state["inputs"]], question)
        longest = max(max(line) for line in found.values())
        last = {name: line[longest] for name, line in found.items()}
        if question == "scales":
            times = last["128"] / last["tensor"]
            finding = f"656 bytes have {times:.2f} times the error of one scale"
        else:
            finding = ", ".join(f"{name}: {value:.1%}" for name, value in last.items())
        figure = new_figure(
            f"{finding} at {longest:,} tokens", x="cached tokens", y="relative error", height=400
        )
        lengths = sorted(next(iter(found.values())))
        add_lines(
            figure,
            lengths,
            _lines({SCALES.get(n, n): [line[k] for k in lengths] for n, line in found.items()}),
        )
        log_ticks(figure, lengths)
        figure.update_yaxes(type="log", tickformat=".1%", tickvals=LOG_TICKS)
        return figure

    def note(self, state: dict[str, Any]) -> str:
        if QUESTIONS[state["question"]] == "scales":
            return "<div>Against exact attention over the cache before it was stored.</div>"
        return "<div>Against exact attention over the stored e4m3 cache, one scale.</div>"


def _lines(values: dict[str, list[float]]) -> list[Line]:
    """The first series dotted, as what the others are compared with."""
    return [
        Line(name, y, PALETTE[i], "solid" if i else "dot", SYMBOLS[i])
        for i, (name, y) in enumerate(values.items())
    ]


def spread_chart(octaves: int = 16) -> go.Figure:
    """Error of the smallest token over how much larger the largest is."""
    seen = list(range(octaves + 1))
    found = [spread_errors(n) for n in seen]
    names = list(found[0])
    one = names.index("e4m3, one scale")
    fails = next((n for n in seen if found[n][names[one]] > 0.05), octaves)
    figure = new_figure(
        f"One e4m3 scale holds until tokens differ by 2^{fails - 1} in size",
        x="log2 of the largest over the smallest token magnitude",
        y="relative error of the smallest token",
        height=360,
    )
    add_lines(figure, seen, _lines({name: [errors_[name] for errors_ in found] for name in names}))
    figure.update_yaxes(type="log", tickformat=".0%", tickvals=[0.01, 0.03, 0.1, 0.3, 1])
    return figure
