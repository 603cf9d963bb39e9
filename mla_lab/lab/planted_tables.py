"""Markdown tables of planted bugs: who sees what."""

from __future__ import annotations

from collections.abc import Sequence

from ..core.resources import data_dir
from ..verify.planted_tools import ALONE, TOOLS
from ..verify.record import Row, read
from . import planted

RECORD = "records/planted.jsonl"
SILENT = "–"


def planted_table(rows: Sequence[Row]) -> str:
    """Bugs by tool: what each reported first; a dash where it was silent."""
    tools = [tool for tool in TOOLS if tool != ALONE]
    head = ["bug", "where", "on the card", "this emulator", *tools]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows[1:]:
        said = [planted.verdict(row, tool) for tool in (ALONE, "ours", *tools)]
        cells = [word or SILENT for word in said]
        lines.append(f"| {row['name']} | {row['where']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def planted_note(rows: Sequence[Row]) -> str:
    """How many bugs each saw, on which card, and what was said of kernels without a bug."""
    head = rows[0].get("tools", {})
    where = f"{head['card']}, {head['tool']}, {head['date']}. " if head else ""
    false = {
        tool: sum(bool(row["mended"].get(tool, {}).get("errors")) for row in rows[1:])
        for tool in TOOLS
        if tool != ALONE
    }
    false["ours"] = sum(bool(row["mended"]["ours"]) for row in rows[1:])
    wrong = ", ".join(f"{tool} {count}" for tool, count in false.items() if count) or "none"
    return (
        f"{where}Reported: {planted.summary(rows)}. "
        f"Reports on the same kernels without the bug: {wrong}."
    )


def made(name: str) -> str:
    """The table or the note, from its record."""
    return {"planted": planted_table, "planted-note": planted_note}[name](read(data_dir() / RECORD))
