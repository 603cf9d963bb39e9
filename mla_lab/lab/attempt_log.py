"""Log of attempts on the kernels: change, expectation, outcome (`data/notes`)."""

from __future__ import annotations

from html import escape
from typing import Any

from ..core.errors import invalid
from . import explorer
from .source import Source
from .style import FONT, PAGE_INK
from .svg import Svg
from .tables import Table, lines, table

RECORD = "notes/kernel_attempts.jsonl"
COLUMNS = ("change", "case", "expected", "came", "why", "card", "date")
#: those that an attempt's picture lists below its title; card and date stand in its note
SHOWN = COLUMNS[1:5]


def attempts(kernel: str, about: str = "") -> Table:
    """Attempts on `kernel` ("cute/keep_ab_sm90"), in order of time; `about`: those that have this
    word in their change or case. Raises InvalidInput for a kernel without any.
    """
    known = dict.fromkeys(row["kernel"] for row in lines(RECORD))
    if kernel not in known:
        raise invalid("kernel", repr(kernel), tuple(known))
    mine = [row for row in lines(RECORD) if row["kernel"] == kernel]
    found = [row for row in mine if about in row["change"] + row["case"]]
    return table(COLUMNS, [[row[name] for name in COLUMNS] for row in found])


class AttemptExplorer(explorer.Explorer):
    """The log of one kernel, one attempt at a time."""

    frames_over = "kernel"

    def controls(self) -> explorer.Knobs:
        kernels = list(dict.fromkeys(row["kernel"] for row in lines(RECORD)))
        most = max(len(attempts(kernel).rows) for kernel in kernels)
        return explorer.knobs(
            kernel=explorer.choice("kernel", kernels, kernels[0], "280px"),
            number=explorer.integers("attempt", 1, most, 1, width="420px"),
        )

    def redraw(self) -> None:
        """The slider ends at the last attempt of the chosen kernel."""
        self.limit("number", len(attempts(self.state["kernel"]).rows))
        super().redraw()

    def shown(self, state: dict[str, Any]) -> tuple[int, int, dict[str, str]]:
        """Number of the attempt, how many the kernel has, and its row."""
        rows = attempts(state["kernel"]).rows
        number = min(state["number"], len(rows))
        return number, len(rows), dict(zip(COLUMNS, rows[number - 1], strict=True))

    def figure(self, state: dict[str, Any]) -> Svg:
        number, most, parts = self.shown(state)
        title = f"Attempt {number} of {most} on {state['kernel']}: {parts['change']}"
        body = "".join(
            f"<b style='margin-top:6px'>{name}</b>"
            f"<span style='margin-top:6px'>{escape(parts[name]) or '(nothing noted)'}</span>"
            for name in SHOWN
        )
        style = f"font:14px/1.4 {FONT};color:{PAGE_INK};max-width:860px;min-height:190px"
        grid = "display:grid;grid-template-columns:90px 1fr"
        text = f"<b>{escape(title)}</b><div style='{grid}'>{body}</div>"
        return Svg(f"<div style='{style}'>{text}</div>", title)

    def note(self, state: dict[str, Any]) -> str:
        _, _, row = self.shown(state)
        return f"<div>{Source('recorded', card=row['card'], date=row['date']).chip()}</div>"
