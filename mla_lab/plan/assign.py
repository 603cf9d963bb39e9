"""Which worker walks which tile, and in which order.

Each function takes tiles in the order (request, row tile, split) and returns that order permuted
to the workers' walking order, with the workers' ranges in it: (order, worker_begin).
"""

from __future__ import annotations

from heapq import heapreplace

import numpy as np

Assignment = tuple[np.ndarray, np.ndarray]


def by_part(row_tile: np.ndarray, part: np.ndarray, bundle: int, workers: int) -> Assignment:
    """Row tile t of part p goes to worker (p * bundle + t) mod workers; order is kept."""
    return _gather((part * bundle + row_tile) % workers, workers)


def in_turn(blocks: np.ndarray, workers: int) -> Assignment:
    """Longest first, ties in order, dealt to workers 0, 1, ... in turn."""
    longest = np.argsort(-blocks, kind="stable")
    dealt, begins = _gather(np.arange(blocks.size) % workers, workers)
    return longest[dealt], begins


def one_each(blocks: np.ndarray) -> Assignment:
    """Longest first, ties in order, one worker a tile."""
    return np.argsort(-blocks, kind="stable"), np.arange(blocks.size + 1)


def balance(times: np.ndarray, workers: int) -> Assignment:
    """Longest first, ties in order, each to the worker with the least to do so far.

    Graham's LPT rule (1969): at most 4/3 - 1/(3 workers) of the best possible makespan. `times`
    are whole numbers; among equal loads the lowest worker index wins.
    """
    longest = np.argsort(-times, kind="stable")
    owner = np.empty(times.size, dtype=np.int64)
    # a load and its worker in one integer: the heap compares loads first, then indices
    heap = list(range(workers))
    ordered = (times[longest] * workers).tolist()
    owners = []
    for step in ordered:
        lowest = heap[0]
        owners.append(lowest % workers)
        heapreplace(heap, lowest + step)
    owner[:] = owners
    dealt, begins = _gather(owner, workers)
    return longest[dealt], begins


def _gather(owner: np.ndarray, workers: int) -> Assignment:
    begins = np.append(0, np.cumsum(np.bincount(owner, minlength=workers)))
    return np.argsort(owner, kind="stable"), begins
