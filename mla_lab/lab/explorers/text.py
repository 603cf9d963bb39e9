"""The tiny model at work: its text letter by letter, kept and refused drafts, pages that fill."""

from __future__ import annotations

from typing import Any

from .. import explorer
from ..source import Source
from ..style import PAGE_PAPER, PAGE_TINT
from ..svg import Cell, Svg, box, document, label, tint
from ..tiny_decode import PAGE, Decoder, Request, Step
from ..tiny_model import TinyModel

LETTERS, STEPS, DRAFTS = 20, 20, (0, 4)
_CELL, _LINE, _WIDTH = 24.0, 40, 1000.0
OWN, KEPT, REFUSED = tint(0), tint(2), tint(5)


class TextExplorer(explorer.Explorer):
    """Steps through generated letters; every draft length is decoded once, when it is created."""

    source = Source("measured", detail="decoded here")
    frames_over = "step"

    def __init__(self, model: TinyModel, prompt: str, **state: Any) -> None:
        self.model, self.prompt = model, prompt
        self.runs = {n: Decoder(model, [prompt], drafts=n).generate(LETTERS) for n in DRAFTS}
        super().__init__(**state)

    knobs = explorer.knobs(
        drafts=explorer.choice("draft tokens", DRAFTS, 4, "190px"),
        step=explorer.integers("call", 1, STEPS, 4, width="420px"),
    )

    def shown(self, state: dict[str, Any]) -> tuple[Request, list[Step]]:
        """The run of a draft length, and its steps so far; behind the last step nothing changes."""
        request = self.runs[state["drafts"]].requests[0]
        return request, request.steps[: state["step"]]

    def figure(self, state: dict[str, Any]) -> Svg:
        request, steps = self.shown(state)
        letters = sum(step.kept + 1 for step in steps)
        finding = (
            f"{letters} letters in {len(steps)} calls a layer: {sum(s.kept for s in steps)} of "
            f"{sum(len(s.draft) for s in steps)} draft tokens kept; "
            f"{steps[-1].cached} tokens cached"
        )
        body = label(0, 12, finding, size=16, anchor="start")
        body += label(0, 44, "the prompt's end", size=13, anchor="start")
        body += _cells(self.prompt[-_LINE:], 56, [PAGE_TINT] * _LINE)
        body += label(
            0, 104, "generated: blue by the model, green a kept draft", size=13, anchor="start"
        )
        text, fills = self._written(request, steps)
        body += _cells(text, 116, fills)
        body += self._last_draft(steps[-1])
        body += _pages(steps[-1].cached)
        return document(_WIDTH, 330, body, finding)

    def _written(self, request: Request, steps: list[Step]) -> tuple[str, list[str]]:
        fills = [fill for s in steps for fill in [*[KEPT] * s.kept, OWN]]
        tokens = request.tokens[request.prompt : request.prompt + len(fills)]
        return self.model.text(tokens), fills

    def _last_draft(self, step: Step) -> str:
        parts = [
            label(0, 198, "the draft of this call: orange was refused", size=13, anchor="start")
        ]
        fills = [KEPT if i < step.kept else REFUSED for i in range(len(step.draft))]
        if not step.draft:
            parts.append(label(0, 220, "none", size=13, anchor="start"))
        return "".join(parts) + _cells(self.model.text(step.draft), 210, fills)

    def line(self, state: dict[str, Any] | None = None) -> str:
        """The expression has the model and the prompt of the notebook."""
        return super().line(state).replace("(", "(model, prompt, ", 1)


def _cells(text: str, y: float, fills: list[str]) -> str:
    signs = {" ": "␣", "\n": "↵"}
    return "".join(
        box(
            at % _LINE * _CELL,
            y + at // _LINE * _CELL * 1.1,
            _CELL,
            _CELL,
            Cell(signs.get(letter, letter), fill, bold=fill == KEPT),
            size=13,
        )
        for at, (letter, fill) in enumerate(zip(text, fills, strict=True))
    )


def _pages(cached: int) -> str:
    """Pages of the request in token order, filled as far as they are used."""
    width, parts = 120.0, [label(0, 262, "its pages, 64 tokens each", size=13, anchor="start")]
    for page in range(-(-cached // PAGE)):
        used = min(PAGE, cached - page * PAGE)
        x = page * (width + 12)
        parts.append(box(x, 274, width, 34, Cell("", PAGE_PAPER, f"page {page}: {used} tokens")))
        parts.append(box(x, 274, width * used / PAGE, 34, Cell(str(used), tint(4))))
    return "".join(parts)
