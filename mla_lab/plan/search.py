"""The policy "cost": of many splits of a batch, those with the least predicted makespan.

Two families of splits:

- *even*: request b in ceil(n_b / piece) pieces of equal size for one `piece` (blocks) of the whole
  batch, longest tile first to the least loaded worker. Whole requests are the largest piece.
- *contiguous*: FlashMLA's rule (see `greedy`) with its overhead from the cost model and the
  smallest payload that fits the workers. It splits at most one request a part, so a ragged batch
  that nearly fills the card has few partials.

Even pieces are tried in the order of a lower bound (mean load, longest tile and merge), which costs
no assignment; the search stops where the bound says that no other can be better by more than 1 %.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .assign import Assignment, beside, by_part
from .cost import CostModel, makespan
from .cuts import Cuts, Shape, cut_by_count, number
from .greedy import contiguous_cuts, greedy, greedy_payload

#: most assignments of one search, and the relative gain below which the search stops
MAX_TRIALS = 6
WORTHWHILE = 0.99
#: most work tiles of a candidate, so that a plan is made in milliseconds
MAX_TILES = 16384


@dataclass(frozen=True)
class Trial:
    """Splits of a batch, assigned to workers and priced."""

    cuts: Cuts
    tiles: np.ndarray
    assignment: Assignment
    makespan_ns: float


def cost(shape: Shape, model: CostModel) -> Cuts:
    """The cuts with the least predicted makespan under `model`."""
    return best_trial(shape, model).cuts


def best_trial(shape: Shape, model: CostModel) -> Trial:
    """The best of both families, with its price."""
    splits, bounds = even_candidates(shape, model)
    order = np.argsort(bounds, kind="stable")
    best = try_cuts(shape, model, even(shape, model, splits[order[0]]))
    for i in order[1:MAX_TRIALS].tolist():
        if bounds[i] > best.makespan_ns * WORTHWHILE:
            break
        trial = try_cuts(shape, model, even(shape, model, splits[i]))
        if trial.makespan_ns < best.makespan_ns:
            best = trial
    if bounds[order[0]] <= best.makespan_ns * WORTHWHILE:
        contiguous = shortest_contiguous(shape, model)
        if contiguous is not None:
            trial = try_cuts(shape, model, contiguous)
            if trial.makespan_ns < best.makespan_ns * WORTHWHILE:
                best = trial
    return best


def even_trials(
    shape: Shape, model: CostModel, counts: Sequence[int], most: int
) -> list[tuple[int, Trial]]:
    """The `most` split counts of `counts` with the least bounds, priced."""
    steps = -(-shape.blocks // model.kv_ways)
    fitting = [n for n in counts if n == 1 or n <= shape.max_blocks]
    splits = np.minimum(np.array(fitting)[:, None], steps)
    fitting = [
        n
        for n, tiles in zip(fitting, splits @ shape.row_tiles, strict=True)
        if n == 1 or tiles <= MAX_TILES
    ]
    splits = splits[: len(fitting)]
    order = np.argsort(bounds_of(shape, model, splits), kind="stable")[:most].tolist()
    return [(fitting[i], try_cuts(shape, model, cut_by_count(shape, splits[i]))) for i in order]


def try_greedy(shape: Shape, model: CostModel) -> Trial:
    """FlashMLA's own splits."""
    return try_cuts(shape, model, greedy(shape))


def try_cuts(shape: Shape, model: CostModel, cuts: Cuts) -> Trial:
    """Number, assign and price `cuts`."""
    tiles, piece = number(shape, cuts)
    times = tile_times(shape, model, tiles)
    if cuts.part is None:
        assignment = beside(tiles, times, shape.workers)
    else:
        bundle = shape.max_row_tiles
        assignment = by_part(tiles[:, 1], cuts.part[piece], bundle, shape.workers)
    order, begins = assignment
    price = makespan(model, tiles[order], times[order], begins, memory_time(shape, model))
    return Trial(cuts, tiles, assignment, price)


def tile_times(shape: Shape, model: CostModel, tiles: np.ndarray) -> np.ndarray:
    """Nanoseconds of each tile on its worker, int64."""
    start = float(start_times(shape, model, np.array([len(tiles)]))[0])
    split = tiles[:, 5] > 1
    partial = model.partial_time(np.count_nonzero(split, keepdims=True), shape.workers)[0]
    return model.tile_times(tiles[:, 3] - tiles[:, 2], split, start, float(partial))


