"""A serving day: its batches, and what a step of it takes by policy, format and drafts."""

from __future__ import annotations

import tempfile
from html import escape
from pathlib import Path
from typing import Any

import ipywidgets as widgets
import plotly.graph_objects as go

from ...core.models import MODELS, get_model
from ...workload import DecodeStep
from .. import explorer, serving_day
from ..lengths import open_trace
from ..predicted import PLAIN
from ..source import PREDICTED
from ..style import BLUE, GREEN, INK, ORANGE, RED, hatch, panels

RANKS = (1, 2, 4, 8)
STEP_MS = (10, 20, 30, 50, 80)
CHANCES = (0.5, 0.6, 0.7, 0.8, 0.9)
FILE = "step.jsonl"
OFFER = f"write {FILE}"


class TuneExplorer(explorer.Explorer):
    """A trace, a model and a moment; policies, formats and drafts of the step at that moment."""

    source = PREDICTED
    frames_over = "moment"

    knobs = explorer.knobs(
        trace=explorer.field("trace file (CSV, JSONL); empty: ours", "", "520px"),
        model=explorer.choice("model", list(MODELS), "deepseek-v3", "230px"),
        tp=explorer.steps("ranks", RANKS, 1, "200px"),
        card=explorer.choice("card", serving_day.CARDS, "H200", "130px"),
        step_ms=explorer.steps("step, ms", STEP_MS, 30, "220px"),
        moment=explorer.integers("moment, %", 0, 100, 50, step=2, width="330px"),
        kind=explorer.choice("format", list(serving_day.FORMATS), "bf16", "240px"),
        drafts=explorer.steps("drafts", serving_day.DRAFTS, 0, "200px"),
        chance=explorer.steps("accepted", CHANCES, 0.7, "220px"),
    )

    def step(self, state: dict[str, Any]) -> DecodeStep:
        """The decode step at the moment of `state`."""
        return serving_day.step_at(state["trace"].strip(), state["moment"] / 100, state["step_ms"])

    def us(self, state: dict[str, Any], **other: Any) -> float:
        """Predicted us of one layer's call, perhaps with another format or number of drafts."""
        return serving_day.chosen_us(self.problem({**state, **other}), state["card"])

    def token_us(self, state: dict[str, Any], drafts: int) -> float:
        """Predicted us of one layer's call for each token that it yields."""
        problem = self.problem({**state, "drafts": drafts})
        return serving_day.token_us(problem, drafts, state["chance"], state["card"])

    def problem(self, state: dict[str, Any]) -> Any:
        """One layer's call of the step on one rank."""
        model, drafts, kind = get_model(state["model"]), state["drafts"], state["kind"]
        return serving_day.problem_of(self.step(state), model, state["tp"], drafts, kind)

    def figure(self, state: dict[str, Any]) -> go.Figure:
        figure = panels(
            self.finding(state),
            (
                "requests that decode",
                "policies, bf16 on an H200: us a layer",
                "formats, best plan: us a layer",
                "drafts, best plan: us/layer/token",
            ),
            height=520,
            margin={"l": 50, "r": 16, "t": 74, "b": 40},
            rows=2,
            cols=3,
            specs=[[{"colspan": 3}, None, None], [{}, {}, {}]],
            vertical_spacing=0.2,
            horizontal_spacing=0.07,
        )
        self._draw_batches(figure, state)
        spread = state["card"] == "H200"
        policies = serving_day.policy_us(self.problem({**state, "kind": "bf16"}))
        _bars(figure, policies, PLAIN, 1)
        formats = {kind: self.us(state, kind=kind) for kind in serving_day.FORMATS}
        _bars(figure, formats, state["kind"], 2, spread)
        drafts = {str(n): self.token_us(state, n) for n in serving_day.DRAFTS}
        _bars(figure, drafts, str(state["drafts"]), 3, spread)
        figure.update_layout(showlegend=False)
        return figure

    def finding(self, state: dict[str, Any]) -> str:
        """The moment in a sentence."""
        count, us = len(self.step(state)), self.us(state)
        layers = get_model(state["model"]).layers
        many = f"{count} requests decode" if count > 1 else "1 request decodes"
        whole = f"{us * layers / 1e3:.2f} ms in {layers} layers"
        return f"{many}: attention takes {us:.1f} us a layer, {whole}"

    def _draw_batches(self, figure: go.Figure, state: dict[str, Any]) -> None:
        path = state["trace"].strip()
        moments, counts = serving_day.batches(path, state["step_ms"])
        figure.add_scatter(
            x=moments, y=counts, line={"color": BLUE, "shape": "hv"}, row=1, col=1, name="requests"
        )
        at, busy = serving_day.moment_at(path, state["moment"] / 100, state["step_ms"])
        words = "" if busy else "(nearest step)"
        line = {"color": RED, "dash": "dot", "width": 2}
        figure.add_vline(x=at, line=line, annotation_text=words, row=1, col=1)
        figure.update_xaxes(title_text="seconds from the first arrival", row=1, col=1)

    def note(self, state: dict[str, Any]) -> str:
        errors, step = serving_day.errors(), self.step(state)
        problem, layers = self.problem(state), get_model(state["model"]).layers
        ms = self.us(state) * layers / 1e3
        bars = (
            f"Error bars: {errors.steps} recorded steps of serving traces, as plain calls, took "
            f"{errors.low:.2f} to {errors.high:.2f} times what is predicted of them "
            f"({errors.card}, {errors.date}, bf16, nine of ten)."
        )
        if state["card"] != "H200":
            bars = f"No error bars: those of {errors.card} say nothing of this card."
        lines = "".join(
            f"<code style='display:block;font-size:12px'>{escape(c)}</code>"
            for c in serving_day.commands(FILE, state, len(step))
        )
        return (
            f"<div>{escape(open_trace(state['trace'].strip()).summary())}. {problem.heads} heads a "
            f"rank, {problem.total_kv:,} cached tokens; attention of {layers} layers is "
            f"{ms / state['step_ms']:.0%} of a step of {state['step_ms']} ms. {bars}</div>"
            f"<div>The button writes {FILE}: these requests, for</div>{lines}"
        )

    def write(self, folder: Path) -> Path:
        """The step of the present state as JSON lines that the commands take."""
        path = folder / FILE
        serving_day.write_step(self.step(self.state), path)
        return path

    def _save(self, button: widgets.Button) -> None:
        self.write(Path.cwd())
        number = len(self.step(self.state))
        button.description = f"wrote {FILE}, {number} request{'s' * (number > 1)}"

    def _uploaded(self, change: Any) -> None:
        if change.new:
            change.owner.value = ()  # else the same file cannot be chosen again
            self.guarded(lambda: self.upload(bytes(change.new[0].content)))

    def upload(self, content: bytes) -> None:
        """Show a trace that came as bytes."""
        folder = Path(tempfile.mkdtemp(prefix="mla-lab-trace-"))
        path = folder / "uploaded_trace"
        path.write_bytes(content)
        open_trace(str(path))  # an error names its line, and the old trace stays
        self.widgets["trace"].value = str(path)

    def layout(self) -> widgets.Widget:
        """Controls with an upload and a button that writes the step."""
        box = super().layout()
        wide = {"layout": widgets.Layout(width="auto")}
        upload = widgets.FileUpload(accept=".csv,.jsonl", description="upload a trace", **wide)
        upload.observe(self._uploaded, names="value")
        save = widgets.Button(description=OFFER, icon="save", **wide)
        save.on_click(lambda button: self.guarded(lambda: self._save(button)))
        for widget in self.widgets.values():  # another step is not yet written
            widget.observe(lambda _: setattr(save, "description", OFFER), names="value")
        box.children = (widgets.HBox([upload, save]), *box.children)
        return box


def _bars(
    figure: go.Figure, us: dict[str, float], chosen: str, col: int, spread: bool = False
) -> None:
    """Bars of a panel of the lower row, the chosen one in green; `spread`: with error bars."""
    values = list(us.values())
    errors = serving_day.errors()
    bars: dict[str, Any] = {}
    if spread:
        bars["error_y"] = {
            "type": "data",
            "symmetric": False,
            "array": [v * (errors.high - 1) for v in values],
            "arrayminus": [v * (1 - errors.low) for v in values],
            "color": INK,
        }
    fill = [GREEN if name == chosen else ORANGE for name in us]
    figure.add_bar(
        x=list(us),
        y=values,
        marker={"color": fill, "pattern": hatch("predicted")},
        hovertemplate="%{x}: %{y:.1f} us<extra></extra>",
        row=2,
        col=col,
        **bars,
    )
    # below the bar, where no hatching lies behind the number
    figure.update_xaxes(
        type="category",
        tickvals=list(us),
        ticktext=[f"{name}<br><b>{v:.1f}</b>" for name, v in us.items()],
        tickfont={"size": 11},
        tickangle=0,
        row=2,
        col=col,
    )
