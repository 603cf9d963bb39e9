"""Accumulation of tensor cores with few bits, and its correction by periodic sums in fp32.

The model: at each k-step of 32 products, accumulator and products are truncated to a
number of bits below the largest of them, and added exactly. DeepSeek-V3's report (section 3.3.2)
finds about 14 bits of it on Hopper.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import plotly.graph_objects as go
import torch
from torch import Tensor

from ...core.dims import LATENT_DIM, ROPE_DIM
from ...reference.inputs import KV_STD
from .. import explorer
from ..eight_bits import e4m3
from ..source import formula
from ..style import BLUE, GREY, ORANGE, Line, add_lines, log_ticks, new_figure

#: products of one k-step
STEP = 32
#: modelled columns of a head, heads, and the longest cache
COLUMNS, HEADS, LONGEST = 32, 4, 65536
#: k-steps between two additions in fp32; 0: never
PROMOTIONS = {
    "every tile (2 k-steps)": 2,
    "every 16 k-steps": 16,
    "every 128 k-steps": 128,
    "never": 0,
}
LENGTHS = tuple(1024 << i for i in range(7))


def add(acc: np.ndarray, products: np.ndarray, most: np.ndarray, bits: int) -> np.ndarray:
    """acc [...] + products [STEP, ...] as a unit of `bits` bits adds them, float64; `most` [...]
    is the products' largest magnitude.
    """
    _, exponent = np.frexp(np.maximum(np.maximum(most, np.abs(acc)), 2.0**-60))
    units = np.ldexp(1.0, bits - exponent)
    return (np.trunc(products * units).sum(0) + np.trunc(acc * units)) / units


def accumulate(products: Tensor, bits: int, promote: int) -> Tensor:
    """Sums after each k-step of products [steps, STEP, ...]: [steps, ...].

    promote: k-steps after which the unit's sum is added to another in fp32, 0 for never.
    """
    every = products.numpy()
    most = np.abs(every).max(1)
    acc = np.zeros_like(most[0])
    total = np.zeros_like(acc)
    found = np.empty_like(most)
    for step, some in enumerate(every):
        acc = add(acc, some, most[step], bits)
        found[step] = (total + acc).astype(np.float32)
        if promote and (step + 1) % promote == 0:
            total, acc = found[step], np.zeros_like(acc)
    return torch.from_numpy(found)


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


@lru_cache(maxsize=2)
def sums(seed: int, longest: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of `example`: products [steps, STEP, heads, columns], the last step of each length, sums of
    rounded weights there, and the exact results there.
    """
    weights, kept, values = example(seed, longest)
    ends = torch.tensor([n for n in LENGTHS if n <= longest]) - 1
    products = (kept * values).unflatten(0, (-1, STEP))
    wanted = (weights * values).cumsum(0)[ends] / weights.cumsum(0)[ends]
    return products, (ends + 1) // STEP - 1, kept.cumsum(0)[ends], wanted


@lru_cache(maxsize=32)
def accumulator_curve(
    bits: int, promote: int, seed: int = 1, longest: int = LONGEST
) -> tuple[float, ...]:
    """Error at each of LENGTHS up to `longest`; bits 0: an exact sum of the rounded weights."""
    products, last, totals, wanted = sums(seed, longest)
    added = accumulate(products, bits, promote) if bits else products.sum(1).cumsum(0)
    found = added[last] / totals
    return tuple(((found - wanted).flatten(1).norm(dim=1) / wanted.flatten(1).norm(dim=1)).tolist())


class AccumulatorExplorer(explorer.Explorer):
    """Error over the kv length: weights alone, a unit left to itself, and the chosen promotion."""

    source = formula("simulated sums")

    knobs = explorer.knobs(
        bits=explorer.steps("bits of the unit", (12, 13, 14, 16, 24), 14, "300px"),
        promote=explorer.choice("add in fp32", tuple(PROMOTIONS), "never", "300px"),
    )

    def figure(self, state: dict[str, Any]) -> go.Figure:
        bits, promote = state["bits"], PROMOTIONS[state["promote"]]
        exact, chosen = accumulator_curve(0, 0), accumulator_curve(bits, promote)
        added = f"added in fp32 {state['promote']}" if promote else "never added in fp32"
        figure = new_figure(
            f"{bits} bits, {added}: {chosen[-1] / exact[-1]:.2f} times the "
            f"error of rounded weights at {LONGEST:,} tokens",
            x="cached tokens, one worker",
            y="relative error",
            height=380,
        )
        series = [Line("rounded weights, exact sums", exact, GREY, "dot")]
        if promote:
            alone = accumulator_curve(bits, 0)
            series.append(Line(f"{bits} bits, never", alone, ORANGE, "dash", "square"))
        series.append(Line(f"{bits} bits, {state['promote']}", chosen, BLUE, "solid", "diamond"))
        add_lines(figure, LENGTHS, series)
        log_ticks(figure, LENGTHS)
        figure.update_yaxes(rangemode="tozero", tickformat=".1%")
        return figure
