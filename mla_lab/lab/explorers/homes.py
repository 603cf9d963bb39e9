"""One element of S or O: the Hopper register and the Blackwell lane and column that hold it."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import explorer, tile_homes
from ..source import formula
from ..style import INK, ORANGE, PAGE_INK, PAGE_PAPER, RED
from ..svg import Svg, document, label, tint

WIDTH, PANEL, GAP, MATRIX, STORE = 960, 452, 40, 128, 128
#: regions of tensor memory: name, first column, one behind the last, tint
REGIONS = (("S0", 0, 64, 0), ("S1", 64, 128, 4), ("O", 128, 384, 2), ("not used", 384, 512, 7))


def _box(x: float, y: float, width: float, height: float, fill: str, more: str = "") -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
        f'fill="{fill}" {more}/>'
    )


def _dot(x: float, y: float) -> str:
    ring = f'fill="{PAGE_PAPER}" stroke="{RED}" stroke-width="3"'
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" {ring}/>'


def _matrix(x: float, y: float, mask: np.ndarray, row: int, column: int) -> str:
    """The tile as a matrix; what one thread holds is filled, the element has a ring."""
    rows, columns = mask.shape
    wide, high = PANEL / columns, MATRIX / rows
    parts = [_box(x, y, PANEL, MATRIX, PAGE_PAPER, f'stroke="{PAGE_INK}"')]
    for r in np.flatnonzero(mask.any(1)):
        edges = np.flatnonzero(np.diff(np.r_[0, mask[r].astype(int), 0]))
        for first, last in edges.reshape(-1, 2):
            width = max(1.5, (last - first) * wide)
            parts.append(_box(x + first * wide, y + r * high, width, max(3, high), ORANGE))
    return "".join(parts) + _dot(x + (column + 0.5) * wide, y + (row + 0.5) * high)


def _registers(x: float, y: float, tile: tile_homes.Tile, at: tile_homes.Register) -> str:
    """Registers of a warp group: 128 threads down, accumulator registers across."""
    wide, high = PANEL / tile.registers, STORE / 128
    parts = []
    for warp in range(4):
        more = 'stroke="#8A8A8A"'
        parts.append(_box(x, y + 32 * warp * high, PANEL, 32 * high, tint(warp), more))
    parts.append(_box(x, y + at.thread * high - 1, PANEL, 3, ORANGE))
    for warp in range(4):  # over the line of a thread, which may pass behind a name
        middle = y + (32 * warp + 16) * high
        parts.append(_box(x + 3, middle - 7, 46, 14, tint(warp)))
        parts.append(label(x + 6, middle, f"warp {warp}", anchor="start", ink=INK))
    return "".join(parts) + _dot(x + (at.value + 0.5) * wide, y + (at.thread + 0.5) * high)


def _tensor_memory(x: float, y: float, tile: tile_homes.Tile, at: tile_homes.Place) -> str:
    """Tensor memory of a CTA: 128 lanes down, 512 columns across."""
    wide, high = PANEL / 512, STORE / 128
    parts = []
    for name, first, last, color in REGIONS:
        more = 'stroke="#8A8A8A"'
        width = (last - first) * wide
        parts.append(_box(x + first * wide, y, width, STORE, tint(color), more))
        parts.append(label(x + (first + last) / 2 * wide, y + 12, name, ink=INK))
    _, columns = tile_homes.lanes_and_columns(tile)
    first, last = int(columns.min()), int(columns.max()) + 1
    parts.append(_box(x + first * wide, y + at.lane * high - 1, (last - first) * wide, 3, ORANGE))
    return "".join(parts) + _dot(x + (at.column + 0.5) * wide, y + (at.lane + 0.5) * high)


class HomeExplorer(explorer.Explorer):
    """The same element on both cards; orange is all that its thread, or its lane, holds."""

    source = formula("PTX ISA, emulator")
    frames_over = "tile"

    knobs = explorer.knobs(
        tile=explorer.choice("tile", list(tile_homes.TILES), "S, 128 rows x 128 tokens", "290px"),
        row=explorer.integers("row", 0, 127, 19, width="300px"),
        column=explorer.integers("column", 0, 511, 74, width="300px"),
    )

    def figure(self, state: dict[str, Any]) -> Svg:
        tile, row, column = self._element(state)
        one, two = tile_homes.hopper(tile, row, column), tile_homes.blackwell(tile, row, column)
        theirs, ours = tile_homes.of_thread(tile, row, column)
        group = f"CTA {one.cta}, warp group {one.group}: 128 threads of {tile.registers} registers"
        left, right = 4.0, 4.0 + PANEL + GAP
        words = (
            f"row {row}, column {column}: on Hopper register {one.value} of thread {one.thread}, "
            f"on Blackwell lane {two.lane}, column {two.column}"
        )
        body = [
            label(left, 14, words, size=15, anchor="start"),
            label(left, 40, f"Hopper: what thread {one.thread} holds", anchor="start"),
            label(right, 40, f"Blackwell: what lane {two.lane} holds", anchor="start"),
            _matrix(left, 52, theirs, row, column),
            _matrix(right, 52, ours, row, column),
            label(left, 200, group, anchor="start"),
            label(
                right, 200, f"CTA {two.cta}: 128 lanes of 512 columns of tensor memory",
                anchor="start",
            ),
            _registers(left, 212, tile, one),
            _tensor_memory(right, 212, tile, two),
        ]  # fmt: skip
        return document(WIDTH, 346, "".join(body), words)

    def note(self, state: dict[str, Any]) -> str:
        tile, row, column = self._element(state)
        theirs, ours = tile_homes.of_thread(tile, row, column)
        place = tile_homes.blackwell(tile, row, column)
        return (
            f"<div>On Hopper the thread has {int(theirs.any(1).sum())} rows and {theirs.sum()} "
            f"elements in registers. On Blackwell no thread holds the tile: thread "
            f"{tile_homes.reader(place)} of the softmax warp group loads the lane, "
            f"{int(ours.any(1).sum())} row and {ours.sum()} elements, when it needs them.</div>"
        )

    def _element(self, state: dict[str, Any]) -> tuple[tile_homes.Tile, int, int]:
        tile = tile_homes.TILES[state["tile"]]
        return tile, min(state["row"], tile.rows - 1), min(state["column"], tile.columns - 1)
