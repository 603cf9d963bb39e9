"""The table of what the browser test measured: a row a notebook, from its record."""

from __future__ import annotations

from functools import cache

from ..core.markdown import markdown_table
from ..core.resources import data_dir
from ..verify.record import Row, read
from .workbook_map import NOTEBOOKS

RECORD = "workbook_browser.jsonl"
#: milliseconds of a redraw, and bytes that a notebook may send to the page
REDRAW_MS, PAGE_BYTES = 300, 1_000_000
#: seconds that a notebook may run, and one that compiles its kernels for the first time
RUN_S, COMPILING_S = 15, 60


@cache
def rows() -> tuple[Row, ...]:
    """The record: its run first, then the notebooks."""
    return tuple(read(data_dir() / "records" / RECORD))


def most_s(notebook: str) -> int:
    """Seconds that all cells of a notebook, named by its file, may take."""
    return COMPILING_S if notebook.startswith("6") else RUN_S


def note() -> str:
    """Where, when and with which code it was measured, and the largest of each figure."""
    run, *cases = rows()
    found = run["environment"]
    commits = ", ".join(dict.fromkeys(row["commit"][:9] for row in cases))
    slowest = max(cases, key=lambda row: max(row["redraw_ms"]))
    return (
        f"{len(cases)} notebooks in JupyterLab and {run['browser']}, no GPU, "
        f"{found['host']['cores']} {found['host']['processor']} cores, Python {found['python']}, "
        f"commits {commits}, {found['date']}. Largest values: "
        f"{max(row['run_s'] for row in cases):.1f} s to run all cells, "
        f"{max(row['bytes'] for row in cases):,} bytes to the page, "
        f"{max(slowest['redraw_ms'])} ms for a redraw (notebook {slowest['notebook'][:2]})."
    )


def table() -> str:
    """One row a notebook: seconds of all cells, bytes to the page, both redraws."""
    cases = {row["notebook"]: row for row in rows()[1:]}
    lines = []
    for entry in NOTEBOOKS:
        row = cases[entry.file.removesuffix(".ipynb")]
        moved = ", ".join(map(str, row["redraw_ms"]))
        name = f"{entry.number} {entry.title}"
        lines.append((name, f"{row['run_s']:.1f}", f"{row['bytes']:,}", moved))
    return markdown_table(("notebook", "run, s:", "bytes to the page:", "redraws, ms:"), lines)
