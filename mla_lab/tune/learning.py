"""What launches teach beside the constants of the cost model: `plan.correction` of each tile.

Ridge regression of the logarithm of measured over predicted time, for all tiles at once: what the
launches of a case have in common is taken out, since no choice hangs on it, and the quick ones of a
case weigh most (as in `fitting`). A tile's bumps stand at launches that are far from each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..plan import KernelCosts
from ..plan.correction import FEATURES, Correction, near
from .fitting import LEAST, NEAR, PLAIN, Launch, Timed, bare

#: pull of a weight or a height towards 0, in weights of launches; digits that are kept
RIDGE, DIGITS = 0.1, 4
#: bumps of a tile, and the launches that it has at least for them
BUMPS, ENOUGH = 24, 64
#: a launch where no bump stands: so slow that its place does not matter
FAR = 0.05


def learn(costs: Sequence[KernelCosts], found: Sequence[Launch]) -> list[KernelCosts]:
    """`costs` with the corrections that `found` teach; of a tile that was not launched, none."""
    timed = Timed(found)
    over = np.log(timed.us / timed.predict({family.key: family for family in bare(costs)}))
    weight = np.maximum(LEAST, np.exp(-(timed.us / timed.best[timed.case] - 1) / NEAR))
    tiles = sorted(set(timed.tile))
    places, columns = [], []
    for tile in tiles:
        own = np.array([other == tile for other in timed.tile])
        places.append(_places(timed.measures[own & (weight > FAR)]))
        taken = [timed.measures[:, : len(FEATURES)], near(timed.measures, places[-1])]
        columns.append(own[:, None] * np.concatenate(taken, axis=1))
    solved = _solve(np.concatenate(columns, axis=1), over, weight, timed.case)
    learnt: dict[tuple[str, str], list[tuple[int, int, Correction]]] = {}
    ends = np.cumsum([column.shape[1] for column in columns])
    for (key, rows, cluster), own, part in zip(
        tiles, places, np.split(solved.round(DIGITS), ends[:-1]), strict=True
    ):
        weights, heights = np.split(part, [len(FEATURES)])
        bumps = np.concatenate([own, heights[:, None]], axis=1)
        correction = Correction(tuple(weights.tolist()), tuple(map(tuple, bumps.tolist())))
        learnt.setdefault(key, []).append((rows, cluster, correction))
    return [
        replace(family, corrections=tuple(learnt.get(family.key, family.corrections)))
        for family in costs
    ]


def _places(measures: np.ndarray) -> np.ndarray:
    """Up to `BUMPS` places, float64 [n, place]: the first launch's, then always the farthest."""
    each = measures[:, len(FEATURES) :].round(2)
    if len(each) < ENOUGH:
        return each[:0]
    places = [each[0]]
    apart = ((each - each[0]) ** 2).sum(axis=1)
    while len(places) < BUMPS and apart.max() > 0:
        places.append(each[apart.argmax()])
        apart = np.minimum(apart, ((each - places[-1]) ** 2).sum(axis=1))
    return np.array(places)


def _solve(
    design: np.ndarray, over: np.ndarray, weight: np.ndarray, case: np.ndarray
) -> np.ndarray:
    """Weights of the columns of `design` by which `over` follows from it, inside each case."""
    in_case = np.bincount(case, weights=weight)
    shared = np.zeros((len(in_case), design.shape[1]))
    np.add.at(shared, case, weight[:, None] * design)
    apart = design - (shared / in_case[:, None])[case]
    common = np.bincount(case, weights=weight * over) / in_case
    inside, itself = weight[:, None] * apart, PLAIN**2 * weight[:, None] * design
    square = inside.T @ apart + itself.T @ design + RIDGE * np.eye(design.shape[1])
    return np.linalg.solve(square, inside.T @ (over - common[case]) + itself.T @ over)
