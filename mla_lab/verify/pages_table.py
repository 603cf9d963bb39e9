"""The plain call with pages of one token, of 16 and of 64, by format."""

from __future__ import annotations

from collections.abc import Sequence

from ..bench.records import Row, medians, problem_of, read, results
from ..bench.report import headline, origin
from ..core.errors import invalid
from ..core.markdown import markdown_table
from ..core.problem import Problem
from ..core.resources import data_dir

RECORD = "records/h200_plain_pages.jsonl"
#: tokens of a page; the first is what the others are compared with
SIZES = (64, 16, 1)

#: what calls of one line have in common: query, cache, heads, requests, tokens
Key = tuple[str, str, int, int, int]


def times(rows: Sequence[Row]) -> dict[Key, dict[int, float]]:
    """Microseconds by page size. Raises InvalidInput where a size is missing."""
    us, ours = medians(rows), headline(rows)
    found: dict[Key, dict[int, float]] = {}
    for row in results(rows, "ok"):
        problem = problem_of(row)
        found.setdefault(_key(problem), {})[problem.page_size] = us[row["case"], ours]
    for key, by_size in found.items():
        if set(by_size) != set(SIZES):
            raise invalid("page sizes", f"{sorted(by_size)} of {key}", sorted(SIZES))
    return found


def _key(problem: Problem) -> Key:
    tokens = max(problem.kv_lens)
    return problem.q_dtype, problem.kv_format, problem.heads, problem.batch, tokens


def made() -> str:
    """The table of the record in `data/`."""
    return table(list(read(data_dir() / RECORD)))


def table(rows: Sequence[Row]) -> str:
    """A line for each format, number of heads and batch."""
    lines = []
    for (query, cache, heads, batch, tokens), by_size in times(rows).items():
        one, *others = (by_size[size] for size in SIZES)
        ratios = (f"{other / one:.2f}" for other in others)
        values = (f"{us:.1f}" for us in (one, *others))
        lines.append((query, cache, heads, batch, f"{tokens:,}", *values, *ratios))
    names = (
        *("query", "cache", "heads:", "requests:", "tokens:"),
        *(f"us, pages of {size}:" for size in SIZES),
        *(f"{size} / {SIZES[0]}:" for size in SIZES[1:]),
    )
    return f"{origin(rows)}.\n\n{markdown_table(names, lines)}"
