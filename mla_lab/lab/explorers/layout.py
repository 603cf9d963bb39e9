"""Layouts as pictures: the algebra of two layouts, and CuTe's own answer beside ours."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

from ...core.errors import MlaLabError, Unsupported
from ...cute import layout_algebra as live
from .. import explorer
from ..layout import Layout, coalesce, complement, compose, divide, flatten
from ..source import formula
from ..svg import Cell, Svg, document, grid, label, ramp, row_of, tint

#: what the explorer can do, CuTe's name for it, and the result by this package's algebra
OPERATIONS: dict[str, tuple[str, Callable[[Layout, Layout], Layout]]] = {
    "show A": ("layout", lambda a, b: a),
    "coalesce A": ("coalesce", lambda a, b: coalesce(a)),
    "A after B": ("composition", compose),
    "what A leaves out": ("complement", lambda a, b: complement(a, b.size)),
    "divide A by tiles B": ("logical_divide", divide),
}
#: cells beyond this are too many to read
MAX_CELLS = 512


def ask_cute(operation: str, a: Layout, b: Layout) -> live.LiveLayout:
    """CuTe's answer, traced by the DSL. Raises Unsupported where it is not installed."""
    pairs = [(a.shape, a.stride)]
    if operation in ("A after B", "divide A by tiles B"):
        pairs.append((b.shape, b.stride))
    cosize = b.size if operation == "what A leaves out" else 0
    return live.evaluate(OPERATIONS[operation][0], *pairs, cosize=cosize)


def picture(layout: Layout, name: str, *, color_by_tile: bool = False) -> Svg:
    """Offsets as a grid: first mode down, the rest across; from blue to yellow with the offset."""
    first, *rest = layout.modes
    rows, columns = (first.size, prod(mode.size for mode in rest)) if rest else (1, first.size)
    if rows * columns > MAX_CELLS:
        text = f"{name} = {layout}: {rows} x {columns} cells, too many to draw"
        return document(560, 26, label(4, 13, text, size=13, anchor="start"), text)
    last = max(1, layout.cosize - 1)

    def cell(i: int, j: int) -> Cell:
        offset = layout(i + j * rows)
        # in a divided layout the first mode is the place within a tile, the second the tile
        fill = tint(j) if color_by_tile else ramp(offset / last)
        return Cell(str(offset), fill, f"({i}, {j}) is at offset {offset}")

    return grid(
        [[cell(i, j) for j in range(columns)] for i in range(rows)],
        f"{name} = {layout}, {rows} by {columns} offsets",
        rows=[str(i) for i in range(rows)],
        columns=[str(j) for j in range(columns)],
        size=(34, 26) if columns <= 24 else (26, 24),
        caption=f"{name} = {layout}",
    )


class LayoutExplorer(explorer.Explorer):
    """Two layouts as text, an operation between them, the result as a grid, and CuTe's answer."""

    source = formula("own algebra")
    frames_over = "operation"

    knobs = explorer.knobs(
        a=explorer.field("A", "(4,6):(6,1)", "260px"),
        operation=explorer.choice("operation", list(OPERATIONS), "show A", "270px"),
        b=explorer.field("B", "(2,3):(1,4)", "260px"),
    )

    def figure(self, state: dict[str, Any]) -> Svg:
        a, b, result = self.answers(state)
        if isinstance(result, MlaLabError):
            # in a composition A is the outer function, B the inner one
            words = str(result).replace("inner:", f"{state['operation']}, B:")
            return refusal(words)
        shown = [picture(a, "A")]
        if state["operation"] not in ("show A", "coalesce A"):
            shown.append(picture(b, "B"))
        if state["operation"] != "show A":
            by_tile = state["operation"] == "divide A by tiles B"
            shown.append(picture(result, "result", color_by_tile=by_tile))
        return row_of(shown)

    def answers(self, state: dict[str, Any]) -> tuple[Layout, Layout, Layout | MlaLabError]:
        """A, B and the result, which is the refusal where there is none."""
        a, b = Layout.of("1:0"), Layout.of("1:0")
        try:
            a, b = Layout.of(state["a"]), Layout.of(state["b"])
            _, result = OPERATIONS[state["operation"]]
            return a, b, result(a, b)
        except MlaLabError as error:
            return a, b, error

    def note(self, state: dict[str, Any]) -> str:
        a, b, result = self.answers(state)
        if isinstance(result, MlaLabError) or result.size > MAX_CELLS:
            return ""
        try:
            answer = ask_cute(state["operation"], a, b)
        except Unsupported as error:  # CuTe was not called
            return f"<div>No answer of CuTe: {error}</div>"
        except MlaLabError as error:
            return f"<div>CuTe refuses: {error}</div>"
        same = list(answer.offsets) == result.offsets()
        verdict = "the same function" if same else "<b>another function</b>"
        modes = len(flatten(result.shape))
        return (
            f"<div><code>{answer.expression}</code><br>CuTe DSL answers <code>{answer.layout}"
            f"</code>, ours is <code>{result}</code>: {verdict}. "
            f"{result.size} coordinates, {modes} mode{'s' * (modes > 1)} in all, cosize "
            f"{result.cosize} (largest offset + 1).</div>"
        )


def refusal(text: str) -> Svg:
    """A sentence in place of a picture."""
    return document(900, 30, label(4, 15, text, size=13, anchor="start"), text)
