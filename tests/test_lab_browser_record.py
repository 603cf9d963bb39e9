"""The record of the browser test holds what notebooks must: every one of them."""

from __future__ import annotations

import pytest

from mla_lab.lab import browser_table
from mla_lab.lab.workbook_map import NOTEBOOKS
from mla_lab.verify.record import Row


def test_every_notebook_was_measured_in_the_browser() -> None:
    measured = [f"{row['notebook']}.ipynb" for row in browser_table.rows()[1:]]
    assert measured == [entry.file for entry in NOTEBOOKS]
    for entry in NOTEBOOKS:
        assert f"| {entry.number} {entry.title} |" in browser_table.table()
    assert browser_table.note().startswith(f"{len(NOTEBOOKS)} notebooks in JupyterLab and Chrom")


@pytest.mark.parametrize("row", browser_table.rows()[1:], ids=lambda row: row["notebook"][:2])
def test_a_notebook_stays_within_its_limits(row: Row) -> None:
    assert 0 < row["run_s"] <= browser_table.most_s(row["notebook"])
    assert 0 < row["bytes"] < browser_table.PAGE_BYTES
    assert len(row["redraw_ms"]) == 2
    assert all(0 < ms <= browser_table.REDRAW_MS for ms in row["redraw_ms"])
