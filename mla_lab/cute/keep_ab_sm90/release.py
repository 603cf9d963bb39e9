"""Releases of the ring's stages by the warps that have read a KV tile or the query."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import const_expr

from ..rows_on_m.params import Cta


@cute.jit
def release_kv(cta: Cta, stage, lane):
    """One lane of a warp arrives at the stage's empty barrier, of both CTAs in a cluster of two."""
    if const_expr(cta.cfg.cluster == 1):
        with cute.arch.elect_one():
            cta.s.kv_pipe.consumer_release(stage, count=cta.cfg.releases)
    else:
        if lane < 2:
            cta.s.kv_pipe.consumer_release(stage, lane)


@cute.jit
def release_query(cta: Cta, thread):
    """Arrivals at the empty barrier of stage 0, from which Q has been read: as many as those of
    eight PV warps, which read a KV tile."""
    if const_expr(cta.cfg.gather):  # of all threads: racecheck follows those that arrive
        cta.s.kv_pipe.consumer_release(0)
    else:
        for _ in cutlass.range_constexpr(2):
            release_kv(cta, 0, thread & 31)
