"""What was tried on the kernels, what was expected of it, and what came: `data/`'s own log."""

from __future__ import annotations

import json
from functools import cache

from ..core.errors import invalid
from ..core.resources import data_dir
from .source import Source
from .tables import Table, table

RECORD = "notes/kernel_attempts.jsonl"
COLUMNS = ("change", "case", "expected", "came", "why")


@cache
def _rows() -> tuple[dict[str, str], ...]:
    text = (data_dir() / RECORD).read_text(encoding="utf-8")
    return tuple(json.loads(line) for line in text.splitlines())


def attempts(kernel: str, about: str = "") -> Table:
    """Attempts on `kernel` ("cute/keep_ab_sm90"), in order of time; `about`: those that have this
    word in their change or case. Raises InvalidInput for a kernel without any.
    """
    known = dict.fromkeys(row["kernel"] for row in _rows())
    if kernel not in known:
        raise invalid("kernel", repr(kernel), tuple(known))
    mine = [row for row in _rows() if row["kernel"] == kernel]
    found = [row for row in mine if about in row["change"] + row["case"]]
    dates = sorted({row["date"] for row in mine})
    source = Source("recorded", card=mine[0]["card"], date=dates[-1])
    return table(COLUMNS, [[row[name] for name in COLUMNS] for row in found], source=source)
