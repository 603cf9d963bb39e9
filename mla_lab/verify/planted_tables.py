"""Markdown tables of planted bugs: who sees what."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ..core.markdown import markdown_table
from .planted_tools import ALONE, TOOLS
from .record import Row

SILENT = "–"
#: verdicts that are no report of a bug
UNSEEN = ("", "hangs", "no summary", "not run")


def planted_table(rows: Sequence[Row]) -> str:
    """Bugs by tool: what each reported first; a dash where it was silent."""
    tools = [tool for tool in TOOLS if tool != ALONE]
    lines = []
    for row in rows[1:]:
        said = [verdict(row, tool) for tool in (ALONE, "ours", *tools)]
        lines.append((row["name"], row["where"], *(word or SILENT for word in said)))
    return markdown_table(("bug", "where", "on the card", "this emulator", *tools), lines)


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
    return f"{where}Bugs reported: {summary(rows)}. Reports on the twins without the bug: {wrong}."


def verdict(row: dict[str, Any], tool: str) -> str:
    """What a tool made of a bug: what it reported first, "hangs", "no summary" where it ended
    without one, or "" where it was silent.
    """
    said = row["planted"].get(tool)
    if tool == "ours":
        return said[0].split(": ")[1] if said else ""
    if not said:
        return "not run"
    if tool == ALONE:
        return _alone(row)
    if said["end"] == "hang":
        return "hangs"
    if said["errors"] is None:
        return "no summary"
    return _short(said["first"]) if said["errors"] else ""


def _alone(row: dict[str, Any]) -> str:
    """What is to be seen on a card without a tool."""
    planted, mended = row["planted"][ALONE], row["mended"][ALONE]
    if planted["end"] == "hang":
        return "hangs"
    if planted["end"] == "failed":
        return planted["first"].split(": ")[-1] or "fails"
    return "right" if planted["result"] == mended["result"] else "wrong result"


#: words of compute-sanitizer's messages -> ours
WORDS = (
    (r"Potential (RAW|WAR|WAW) hazard", r"\1 hazard"),
    (r"Potential invalid __shared__ (read|write)", r"invalid \1: its CTA may have exited"),
    (r"Invalid __(\w+?)__ (read|write|atomic)", r"invalid \1 \2"),
    (r"Uninitialized __(\w+?)__ memory read", r"uninitialised \1 read"),
    (r"Barrier error detected\. (.*?)\.?$", r"barrier error: \1"),
)


def _short(lines: Sequence[str]) -> str:
    """The first message of a tool, in a few words; "" of an error that the driver says as well."""
    for line in lines:
        for pattern, words in WORDS:
            found = re.search(pattern, line)
            if found:
                return found.expand(words)
    return ""


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """How many bugs each of the checks saw."""
    tools = ["ours", *(tool for tool in TOOLS if tool != ALONE)]
    seen = {tool: sum(verdict(r, tool) not in UNSEEN for r in rows[1:]) for tool in tools}
    return ", ".join(f"{tool} {count} of {len(rows) - 1}" for tool, count in seen.items())


def failed(rows: Sequence[dict[str, Any]]) -> bool:
    """Whether our checks report anything without the bug."""
    return any(row["mended"]["ours"] for row in rows[1:])
