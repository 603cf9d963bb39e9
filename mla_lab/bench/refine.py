"""From constants that predict well to constants that choose well.

A fit minimises the error of all times alike, but a choice is lost where two variants lie close.
`refine` walks from the fitted constants by random factors, and keeps what lowers the regret of
the choices (see `fitting`), with a little weight on the error, so that predictions stay honest.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..plan import KernelCosts
from ..plan.calibrate import predictions
from .fitting import TOLD, Launch

FACTORS = (0.5, 0.7, 0.85, 0.93, 1.07, 1.15, 1.4, 2.0)
#: of the median error, and of the worst regret, beside the mean regret
ERROR_WEIGHT, WORST_WEIGHT = 0.15, 0.05


def refine(
    costs: Sequence[KernelCosts], found: Sequence[Launch], steps: int, seed: int = 0
) -> list[KernelCosts]:
    """`costs` after `steps` tries; the same seed and record give the same constants."""
    rng = random.Random(seed)
    best = {family.key: family for family in costs}
    measured = [launch for launch in found if launch.key in best]
    score = Score(measured)
    least = score(best)
    keys = sorted({launch.key for launch in measured})
    for _ in range(steps):
        key = rng.choice(keys)
        names = rng.sample(TOLD, rng.choice((1, 1, 2, 3)))
        changes = {
            name: max(1e-3, getattr(best[key], name) * rng.choice(FACTORS)) for name in names
        }
        tried = best | {key: replace(best[key], **changes)}
        value = score(tried)
        if value < least:
            best, least = tried, value
    return [best[family.key] for family in costs]


class Score:
    """How badly constants choose and predict, over the same launches again and again."""

    def __init__(self, found: Sequence[Launch]) -> None:
        self._us = np.array([launch.measured.us for launch in found])
        cases = np.array([launch.case for launch in found])
        self._cases = [np.flatnonzero(cases == name) for name in dict.fromkeys(cases.tolist())]
        self._own = {
            key: [i for i, launch in enumerate(found) if launch.key == key]
            for key in {launch.key for launch in found}
        }
        self._found = found

    def __call__(self, costs: dict[tuple[str, str], KernelCosts]) -> float:
        us, predicted = self._us, np.empty(len(self._us))
        for key, own in self._own.items():
            predicted[own] = predictions(costs[key], [self._found[i].measured for i in own])
        regrets = [us[own[predicted[own].argmin()]] / us[own].min() - 1 for own in self._cases]
        error = float(np.median(np.abs(predicted / us - 1)))
        return float(np.mean(regrets)) + ERROR_WEIGHT * error + WORST_WEIGHT * max(regrets)
