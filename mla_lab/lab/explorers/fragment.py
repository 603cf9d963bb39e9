"""Thread and register of each element of a WGMMA accumulator.

The accumulator of m64nNk16 (PTX ISA, wgmma register fragments): 128 threads, N/2 values each.
As a CuTe layout from (thread, value) to the element row + 64 * column:
((4,8,4),(2,2,N/8)):((128,1,16),(64,8,512)).
"""

from __future__ import annotations

from typing import Any

from .. import explorer
from ..source import formula
from ..svg import Cell, Svg, grid, tint
from ..tile_homes import accumulator, owners

#: rows that are drawn: one warp's
SHOWN_ROWS = 16


class FragmentExplorer(explorer.Explorer):
    """One warp's sixteen rows of the accumulator; the chosen thread's values are outlined."""

    source = formula("PTX ISA")
    frames_over = "lane"

    knobs = explorer.knobs(
        warp=explorer.integers("warp", 0, 3, 0, width="200px"),
        lane=explorer.integers("lane", 0, 31, 5, width="330px"),
        columns=explorer.steps("columns", (8, 16, 24, 32), 16, "240px"),
    )

    def figure(self, state: dict[str, Any]) -> Svg:
        owner = owners(state["columns"])
        mine = 32 * state["warp"] + state["lane"]
        first = 16 * state["warp"]

        def cell(row: int, column: int) -> Cell:
            thread, value = owner[row, column]
            title = f"row {row}, column {column}: thread {thread}, value {value}"
            return Cell(f"{thread % 32}.{value}", tint(thread % 4), title, thread == mine)

        shown, columns = range(first, first + SHOWN_ROWS), range(state["columns"])
        rows = sorted({r for (r, _), (t, _) in owner.items() if t == mine})
        finding = f"lane {state['lane']} holds values in rows {rows[0]} and {rows[1]}"
        return grid(
            [[cell(row, column) for column in columns] for row in shown],
            f"Accumulator rows {first} to {first + 15}, {finding}",
            rows=[str(row) for row in shown],
            columns=[str(column) for column in columns],
            size=(44 if state["columns"] <= 16 else 33, 25),
            caption=f"{finding}; in a cell: lane.value",
        )

    def note(self, state: dict[str, Any]) -> str:
        columns = state["columns"]
        return (
            f"<div><code>{accumulator(columns)}</code>: four neighbouring lanes share a row, so a "
            f"row's max takes the {columns // 4} values of each lane and two shuffles. "
            f"A 64 x 512 accumulator would be {512 // 2} registers a thread, so two warp groups "
            "share it.</div>"
        )
