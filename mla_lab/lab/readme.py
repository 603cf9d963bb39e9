"""The parts of the README that code writes: the map, the simulator's error table, the picture.

python -m mla_lab.lab.readme [README.md]       at the top of a checkout; `make format` does it too
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from ..core.errors import invalid
from ..simulate.recorded import error_table, recorded
from .readme_picture import cover
from .workbook_map import NOTEBOOKS

PICTURE = Path("data/pictures/plan.svg")


def workbook_table() -> str:
    """One row a notebook: its number, its title as a link, what it teaches."""
    rows = [f"| {e.number} | [{e.title}](notebooks/{e.file}) | {e.after} |" for e in NOTEBOOKS]
    return "\n".join(["| | notebook | afterwards you can |", "|---|---|---|", *rows]) + "\n"


def simulator_table() -> str:
    """How well the simulator predicts what it was not fitted to."""
    return error_table(recorded().judgements)


#: what stands between `<!-- name -->` and `<!-- /name -->`
REGIONS = {"workbook": workbook_table, "simulator": simulator_table}


def with_regions(text: str) -> str:
    """`text` with every region between its markers made anew. Raises InvalidInput without them."""
    for name, write in REGIONS.items():
        region = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        made = write()
        text, count = region.subn(lambda m, made=made: m[1] + made + m[2], text)  # type: ignore[misc]
        if count != 1:
            raise invalid(
                "README", f"{count} places for {name}", f"one <!-- {name} --> and its end"
            )
    return text


def refresh(readme: Path) -> None:
    """Writes the regions of `readme`, and the picture beside it."""
    readme.write_text(with_regions(readme.read_text(encoding="utf-8")), encoding="utf-8")
    (readme.parent / PICTURE).write_text(cover().markup + "\n", encoding="utf-8")


if __name__ == "__main__":
    refresh(Path(sys.argv[1] if len(sys.argv) > 1 else "README.md"))
