"""Operations of the naive and the absorbed form, by the number of new tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go

from .. import explorer
from ..mla_math import absorbed_flops, naive_flops
from ..source import formula
from ..style import BLUE, ORANGE, RED, log_ticks, new_figure

HEADS = (16, 32, 64, 128)
NEW_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class AbsorbExplorer(explorer.Explorer):
    """Both forms' operations over the new tokens of a step; the chosen step is marked."""

    source = formula()
    frames_over = "new_tokens"

    knobs = explorer.knobs(
        new_tokens=explorer.steps("new tokens", NEW_TOKENS, 1, "320px"),
        kv_len=explorer.steps("cached", (512, 2048, 8192, 32768), 8192, "280px"),
        heads=explorer.steps("heads", HEADS, 128, "240px"),
    )

    def figure(self, state: dict[str, Any]) -> go.Figure:
        q, kv, heads = state["new_tokens"], state["kv_len"], state["heads"]
        ours, theirs = absorbed_flops(q, kv, heads), naive_flops(q, kv, heads)
        better = "absorbed" if ours < theirs else "naive"
        ratio = max(ours, theirs) / min(ours, theirs)
        finding = f"the {better} form needs {ratio:.1f}x fewer operations"
        if ratio < 1.05:
            finding = "both forms need nearly the same number of operations"
        figure = new_figure(
            f"{q} new token{'s' * (q > 1)}: {finding}",
            x="new tokens in the step",
            y="GFLOP",
        )
        x = np.unique(np.round(np.geomspace(1, 1024, 60)).astype(int))
        forms = (
            ("naive", naive_flops, ORANGE, "dash"),
            ("absorbed", absorbed_flops, BLUE, "solid"),
        )
        for name, count, color, dash in forms:
            y = [count(int(n), kv, heads) / 1e9 for n in x]
            figure.add_scatter(x=x, y=y, name=name, line={"color": color, "dash": dash, "width": 3})
        figure.add_scatter(
            x=[q, q],
            y=[ours / 1e9, theirs / 1e9],
            mode="markers",
            marker={"size": 12, "color": RED, "symbol": ["circle", "diamond"]},
            name="this step",
        )
        log_ticks(figure, NEW_TOKENS)
        figure.update_yaxes(type="log", dtick=1)
        return figure
