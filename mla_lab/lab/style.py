"""Style of all pictures: colour-blind-safe, a finding as the title, source shown by fill.

Colours are Okabe and Ito's eight (https://jfly.uni-koeln.de/color/); ramps are cividis.
Colour never stands alone: roles also differ by label, sources by hatch.

plotly takes no CSS variable, so a chart is drawn with PAPER, INK and GRID; on a page with
`stylesheet`, whatever has one of them takes the variable of JupyterLab's theme, at once when the
theme changes. Without it a chart is a white sheet with dark text. A saved notebook shows the
picture that JupyterLab keeps beside a chart, until the pointer is on it; in a dark theme it is
inverted.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from functools import lru_cache
from typing import Any, NamedTuple

import plotly.graph_objects as go
import plotly.io as pio
from plotly.subplots import make_subplots

ORANGE = "#E69F00"
SKY = "#56B4E9"
GREEN = "#009E73"
YELLOW = "#F0E442"
BLUE = "#0072B2"
RED = "#D55E00"
PINK = "#CC79A7"
GREY = "#8A8A8A"
INK = "#1F2430"
#: sheet and grid of a chart; a step off white, so that a page finds our charts by it (`stylesheet`)
PAPER, GRID = "#FFFFFE", "#E8EAEF"
#: the page's own colours, which follow its theme; behind the comma: where a page has no theme
PAGE_PAPER = "var(--jp-layout-color0,#fff)"
PAGE_TINT = "var(--jp-layout-color2,#F4F6FA)"
PAGE_CODE = "var(--jp-cell-editor-background,#F5F5F5)"
PAGE_GRID = f"var(--jp-border-color2,{GRID})"
PAGE_INK = f"var(--jp-content-font-color1,{INK})"
PAGE_LINK = "var(--jp-content-link-color,#0072B2)"


def luminance(color: str) -> float:
    """Relative luminance of `#RRGGBB`, 0 to 1 (WCAG 2.2, section 1.4.3)."""
    shares = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in shares)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    """Contrast ratio of two colours `#RRGGBB`, 1 to 21 (WCAG 2.2); text needs 4.5."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def ink_on(fill: str) -> str:
    """Black or white, whichever contrasts more with `fill`: 4.58 at least."""
    return max(("#000000", "#FFFFFF"), key=lambda ink: contrast(ink, fill))


#: order in which series take their colours
PALETTE = (BLUE, ORANGE, GREEN, PINK, SKY, RED, YELLOW, GREY)

#: one colour a role of a worker, in pictures of time
ROLE_COLORS: Mapping[str, str] = {
    "launch": "#C9CDD6",
    "setup": YELLOW,
    "load": SKY,
    "attend": BLUE,
    "qk": BLUE,
    "softmax": ORANGE,
    "pv": GREEN,
    "write": GREEN,
    "wait": "#E3E6EC",
    "merge": RED,
}

#: hatch of a bar by where its number comes from
HATCH: Mapping[str, str] = {"predicted": "/", "measured": "", "recorded": ""}


def hatch(kind: str) -> dict[str, object]:
    """plotly's `marker.pattern` for a kind of source: light lines over the bar's own colour."""
    return {
        "shape": HATCH[kind],
        "size": 6,
        "solidity": 0.25,
        "fillmode": "overlay",
        "fgcolor": "rgba(255,255,255,0.75)",
    }


FONT = "Inter, Segoe UI, Helvetica, Arial, sans-serif"

#: plotly's tool bar lies over long titles; a double click resets the axes without it. JupyterLab
#: itself resizes charts: one that is `responsive` beside has height 0 once the theme changes
CONFIG = {"displayModeBar": False, "responsive": False}
for _renderer in ("plotly_mimetype", "notebook", "notebook_connected"):
    pio.renderers[_renderer].config = CONFIG

_AXIS = {
    "gridcolor": GRID,
    "linecolor": INK,
    "tickcolor": INK,
    "ticks": "outside",
    "zeroline": False,
    "title": {"font": {"size": 13}, "standoff": 8},
    "automargin": True,
}

TEMPLATE = go.layout.Template(
    layout={
        "font": {"family": FONT, "size": 14, "color": INK},
        "title": {"x": 0.0, "xref": "paper", "xanchor": "left", "font": {"size": 17}},
        "colorway": list(PALETTE),
        "paper_bgcolor": PAPER,
        "plot_bgcolor": PAPER,
        "hoverlabel": {
            "bgcolor": PAPER,
            "bordercolor": GREY,
            "font": {"family": FONT, "size": 13, "color": INK},
        },
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": GREY, "activecolor": INK},
        "annotationdefaults": {"arrowcolor": INK},
        "shapedefaults": {"line": {"color": INK}},
        # below the axis titles, however many rows it takes
        "legend": {
            "orientation": "h",
            "yref": "container",
            "y": 0.0,
            "yanchor": "bottom",
            "x": 0.0,
        },
        "xaxis": _AXIS,
        "yaxis": _AXIS,
        "bargap": 0.15,
    }
)


