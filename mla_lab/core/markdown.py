"""Markdown tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def markdown_table(columns: Sequence[str], rows: Iterable[Iterable[object]]) -> str:
    """Names of columns, then a line for each row of cells. A column whose name ends with a colon
    is aligned right.
    """
    names = [column.removesuffix(":") for column in columns]
    head = "".join(f" {name} |" if name else " |" for name in names)
    rule = "".join("---:|" if column.endswith(":") else "---|" for column in columns)
    lines = (f"| {' | '.join(map(str, row))} |" for row in rows)
    return "\n".join([f"|{head}", f"|{rule}", *lines])
