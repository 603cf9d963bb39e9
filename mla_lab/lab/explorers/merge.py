"""A softmax taken in pieces: the partial result of each split, and their merge."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import plotly.graph_objects as go
import torch

from ...reference.mla import merge_partials
from .. import explorer
from ..source import formula
from ..style import INK, PALETTE, PAPER, panels

NUM_TOKENS = 48


@dataclass(frozen=True)
class Partial:
    """One split's result: normalised out [dims], natural log-sum-exp; -inf where it saw no key."""

    begin: int
    end: int
    out: np.ndarray
    lse: float


def attend(scores: np.ndarray, values: np.ndarray, begin: int, end: int) -> Partial:
    """Softmax attention of one query over tokens [begin, end)."""
    if begin == end:
        return Partial(begin, end, np.zeros(values.shape[1]), -np.inf)
    part = scores[begin:end]
    weights = np.exp(part - part.max())
    out = weights @ values[begin:end] / weights.sum()
    return Partial(begin, end, out, float(part.max() + np.log(weights.sum())))


def merge(partials: list[Partial]) -> tuple[np.ndarray, float, np.ndarray]:
    """(out, lse, weight of each partial) by the contract's own merge of partials."""
    outs = torch.tensor(np.array([p.out for p in partials]))[:, None]
    lses = torch.tensor([[p.lse] for p in partials], dtype=torch.float64)
    merged = merge_partials(outs, lses)
    seen = not merged.lse.isneginf().any()
    weights = torch.exp(lses - merged.lse) if seen else torch.zeros_like(lses)
    return merged.out[0].numpy(), float(merged.lse), weights[:, 0].numpy()


def tokens(seed: int, sharpness: float) -> tuple[np.ndarray, np.ndarray]:
    """Scores [48] and values [48, 8] of a small example; sharpness scales the scores."""
    rng = np.random.default_rng(seed)
    return sharpness * rng.standard_normal(NUM_TOKENS), rng.standard_normal((NUM_TOKENS, 8))


class MergeExplorer(explorer.Explorer):
    """Scores of 48 tokens by split; beside them the share of tokens and weight of each split."""

    source = formula("float64")
    frames_over = "splits"

    knobs = explorer.knobs(
        splits=explorer.integers("splits", 1, 8, 4, width="260px"),
        sharpness=explorer.steps("sharpness", (0, 1, 2, 4, 8, 16), 2, "270px"),
        empty=explorer.tick("one split has no key", False),
        seed=explorer.integers("seed", 0, 9, 3, width="230px"),
    )

    def partials(self, state: dict[str, Any]) -> list[Partial]:
        """Equal splits; with `empty`, one more that has an empty range."""
        scores, values = tokens(state["seed"], state["sharpness"])
        cuts = [NUM_TOKENS * i // state["splits"] for i in range(state["splits"] + 1)]
        if state["empty"]:
            cuts.insert(1, cuts[1])
        return [attend(scores, values, begin, end) for begin, end in pairwise(cuts)]

    def figure(self, state: dict[str, Any]) -> go.Figure:
        scores, values = tokens(state["seed"], state["sharpness"])
        partials = self.partials(state)
        out, lse, weights = merge(partials)
        whole = attend(scores, values, 0, NUM_TOKENS)
        gap = max(np.abs(out - whole.out).max(), abs(lse - whole.lse))
        best = int(weights.argmax())
        figure = panels(
            f"Split {best} has {weights[best]:.0%} of the weight; "
            f"merged and whole differ by {gap:.1e}",
            ("score of each token, coloured by split", "what each split brings"),
            height=400,
            margin={"l": 60, "r": 16, "t": 84, "b": 90},
            cols=2,
            column_widths=[0.62, 0.38],
            horizontal_spacing=0.09,
        )
        for i, part in enumerate(partials):
            figure.add_bar(
                x=np.arange(part.begin, part.end),
                y=scores[part.begin : part.end],
                marker_color=PALETTE[i % 8],
                name=f"split {i}",
                showlegend=False,
                hovertemplate=f"token %{{x}}, split {i}: %{{y:.2f}}<extra></extra>",
            )
        names = [f"{i}<br>{p.lse:.1f}" for i, p in enumerate(partials)]
        share = [(p.end - p.begin) / NUM_TOKENS for p in partials]
        colors = [PALETTE[i % 8] for i in range(len(partials))]
        figure.add_bar(
            x=names,
            y=share,
            name="share of tokens",
            row=1,
            col=2,
            marker={"color": PAPER, "line": {"color": INK, "width": 1}},
        )
        figure.add_bar(
            x=names, y=weights, name="weight in the merge", marker_color=colors, row=1, col=2
        )
        figure.update_xaxes(title_text="token", col=1)
        figure.update_xaxes(title_text="split, and its lse", type="category", tickangle=0, col=2)
        figure.update_xaxes(tickfont={"size": 12}, col=2)
        figure.update_yaxes(title_text="score", col=1)
        figure.update_yaxes(range=[0, 1], tickformat=".0%", col=2)
        return figure
