"""From constants that predict well to constants that choose well.

A fit minimises the error of all times alike, but a choice is lost where two variants lie close.
`refine` walks from the fitted constants by random factors, and keeps what lowers the regret of the
choices (see `fitting`), with a little weight on the error, so that predictions stay honest. Regret
is counted softly: predictions that lie close share the choice, so that one which is right by a hair
on these cases counts for little, as it would on others.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..plan import KernelCosts
from .fitting import TOLD, Costs, Launch, Timed

#: standard deviation of a try's log factor
SPREAD = 0.15
#: relative difference of predictions at which a choice falls 1 : e, and the median error's weight
SOFTNESS, ERROR_WEIGHT = 0.015, 0.1


def refine(
    costs: Sequence[KernelCosts], found: Sequence[Launch], steps: int, seed: int = 0
) -> list[KernelCosts]:
    """`costs` after `steps` tries; the same seed and record give the same constants."""
    rng = random.Random(seed)
    timed = Timed(found)
    best = {family.key: family for family in costs}
    predicted = timed.predict(best)
    least = score(timed, predicted)
    keys = sorted(timed.own)
    for _ in range(steps):
        key = rng.choice(keys)
        names = rng.sample(TOLD, rng.choice((1, 1, 2, 3)))
        tried = replace(best[key], **_changes(rng, best[key], names))
        there = predicted.copy()
        there[timed.own[key]] = timed.predict_own(tried)
        value = score(timed, there)
        if value < least:
            best[key], predicted, least = tried, there, value
    return [best[family.key] for family in costs]


def _changes(rng: random.Random, costs: KernelCosts, names: Sequence[str]) -> dict[str, Any]:
    least = {"sharpness": 1.0}
    return {
        name: max(least.get(name, 1e-3), getattr(costs, name) * math.exp(rng.gauss(0.0, SPREAD)))
        for name in names
    }


def score(timed: Timed, predicted: np.ndarray) -> float:
    """How badly predictions choose and predict."""
    least = np.full(len(timed.cases), np.inf)
    np.minimum.at(least, timed.case, predicted)
    share = np.exp(-np.log(predicted / least[timed.case]) / SOFTNESS)
    regret = share * (timed.us / timed.best[timed.case] - 1)
    count = len(timed.cases)
    chosen = np.bincount(timed.case, weights=share, minlength=count)
    soft = np.bincount(timed.case, weights=regret, minlength=count) / chosen
    return float(soft.mean() + ERROR_WEIGHT * np.median(np.abs(predicted / timed.us - 1)))


def score_of(costs: Costs, found: Sequence[Launch]) -> float:
    """The same, of constants."""
    timed = Timed(found)
    return score(timed, timed.predict(costs))
