"""How every picture looks: colour-blind-safe, a finding as its title, source shown by fill.

Colours are Okabe and Ito's eight (https://jfly.uni-koeln.de/color/); ramps are cividis.
Colour never stands alone: roles also differ by label, sources by hatch.
"""

from __future__ import annotations

from collections.abc import Mapping

import plotly.graph_objects as go

BLACK = "#000000"
ORANGE = "#E69F00"
SKY = "#56B4E9"
GREEN = "#009E73"
YELLOW = "#F0E442"
BLUE = "#0072B2"
RED = "#D55E00"
PINK = "#CC79A7"
GREY = "#8A8A8A"
INK = "#1F2430"
PAPER = "#FFFFFF"
#: of text and boxes on the page itself, which a dark theme turns over
PAGE_TINT = "var(--jp-layout-color2,#F4F6FA)"
PAGE_INK = "var(--jp-content-font-color1,#1F2430)"
PAGE_LINK = "var(--jp-content-link-color,#0072B2)"

#: order in which series take their colours
PALETTE = (BLUE, ORANGE, GREEN, PINK, SKY, RED, YELLOW, GREY)
RAMP = "cividis"

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

#: plotly's tool bar lies over long titles; a double click resets the axes without it
_TOOLS = ["toImage", "zoom2d", "pan2d", "select2d", "lasso2d", "zoomIn2d", "zoomOut2d"]
_TOOLS += ["autoScale2d", "resetScale2d"]

_AXIS = {
    "gridcolor": "#E8EAEF",
    "linecolor": INK,
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
        "hoverlabel": {"font": {"family": FONT, "size": 13}},
        "legend": {"orientation": "h", "y": -0.2, "x": 0.0},
        "xaxis": _AXIS,
        "yaxis": _AXIS,
        "bargap": 0.15,
        "modebar": {"remove": _TOOLS},
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
