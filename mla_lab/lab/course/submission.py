"""What students handed in: their files in a folder, none of them trusted.

A folder in it is a student; a notebook or a progress file that lies in it directly is one too.
Links are not followed, and large files are not read.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...core.errors import MlaLabError, invalid
from ..checks import CHECKS

#: bytes of a notebook and of a progress file that are read at most; files of a student
NOTEBOOK_BYTES, PROGRESS_BYTES, FILES = 20_000_000, 1_000_000, 200
#: characters of a sentence or a name that are shown
SHOWN = 300


class Unreadable(MlaLabError):
    """A file that a student handed in cannot be read; the message says why."""


@dataclass
class Work:
    """A student's files; `problems` are sentences about those that were not taken."""

    student: str
    notebooks: list[Path] = field(default_factory=list)
    progress: list[Path] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def plain(text: object, most: int = SHOWN) -> str:
    """`text` on one line without control characters, shortened to `most` characters."""
    shown = "".join(c if c.isprintable() else " " for c in str(text)[: 4 * most])
    line = " ".join(shown.split())
    return line if len(line) <= most else f"{line[: most - 3]}..."


def works(folder: Path) -> list[Work]:
    """The students of `folder`, by name. Raises InvalidInput where it is no folder, or empty."""
    if not folder.is_dir():
        raise invalid("folder", folder, "a folder with one folder a student")
    found: dict[str, Work] = {}
    for path in sorted(folder.iterdir()):
        if path.name.startswith((".", "__")):
            continue
        own = path.is_dir() and not path.is_symlink()
        if not own and path.suffix not in (".ipynb", ".json"):
            continue
        name = plain(path.name if own else path.stem, 40)
        work = found.setdefault(name, Work(name))
        for file in _files(path) if own else [path]:
            _take(work, file, path if own else folder)
    if not found:
        raise invalid("folder", folder, "a folder with one folder a student; this one has none")
    for work in found.values():
        if not (work.notebooks or work.progress or work.problems):
            work.problems.append("Nothing was handed in: no notebook and no progress file.")
    return list(found.values())


def _files(folder: Path) -> Iterator[Path]:
    """Notebooks and progress files below `folder`, in order, links left alone."""
    count = 0
    for here, folders, files in os.walk(folder):
        folders[:] = sorted(f for f in folders if not f.startswith((".", "__")))
        for name in sorted(files):
            if name.endswith((".ipynb", ".json")) and not name.startswith("."):
                count += 1
                if count > FILES:
                    return
                yield Path(here) / name


def _take(work: Work, path: Path, top: Path) -> None:
    name = plain(path.relative_to(top), 80)
    limit = NOTEBOOK_BYTES if path.suffix == ".ipynb" else PROGRESS_BYTES
    try:
        status = path.lstat()
    except OSError as error:
        work.problems.append(f"{name}: {error.strerror}.")
        return
    if not stat.S_ISREG(status.st_mode):
        work.problems.append(f"{name} is no plain file, and is not followed.")
    elif not status.st_size:
        work.problems.append(f"{name} is empty.")
    elif status.st_size > limit:
        work.problems.append(f"{name} has {status.st_size:,} bytes; {limit:,} are read at most.")
    else:
        (work.notebooks if path.suffix == ".ipynb" else work.progress).append(path)


def _document(path: Path) -> Any:
    """The JSON of a file. Raises Unreadable."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise Unreadable(f"{path.name}: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"{path.name} is torn or no JSON: {plain(error, 80)}.") from error


def claims(path: Path) -> dict[str, str]:
    """Date by exercise, as a progress file says it. Raises Unreadable for another form."""
    found = _document(path)
    if not isinstance(found, dict):
        raise Unreadable(f"{path.name} is no progress file: it holds no object of dates.")
    return {number: plain(date, 40) for number, date in found.items() if number in CHECKS}


def code_cells(path: Path) -> list[str]:
    """Sources of a notebook's code cells. Raises Unreadable where it is no notebook."""
    notebook = _document(path)
    cells = notebook.get("cells") if isinstance(notebook, dict) else None
    if not isinstance(cells, list):
        raise Unreadable(f"{path.name} is no notebook: it has no list of cells.")
    sources = []
    for cell in cells:
        if isinstance(cell, dict) and cell.get("cell_type") == "code":
            source = cell.get("source", "")
            sources.append("".join(map(str, source)) if isinstance(source, list) else str(source))
    return sources
