"""Two compiled kernels side by side: instruction classes, resources, differences."""

from __future__ import annotations

from typing import Any

import plotly.graph_objects as go

from .. import explorer
from ..style import BLUE, ORANGE, instruction_bars
from ..tables import Table, table
from ..xray_facts import KERNELS, Facts, facts

#: classes in reading order; "other" is index arithmetic, moves and branches
CLASSES = (
    "matrix",
    "tma",
    "shared",
    "global",
    "barrier",
    "special function",
    "shuffle",
    "register file",
    "local",
)


class XrayExplorer(explorer.Explorer):
    """Instruction classes of two kernels as bars; the note has the resources of both."""

    frames_over = "right"

    def controls(self) -> explorer.Knobs:
        names = list(KERNELS)
        for name in names:  # disassembled once, here, and not in a redraw
            facts(name)
        return explorer.knobs(
            left=explorer.choice("left bars", names, names[2], "370px"),
            right=explorer.choice("right bars", names, names[4], "370px"),
        )

    def sides(self, state: dict[str, Any]) -> tuple[Facts, Facts]:
        """Facts of both kernels."""
        return facts(state["left"]), facts(state["right"])

    def figure(self, state: dict[str, Any]) -> go.Figure:
        sides = self.sides(state)
        spills = sum(side.spills for side in sides)
        title = (
            f"{spills or 'No'} spills; {sides[0].count('HGMMA')} against "
            f"{sides[1].count('HGMMA')} matrix instructions"
        )
        colors = (BLUE, ORANGE)
        drawn = {s.kernel: (c, s.classes) for s, c in zip(sides, colors, strict=True)}
        return instruction_bars(title, CLASSES, drawn, decades=3.6)

    def note(self, state: dict[str, Any]) -> str:
        lines = [
            f"{side.source.chip()} <b>{side.kernel}</b>: {side.registers} registers a thread, "
            f"{side.dynamic_shared / 1024:.0f} KB of dynamic and {side.static_shared:,} bytes of "
            f"static shared memory, "
            f"stack {side.stack} bytes, {sum(side.classes.values()):,} instructions"
            for side in self.sides(state)
        ]
        return "<div>" + "<br>".join(lines) + "</div>"


def opcode_table(kernel: str, prefixes: tuple[str, ...]) -> Table:
    """Static counts of a kernel's opcodes that begin with one of `prefixes`."""
    found = facts(kernel)
    rows = sorted(
        ((op, n) for op, n in found.opcodes.items() if op.startswith(prefixes)),
        key=lambda row: (-row[1], row[0]),
    )
    return table(("SASS instruction", "in the code"), rows, source=found.source)
