"""Whether the pictures of a page have the colours of its theme."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from PIL import Image

from mla_lab.lab.style import contrast, luminance

from ..css_colors import rgb
from .jupyter import Picture

#: contrast that text needs (WCAG 2.2, level AA)
READABLE = 4.5
#: luminance of a dark sheet at most; the three channels of a pixel that counts as white; the share
#: of a picture that white may fill, which is text and its marks
DARK, WHITE, MOST_WHITE = 0.1, 235, 0.25


def faults(pictures: Iterable[Picture], dark: bool, screenshot: Path) -> list[str]:
    """What does not follow the theme: a sheet of the other one, text that cannot be read on it, and
    in the dark whatever is painted white.
    """
    shown = np.asarray(Image.open(screenshot).convert("RGB"))
    found = []
    for one in pictures:
        ground = rgb(one.ground)
        if (luminance(ground) < DARK) != dark:
            found.append(f"{one.words}: sheet {one.ground}")
        found += [
            f"{one.words}: text {ink} on {one.ground}"
            for ink in one.inks
            if contrast(rgb(ink, ground), ground) < READABLE
        ]
        left, top, right, bottom = (round(edge) for edge in one.box)
        inside = shown[max(top, 0) : bottom, max(left, 0) : right]
        share = float((inside.min(-1) >= WHITE).mean()) if inside.size else 0.0
        if dark and share > MOST_WHITE:
            found.append(f"{one.words}: {share:.0%} of it is white")
    return found


def ground(screenshot: Path) -> float:
    """The luminance of a picture's most frequent colour."""
    pixels = np.asarray(Image.open(screenshot).convert("RGB")).reshape(-1, 3)
    colors, counts = np.unique(pixels, axis=0, return_counts=True)
    return luminance("#" + "".join(f"{channel:02x}" for channel in colors[counts.argmax()]))