def new_figure(title: str, *, x: str = "", y: str = "", height: int = 380) -> go.Figure:
    """An empty chart. `title` states the finding; `x` and `y` name quantity and unit."""
    figure = go.Figure()
    figure.update_layout(
        template=TEMPLATE,
        title_text=title,
        height=height,
        margin={"l": 70, "r": 20, "t": 56, "b": 60},
        xaxis_title_text=x,
        yaxis_title_text=y,
    )
    return figure


def panels(
    title: str, headings: Sequence[str], *, height: int, margin: Mapping[str, int], **grid: Any
) -> go.Figure:
    """An empty figure of several charts, each under its heading; `grid` goes to `make_subplots`."""
    figure = deepcopy(_empty_panels(tuple(headings), json.dumps(grid)))
    figure.update_layout(title_text=title, height=height, margin=dict(margin))
    return figure


@lru_cache(maxsize=32)
def _empty_panels(headings: tuple[str, ...], grid: str) -> go.Figure:
    """Charts under their headings; made once, as that takes 20 ms and a copy 3 (two cores,
    2026-11-29)."""
    figure = make_subplots(subplot_titles=headings, **json.loads(grid))
    figure.update_layout(template=TEMPLATE)
    figure.update_annotations(font={"size": 13, "color": INK})
    return figure


#: marks of the series of a chart, in their order
SYMBOLS = ("circle", "square", "diamond", "cross", "x", "triangle-up", "star", "pentagon", "hash")


class Line(NamedTuple):
    """One series of a chart; told apart by colour, dash and symbol alike."""

    name: str
    y: Sequence[Any]
    color: str
    dash: str = "solid"
    symbol: str = "circle"


def add_lines(figure: go.Figure, x: Sequence[Any], lines: Iterable[Line], **trace: Any) -> None:
    """Adds series with marks over the same `x`; `trace` has more of plotly's fields for each."""
    for line in lines:
        figure.add_scatter(
            x=list(x),
            y=list(line.y),
            name=line.name,
            mode="lines+markers",
            line={"color": line.color, "dash": line.dash, "width": 2.5},
            marker={"symbol": line.symbol, "size": 9, "color": line.color},
            **trace,
        )


#: ticks of a logarithmic axis of one to three decades: 1, 2 and 5 of each, written in full
LOG_TICKS = [float(f"{digit}e{power}") for power in range(-3, 5) for digit in (1, 2, 5)]


def log_ticks(figure: go.Figure, values: Sequence[int]) -> None:
    """A logarithmic x axis that names these values and no other."""
    figure.update_xaxes(type="log", tickvals=list(values), ticktext=[f"{n:,}" for n in values])


def add_bars(
    figure: go.Figure,
    names: Sequence[str],
    values: Sequence[float | None],
    form: str,
    *,
    lying: bool = False,
    **trace: Any,
) -> None:
    """Adds a bar for each name, its value beside its end in the format `form`; none at zero or
    None. `trace` has more of plotly's fields.
    """
    text = [format(value, form) if value else "" for value in values]
    axes = {"y": list(names), "x": list(values), "orientation": "h"}
    if not lying:
        axes = {"x": list(names), "y": list(values)}
    figure.add_bar(**axes, text=text, textposition="outside", **trace)


def instruction_bars(
    title: str,
    classes: Sequence[str],
    kernels: Mapping[str, tuple[str, Mapping[str, int]]],
    decades: float,
) -> go.Figure:
    """Instructions by class, kernels side by side: by name a colour and counts; the axis ends at
    ten to the power of `decades`.
    """
    figure = new_figure(title, y="instructions in the code", height=360)
    for name, (color, counts) in kernels.items():
        values = [counts.get(kind, 0) for kind in classes]
        add_bars(figure, classes, values, ",", name=name, marker_color=color)
    figure.update_yaxes(type="log", range=[-0.2, decades], dtick=1)
    return figure


#: (ours, the page's, properties, elements): text inside a bar stands on the bar's colour
_RULES = (
    (PAPER, PAGE_PAPER, ("background", "fill", "stroke"), ""),
    (INK, PAGE_INK, ("fill", "stroke"), ":not(.bartext-inside)"),
    (GRID, PAGE_GRID, ("stroke",), ""),
)
#: pixels that our longest titles and the labels of panels side by side need: in a narrower window
#: a chart keeps this width, and its output scrolls
CHART_WIDTH = 740
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
    """Rules that put the page's colours in place of ours, for charts and their saved pictures, and
    that let an output scroll where a chart is wider than the page.
    """
    charts = [
        f'.js-plotly-plot {elements}[style*="{name}: {css_rgb(ours)}"]{{{name}:{page} !important}}'
        for ours, page, names, elements in _RULES
        for name in names
    ]
    ours = f'.main-svg[style*="background: {css_rgb(PAPER)}"]'
    narrow = (
        f".jp-RenderedPlotly:has({ours}){{min-width:{CHART_WIDTH}px}}",
        f".jp-OutputArea-child:has(>.jp-RenderedPlotly {ours}){{overflow-x:auto}}",
    )
    return "\n".join((*charts, _SAVED, *narrow))
