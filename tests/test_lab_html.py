"""The static site: pages without a kernel, sliders over pictures, nothing from elsewhere."""

from __future__ import annotations

import json
import re
from html import escape
from pathlib import Path

import nbformat
import pytest

from mla_lab.lab import html, site
from mla_lab.lab.course.syllabus import SESSIONS
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


def cell(source: str, text: str = "", **metadata: object) -> dict[str, object]:
    outputs = [{"output_type": "stream", "text": text}] if text else []
    return {"cell_type": "code", "source": source, "outputs": outputs, "metadata": metadata}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A site of every note, and of one notebook that was not run."""
    solution = ["def f():", "    return 42", 'lab.solved("31.1")']
    cells = [
        {"cell_type": "markdown", "source": "# 31 \u00b7 Splits\n\nA split of a page, a split."},
        cell('from mla_lab import lab\n\nlab.start("31")', "a banner"),
        {"cell_type": "markdown", "source": "See [32](32_lse_merge.ipynb) and `split`.\n\n## Play"},
        cell("print(1)", "one < two"),
        cell("def f():\n    return ...", nbmake={"post_cell_execute": solution}),
        cell('lab.check("31.1", f)', "Solved"),
        cell("lab.finish()", "provenance"),
    ]
    folder = tmp_path_factory.mktemp("site")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(site, "execute", lambda path: {"cells": cells})
        assert site.build(Path("notebooks"), folder / "out", only=["31"]) == ["31"]
    return folder / "out"


def test_the_site_is_built_without_a_warning_and_takes_nothing_from_the_network(
    built: Path,
) -> None:
    for name in ("index", "course", "glossary", "verified", "31_split_kv_policies", "search"):
        text = (built / f"{name}.html").read_text()
        assert not re.search(r"(src=|<link[^>]*href=)[\"']https?:", text), name
    front = (built / "index.html").read_text()
    assert all(escape(session.title) in front for session in SESSIONS)
    assert all(entry.file.replace(".ipynb", ".html") in front for entry in NOTEBOOKS)
    assert "<table" in (built / "verified.html").read_text()
    assert (built / site.SCRIPT).stat().st_size > 1_000_000
    assert "swizzl" in (built / "searchindex.js").read_text()


def test_a_page_reads_as_a_lesson(built: Path) -> None:
    page = (built / "31_split_kv_policies.html").read_text()
    assert "one &lt; two" in page
    assert "Yours: exercise 31.1" in page
    for hidden in ("42", "Solved", "provenance", "a banner", "lab.start", "lab.solved"):
        assert f">{hidden}" not in page and f"{hidden}<" not in page, hidden
    assert page.count('href="glossary.html#word-split"') == 1, "its first use alone"
    assert "<code" in page and "32_lse_merge" not in page.split("</nav>")[-1]
    assert "word-split" in (built / "glossary.html").read_text()


def test_a_warning_of_sphinx_fails_the_build(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "conf.py").write_text('extensions = ["myst_parser"]\n')
    (source / "index.md").write_text("# A\n\n[gone](gone.md)\n")
    with pytest.raises(site.SiteFailed, match="gone"):
        site.render(source, tmp_path / "out")


def test_solutions_run_and_are_not_shown(tmp_path: Path) -> None:
    notebook = nbformat.v4.new_notebook()
    stub = nbformat.v4.new_code_cell("def f():\n    return ...")
    stub["metadata"]["nbmake"] = {"post_cell_execute": ["def f():", "    return 42"]}
    notebook["cells"] = [stub, nbformat.v4.new_code_cell("print(f())")]
    nbformat.write(notebook, tmp_path / "a.ipynb")
    cells = html.execute(tmp_path / "a.ipynb")["cells"]
    assert [c["source"] for c in cells] == ["def f():\n    return ...", "print(f())"]
    assert cells[1]["outputs"][0]["text"] == "42\n"


def test_words_inside_code_links_and_headings_stay_as_they_are() -> None:
    text = "# A split\n\nA `split`, a [split](x.md), a split, a split."
    shown = site.with_words(text, set())
    assert shown.startswith("# A split\n\nA `split`, a [split](x.md), a <a class")
    assert shown.endswith(">split</a>, a split.")
    assert site.inside("[a](b.md) [c](../d/e.ipynb#f) [g](https://h)", {"e"}) == (
        "a [c](e.md#f) [g](https://h)"
    )
