"""A swizzle as a picture: the banks of each 16-byte vector of an atom, and their conflicts."""

from __future__ import annotations

from typing import Any

from .. import banks, explorer
from ..layout import Swizzle
from ..source import formula
from ..svg import Cell, Svg, grid, row_of, tint

BITS = (0, 1, 2, 3)
ROW_BYTES = (16, 32, 64, 128, 256)
READS = ("a column (matrix unit)", "front to back (bulk copy)")
_GROUPS = banks.NUM_BANKS * banks.BANK_BYTES // banks.VECTOR_BYTES


class SwizzleExplorer(explorer.Explorer):
    """Eight rows of an atom: logical place left, bank groups right, one access outlined."""

    source = formula("bank arithmetic")
    frames_over = "bits"

    knobs = explorer.knobs(
        row_bytes=explorer.steps("bytes a row", ROW_BYTES, 128, "270px"),
        bits=explorer.steps("swizzle bits", BITS, 0, "250px"),
        read=explorer.choice("read", READS, READS[0], "280px"),
        chunk=explorer.integers("access number", 0, 7, 2, width="270px"),
    )

    def access(self, state: dict[str, Any]) -> list[int]:
        """Logical byte offsets that eight lanes access together."""
        row_bytes = state["row_bytes"]
        if state["read"] == READS[0]:
            return banks.column(row_bytes, state["chunk"] % (row_bytes // banks.VECTOR_BYTES))
        width = banks.GROUP_LANES * banks.VECTOR_BYTES
        start = state["chunk"] * width % (8 * row_bytes)
        return [start + lane * banks.VECTOR_BYTES for lane in range(banks.GROUP_LANES)]

    def turns(self, state: dict[str, Any]) -> int:
        """Turns that the outlined access takes after the swizzle."""
        swizzle = Swizzle(state["bits"], 4, 3)
        return banks.turns([swizzle(byte) for byte in self.access(state)])

    def figure(self, state: dict[str, Any]) -> Svg:
        swizzle, turns = Swizzle(state["bits"], 4, 3), self.turns(state)
        wanted = set(self.access(state))
        verdict = "conflict-free" if turns == 1 else f"{turns}-way conflict"
        return row_of(
            [
                _logical(state["row_bytes"], wanted),
                _physical(state["row_bytes"], swizzle, wanted, verdict),
            ],
            gap=40,
        )

    def note(self, state: dict[str, Any]) -> str:
        swizzle = Swizzle(state["bits"], 4, 3)
        column = banks.worst_column(state["row_bytes"], swizzle)
        row = banks.worst_row(state["row_bytes"], swizzle)
        return (
            f"<div><code>Swizzle&lt;{state['bits']},4,3&gt;</code> on rows of {state['row_bytes']} "
            f"bytes. Turns at most: <b>{column}</b> for a column, <b>{row}</b> for filling the "
            "atom front to back.</div>"
        )


def _name(byte: int, row_bytes: int) -> str:
    return f"{byte // row_bytes}.{byte % row_bytes // banks.VECTOR_BYTES}"


def _logical(row_bytes: int, wanted: set[int]) -> Svg:
    """The atom as the program sees it: row.vector, coloured by row."""
    chunks = row_bytes // banks.VECTOR_BYTES

    def cell(row: int, chunk: int) -> Cell:
        byte = row * row_bytes + chunk * banks.VECTOR_BYTES
        title = f"row {row}, bytes {chunk * 16} to {chunk * 16 + 15}"
        return Cell(_name(byte, row_bytes), tint(row), title, byte in wanted)

    return grid(
        [[cell(row, chunk) for chunk in range(chunks)] for row in range(8)],
        f"Atom of 8 rows of {row_bytes} bytes as row.vector",
        rows=[f"row {r}" for r in range(8)],
        columns=[str(c) for c in range(chunks)],
        size=(40 if chunks <= 8 else 30, 27),
        caption="the tile: row.vector of 16 B",
    )


def _physical(row_bytes: int, swizzle: Swizzle, wanted: set[int], verdict: str) -> Svg:
    """Shared memory as banks see it: a line is 128 bytes, a column is four banks."""
    place = {swizzle(b): b for b in range(0, 8 * row_bytes, banks.VECTOR_BYTES)}
    lines = -(-8 * row_bytes // 128)

    def cell(line: int, group: int) -> Cell:
        byte = place.get(line * 128 + group * banks.VECTOR_BYTES)
        if byte is None:
            return Cell("")
        name = _name(byte, row_bytes)
        title = f"vector {name} in banks {4 * group} to {4 * group + 3}"
        return Cell(name, tint(byte // row_bytes), title, byte in wanted)

    return grid(
        [[cell(line, group) for group in range(_GROUPS)] for line in range(lines)],
        f"The same vectors over the 32 banks; the outlined access: {verdict}",
        rows=[f"{128 * i} B" for i in range(lines)],
        columns=[f"{4 * g}-{4 * g + 3}" for g in range(_GROUPS)],
        size=(44, 27),
        caption=f"the banks; outlined access: {verdict}",
    )
