"""Markdown tables: alignment, empty names and cells, values of any type."""

from __future__ import annotations

from mla_lab.core.markdown import markdown_table


def test_a_colon_aligns_right_and_is_not_shown() -> None:
    assert markdown_table(("case", "us:", ""), [("a", 1.5, ""), ("b", 20, "far")]) == (
        "| case | us | |\n|---|---:|---|\n| a | 1.5 |  |\n| b | 20 | far |"
    )


def test_a_table_may_have_no_rows_and_a_nameless_number() -> None:
    assert markdown_table(("why", ":"), {}.items()) == "| why | |\n|---|---:|"
