"""Simulator of a planned decode: `simulate(plan)` returns a `Timeline`.

Two models, one above the other. `pipeline` steps one CTA's loop block by block (load, QK,
softmax, PV over a ring of stages); `engine` runs a whole plan on a card: launch, waves, CTAs or
clusters on SMs, shared bandwidth, partials and their merge.
"""

from __future__ import annotations

from .constants import H200, SWAP_AB, Constants
from .launch import bounds, simulate
from .pipeline import Pipeline, run_pipeline
from .recorded import constants_for
from .timeline import Event, Timeline

__all__ = [
    "H200",
    "SWAP_AB",
    "Constants",
    "Event",
    "Pipeline",
    "Timeline",
    "bounds",
    "constants_for",
    "run_pipeline",
    "simulate",
]
