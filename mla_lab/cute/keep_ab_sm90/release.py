"""Releases of the ring's stages by the warps that have read a KV tile or the query.

A stage's empty barrier counts the eight PV warps that read a KV tile: one lane of each arrives,
behind the reads of all. The four QK-softmax warps, which read the query, arrive twice.

With `gather` all lanes arrive, each for itself: then threads refill the stage by `cp.async`, and
compute-sanitizer's racecheck, which sees those writes but not TMA's, takes only the reads of
threads that arrive as done. That costs no time: 0.99 to 1.01 over 16 sparse shapes (H200,
2026-11-29, `data/notes/kernel_attempts.jsonl`).
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass import const_expr

from ..rows_on_m.params import Cta

PV_WARPS = 8


def releases(cfg: Any) -> int:
    """Arrivals of a stage's empty barrier in a phase, cfg: `Config` or `Fp8Config`."""
    return 32 * PV_WARPS if cfg.gather else PV_WARPS * cfg.cluster


@cute.jit
def release_stage(cta: Cta, stage, lane):
    """A warp has read a stage: arrive at its empty barrier, in a cluster of two of both CTAs."""
    if const_expr(cta.cfg.gather):
        cta.s.kv_pipe.consumer_release(stage)
    elif const_expr(cta.cfg.cluster == 1):
        with cute.arch.elect_one():
            cta.s.kv_pipe.consumer_release(stage)
    else:
        if lane < 2:
            cta.s.kv_pipe.consumer_release(stage, lane)
