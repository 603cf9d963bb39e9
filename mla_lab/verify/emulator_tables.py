"""Markdown tables of what the emulator's records say: builds, and deletions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ..core.markdown import markdown_table
from .record import Row


def emulated_note(rows: Sequence[Row]) -> str:
    """How many builds ran, and what came of them."""
    counts = Counter(row["status"] for row in rows[1:])
    words = ", ".join(f"{count} {status}" for status, count in counts.most_common())
    calls = sum(len(row["problems"]) for row in rows[1:])
    worst = max(p.get("out_error", 0.0) for row in rows[1:] for p in row["problems"])
    commits = Counter(row["commit"][:7] for row in rows[1:])
    of = ", ".join(f"{count} of {commit}" for commit, count in commits.most_common())
    return (
        f"{len(rows) - 1} of {rows[0]['cases']} builds for SM90 ran, {calls} calls with all checks "
        f"on: {words}. Largest relative error of out: {worst:.1e} (e4m3 throughout). Builds by "
        f"commit: {of}."
    )


def mutations_table(rows: Sequence[Row]) -> str:
    """Deletions by build, and of each family."""
    lines = [_deletions(f"`{row['name']}`", [row]) for row in rows[1:]]
    families = dict.fromkeys(row["family"] for row in rows[1:])
    for family in families:
        lines.append(_deletions(family, [row for row in rows[1:] if row["family"] == family]))
    names = ("build", "deleted:", "reported:", "argued:", "without effect:")
    return markdown_table(names, [*lines, _deletions("all", rows[1:])])


def _deletions(name: str, rows: Sequence[Row]) -> tuple[object, ...]:
    """A line of the table."""
    tried, seen = (sum(row[key] for row in rows) for key in ("tried", "reported"))
    idle = sum(map(_without_effect, rows))
    share = 100 * seen / tried
    return name, tried, f"{seen} ({share:.1f} %)", tried - seen, idle


def exceptions_table(rows: Sequence[Row]) -> str:
    """Deletions that are not reported, and why."""
    found = Counter(
        (row["family"], left["what"], _file(left["place"]), left["why"])
        for row in rows[1:]
        for left in row["unreported"]
    )
    return markdown_table(
        ("family", "deleted", "behind, as the file was named", "times:", "why no run can differ"),
        ((family, what, f"`{at}`", times, why) for (family, what, at, why), times in found.items()),
    )


def _file(place: str) -> str:
    """The file of a place, as short as it is clear."""
    return place.split(":")[0].removeprefix("mla_lab/").removeprefix("cute/")


def _without_effect(row: Row) -> int:
    return len(row["nobody_waits"]) + len(row.get("pacing", ()))
