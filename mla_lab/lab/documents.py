"""Generated parts of README and of the pages of `data/notes/`: tables, notes and pictures.

    python -m mla_lab.lab.documents [FOLDER]      the top of a checkout; `make format` does it too

A table stands between `<!-- made: NAME -->` and `<!-- /made -->`, with a NAME of `TABLES`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from ..bench.report import call_note, method_note, origin, own_table, short_table, times_table
from ..core.errors import invalid
from ..core.markdown import markdown_table
from ..simulate import blackwell
from ..simulate.recorded import error_table, recorded
from ..verify import (
    card_table,
    eight_bits_table,
    engine_tables,
    merge_table,
    plain_tables,
    sm100_tables,
    sparse_table,
    tables,
    targets,
)
from ..verify.target_figures import ANCHOR, PLAIN, PLAIN_EIGHT_BITS, PLAIN_TRACES, rows_of
from . import browser_table, shared_lines
from .course.syllabus import exercise_table, overview, syllabus
from .readme_picture import cover
from .speed_chart import chart
from .workbook_map import NOTEBOOKS

PICTURES = {"data/pictures/plan.svg": cover, "data/pictures/speed.svg": chart}
NOTES = Path("data/notes")
_REGION = re.compile(r"<!-- made: (?P<name>[\w-]+) -->\n.*?<!-- /made -->", re.DOTALL)


def workbook_table() -> str:
    """One row a notebook: number, title as a link, learning goal."""
    rows = ((e.number, f"[{e.title}](notebooks/{e.file})", e.after) for e in NOTEBOOKS)
    return markdown_table(("", "notebook", "afterwards you can"), rows)


def speed_call() -> str:
    """What README's table of speed needs beside it: card and day, how to read a case, the call."""
    rows = rows_of(PLAIN)
    return (
        f"{origin(rows)}. In the name of a case, `b` counts requests, `q` new tokens of each, `h` "
        "heads, and `kv` cached tokens of each; `gauss` has drawn lengths. FA3 with qv is "
        "FlashAttention-3 with the latent part of the query passed as its argument `qv`. "
        f"{call_note(rows)}"
    )


TABLES: dict[str, Callable[[], str]] = {
    "workbook": workbook_table,
    "course-overview": overview,
    "syllabus": syllabus,
    "exercises": exercise_table,
    "workbook-browser-note": browser_table.note,
    "workbook-browser": browser_table.table,
    "speed-call": speed_call,
    "speed-short": lambda: short_table(rows_of(PLAIN)),
    "speed": lambda: times_table(rows_of(PLAIN), "anchor"),
    "speed-method": lambda: method_note(rows_of(PLAIN)),
    "speed-cards": card_table.made,
    "speed-h100": lambda: times_table(rows_of(card_table.H100_PLAIN), "anchor"),
    "speed-h100-method": lambda: method_note(rows_of(card_table.H100_PLAIN)),
    "speed-h100-traces": lambda: times_table(rows_of(card_table.H100_PLAIN_TRACES), "trace"),
    "speed-traces": lambda: times_table(rows_of(PLAIN_TRACES), "trace"),
    "speed-heldout": plain_tables.held_out,
    "speed-uniform": plain_tables.uniform,
    "speed-pages": plain_tables.pages,
    "speed-invariant": card_table.invariance,
    "speed-planned": lambda: times_table(rows_of(ANCHOR), "anchor"),
    "speed-planned-method": lambda: method_note(rows_of(ANCHOR)),
    "eight-bits-plain": lambda: (
        f"{origin(rows_of(PLAIN_EIGHT_BITS))}.\n\n{own_table(rows_of(PLAIN_EIGHT_BITS))}"
    ),
    "simulator": lambda: error_table(recorded().judgements).rstrip(),
    "targets": targets.made,
    "eight-bits": lambda: (
        f"{origin(rows_of(eight_bits_table.RECORD))}.\n\n"
        f"{eight_bits_table.table(rows_of(eight_bits_table.RECORD))}"
    ),
    "eight-bits-apart": lambda: eight_bits_table.apart(
        rows_of(eight_bits_table.RECORD), rows_of(PLAIN_EIGHT_BITS)
    ),
    "eight-bits-h100": lambda: (
        f"{origin(rows_of(card_table.H100_EIGHT_BITS))}.\n\n"
        f"{eight_bits_table.table(rows_of(card_table.H100_EIGHT_BITS))}"
    ),
    "sparse-656": sparse_table.made,
    "sparse-656-h100": sparse_table.on_h100,
    "sparse-bf16": sparse_table.of_bf16,
    "sparse-power": sparse_table.power,
    "merges": merge_table.made,
    "merge-attempts": merge_table.attempts,
    "blackwell": blackwell.table,
    "blackwell-counts": blackwell.counts_table,
    "blackwell-note": blackwell.note,
    "sm100-shared": shared_lines.table,
    **sm100_tables.TABLES,
    **engine_tables.TABLES,
    **{name: partial(tables.made, name) for name in tables.TABLES},
}


def fill(text: str) -> str:
    """`text` with every marked table generated anew. Raises InvalidInput for an unknown name."""

    def made(match: re.Match[str]) -> str:
        name = match["name"]
        if name not in TABLES:
            raise invalid("table", repr(name), tuple(TABLES))
        return f"<!-- made: {name} -->\n{TABLES[name]()}\n<!-- /made -->"

    return _REGION.sub(made, text)


def pages(top: Path) -> list[Path]:
    """README and the notes of a checkout."""
    return [top / "README.md", *sorted((top / NOTES).glob("*.md"))]


def refresh(top: Path) -> None:
    """Writes the marked tables of all pages of a checkout, and the pictures."""
    for path in pages(top):
        path.write_text(fill(path.read_text(encoding="utf-8")), encoding="utf-8")
    for name, draw in PICTURES.items():
        (top / name).write_text(draw().fixed + "\n", encoding="utf-8")


if __name__ == "__main__":
    refresh(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
