"""Table of sparse calls over 656-byte tokens beside FlashMLA: by the kernel that gathers tokens, by
the one that widens them once per cluster, and by the one of the two that "cute" takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import geometric_mean

from ..backends.cute.widening import takes
from ..core.resources import data_dir
from .record import Row, read

RECORD = "records/h200_widened.jsonl"
#: FlashMLA's time over ours in each case, by heads
Figures = dict[int, list[float]]


def made() -> str:
    """The table of the record in `data/`."""
    return table(read(data_dir() / RECORD))


def table(rows: Sequence[Row]) -> str:
    """A line for each case, then FlashMLA's time over ours by heads."""
    head = next(row for row in rows if row["kind"] == "run")
    lines = [
        "| heads | query tokens | batch | FlashMLA us | gathered | widened | FlashMLA / ours |",
        "|---:|---:|---:|---:|---:|---:|---:|",
    ]
    figures: Figures = {}
    for row in (row for row in rows if row["kind"] == "case"):
        us, heads = row["us"], row["heads"]
        ours = us[taken(row)]
        figures.setdefault(heads, []).append(us["flashmla"] / ours)
        cells = [_bold(name, us, taken(row)) for name in ("gathered", "widened")]
        shape = f"| {heads} | {row['q_len']} | {row['batch']} | {us['flashmla']:.1f} |"
        lines.append(f"{shape} {' | '.join(cells)} | {us['flashmla'] / ours:.2f} |")
    return "\n".join([*lines, "", _sentence(head, figures)])


def taken(row: Row) -> str:
    """The kernel that "cute" takes for a case."""
    return "widened" if takes(row["heads"], row["batch"] * row["q_len"]) else "gathered"


def _bold(name: str, us: dict[str, float], chosen: str) -> str:
    return f"**{us[name]:.1f}**" if name == chosen else f"{us[name]:.1f}"


def _sentence(head: Row, figures: Figures) -> str:
    parts = [
        f"{heads} heads {geometric_mean(found):.2f}, {min(found):.2f} at least"
        for heads, found in figures.items()
    ]
    where = f"{head['card']}, {head['date']}, commit {head['commit']}"
    return (
        f"FlashMLA ({head['flash_mla_commit']}) over ours, geometric means: {'; '.join(parts)}. "
        f"{where}: {head['method']}."
    )
