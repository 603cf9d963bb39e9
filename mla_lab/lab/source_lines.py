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


def line_of(place: Place) -> str:
    """The source line of a place, or the one above an empty one; "" where there is none."""
    lines = lines_of(place.file)
    if not 0 < place.line <= len(lines):
        return ""
    return lines[place.line - 1] or lines[place.line - 2]


def context(place: Place, around: int = 3) -> list[tuple[int, str, bool]]:
    """(number, text, whether it is the place's own) of the lines around a place."""
    lines = lines_of(place.file)
    first, last = max(1, place.line - around), min(len(lines), place.line + around)
    return [(n, lines[n - 1], n == place.line) for n in range(first, last + 1)]
