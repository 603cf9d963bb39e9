"""What launches teach beside the constants of the cost model: the weights of `plan.correction`.

Ridge regression of the logarithm of measured over predicted time on the features of a launch, for
all tiles at once: what the launches of a case have in common is taken out, since no choice hangs on
it, and the quick ones of a case weigh most (as in `fitting`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..plan import KernelCosts
from ..plan.correction import FEATURES
from .fitting import LEAST, NEAR, PLAIN, Launch, Timed, bare

#: pull of a weight towards 0, in weights of launches; digits that are kept
RIDGE, DIGITS = 0.1, 4


def learn(costs: Sequence[KernelCosts], found: Sequence[Launch]) -> list[KernelCosts]:
    """`costs` with the weights that `found` teach; of a tile that was not launched, none."""
    plain = bare(costs)
    timed = Timed(found)
    over = np.log(timed.us / timed.predict({family.key: family for family in plain}))
    tiles = sorted(set(timed.tile))
    width = len(FEATURES)
    design = np.zeros((len(found), len(tiles) * width))
    for i, tile in enumerate(timed.tile):
        at = tiles.index(tile) * width
        design[i, at : at + width] = timed.features[i]
    near = np.maximum(LEAST, np.exp(-(timed.us / timed.best[timed.case] - 1) / NEAR))
    in_case = np.bincount(timed.case, weights=near)
    shared = np.zeros((len(in_case), design.shape[1]))
    np.add.at(shared, timed.case, near[:, None] * design)
    apart = design - (shared / in_case[:, None])[timed.case]
    common = np.bincount(timed.case, weights=near * over) / in_case
    weighted, itself = near[:, None] * apart, PLAIN**2 * near[:, None] * design
    square = weighted.T @ apart + itself.T @ design + RIDGE * np.eye(design.shape[1])
    weights = np.linalg.solve(
        square, weighted.T @ (over - common[timed.case]) + itself.T @ over
    ).reshape(len(tiles), width)
    learnt: dict[tuple[str, str], list[tuple[int, int, tuple[float, ...]]]] = {}
    for (key, rows, cluster), row in zip(tiles, weights.round(DIGITS).tolist(), strict=True):
        learnt.setdefault(key, []).append((rows, cluster, tuple(row)))
    return [
        replace(family, corrections=tuple(learnt.get(family.key, family.corrections)))
        for family in costs
    ]
