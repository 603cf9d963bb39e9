"""Colours of style sheets as `#RRGGBB`, and pictures that would not follow a page's theme."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

from mla_lab.lab.explorer import PLOTLY_MIME

#: what a picture may not be filled with: white where the theme has a colour of its own, and the
#: dark grey that plotly takes where a template names no colour
_WHITE = re.compile(
    r"(?:fill|background|background-color)\s*[=:]\s*[\"']?\s*(#fff\b|#f{6}\b|white)"
)
FIXED = ("#fff", "#ffffff", "white", "#444", "#444444")
#: text inside a bar stands on the bar's colour
INSIDE = "insidetextfont"


def rgb(color: str, ground: str = "#FFFFFF") -> str:
    """A colour of a style sheet, over a ground where it is not opaque."""
    if found := re.fullmatch(r"var\(--[\w-]+,\s*(.*)\)", color):
        return rgb(found[1], ground)
    if color == "white":
        return "#FFFFFF"
    if found := re.fullmatch(r"#(\w)(\w)(\w)", color):
        return "#" + "".join(2 * digit for digit in found.groups()).upper()
    if found := re.fullmatch(r"rgba?\(([^)]*)\)", color):
        red, green, blue, *alpha = (float(part) for part in found[1].split(","))
        share, below = (alpha or [1.0])[0], (int(ground[i : i + 2], 16) for i in (1, 3, 5))
        mixed = (
            share * a + (1 - share) * b for a, b in zip((red, green, blue), below, strict=True)
        )
        return "#" + "".join(f"{round(part):02X}" for part in mixed)
    if re.fullmatch(r"#\w{6}", color):
        return color.upper()
    raise ValueError(color)


def unthemed(bundle: dict[str, Any]) -> list[str]:
    """Colours of a picture's output that stay as they are in a dark theme and should not."""
    if PLOTLY_MIME in bundle:
        figure = json.loads(json.dumps(bundle[PLOTLY_MIME]))
        return [f"{at}: {c}" for at, c in _strings(figure, "") if c.lower() in FIXED]
    return _WHITE.findall(bundle["text/html"].lower())


def _strings(value: Any, at: str) -> Iterator[tuple[str, str]]:
    """Strings of nested data with their keys; a template's colours are tested once for all."""
    if isinstance(value, str):
        yield at, value
    pairs: Iterable[tuple[Any, Any]] = value.items() if isinstance(value, dict) else ()
    pairs = enumerate(value) if isinstance(value, list) else pairs
    for key, inner in pairs:
        if key not in (INSIDE, "template"):
            yield from _strings(inner, f"{at}.{key}")
