"""Charts in the theme of their page: a stylesheet puts the page's colours in place of ours.

plotly takes no CSS variable, so a chart is drawn with PAPER, INK and GRID of `style`; whatever has
one of them takes the variable of JupyterLab's theme, at once when the theme changes. Without the
stylesheet a chart is a white sheet with dark text. A saved notebook shows the picture that
JupyterLab keeps beside a chart, until the pointer is on it; in a dark theme it is inverted.
"""

from __future__ import annotations

from .style import GRID, INK, PAGE_GRID, PAGE_INK, PAGE_PAPER, PAPER

#: (ours, the page's, properties, elements): text inside a bar stands on the bar's colour
_RULES = (
    (PAPER, PAGE_PAPER, ("background", "fill", "stroke"), ""),
    (INK, PAGE_INK, ("fill", "stroke"), ":not(.bartext-inside)"),
    (GRID, PAGE_GRID, ("stroke",), ""),
)
#: the share of inversion turns PAPER to the #111 of JupyterLab's dark theme; hues come back by half
#: a turn
_SAVED = (
    "body[data-jp-theme-light=false] .jp-RenderedPlotly .plot-img"
    "{filter:invert(.933) hue-rotate(180deg)}"
)


def css_rgb(color: str) -> str:
    """`#RRGGBB` as browsers write it in an element's style."""
    return f"rgb({', '.join(str(int(color[i : i + 2], 16)) for i in (1, 3, 5))})"


def stylesheet() -> str:
    """The rules, for charts and their saved pictures alone."""
    charts = [
        f'.js-plotly-plot {elements}[style*="{name}: {css_rgb(ours)}"]{{{name}:{page} !important}}'
        for ours, page, names, elements in _RULES
        for name in names
    ]
    return "\n".join((*charts, _SAVED))
