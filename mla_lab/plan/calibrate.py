"""Fit the constants of a kernel family to measured launches.

Gauss-Newton on the logarithms: constants stay above zero, and a small launch counts as much as a
large one. What the cases do not tell apart stays near where it began.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..errors import invalid
from .kernel_costs import KernelCosts
from .schedule import predicted_us
from .tile import Plan

#: constants that launches of one card tell
FITTED = (
    "tile_ns",
    "block_ns",
    "block_row_ns",
    "hot_factor",
    "copy_rate",
    "exchange_rate",
    "merge_ns",
    "card_rate",
)
#: pull towards the start, in relative residuals per unit of log change; and a step's largest change
DAMPING, MAX_STEP = 0.02, 0.5


@dataclass(frozen=True)
class Measured:
    """One timed launch: its plan, how the kernel was built, microseconds."""

    plan: Plan
    us: float
    cluster: int = 1
    fused_merge: bool = True


def predictions(costs: KernelCosts, cases: Sequence[Measured]) -> np.ndarray:
    """Microseconds that `costs` expects of each case, float64."""
    return np.array(
        [
            predicted_us(
                case.plan,
                costs.model(
                    case.plan.problem,
                    case.plan.tile_rows,
                    case.plan.tile_kv,
                    case.cluster,
                    case.fused_merge,
                ),
            )
            for case in cases
        ]
    )


def fit(
    costs: KernelCosts,
    cases: Sequence[Measured],
    names: Sequence[str] = FITTED,
    rounds: int = 12,
) -> KernelCosts:
    """`costs` with the constants in `names` moved to where the cases' predictions fit best.

    A constant that is 0 stays 0. Raises InvalidInput without cases or with a time of 0.
    """
    measured = np.array([case.us for case in cases])
    if not cases or not (measured > 0).all():
        raise invalid("cases", measured.tolist(), "launches that took time")
    names = [name for name in names if getattr(costs, name) > 0]
    start = np.log([getattr(costs, name) for name in names])
    log = start.copy()

    def residuals(point: np.ndarray) -> np.ndarray:
        values = dict(zip(names, np.exp(point).tolist(), strict=True))
        error = np.log(predictions(replace(costs, **values), cases) / measured)
        return np.append(error, DAMPING * (point - start))

    for _ in range(rounds):
        here = residuals(log)
        slopes = [(residuals(log + step) - here) / 1e-3 for step in 1e-3 * np.eye(len(names))]
        move = np.linalg.lstsq(np.stack(slopes, axis=1), -here, rcond=None)[0]
        move = np.clip(move, -MAX_STEP, MAX_STEP)
        # halve the step until it helps: predictions have corners where another limit takes over
        scales = [s for s in 0.5 ** np.arange(6) if _loss(residuals(log + s * move)) < _loss(here)]
        if not scales:
            break
        log = log + scales[0] * move
    return replace(costs, **dict(zip(names, np.exp(log).tolist(), strict=True)))


def _loss(residual: np.ndarray) -> float:
    return float(residual @ residual)
