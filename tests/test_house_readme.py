"""The README says what is so: its code runs, its picture is ours, its map is complete."""

from __future__ import annotations

import re

import pytest

from mla_lab import cli
from mla_lab.core.errors import InvalidInput
from mla_lab.lab.readme import PICTURE, with_regions
from mla_lab.lab.readme_picture import cover
from mla_lab.lab.workbook_map import NOTEBOOKS

from .house import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_five_lines_run():
    (code,) = re.findall(r"```python\n(.*?)```", README, re.S)
    names: dict[str, object] = {}
    exec(compile(code, "README.md", "exec"), names)
    out = names["out"]
    assert tuple(out.shape) == (2, 1, 128, 512)  # type: ignore[attr-defined]
    assert out.isfinite().all()  # type: ignore[attr-defined]


def test_the_picture_is_what_the_code_draws():
    drawn = (ROOT / PICTURE).read_text(encoding="utf-8")
    assert drawn == cover().markup + "\n", "fix: make format; then see that the README's words hold"
    (gain,) = re.findall(r" ([\d.]+) times sooner", drawn)
    assert float(gain) > 4, "the README says less than a quarter"


def test_the_map_is_the_workbook_s_and_the_error_table_the_record_s():
    assert with_regions(README) == README, "fix: make format"
    assert {e.file for e in NOTEBOOKS} == {p.name for p in (ROOT / "notebooks").glob("*.ipynb")}


def test_a_region_needs_its_place():
    with pytest.raises(InvalidInput, match="0 places for workbook"):
        with_regions("no markers")
    with pytest.raises(InvalidInput, match="0 places for simulator"):
        with_regions("<!-- workbook -->\n<!-- /workbook -->")


def test_links_lead_somewhere():
    targets = re.findall(r"\]\(([^)#:]+)\)", README)
    assert targets
    assert [t for t in targets if not (ROOT / t).exists()] == []


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    contributing = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^make ([a-z-]+)", README + contributing, re.M))
    assert {"lab", "test"} <= named
    assert [t for t in named if not re.search(rf"^{t}:", makefile, re.M)] == []


@pytest.mark.parametrize("line", re.findall(r"^mla-lab (.*?)(?:  .*)?$", README, re.M))
def test_commands_of_the_readme_parse(line):
    assert cli.build_parser().parse_args(line.split()).command == line.split()[0]
