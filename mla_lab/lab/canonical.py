"""The one form in which notebooks are stored, and the command that brings them into it.

    python -m mla_lab.lab.canonical notebooks

Stored notebooks carry no outputs, no execution counts, no widget state and no editor's metadata,
so that a diff shows what a person changed. The layout is nbformat's own: one space of indent,
sorted keys, sources as lists of lines.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..core.errors import InvalidInput

KERNELSPEC = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
#: metadata that a person or a test wrote; `execution` and `nbmake` are nbmake's settings
KEPT_METADATA = {"execution", "mla_lab"}
KEPT_CELL_METADATA = {"deletable", "editable", "jupyter", "mla_lab", "nbmake", "tags"}
_CELL_ID = re.compile(r"[a-zA-Z0-9_-]{1,64}")

Json = dict[str, Any]


def _source_lines(source: str | list[str]) -> list[str]:
    text = source if isinstance(source, str) else "".join(source)
    return text.strip("\n").rstrip().splitlines(keepends=True)


def _cell_id(cell: Json, index: int, taken: set[str]) -> str:
    """The cell's own id; one from its position where it is missing, malformed or a duplicate."""
    own = cell.get("id", "")
    if _CELL_ID.fullmatch(own) and own not in taken:
        return str(own)
    number = index
    while (name := f"cell-{number:02d}") in taken:
        number += 1
    return name


def _canonical_cell(cell: Json, cell_id: str) -> Json:
    metadata = {k: v for k, v in cell.get("metadata", {}).items() if k in KEPT_CELL_METADATA}
    result: Json = {
        "cell_type": cell["cell_type"],
        "id": cell_id,
        "metadata": metadata,
        "source": _source_lines(cell.get("source", "")),
    }
    if cell["cell_type"] == "code":
        result |= {"execution_count": None, "outputs": []}
    elif cell.get("attachments"):
        result["attachments"] = cell["attachments"]
    return result


def canonical(text: str) -> str:
    """The canonical form of a notebook's JSON `text`. Raises InvalidInput if it is no notebook."""
    try:
        notebook = json.loads(text)
        cells = notebook["cells"]
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidInput(f"notebook: got {error!r}; supported: nbformat 4 JSON") from error
    taken: set[str] = set()
    result = []
    for index, cell in enumerate(cells):
        cell_id = _cell_id(cell, index, taken)
        taken.add(cell_id)
        result.append(_canonical_cell(cell, cell_id))
    metadata = {k: v for k, v in notebook.get("metadata", {}).items() if k in KEPT_METADATA}
    metadata |= {"kernelspec": KERNELSPEC, "language_info": {"name": "python"}}
    document = {"cells": result, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(document, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def notebooks_in(paths: Iterable[Path]) -> list[Path]:
    """Notebook files among `paths`, folders searched, editor checkpoints left out."""
    found = []
    for path in paths:
        if not path.exists():
            raise InvalidInput(f"path: got {path}; supported: a notebook or a folder that exists")
        inside = sorted(path.rglob("*.ipynb")) if path.is_dir() else [path]
        found += [p for p in inside if ".ipynb_checkpoints" not in p.parts]
    return found


def main(paths: Iterable[str]) -> None:
    """Rewrite the notebooks among `paths` that are not canonical, and name them."""
    for path in notebooks_in(map(Path, paths)):
        text = path.read_text(encoding="utf-8")
        form = canonical(text)
        if form != text:
            path.write_text(form, encoding="utf-8")
            print(f"{path}: rewritten")


if __name__ == "__main__":
    main(sys.argv[1:])
