"""A bf16 number, digit by digit, as the sum of two e4m3 numbers."""

from __future__ import annotations

import math
from typing import Any

import plotly.graph_objects as go
import torch

from .. import explorer
from ..eight_bits import TOP, row_scale, split, splits_exactly
from ..source import formula
from ..style import BLUE, ORANGE, PAGE_PAPER, new_figure
from ..svg import Cell, Svg, box, document, label, tint

#: powers of two that have a column
HIGHEST, LOWEST = 8, -15
_LEFT, _CELL = 262.0, (30.0, 30.0)


def bf16(text: str) -> float:
    """The bf16 number nearest to `text`; NaN where that is no number."""
    try:
        return float(torch.tensor(float(text)).bfloat16())
    except ValueError:
        return math.nan


def digits(value: float) -> dict[int, int]:
    """Binary digits of |value| by power of two, from the first one that is set to the last."""
    if value == 0:
        return {}
    whole, parts = abs(value).as_integer_ratio()  # a bf16 number: parts is a power of two
    zeros = (whole & -whole).bit_length() - 1
    number, lowest = whole >> zeros, zeros - parts.bit_length() + 1
    return {lowest + i: number >> i & 1 for i in range(number.bit_length())}


def byte_of(value: float) -> str:
    """The e4m3 byte of `value`: sign, exponent, mantissa."""
    bits = torch.tensor(value).to(torch.float8_e4m3fn).view(torch.uint8)
    text = f"{int(bits):08b}"
    return f"{text[0]} {text[1:5]} {text[5:]}"


class SplitExplorer(explorer.Explorer):
    """The scaled number, its first term, what that leaves, and the second term, in columns."""

    source = formula("x = hi + lo / 16")
    frames_over = "top"

    knobs = explorer.knobs(
        number=explorer.field("number", "3.14159", "220px"),
        top=explorer.steps("row's greatest", (1, 4, 64, 1024, 16384, 2**16, 2**18), 4, "320px"),
    )

    def figure(self, state: dict[str, Any]) -> Svg:
        x = bf16(state["number"])
        if not math.isfinite(x):
            return document(
                700, 30, label(0, 14, "not a finite number", anchor="start"), "no number"
            )
        top = max(abs(x), float(state["top"]))
        scaled = x * float(row_scale(torch.tensor([top])))
        terms = split(torch.tensor(scaled, dtype=torch.float64))
        hi, lo, left = float(terms.hi), float(terms.lo), scaled - float(terms.hi)
        gap = abs(scaled - float(terms.sum))
        verdict = (
            "exactly" if gap == 0 else f"but for {gap:g}, 2^{math.log2(gap / TOP):.0f} of the top"
        )
        sign = "-" if lo < 0 else "+"
        finding = f"{x:g} becomes {scaled:g} = {hi:g} {sign} {abs(lo):g} / 16, {verdict}"
        rows = (
            (f"bf16, scaled: {scaled:g}", scaled, 0),
            (f"hi = {hi:g}, byte {byte_of(hi)}", hi, 1),
            (f"left: {left:g}", left, 7),
            (f"lo / 16: lo = {lo:g}, byte {byte_of(lo)}", lo / 16, 2),
        )
        body = label(0, 12, finding, size=16, anchor="start") + _columns(40)
        for i, (name, value, color) in enumerate(rows):
            body += _row(54 + i * (_CELL[1] + 8), name, value, color)
        width = _LEFT + (HIGHEST - LOWEST + 1) * _CELL[0] + 8
        return document(width, 54 + len(rows) * (_CELL[1] + 8), body, finding)

    def note(self, state: dict[str, Any]) -> str:
        beyond = float(state["top"]) < abs(bf16(state["number"])) < math.inf
        return (
            "<div>Columns are powers of two. A term keeps four digits from its first 1 on; of "
            "<code>lo / 16</code> none lies below 2^-13."
            f"{' The number is itself the greatest of its row.' * beyond}</div>"
        )


def _columns(y: float) -> str:
    return "".join(
        label(_LEFT + (HIGHEST - power + 0.5) * _CELL[0], y, str(power), size=11)
        for power in range(HIGHEST, LOWEST - 1, -1)
    )


def _row(y: float, name: str, value: float, color: int) -> str:
    """One number: its name, its sign, its digits under their powers of two."""
    sign = "-" if value < 0 else "+"
    found = digits(value)
    parts = [
        label(0, y + _CELL[1] / 2, name, size=13, anchor="start"),
        label(_LEFT - 10, y + _CELL[1] / 2, sign, size=16),
    ]
    for power in range(HIGHEST, LOWEST - 1, -1):
        digit = found.get(power)
        fill = PAGE_PAPER if digit is None else tint(color)
        title = f"2^{power}: {digit or 0}"
        cell = Cell("" if digit is None else str(digit), fill, title, digit == 1)
        parts.append(box(_LEFT + (HIGHEST - power) * _CELL[0], y, *_CELL, cell))
    return "".join(parts)


def exact_shares() -> dict[int, float]:
    """Share of bf16 numbers that split exactly, by octaves below their row's greatest."""
    random = torch.Generator().manual_seed(0)
    shares = {}
    for octave in range(25):
        mantissas = 1 + torch.rand(400, 64, generator=random)
        row = (mantissas * 2.0**-octave).bfloat16()
        row[:, 0] = 1.5
        shares[octave] = float(splits_exactly(row)[:, 1:].double().mean())
    return shares


def share_chart() -> go.Figure:
    """Share of numbers that split exactly, over how far they lie below their row's greatest."""
    shares = exact_shares()
    holds = max(octave for octave in shares if all(shares[o] == 1 for o in range(octave + 1)))
    figure = new_figure(
        f"Every bf16 number splits exactly down to 2^-{holds} of its row's greatest",
        x="octaves below the row's greatest",
        y="split exactly",
        height=320,
    )
    colors = [BLUE if share == 1 else ORANGE for share in shares.values()]
    figure.add_bar(x=list(shares), y=list(shares.values()), marker_color=colors)
    figure.update_yaxes(tickformat=".0%", range=[0, 1.05])
    return figure
