"""What is said of Blackwell without a card: open facts of a note, and predicted times."""

from __future__ import annotations

from functools import cache

from ..core.resources import data_dir
from ..simulate import blackwell
from .source import Source
from .tables import Table, table

NOTE, HEADING = "notes/sm100.md", "## Facts that only a card can settle"
#: cases whose times are shown: 1, 64 and 256 requests of 8,192 tokens, 128 heads, bf16
CASES = tuple(f"b{batch}_q1_h128_kv8192_p32" for batch in (1, 64, 256))


@cache
def card_facts() -> Table:
    """Facts that only a card can settle: each with what the code relies on, and its guard."""
    text = (data_dir() / NOTE).read_text(encoding="utf-8").split(HEADING)[1]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return table(head, ([cell.replace("`", "") for cell in row] for row in rows))


@cache
def paper_times() -> Table:
    """Microseconds on a B200: published of NVIDIA's kernel, and what the model says of ours."""
    constants, published = blackwell.fit(), blackwell.published()
    problems = {case.name: case.problem for part in blackwell.tables() for case in part}
    rows = [
        (
            name,
            published[name][blackwell.LIKE_OURS],
            constants.published(problems[name]),
            constants.ours(problems[name]),
        )
        for name in CASES
    ]
    heads = ("case", "cute-dsl, published, us", "cute-dsl, predicted, us", "ours, predicted, us")
    return table(heads, rows, source=Source("predicted", detail="paper model, no card"))
