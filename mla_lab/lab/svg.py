"""Grids as SVG: cells with a label, a fill and a title, for layouts, pages and masks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from plotly.colors import sample_colorscale

from .style import FONT, GREY, INK, PAGE_INK, PAGE_PAPER

#: Okabe-Ito tints on which black text stays readable
TINTS = ("#BBD7EA", "#F6D999", "#A8DCCB", "#EBCADB", "#CDE8F8", "#F0BE9A", "#FAF5B8", "#D9DBE0")

#: style of a drawing: a sheet with a margin
SHEET = f"max-width:100%;height:auto;background:{PAGE_PAPER};padding:6px;box-sizing:border-box"
_CIVIDIS = ("rgb(126,142,172)", "rgb(176,178,176)", "rgb(255,236,130)")
#: a colour of the page, and the one that it is where the page has no theme
_OF_PAGE = re.compile(r"var\(--[\w-]+,(#\w+)\)")


@dataclass(frozen=True)
class Cell:
    """One cell: label, fill, and the sentence for hovering and screen readers."""

    text: str
    fill: str = PAGE_PAPER
    title: str = ""
    bold: bool = False

    @property
    def ink(self) -> str:
        """Colour of the text: the page's on a fill of the page, dark on any other."""
        return PAGE_INK if self.fill.startswith("var(") else INK


@dataclass(frozen=True)
class Svg:
    """A finished picture with its alt text; displays in a notebook."""

    markup: str
    alt: str

    def _repr_html_(self) -> str:
        return self.markup

    @property
    def fixed(self) -> str:
        """The markup in the colours of a light page, for a file."""
        return _OF_PAGE.sub(r"\1", self.markup)


def tint(index: int) -> str:
    """The `index`-th fill, cycling."""
    return TINTS[index % len(TINTS)]


def ramp(position: float) -> str:
    """Cividis at `position` in [0, 1], lightened so that dark text stays readable."""
    (color,) = sample_colorscale(_CIVIDIS, min(max(position, 0.0), 1.0), colortype="tuple")
    return "#" + "".join(f"{round(255 * share):02x}" for share in color)


def document(width: float, height: float, body: str, alt: str) -> Svg:
    """Wraps `body` in an accessible SVG that shrinks to the page, never grows."""
    markup = (
        f'<svg role="img" aria-label="{escape(alt)}" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" style="{SHEET}" '
        f'xmlns="http://www.w3.org/2000/svg" font-family="{FONT}">'
        f"<title>{escape(alt)}</title>{body}</svg>"
    )
    return Svg(markup, alt)


def label(
    x: float, y: float, text: str, *, size: int = 12, anchor: str = "middle", ink: str = PAGE_INK
) -> str:
    """Text centred on its line at (x, y); on a tint its `ink` is INK."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" '
        f'dominant-baseline="central" fill="{ink}">{escape(text)}</text>'
    )


def box(x: float, y: float, width: float, height: float, cell: Cell, *, size: int = 12) -> str:
    """One rectangle with its text and title. An outline lies inside it: a line of the page's ink,
    which stands out from the sheet, and on a tint a thinner one of the text's ink within.
    """
    title = f"<title>{escape(cell.title)}</title>" if cell.title else ""
    weight = ' font-weight="700"' if cell.bold else ""
    text = (
        f'<text x="{x + width / 2:.1f}" y="{y + height / 2:.1f}" font-size="{size}"{weight} '
        f'text-anchor="middle" dominant-baseline="central" fill="{cell.ink}">'
        f"{escape(cell.text)}</text>"
        if cell.text
        else ""
    )

    def rectangle(inset: float, fill: str, stroke: str, line: float) -> str:
        wide, high = max(width - 2 * inset, 0), max(height - 2 * inset, 0)
        return (
            f'<rect x="{x + inset:.2f}" y="{y + inset:.2f}" width="{wide:.2f}" '
            f'height="{high:.2f}" fill="{fill}" stroke="{stroke}" stroke-width="{line}"/>'
        )

    if not cell.bold:
        return f"<g>{title}{rectangle(0, cell.fill, GREY, 1)}{text}</g>"
    edges = rectangle(0.75, cell.fill, PAGE_INK, 1.5)
    if cell.ink != PAGE_INK:
        edges += rectangle(2, "none", cell.ink, 1)
    return f"<g>{title}{edges}{text}</g>"


def grid(
    cells: Sequence[Sequence[Cell]],
    alt: str,
    *,
    rows: Sequence[str] = (),
    columns: Sequence[str] = (),
    size: tuple[float, float] = (44, 30),
    caption: str = "",
) -> Svg:
    """A table of cells with row names left and column names above; `size` is of one cell, px."""
    width, height = size
    left = 8 + (7.5 * max((len(r) for r in rows), default=0) + 6 if rows else 0)
    top = 6 + (22 if caption else 0) + (20 if columns else 0)
    font = 12 if width >= 34 else 10
    parts = [label(left, 14, caption, size=14, anchor="start")] if caption else []
    outlined: list[str] = []  # drawn last, else the next cell covers a part of the outline
    for j, name in enumerate(columns):
        parts.append(label(left + (j + 0.5) * width, top - 10, name, size=font))
    for i, row in enumerate(cells):
        if rows:
            parts.append(label(left - 6, top + (i + 0.5) * height, rows[i], size=12, anchor="end"))
        for j, cell in enumerate(row):
            layer = outlined if cell.bold else parts
            layer.append(box(left + j * width, top + i * height, width, height, cell, size=font))
    total_width = left + width * max((len(r) for r in cells), default=0) + 8
    total_width = max(total_width, 7.6 * len(caption) + left)
    body = "".join(parts + outlined)
    return document(total_width, top + height * len(cells) + 6, body, alt)


def row_of(pictures: Sequence[Svg], gap: int = 26) -> Svg:
    """Pictures beside each other, wrapping where the page is narrow."""
    inner = "".join(f"<div>{p.markup}</div>" for p in pictures)
    style = f"display:flex;flex-wrap:wrap;gap:10px {gap}px;align-items:flex-start"
    return Svg(f"<div style='{style}'>{inner}</div>", "; ".join(p.alt for p in pictures))
