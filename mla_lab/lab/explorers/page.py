"""A request's KV tiles above, the page pool below, and the TMA boxes between them."""

from __future__ import annotations

from typing import Any

from .. import explorer, pages
from ..source import formula
from ..style import PAGE_TINT
from ..svg import Cell, Svg, box, document, label, tint

#: tokens of the pool that is drawn
POOL_TOKENS = 1024
_WIDTH = 1000.0
_TILE_HEIGHT = 46.0


class PageExplorer(explorer.Explorer):
    """One request on random pages; a tile's boxes are outlined in both rows."""

    source = formula("boxes of a block table")
    frames_over = "page_size"

    knobs = explorer.knobs(
        kv_len=explorer.integers("tokens", 1, 512, 300, width="330px"),
        page_size=explorer.steps("page size", (16, 32, 64, 128), 16, "260px"),
        tile=explorer.integers("tile", 0, 7, 1, width="230px"),
        seed=explorer.integers("seed of the table", 0, 9, 4, width="300px"),
    )

    def boxes(self, state: dict[str, Any]) -> list[pages.Box]:
        """All boxes of the request."""
        pool = POOL_TOKENS // state["page_size"]
        table = pages.random_table(state["kv_len"], state["page_size"], pool, state["seed"])
        return pages.boxes(table, state["kv_len"], state["page_size"])

    def figure(self, state: dict[str, Any]) -> Svg:
        fetched = self.boxes(state)
        chosen = min(state["tile"], fetched[-1].tile)  # a short request has fewer tiles
        mine = [b for b in fetched if b.tile == chosen]
        finding = (
            f"Tile {chosen} is {len(mine)} box{'es' * (len(mine) > 1)} "
            f"of {mine[0].rows} rows from page{'s' * (len(mine) > 1)} "
            + ", ".join(str(b.page) for b in mine)
        )
        body = label(0, 10, finding, size=16, anchor="start")
        body += _request(state, fetched, chosen) + _pool(state, fetched, chosen)
        return document(_WIDTH + 8, 290, body, finding)

    def note(self, state: dict[str, Any]) -> str:
        t = pages.traffic(state["kv_len"], state["page_size"])
        return (
            f"<div>{t.boxes} box{'es' * (t.boxes > 1)}, {t.copies} bulk copies; "
            f"{t.wasted_rows} rows fetched behind the last token; "
            f"{t.unused_slots} slots of its pages unused.</div>"
        )


def _outlined_last(fetched: list[pages.Box], chosen: int) -> list[pages.Box]:
    """The boxes in an order in which no neighbour covers a part of an outline."""
    return sorted(fetched, key=lambda b: b.tile == chosen)


def _request(state: dict[str, Any], fetched: list[pages.Box], chosen: int) -> str:
    """The request in token order; what lies behind its last token is left empty."""
    scale = _WIDTH / 512
    heading = "the request, token 0 at the left; a number is a page id"
    parts = [label(0, 44, heading, size=13, anchor="start")]
    for b in _outlined_last(fetched, chosen):
        first = b.tile * pages.TILE_KV + b.at
        rows = min(b.rows, state["kv_len"] - first)
        cell = Cell(
            str(b.page) if rows * scale > 12 else "",
            tint(b.tile),
            f"tokens {first} to {first + rows - 1}: page {b.page}, rows {b.row} on",
            b.tile == chosen,
        )
        parts.append(box(first * scale, 56, rows * scale, _TILE_HEIGHT, cell, size=11))
    return "".join(parts)


def _pool(state: dict[str, Any], fetched: list[pages.Box], chosen: int) -> str:
    """The page pool, two lines; grey pages belong to others."""
    size = state["page_size"]
    per_line = 512 // size
    scale = _WIDTH / 512
    used = {b.page for b in fetched}
    parts = [label(0, 136, "the page pool, by page id", size=13, anchor="start")]
    for page in range(POOL_TOKENS // size):
        x, y = page % per_line * size * scale, 150 + page // per_line * 62
        name = "" if page in used else str(page)
        foreign = Cell(name, PAGE_TINT, f"page {page}: another request's, or free")
        parts.append(box(x, y, size * scale, _TILE_HEIGHT, foreign, size=11))
    for b in _outlined_last(fetched, chosen):
        title = f"page {b.page} fills tile {b.tile}"
        cell = Cell(str(b.page), tint(b.tile), title, b.tile == chosen)
        x = (b.page % per_line * size + b.row) * scale
        y = 150 + b.page // per_line * 62
        parts.append(box(x, y, b.rows * scale, _TILE_HEIGHT, cell, size=11))
    return "".join(parts)
