"""The static site: pages without a kernel, sliders over pictures, nothing from elsewhere."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from mla_lab.lab import html
from mla_lab.lab.explorer import FRAMES_MIME, Explorer
from mla_lab.lab.explorers import page as page_explorer
from mla_lab.lab.explorers import plan as plan_explorer
from mla_lab.lab.workbook_map import NOTEBOOKS


def frames_of(explorer: Explorer) -> dict[str, object]:
    return dict(explorer._repr_mimebundle_()[FRAMES_MIME])


def test_an_explorer_becomes_a_slider_over_its_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_LAB_HTML", "1")
    explorer = page_explorer.PageExplorer(page_size=64)
    text = html.frames_html(frames_of(explorer))
    found = re.search(r"<script[^>]*>(.*?)</script>", text, re.DOTALL)
    assert found
    data = json.loads(found.group(1).replace("<\\/", "</"))
    assert [frame["value"] for frame in data["frames"]] == ["16", "32", "64", "128"]
    assert "max='3' value='2'" in text
    # each picture has its own words below it
    lines = [frame["words"] for frame in data["frames"]]
    for size, line in zip((16, 32, 64, 128), lines, strict=True):
        assert f"page_size={size}," in line


def test_without_the_variable_a_notebook_carries_no_frames() -> None:
    assert FRAMES_MIME not in page_explorer.PageExplorer()._repr_mimebundle_()


def test_an_explorers_frames_stay_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLA_LAB_HTML", "1")
    assert len(json.dumps(frames_of(plan_explorer.PlanExplorer()))) < 3_000_000


def test_outputs_of_each_kind() -> None:
    assert "<pre" in html.output_html({"output_type": "stream", "text": "a < b"})
    assert "a &lt; b" in html.output_html({"output_type": "stream", "text": "a < b"})
    table = {"output_type": "display_data", "data": {"text/html": "<a href='31_x.ipynb'>31</a>"}}
    assert "31_x.html'" in html.output_html(table)
    chart = {"application/vnd.plotly.v1+json": {"data": [], "layout": {"title": "</script>"}}}
    shown = html.output_html({"output_type": "execute_result", "data": chart})
    assert shown.count("</script>") == 1


def test_the_site_has_an_index_and_takes_nothing_from_the_network(tmp_path: Path) -> None:
    assert html.build(Path("notebooks"), tmp_path, only=["none"]) == []
    index = (tmp_path / "index.html").read_text()
    assert all(entry.file.replace(".ipynb", ".html") in index for entry in NOTEBOOKS)
    assert not re.search(r"(src|href)='https?:", index)
    assert "verified.html" in index
    page = (tmp_path / "verified.html").read_text()
    assert "<table" in page and 'href="dropin.html"' in page and (tmp_path / "dropin.html").exists()
    assert (tmp_path / html.SCRIPT).stat().st_size > 1_000_000


def test_a_cell_is_code_above_its_outputs() -> None:
    cell = {
        "cell_type": "code",
        "source": "print(1)",
        "outputs": [{"output_type": "stream", "text": "1\n"}],
    }
    page = html.page(NOTEBOOKS[0], {"cells": [cell, {"cell_type": "markdown", "source": "## Hi"}]})
    assert page.index("print") < page.index("<pre class='out'>1")
    assert "<h2" in page
