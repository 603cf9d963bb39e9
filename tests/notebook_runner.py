"""Runs a notebook's cells in this process, solutions included, for tests that change the package.

nbmake runs the notebooks themselves; this runner is for what must happen around them: a planted
mistake, a planted record. Cells are plain Python, so `exec` is enough.
"""

from __future__ import annotations

import json
import linecache
from pathlib import Path
from typing import Any

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"


def path_of(number: str) -> Path:
    """File of notebook `number`."""
    (path,) = NOTEBOOKS.glob(f"{number}_*.ipynb")
    return path


def cells_of(path: Path) -> list[dict[str, Any]]:
    """Cells of a notebook, sources joined."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [{**cell, "source": "".join(cell["source"])} for cell in cells]


def execute(source: str, name: str, names: dict[str, Any]) -> None:
    """Executes a cell; its functions have their source, as in IPython."""
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    exec(compile(source, name, "exec"), names)


def run(number: str, until: str = "") -> dict[str, Any]:
    """Executes the code cells of a notebook in order; returns its names.

    until: stop after the first cell that contains this text.
    """
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell in cells_of(path_of(number)):
        if cell["cell_type"] != "code":
            continue
        execute(cell["source"], f"{number}:{cell['id']}", names)
        solution = cell["metadata"].get("nbmake", {}).get("post_cell_execute", [])
        exec(compile("\n".join(solution), f"{number}:{cell['id']}:solution", "exec"), names)
        if until and until in cell["source"]:
            break
    return names
