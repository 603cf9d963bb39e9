"""The code of a step of notebooks 60 to 69, whole or against the step before, with lines marked."""

from __future__ import annotations

import re
from difflib import unified_diff
from typing import Any

from .. import explorer
from ..source import Source
from ..steps.catalogue import Step, step
from ..steps.plain import imported_numbers
from ..steps.text import given_text, highlighted
from ..svg import Svg

CODE, NEW = "the code", "what is new"
#: what a reader looks for, and the words by which its lines are found
MARKS = {
    "nothing": "",
    "your functions": "",
    "barriers": r"barrier|mbar|arrive|wait|parity|sync",
    "copies": r"\bcopy|copies|tma|Copy",
    "products": r"mma|gemm",
    "shared memory": r"smem|swizzle|allocate|storage",
    "registers": r"setmaxreg|rmem|fragment|register",
}


def marked_lines(of: Step, text: str, mark: str) -> list[int]:
    """Numbers of the lines of `text`, from 1, that have what `mark` looks for."""
    words = MARKS[mark]
    if mark == "your functions":
        words = r"\b(" + "|".join(of.functions) + r")\b"
    if not words:
        return []
    return [i for i, line in enumerate(text.splitlines(), 1) if re.search(words, line)]


def changes(of: Step) -> str:
    """The step's text against that of the step before, as a unified diff without its head; the
    whole text where there is none before.
    """
    now = given_text(of)
    if not of.before:
        return now
    before = given_text(step(of.before)).splitlines()
    lines = unified_diff(before, now.splitlines(), n=2, lineterm="")
    return "\n".join(line for line in lines if not line.startswith(("---", "+++"))) + "\n"


class StepExplorer(explorer.Explorer):
    """What is given of a step, with stubs where the reader writes."""

    source = Source("predicted", detail="nothing runs here")
    knobs = explorer.knobs(
        show=explorer.choice("show", (CODE, NEW), CODE, "240px"),
        mark=explorer.choice("mark", tuple(MARKS), "your functions", "230px"),
    )

    def __init__(self, number: str = "61", **state: Any) -> None:
        self.step = step(number)
        self.name = f"lab.StepExplorer({number!r})"
        super().__init__(**state)

    def line(self, state: dict[str, Any] | None = None) -> str:
        """As of every explorer, the number of the step in front."""
        return super().line(state).replace(")(", ", ")

    def figure(self, state: dict[str, Any]) -> Svg:
        new = state["show"] == NEW and bool(self.step.before)
        text = changes(self.step) if new else given_text(self.step)
        lines = marked_lines(self.step, text, state["mark"])
        since = f", against step {self.step.before}" if new else ""
        found = f"Step {self.step.number}{since}: {len(text.splitlines())} lines"
        if lines:
            found += f", {len(lines)} of them marked: {state['mark']}"
        elif state["mark"] != "nothing":
            found += f", none of them about {state['mark']}"
        return Svg(highlighted(text, lines, "diff" if new else "python"), found)

    def note(self, state: dict[str, Any]) -> str:
        text = self.title(**state)
        first = " It is the first step." if state["show"] == NEW and not self.step.before else ""
        numbers = imported_numbers(self.step.path).items()
        listed = ", ".join(f"<code>{name} = {value}</code>" for name, value in numbers)
        return f"<div>{text}.{first} Numbers that it imports: {listed}.</div>"
