"""Lines of this package's sources, as messages of the emulator name them."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from ..emulate.ptx import Place

ROOT = Path(__file__).resolve().parents[2]


@cache
def lines_of(file: str) -> tuple[str, ...]:
    """Lines of a file that a place names, none where the sources are not installed."""
    path = ROOT / file
    return tuple(path.read_text(encoding="utf-8").splitlines()) if path.is_file() else ()


def written(place: Place) -> Place:
    """The place, or the line above where its own is empty: a statement may end behind its text."""
    lines = lines_of(place.file)
    empty = 1 < place.line <= len(lines) and not lines[place.line - 1].strip()
    return Place(place.file, place.line - empty)


def line_of(place: Place) -> str:
    """The source line of a place, or the one above an empty one; "" where there is none."""
    lines, at = lines_of(place.file), written(place).line
    return lines[at - 1] if 0 < at <= len(lines) else ""


def context(place: Place, around: int = 3) -> list[tuple[int, str, bool]]:
    """(number, text, whether it is the place's own) of the lines around a place."""
    lines, at = lines_of(place.file), written(place).line
    first, last = max(1, at - around), min(len(lines), at + around)
    return [(n, lines[n - 1], n == at) for n in range(first, last + 1)]