def start_times(shape: Shape, model: CostModel, tiles: np.ndarray) -> np.ndarray:
    """Nanoseconds of a work tile before its first step, for each number of work tiles."""
    return np.asarray(model.start_time(np.minimum(tiles, shape.workers) * sharing(shape)))


def memory_time(shape: Shape, model: CostModel) -> float:
    """Nanoseconds for reading each request's KV once from HBM, and once a row tile from L2."""
    taken = float((shape.blocks * shape.row_tiles).sum())
    return float(model.memory_time(float(shape.blocks.sum()), taken))


def sharing(shape: Shape) -> float:
    """Share of workers that read different keys: 1/2 for two row tiles a request."""
    return float(shape.blocks.sum() / max(1, (shape.blocks * shape.row_tiles).sum()))


def even(shape: Shape, model: CostModel, splits: np.ndarray) -> Cuts:
    """Equal pieces, cut where all CTAs that split the KV of a tile have equally many blocks."""
    return cut_by_count(shape, splits, model.kv_ways)


def even_candidates(shape: Shape, model: CostModel) -> tuple[np.ndarray, np.ndarray]:
    """Splits of every request for each candidate piece, int64 [candidates, n], and the lower bound
    of each candidate's makespan in nanoseconds, float64 [candidates].
    """
    steps = -(-shape.blocks // model.kv_ways)
    splits = -(-steps[None, :] // piece_sizes(shape, steps)[:, None])
    keep = (splits @ shape.row_tiles <= MAX_TILES) | (splits.max(axis=1) == 1)
    return splits[keep], bounds_of(shape, model, splits[keep])


def bounds_of(shape: Shape, model: CostModel, splits: np.ndarray) -> np.ndarray:
    """The lower bound of each row of `splits`, int64 [candidates, n], in ns, float64."""
    steps, tiles = -(-shape.blocks // model.kv_ways), splits @ shape.row_tiles
    start, memory = start_times(shape, model, tiles)[:, None], memory_time(shape, model)
    partials = np.where(splits > 1, splits, 0) @ shape.row_tiles
    partial = model.partial_time(partials, shape.workers)[:, None]
    merge = model.merge_time(partials, splits.max(axis=1))
    each = start + (splits > 1) * partial
    saved = model.head_start * splits * (steps > splits)
    mean = ((splits * each + (steps - saved) * model.block_ns) @ shape.row_tiles) / shape.workers
    longest = each + model.steps(-(-steps // splits)) * model.block_ns
    last = np.maximum(mean, longest.max(axis=1))
    ready = np.where(splits > 1, longest, 0.0).max(axis=1) if model.fused_merge else last
    return np.asarray(model.launch_ns + model.ends(last, ready, merge, memory))


def piece_sizes(shape: Shape, steps: np.ndarray) -> np.ndarray:
    """Candidate sizes in steps, largest first: the longest request in 1, 2, 3, ... pieces, ever
    coarser up to one a block or one a worker, and the counts that fill one to four waves exactly.
    """
    longest = int(steps.max())
    coarse = np.unique(np.rint(1.15 ** np.arange(64)).astype(np.int64))
    fills = np.arange(1, 5) * shape.workers // max(1, int(shape.row_tiles.sum()))
    most = min(longest, shape.workers)
    counts = np.concatenate([np.arange(1, 17), coarse, fills, [most]])
    counts = counts[(counts >= 1) & (counts <= most)]
    return np.unique(-(-longest // counts))[::-1]


def shortest_contiguous(shape: Shape, model: CostModel) -> Cuts | None:
    """Contiguous splits with the smallest payload that fits the workers."""
    parts = max(1, shape.workers // shape.max_row_tiles)
    overhead = piece_overhead(shape, model)
    high = greedy_payload(shape.blocks, parts, overhead)
    low = max(overhead + 1, high - 2 * overhead)
    while low < high:
        middle = (low + high) // 2
        if contiguous_cuts(shape.blocks, parts, overhead, middle) is None:
            low = middle + 1
        else:
            high = middle
    return contiguous_cuts(shape.blocks, parts, overhead, high)


def piece_overhead(shape: Shape, model: CostModel) -> int:
    """A piece's fixed cost in blocks, at least 1."""
    parts = max(1, shape.workers // shape.max_row_tiles)
    pieces = np.array([parts * shape.max_row_tiles])
    partial = model.partial_time(pieces, shape.workers)[0]
    start = float(start_times(shape, model, pieces)[0])
    return max(1, round((start + partial) / model.block_ns * model.kv_ways))
