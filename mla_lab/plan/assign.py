"""Which worker walks which tile, and in which order.

Each function takes tiles in the order (request, row tile, split) and returns that order permuted
to the workers' walking order, with the workers' ranges in it: (order, worker_begin).
"""

from __future__ import annotations

from heapq import heapify, heapreplace

import numpy as np

Assignment = tuple[np.ndarray, np.ndarray]

#: tiles that a heap hands out at once, and tiles a round below which the heap is quicker
HEAP_TILES, FEW = 1024, 24


def by_part(row_tile: np.ndarray, part: np.ndarray, bundle: int, workers: int) -> Assignment:
    """Row tile t of part p goes to worker (p * bundle + t) mod workers; order is kept."""
    return _gather((part * bundle + row_tile) % workers, workers)


def in_turn(blocks: np.ndarray, workers: int) -> Assignment:
    """Longest first, ties in order, dealt to workers 0, 1, ... in turn, and in the next round
    backwards: who got the longest of one round gets the shortest of the next.
    """
    longest = np.argsort(-blocks, kind="stable")
    turn, at = np.divmod(np.arange(blocks.size), workers)
    dealt, begins = _gather(np.where(turn % 2, workers - 1 - at, at), workers)
    return longest[dealt], begins


def one_each(blocks: np.ndarray) -> Assignment:
    """Longest first, ties in order, one worker a tile."""
    return np.argsort(-blocks, kind="stable"), np.arange(blocks.size + 1)


def beside(tiles: np.ndarray, times: np.ndarray, workers: int) -> Assignment:
    """`balance` of work tiles, those that read the same keys beside each other where it leaves a
    choice: neighbours begin together, so that what one reads the others find in L2, and a group's
    partials are there at the same time. (keep_ab, 128 heads, one request of 65536 keys: 34.6 us
    where 64 pieces lie so, 37.5 where row tiles lie apart.)

    A worker each, where there are as many, in just that order.
    """
    request, row_tile, split = (tiles[:, column].astype(np.int64) for column in (0, 1, 4))
    rows, splits = row_tile.max(initial=0) + 1, split.max(initial=0) + 1
    near = np.argsort((request * splits + split) * rows + row_tile, kind="stable")
    if len(near) <= workers:
        return near, np.minimum(np.arange(workers + 1), len(near))
    order, begins = balance(times[near], workers)
    return near[order], begins


def _round(times: np.ndarray, loads: np.ndarray, owner: np.ndarray) -> int:
    """Hand out the tiles that go to different workers; how many those are.

    Tile i goes to the i-th least loaded worker while no earlier one is done sooner.
    """
    least = np.argsort(loads, kind="stable")[: times.size]
    after = loads[least] + times
    free = loads[least[1:]] < np.minimum.accumulate(after)[:-1]
    taken = times.size if free.all() else int(free.argmin()) + 1
    owner[:taken] = least[:taken]
    loads[least[:taken]] = after[:taken]
    return taken


def _by_heap(times: np.ndarray, loads: np.ndarray, owner: np.ndarray) -> int:
    """Hand out all of `times` one by one; how many those are."""
    workers = loads.size
    # a load and its worker in one integer: the heap compares loads first, then indices
    heap = (loads * workers + np.arange(workers)).tolist()
    heapify(heap)
    owners = []
    for step in (times * workers).tolist():
        lowest = heap[0]
        owners.append(lowest % workers)
        heapreplace(heap, lowest + step)
    owner[: times.size] = owners
    for value in heap:
        loads[value % workers] = value // workers
    return times.size


def balance(times: np.ndarray, workers: int) -> Assignment:
    """Longest first, ties in order, each to the worker with the least to do so far.

    Graham's LPT rule (1969): at most 4/3 - 1/(3 workers) of the best possible makespan. `times`
    are whole numbers above 0; among equal loads the lowest worker index wins. A round hands out
    as many tiles at once as the rule gives to different workers; where that is few, a heap does.
    """
    longest = np.argsort(-times, kind="stable")
    ordered = times[longest]
    owner = np.empty(times.size, dtype=np.int64)
    loads = np.zeros(workers, dtype=np.int64)
    at, rounds = 0, True
    while at < times.size:
        if rounds:
            taken = _round(ordered[at : at + workers], loads, owner[at:])
            rounds = taken >= FEW
        else:
            taken = _by_heap(ordered[at : at + HEAP_TILES], loads, owner[at:])
            rounds = True
        at += taken
    dealt, begins = _gather(owner, workers)
    return longest[dealt], begins


def _gather(owner: np.ndarray, workers: int) -> Assignment:
    begins = np.append(0, np.cumsum(np.bincount(owner, minlength=workers)))
    return np.argsort(owner, kind="stable"), begins
