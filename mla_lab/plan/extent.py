"""Row tiles and KV positions of a problem."""

from __future__ import annotations

import numpy as np

from ..core.problem import Problem


def row_tiles(problem: Problem, tile_rows: int) -> np.ndarray:
    """Row tiles of each request, int64 [batch]. In a sparse problem none spans two tokens."""
    if problem.top_k:
        return np.asarray(problem.q_lens, dtype=np.int64) * -(-problem.heads // tile_rows)
    return -(-problem.rows // tile_rows)


def kv_tokens(problem: Problem) -> np.ndarray:
    """KV positions (sparse: list entries) that each request attends, int64 [batch]."""
    if problem.top_k:
        return np.full(problem.batch, problem.top_k, dtype=np.int64)
    return np.asarray(problem.kv_lens, dtype=np.int64)


def spread(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Owner and position of each of sum(counts) items: [0,0,1,...], [0,1,0,...]."""
    owner = np.repeat(np.arange(counts.size), counts)
    return owner, np.arange(owner.size) - np.repeat(np.cumsum(counts) - counts, counts)
