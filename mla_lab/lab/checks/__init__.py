"""Checks of the exercises, kept out of the notebooks: a wrong answer gets a sentence, no solution.

Each check takes an `Attempt` and returns one sentence of praise, or raises `Hint`.
"""

from __future__ import annotations

from . import debugging, foundations, kernels, plans, steps
from .hints import Attempt, Check, Hint

#: by number of the exercise
CHECKS: dict[str, Check] = {
    **foundations.CHECKS,
    **plans.CHECKS,
    **kernels.CHECKS,
    **debugging.CHECKS,
    **steps.CHECKS,
}

__all__ = ["CHECKS", "Attempt", "Check", "Hint"]
