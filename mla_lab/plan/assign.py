"""Assignment of work tiles to workers.

Each function takes tiles in the order (request, row tile, split) and returns (order, worker_begin):
`order` int64 [tiles] lists the tiles worker by worker, in the order in which each worker runs them,
and `order[worker_begin[w] : worker_begin[w + 1]]` are those of worker w.
"""

from __future__ import annotations

from heapq import heapify, heapreplace

import numpy as np

Assignment = tuple[np.ndarray, np.ndarray]

#: tiles that the heap assigns at a time, and tiles a round below which the heap is faster
HEAP_TILES, FEW = 1024, 24


def by_part(row_tile: np.ndarray, part: np.ndarray, bundle: int, workers: int) -> Assignment:
    """Row tile t of part p goes to worker (p * bundle + t) mod workers; order is kept."""
    return _gather((part * bundle + row_tile) % workers, workers)


def in_turn(blocks: np.ndarray, workers: int) -> Assignment:
    """Tiles by falling length, ties in order, dealt to workers 0, 1, ..., workers - 1 and then
    back, workers - 1, ..., 0: the worker with the longest tile of one round gets the shortest of
    the next.
    """
    longest = np.argsort(-blocks, kind="stable")
    turn, at = np.divmod(np.arange(blocks.size), workers)
    dealt, begins = _gather(np.where(turn % 2, workers - 1 - at, at), workers)
    return longest[dealt], begins


def one_each(blocks: np.ndarray) -> Assignment:
    """Longest first, ties in order, one worker a tile."""
    return np.argsort(-blocks, kind="stable"), np.arange(blocks.size + 1)


def beside(tiles: np.ndarray, times: np.ndarray, workers: int) -> Assignment:
    """`balance`, with ties broken so that tiles which read the same keys go to neighbouring
    workers.

    They start together, so that one reads the keys from HBM and the others from L2, and the
    partials of a row tile are complete at about the same time. (keep_ab, 128 heads, one request of
    65536 keys in 64 pieces: 34.6 us so, 37.5 us with the row tiles apart.) Where there are at least
    as many workers as tiles, each tile has its own worker, in that order.
    """
    request, row_tile, split = (tiles[:, column].astype(np.int64) for column in (0, 1, 4))
    rows, splits = row_tile.max(initial=0) + 1, split.max(initial=0) + 1
    near = np.argsort((request * splits + split) * rows + row_tile, kind="stable")
    if len(near) <= workers:
        return near, np.minimum(np.arange(workers + 1), len(near))
    order, begins = balance(times[near], workers)
    return near[order], begins


def _round(times: np.ndarray, loads: np.ndarray, owner: np.ndarray) -> int:
    """Assign the next tiles that LPT gives to different workers; returns their number.

    Tile i goes to the i-th least loaded worker, as long as no worker served earlier in this round
    would finish sooner.
    """
    least = np.argsort(loads, kind="stable")[: times.size]
    after = loads[least] + times
    free = loads[least[1:]] < np.minimum.accumulate(after)[:-1]
    taken = times.size if free.all() else int(free.argmin()) + 1
    owner[:taken] = least[:taken]
    loads[least[:taken]] = after[:taken]
    return taken


def _by_heap(times: np.ndarray, loads: np.ndarray, owner: np.ndarray) -> int:
    """Assign all of `times` one by one; returns their number."""
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
    """By falling length, ties in order, each tile goes to the least loaded worker.

    Graham's LPT rule (1969): at most 4/3 - 1/(3 workers) of the best possible makespan. `times`
    are whole numbers above 0; among equal loads the lowest worker index wins. A round hands out
    as many tiles at once as the rule gives to different workers; where those are few, a heap is
    used.
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
