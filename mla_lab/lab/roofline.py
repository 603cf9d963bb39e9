"""Rooflines: which side of a card's ridge a decode step lies on, and what is free there."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import plotly.graph_objects as go

from ..core.errors import invalid
from ..core.gpu import PRESETS, Gpu
from ..core.problem import Problem
from . import explorer
from .measuring import cards
from .source import Source, formula
from .style import BLUE, GREEN, GREY, LOG_TICKS, RED, new_figure

HEADS = (1, 2, 4, 8, 16, 32, 64, 128)
#: operations a byte that a chart spans, from below one row of one head on
_SPAN = (1.5, 2000)


def intensity(rows: int, kv_format: str = "bf16") -> float:
    """Operations per byte of cache for `rows` query rows: 241.8 at 128 rows of bf16."""
    token = Problem((1,), (1,), 1, kv_format=kv_format)
    return 2 * rows * (token.head_dim + token.latent_dim) / token.kv_token_bytes


def attainable_tflops(gpu: Gpu, operations_per_byte: float) -> float:
    """The roofline: bandwidth times intensity, up to the matrix rate."""
    return min(gpu.tflops(), gpu.read_tbps * operations_per_byte)


def free_drafts(gpu: Gpu, heads: int, kv_format: str = "bf16") -> int:
    """Draft tokens that cost no extra time: with them memory is still the limit.

    -1 where one token alone is already on the compute side.
    """
    if heads < 1:
        raise invalid("heads", heads, "1 or more")
    most_rows = gpu.ridge() / intensity(1, kv_format)
    return int(most_rows // heads) - 1


@cache
def card_named(name: str) -> Gpu:
    """The card of that name, the H200 by its measured ceilings."""
    return next(gpu for gpu in cards() if gpu.name == name)


def card_source(gpu: Gpu) -> Source:
    """Where the two numbers of a roof come from."""
    if gpu.ceilings:
        return Source("recorded", card=gpu.ceilings.card, date=gpu.ceilings.date)
    return formula(f"datasheet: {gpu.name}")


def _counted(number: int, word: str) -> str:
    return f"{number} {word}{'s' * (number != 1)}"


class RooflineExplorer(explorer.Explorer):
    """One decode step on one card's roofline, log over log."""

    frames_over = "heads"

    knobs = explorer.knobs(
        card=explorer.choice("card", [g.name for g in PRESETS], "H200", "190px"),
        heads=explorer.steps("heads", HEADS, 16, "250px"),
        drafts=explorer.integers("draft tokens", 0, 15, 0, width="290px"),
        batch=explorer.steps("batch", (1, 4, 16, 64, 128), 64, "240px"),
        kv_len=explorer.steps("cached", (1024, 4096, 8192, 32768), 8192, "270px"),
        kv_format=explorer.choice("cache", ["bf16", "fp8_656"], "bf16", "200px"),
    )

    def problem(self, state: dict[str, Any]) -> Problem:
        """The decode step of `state`."""
        q_len = 1 + state["drafts"]
        kv_len = state["kv_len"] + state["drafts"]
        return Problem.uniform(
            state["batch"], q_len, kv_len, state["heads"], kv_format=state["kv_format"]
        )

    def figure(self, state: dict[str, Any]) -> go.Figure:
        gpu, problem = card_named(state["card"]), self.problem(state)
        at, side = problem.intensity(), gpu.bound(problem)
        figure = new_figure(
            f"{_counted(state['heads'], 'head')}, {_counted(1 + state['drafts'], 'token')}: "
            f"the {side} side of "
            f"{gpu.name}, {gpu.roofline_time(problem) * 1e6:.1f} us at best",
            x="operations per byte moved",
            y="TFLOP/s",
            height=400,
        )
        x = np.array([_SPAN[0], gpu.ridge(), _SPAN[1]])
        roof = [attainable_tflops(gpu, float(i)) for i in x]
        line = {"color": BLUE, "width": 3}
        figure.add_scatter(x=x, y=roof, mode="lines", name=f"{gpu.name} roof", line=line)
        # a line of points: plotly places a vline's note wrongly on a logarithmic axis
        figure.add_scatter(
            x=[gpu.ridge()] * 2,
            y=[roof[0], gpu.tflops()],
            mode="lines",
            line={"color": GREY, "dash": "dash"},
            name=f"ridge: {gpu.ridge():.0f} operations a byte",
        )
        figure.add_scatter(
            x=[at],
            y=[attainable_tflops(gpu, at)],
            mode="markers",
            name=f"this step: {at:.0f} operations a byte",
            marker={"size": 15, "color": RED if side == "compute" else GREEN, "symbol": "diamond"},
        )
        spread = [float(np.log10(end)) for end in _SPAN]
        figure.update_xaxes(type="log", range=spread, tickvals=LOG_TICKS)
        figure.update_yaxes(type="log", tickvals=LOG_TICKS)
        return figure

    def note(self, state: dict[str, Any]) -> str:
        gpu = card_named(state["card"])
        free = free_drafts(gpu, state["heads"], state["kv_format"])
        heads = _counted(state["heads"], "head")
        sentence = (
            f"{_counted(free, 'draft token')} {'is' if free == 1 else 'are'} free with {heads} "
            "over a long cache"
            if free >= 0
            else f"with {heads} even one token is compute bound"
        )
        return f"<div>{card_source(gpu).chip()} {sentence} on this card.</div>"
