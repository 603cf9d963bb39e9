"""The record of a browser test, from what it left in the folder of its screenshots.

MLA_LAB_SCREENSHOTS=SHOTS make browser-test
python -m tests.browser.measured SHOTS data/records/workbook_browser.jsonl
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from mla_lab.core.errors import invalid
from mla_lab.core.revision import check_record
from mla_lab.lab.workbook_map import NOTEBOOKS
from mla_lab.verify.record import Row, head_row, write

from .jupyter import CHROMIUM


def rows(folder: Path) -> list[Row]:
    """The run, then a row a notebook, each with its commit: one may be measured anew, alone.

    Raises InvalidInput where a notebook has none.
    """
    head = head_row("workbook-browser", "cpu", len(NOTEBOOKS))
    head["environment"]["command"] = ["make", "browser-test"]
    said = subprocess.run([CHROMIUM, "--version"], capture_output=True, text=True, check=True)
    head["browser"] = " ".join(said.stdout.split()[:2])
    found = []
    for entry in NOTEBOOKS:
        path = folder / f"{Path(entry.file).stem}.json"
        if not path.exists():
            raise invalid("folder", f"{folder} without {path.name}", "one row of each notebook")
        row = json.loads(path.read_text(encoding="utf-8"))
        found.append({"kind": "case", **row})
    return [head, *found]


def main(folder: Path, record: Path) -> None:
    """Write the record."""
    check_record(record)
    found = rows(folder)
    write(record, found)
    sys.stdout.write(f"{record}: {len(found) - 1} notebooks\n")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:3]))
