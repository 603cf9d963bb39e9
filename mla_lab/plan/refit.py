"""A plan adapted to other lengths: the same tiles and workers, other KV ends."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..core.problem import Problem
from .extent import kv_tokens
from .tile import Plan


def refit(plan: Plan, problem: Problem) -> Plan:
    """`plan` for the lengths of `problem`, of as many requests, heads and query tokens.

    The last split of each row tile ends at the request's new length, and a split beyond it is
    empty, which is how kernels treat the rows of a plan.
    """
    if plan.problem == problem:
        return plan
    tiles = plan.tiles.copy()
    blocks = -(-kv_tokens(problem)[tiles[:, 0]] // plan.tile_kv)
    last = tiles[:, 4] + 1 == tiles[:, 5]
    begin = np.minimum(tiles[:, 2], blocks)
    end = np.where(last, blocks, np.minimum(tiles[:, 3], blocks))
    tiles[:, 2], tiles[:, 3] = begin, np.maximum(begin, end)
    return replace(plan, problem=problem, tiles=tiles)
