"""A matrix unit that adds with few bits, and what adding its sums up in fp32 mends.

The model: at each k-step of 32 products, accumulator and products are cut, towards zero, to a
number of bits below the largest of them, and added exactly. DeepSeek-V3's report (section 3.3.2)
finds about 14 bits of it on Hopper.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import ipywidgets as widgets
import plotly.graph_objects as go
import torch
from torch import Tensor

from ..inputs import KV_STD
from ..problem import LATENT_DIM, ROPE_DIM
from . import explorer
from .eight_bits import e4m3
from .source import formula
from .style import BLUE, GREY, ORANGE, new_figure

#: products that the unit adds at once
STEP = 32
#: values of a head that are followed, heads, and the longest cache
COLUMNS, HEADS, LONGEST = 32, 4, 65536
#: k-steps between two additions in fp32; 0: never
PROMOTIONS = {"every tile (2 k-steps)": 2, "every 16": 16, "every 128": 128, "never": 0}
LENGTHS = tuple(1024 << i for i in range(7))


def add(acc: Tensor, products: Tensor, bits: int) -> Tensor:
    """acc [...] + products [STEP, ...] as a unit of `bits` bits adds them, float64."""
    terms = torch.cat([products, acc.unsqueeze(0)])
    _, exponent = torch.frexp(terms.abs().amax(0).clamp_min(2.0**-60))
    unit = torch.ldexp(torch.ones_like(acc), exponent - bits)
    return torch.trunc(terms / unit).sum(0) * unit


def accumulate(products: Tensor, bits: int, promote: int) -> Tensor:
    """Sums after each k-step of products [steps, STEP, ...]: [steps, ...].

    promote: k-steps after which the unit's sum is added to another in fp32, 0 for never.
    """
    acc = torch.zeros_like(products[0, 0])
    total = torch.zeros_like(acc)
    sums = []
    for step, some in enumerate(products, 1):
        acc = add(acc, some, bits)
        sums.append((total + acc).float().double())
        if promote and step % promote == 0:
            total, acc = sums[-1], torch.zeros_like(acc)
    return torch.stack(sums)


@lru_cache(maxsize=4)
def example(seed: int, longest: int = LONGEST) -> tuple[Tensor, Tensor, Tensor]:
    """Exact weights, rounded weights [kv, heads, 1], e4m3 values [kv, 1, columns] of a cache.

    Scores follow from the columns that are kept and from noise that stands for the others.
    """
    random = torch.Generator().manual_seed(seed)
    values = e4m3(KV_STD * torch.randn(longest, COLUMNS, generator=random))
    query = torch.randn(COLUMNS, HEADS, generator=random).double()
    others = (
        torch.randn(longest, HEADS, generator=random)
        * KV_STD
        * (LATENT_DIM + ROPE_DIM - COLUMNS) ** 0.5
    )
    scores = (values @ query + others.double()) / 192**0.5
    weights = 256 * torch.exp(scores - scores.amax(0))
    return weights.unsqueeze(-1), e4m3(weights).unsqueeze(-1), values.unsqueeze(1)


@lru_cache(maxsize=32)
def accumulator_curve(
    bits: int, promote: int, seed: int = 1, longest: int = LONGEST
) -> tuple[float, ...]:
    """Error at each of LENGTHS up to `longest`; bits 0: an exact sum of the rounded weights."""
    weights, kept, values = example(seed, longest)
    ends = torch.tensor([n for n in LENGTHS if n <= longest]) - 1
    steps = (kept * values).unflatten(0, (-1, STEP))
    if bits:
        sums = accumulate(steps, bits, promote)[(ends + 1) // STEP - 1]
    else:
        sums = steps.sum(1).cumsum(0)[(ends + 1) // STEP - 1]
    found = sums / kept.cumsum(0)[ends]
    wanted = (weights * values).cumsum(0)[ends] / weights.cumsum(0)[ends]
    return tuple(((found - wanted).flatten(1).norm(dim=1) / wanted.flatten(1).norm(dim=1)).tolist())


class AccumulatorExplorer(explorer.Explorer):
    """Error over the kv length: weights alone, a unit left to itself, and the chosen promotion."""

    name = "lab.AccumulatorExplorer"
    source = formula("simulated sums")

    def controls(self) -> dict[str, widgets.Widget]:
        return {
            "bits": explorer.steps("bits of the unit", (12, 13, 14, 16, 24), 14, "300px"),
            "promote": explorer.choice("add in fp32", tuple(PROMOTIONS), "never", "300px"),
        }

    def figure(self, state: dict[str, Any]) -> go.Figure:
        bits, promote = state["bits"], PROMOTIONS[state["promote"]]
        exact, chosen = accumulator_curve(0, 0), accumulator_curve(bits, promote)
        figure = new_figure(
            f"{bits} bits, added in fp32 {state['promote']}: at {LONGEST:,} tokens "
            f"{chosen[-1] / exact[-1]:.2f} times the error of the weights",
            x="cached tokens, one worker",
            y="relative error",
            height=380,
        )
        series = [("rounded weights, exact sums", exact, GREY, "dot", "circle")]
        if promote:
            series.append(
                (f"{bits} bits, never", accumulator_curve(bits, 0), ORANGE, "dash", "square")
            )
        series.append((f"{bits} bits, {state['promote']}", chosen, BLUE, "solid", "diamond"))
        for name, line, color, dash, symbol in series:
            figure.add_scatter(
                x=LENGTHS,
                y=line,
                name=name,
                mode="lines+markers",
                line={"color": color, "dash": dash, "width": 2.5},
                marker={"symbol": symbol, "size": 9},
            )
        figure.update_xaxes(type="log", tickvals=LENGTHS, ticktext=[f"{n:,}" for n in LENGTHS])
        figure.update_yaxes(rangemode="tozero", tickformat=".1%")
        return figure
