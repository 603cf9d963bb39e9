"""Markdown tables of what the emulator's records say: builds, and deletions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from .record import Row


def emulated_note(rows: Sequence[Row]) -> str:
    """How many builds ran, and what came of them."""
    counts = Counter(row["status"] for row in rows[1:])
    words = ", ".join(f"{count} {status}" for status, count in counts.most_common())
    calls = sum(len(row["problems"]) for row in rows[1:])
    worst = max(p.get("out_error", 0.0) for row in rows[1:] for p in row["problems"])
    return (
        f"{len(rows) - 1} of {rows[0]['cases']} builds for SM90, {calls} calls with all checks on: "
        f"{words}. Largest relative error of out: {worst:.1e} (e4m3 throughout)."
    )


def mutations_table(rows: Sequence[Row]) -> str:
    """Deletions by build."""
    lines = ["| build | deleted | reported | without effect in the call |", "|---|---:|---:|---:|"]
    for row in rows[1:]:
        idle = _without_effect(row)
        lines.append(f"| `{row['name']}` | {row['tried']} | {row['reported']} | {idle} |")
    tried, seen = (sum(row[key] for row in rows[1:]) for key in ("tried", "reported"))
    idle = sum(map(_without_effect, rows[1:]))
    return "\n".join([*lines, f"| all | {tried} | {seen} | {idle} |"])


def _without_effect(row: Row) -> int:
    return len(row["nobody_waits"]) + len(row.get("pacing", ()))
