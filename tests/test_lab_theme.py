"""Pictures in the colours of their page: readable in JupyterLab and on the site, light and dark."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from mla_lab.jit.toolchain import package_dir
from mla_lab.lab import explorer, site, source, style, svg

from .css_colors import rgb, unthemed

#: contrast that text needs (WCAG 2.2, level AA)
READABLE = 4.5
THEMES = Path(sys.prefix) / "share/jupyter/lab/themes/@jupyterlab"
#: in the package furo
FURO = "theme/furo/static/styles/furo.css"
NAMES = ("--jp-layout-color0", "--jp-layout-color2", "--jp-content-font-color1")


def of_jupyter(name: str) -> tuple[str, ...]:
    """Sheet, tint and ink of a theme of JupyterLab."""
    css = (THEMES / f"theme-{name}-extension/index.css").read_text(encoding="utf-8")
    return tuple(re.search(rf"{n}:([^;]+);", css)[1] for n in NAMES)  # type: ignore[index]


def of_site(dark: bool) -> tuple[str, ...]:
    """The same of the site: the variables that it takes from Sphinx's theme."""
    installed = package_dir("furo")
    assert installed
    css = (installed / FURO).read_text(encoding="utf-8")
    found = []
    for name in NAMES:
        theirs = re.search(rf"{name}:var\((--[\w-]+)\)", site.STYLE)
        assert theirs, name
        found.append(re.findall(rf"{theirs[1]}:([^;}}]+)[;}}]", css)[-1 if dark else 0])
    return tuple(found)


PAGES = {
    "JupyterLab Light": lambda: of_jupyter("light"),
    "JupyterLab Dark": lambda: of_jupyter("dark"),
    "site, light": lambda: of_site(False),
    "site, dark": lambda: of_site(True),
    "no theme": lambda: (style.PAGE_PAPER, style.PAGE_TINT, style.PAGE_INK),
}


@pytest.mark.parametrize("page", PAGES)
def test_text_on_the_page_is_readable(page: str) -> None:
    sheet, tint, ink = PAGES[page]()
    for ground in (rgb(sheet), rgb(tint)):
        assert style.contrast(rgb(ink, ground), ground) >= READABLE
    assert (style.luminance(rgb(sheet)) < 0.1) == ("dark" in page.lower())


def test_every_colour_of_the_template_is_the_pages_own() -> None:
    layout = style.TEMPLATE.layout
    assert {layout.paper_bgcolor, layout.plot_bgcolor, layout.hoverlabel.bgcolor} == {style.PAPER}
    inks = {layout.font.color, layout.hoverlabel.font.color, layout.annotationdefaults.arrowcolor}
    for axis in (layout.xaxis, layout.yaxis):
        inks |= {axis.linecolor, axis.tickcolor}
        assert axis.gridcolor == style.GRID
    assert inks | {layout.shapedefaults.line.color} == {style.INK}
    sheet = style.stylesheet()
    for prop, ours, page in (
        ("background", style.PAPER, "--jp-layout-color0"),
        ("fill", style.PAPER, "--jp-layout-color0"),
        ("fill", style.INK, "--jp-content-font-color1"),
        ("stroke", style.INK, "--jp-content-font-color1"),
        ("stroke", style.GRID, "--jp-border-color2"),
    ):
        rule = rf'\[style\*="{prop}: {re.escape(style.css_rgb(ours))}"\]\{{{prop}:var\({page},'
        assert re.search(rule, sheet), (prop, ours)
    assert style.contrast(style.INK, style.PAPER) >= READABLE, "where nobody reads the stylesheet"


def test_the_stylesheet_finds_our_charts_alone() -> None:
    """plotly's own white and its own ink stay: the page may hold charts of others."""
    assert style.css_rgb(style.PAPER) == "rgb(255, 255, 254)"
    ours = '.main-svg[style*="background: rgb(255, 255, 254)"])'
    assert all(
        rule.startswith(".js-plotly-plot ")
        or " .jp-RenderedPlotly .plot-img{" in rule
        or (":has(" in rule and ours in rule)
        for rule in style.stylesheet().splitlines()
    )


def test_text_on_a_fill_is_readable() -> None:
    fills = [*svg.TINTS, *(svg.ramp(i / 50) for i in range(51)), style.ORANGE]
    assert [f for f in fills if style.contrast(style.INK, f) < READABLE] == []
    colors = [*style.PALETTE, *style.ROLE_COLORS.values()]
    assert [c for c in colors if style.contrast(style.ink_on(c), c) < READABLE] == []
    assert svg.Cell("x").ink == style.PAGE_INK
    assert svg.Cell("x", svg.TINTS[0]).ink == style.INK


def test_a_chip_is_readable() -> None:
    for kind in source.KINDS:
        chip = source.Source(kind, card="H200", date="2026-11-23").chip()
        grounds = re.findall(r"#\w{6}|#\w{3}\b", chip.split("border:")[0])
        ink = re.search(r";color:(#\w+)", chip)
        assert grounds and ink
        assert all(style.contrast(rgb(ink[1]), rgb(g)) >= READABLE for g in grounds), kind


def test_a_drawing_in_a_file_has_colours_of_its_own() -> None:
    drawing = svg.grid([[svg.Cell("a", bold=True)]], "one", caption="one")
    assert "var(" in drawing.markup and "var(" not in drawing.fixed
    assert f'fill="{style.INK}"' in drawing.fixed and "background:#fff;" in drawing.fixed


def test_a_white_sheet_is_found() -> None:
    chart = style.new_figure("a chart")
    chart.add_bar(x=[1], y=[1], marker_color=style.PAPER, insidetextfont={"color": "#FFFFFF"})
    assert unthemed(explorer.mime_bundle(chart)) == []
    chart.update_layout(paper_bgcolor="white")
    assert unthemed(explorer.mime_bundle(chart)) == [".layout.paper_bgcolor: white"]
    drawing = svg.document(10, 10, svg.box(0, 0, 5, 5, svg.Cell("a", "#FFF")), "a")
    assert unthemed(explorer.mime_bundle(drawing)) == ["#fff"]
