"""Small tables for notebooks, numbers right-aligned."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from typing import Any

from ..core.resources import data_dir
from .source import Source

#: characters of a cell that stands in one line: a date, the name of a card
WHOLE = 12


@dataclass(frozen=True)
class Table:
    """Column names, rows of values (None is an empty cell), and the source of the numbers."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    source: Source | None = None

    def column(self, name: str) -> list[Any]:
        """The values of one column."""
        at = list(self.columns).index(name)
        return [row[at] for row in self.rows]

    def _repr_html_(self) -> str:
        head = "".join(f"<th style='text-align:left'>{escape(c)}</th>" for c in self.columns)
        body = "".join("<tr>" + "".join(_cell(v) for v in row) + "</tr>" for row in self.rows)
        chip = self.source.chip() if self.source else ""
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{chip}"


def _cell(value: Any) -> str:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    text = show(value) if number else "" if value is None else str(value)
    whole = ";white-space:nowrap" if len(text) <= WHOLE else ""
    return f"<td style='text-align:{'right' if number else 'left'}{whole}'>{escape(text)}</td>"


def show(value: float) -> str:
    """A number as people write it: thousands separated, three figures of a fraction."""
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def table(columns: Iterable[str], rows: Iterable[Sequence[Any]], **options: Any) -> Table:
    """A `Table` from any iterables."""
    return Table(tuple(columns), tuple(tuple(r) for r in rows), **options)


@cache
def lines(name: str) -> tuple[dict[str, Any], ...]:
    """Rows of a file of JSON lines in `data/`, unchecked."""
    text = (data_dir() / name).read_text(encoding="utf-8")
    return tuple(json.loads(line) for line in text.splitlines())
