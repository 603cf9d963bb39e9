"""A tree of draft tokens, its mask, and the packed uint16 words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...core import masks
from ...core.errors import invalid
from .. import explorer
from ..source import formula
from ..style import PAGE_PAPER
from ..svg import Cell, Svg, box, document, grid, label, row_of, tint

#: parent of draft token t, of 1 and more, by the tree's shape
SHAPES: dict[str, Callable[[int], int]] = {
    "chain": lambda t: t - 1,
    "two branches": lambda t: max(0, t - 2),
    "binary tree": lambda t: (t - 1) // 2,
    "star": lambda t: 0,
}
_SEEN = "#BBD7EA"
_NODE = (40.0, 24.0)


def parents(shape: str, count: int) -> list[int]:
    """Parent of each of `count` draft tokens, -1 for one whose parent is the prefix."""
    if shape not in SHAPES:
        raise invalid("shape", repr(shape), tuple(SHAPES))
    return [-1, *map(SHAPES[shape], range(1, count))]


class MaskExplorer(explorer.Explorer):
    """The tree left, its mask right; the chosen row's path is outlined in both."""

    source = formula("packed bits")
    frames_over = "row"

    knobs = explorer.knobs(
        shape=explorer.choice("tree", tuple(SHAPES), "binary tree", "220px"),
        count=explorer.integers("draft tokens", 1, 15, 7, width="290px"),
        row=explorer.integers("row", 0, 14, 4, width="240px"),
    )

    def figure(self, state: dict[str, Any]) -> Svg:
        parent = parents(state["shape"], state["count"])
        visible = masks.tree(parent).tolist()
        row = min(state["row"], state["count"] - 1)
        return row_of([_tree(parent, visible, row), _mask(visible, row)], gap=40)

    def note(self, state: dict[str, Any]) -> str:
        visible = masks.tree(parents(state["shape"], state["count"]))
        row = min(state["row"], state["count"] - 1)
        words = masks.pack(visible)[row].tolist()
        shown = ", ".join(f"0x{word:04x}" for word in words)
        return f"<div>Row {row} is packed as <code>{shown}</code>, column 0 the lowest bit.</div>"


def _tree(parent: list[int], visible: list[list[bool]], chosen: int) -> Svg:
    """The draft tree, roots left, siblings below each other."""
    path, depth = visible[chosen], [sum(seen) - 1 for seen in visible]
    width, height = _NODE
    at = {
        t: (depth[t] * (width + 26), 30 + depth[:t].count(depth[t]) * (height + 12))
        for t in range(len(parent))
    }
    lines, nodes = [], []
    for token, p in enumerate(parent):
        x, y = at[token]
        if p >= 0:
            px, py = at[p]
            lines.append(
                f'<line x1="{px + width}" y1="{py + height / 2}" x2="{x}" y2="{y + height / 2}" '
                f'stroke="#8A8A8A" stroke-width="{3 if path[token] and path[p] else 1}"/>'
            )
        title = f"draft token {token}, after {'the prefix' if p < 0 else f'token {p}'}"
        nodes.append(
            box(x, y, width, height, Cell(str(token), tint(depth[token]), title, path[token]))
        )
    caption = label(0, 12, "the draft tree", size=14, anchor="start")
    size = (max(x for x, _ in at.values()) + width + 6, max(y for _, y in at.values()) + height + 6)
    alt = f"Draft tree of {len(parent)} tokens"
    return document(max(size[0], 120), size[1], caption + "".join(lines + nodes), alt)


def _mask(visible: list[list[bool]], chosen: int) -> Svg:
    """Rows see columns; bits as 1 and dots."""
    count = len(visible)
    cells = [
        [
            Cell(
                "1" if seen else "·",
                _SEEN if seen else PAGE_PAPER,
                f"token {i} {'sees' if seen else 'does not see'} token {j}",
                i == chosen,
            )
            for j, seen in enumerate(row)
        ]
        for i, row in enumerate(visible)
    ]
    names = [str(i) for i in range(count)]
    alt = f"Mask of {count} draft tokens; row {chosen} attends to {sum(visible[chosen])}"
    caption = f"row {chosen} attends to {sum(visible[chosen])} of {count} draft tokens"
    return grid(cells, alt, rows=names, columns=names, size=(26, 24), caption=caption)
