"""The parts of the README that code writes: the map of the workbook, and the picture.

python -m mla_lab.lab.readme        at the top of a checkout; `make format` does it too
"""

from __future__ import annotations

import re
from pathlib import Path

from ..errors import invalid
from .cover import cover
from .workbook_map import NOTEBOOKS

PICTURE = Path("data/pictures/plan.svg")
_MAP = re.compile(r"(<!-- workbook -->\n).*?(<!-- /workbook -->)", re.DOTALL)


def workbook_table() -> str:
    """One row a notebook: its number, its title as a link, what it teaches."""
    rows = [f"| {e.number} | [{e.title}](notebooks/{e.file}) | {e.after} |" for e in NOTEBOOKS]
    return "\n".join(["| | notebook | afterwards you can |", "|---|---|---|", *rows]) + "\n"


def with_map(text: str) -> str:
    """`text` with the map between its markers made anew. Raises InvalidInput without markers."""
    filled, count = _MAP.subn(lambda m: m[1] + workbook_table() + m[2], text)
    if count != 1:
        raise invalid("README", f"{count} places for the map", "one <!-- workbook --> and its end")
    return filled


if __name__ == "__main__":
    readme = Path("README.md")
    readme.write_text(with_map(readme.read_text(encoding="utf-8")), encoding="utf-8")
    PICTURE.write_text(cover().markup + "\n", encoding="utf-8")
