"""Inside one CTA: the roles of its loop over time, by stages and lookahead."""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go

from ...core.errors import InvalidInput
from ...simulate import H200, Pipeline, run_pipeline
from .. import explorer
from ..gantt import bars
from ..source import PREDICTED
from ..style import PAPER, new_figure

_LANES = ("load", "QK", "softmax", "PV")


class PipelineExplorer(explorer.Explorer):
    """Clocks of each role and the ring's size; lanes are the roles, one bar a block."""

    source = PREDICTED
    frames_over = "stages"

    knobs = explorer.knobs(
        stages=explorer.integers("stages", 1, 6, 3, width="240px"),
        lookahead=explorer.integers("QK ahead", 0, 2, 1, width="240px"),
        load=explorer.integers("load, clocks", 200, 4000, 1100, step=100, width="330px"),
        softmax=explorer.integers("softmax, clocks", 0, 3000, 880, step=40, width="350px"),
        blocks=explorer.integers("blocks", 2, 16, 8, width="240px"),
        latency=explorer.integers(
            "latency, clocks",
            0,
            3000,
            int(Pipeline.of(H200, 64, 64, 1152).latency),
            step=10,  # the default is on the slider's grid
            width="350px",
        ),
    )

    def pipeline(self, state: dict[str, Any]) -> Pipeline:
        """The loop of `state`; QK and PV as on the card."""
        card = Pipeline.of(H200, 64, 64, 1152)
        return Pipeline(
            float(state["load"]),
            float(state["latency"]),
            card.qk,
            float(state["softmax"]),
            card.pv,
            card.release,
            state["stages"],
            state["lookahead"],
        )

    def figure(self, state: dict[str, Any]) -> go.Figure:
        try:
            pipeline = self.pipeline(state)
        except InvalidInput:
            ahead = state["lookahead"]
            empty = new_figure(f"Deadlock: QK {ahead} ahead needs {ahead + 1} stages or more")
            return empty.update_xaxes(visible=False).update_yaxes(visible=False)
        spans = run_pipeline(pipeline, state["blocks"])
        steady = run_pipeline(pipeline, 48).steady()
        matrix = H200.matrix_clocks(64, 64)  # without the gaps that QK and PV have between them
        figure = new_figure(
            f"{steady:.0f} clocks a block; the matrix unit is busy {matrix / steady:.0%} of it",
            x="clocks",
            height=320,
        )
        for bar in bars(spans.timeline(1.0), kind="predicted"):
            bar.text = [str(i) for i in range(len(bar.y))]
            bar.textposition = "inside"
            bar.insidetextanchor = "middle"
            bar.hovertemplate = "%{x:.0f} clocks<extra></extra>"
            bar.marker.line = {"width": 1, "color": PAPER}
            figure.add_trace(bar)
        figure.update_yaxes(
            tickvals=list(range(4)), ticktext=list(_LANES), range=[3.6, -0.6], title_text=""
        )
        figure.update_layout(barmode="overlay", bargap=0.25)
        return figure
