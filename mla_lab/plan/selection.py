"""Which build runs a call whose lengths are unknown: batch, rows and formats decide.

Each launch mode (see `launch_modes`) is priced for requests of one length and for drawn ones, at
mean lengths of `BLOCKS`: a persistent mode by the tiles that its workers find themselves (see
`self_schedule`), a static grid by the most pieces that a request may have. The mode with the least
mean logarithm of its price over the best one's is chosen, so that no length costs much more than
the build that is best for it alone. Its `regret` says how much. Where one tile of swap_ab holds all
rows, and keep_ab is priced as it, the one that loses less at its worst length is taken: 128
requests of the Azure trace with 16 heads take 71 to 79 us by swap_ab and 76 to 83 us by keep_ab,
128 of 1,024 tokens 56 and 55 us (H100, 2026-11-26, `data/notes/kernel_attempts.jsonl`). Where both
tiles of keep_ab are priced alike over eight bits, many requests take the cluster of two: over e4m3
throughout 64 and 128 requests of 8,192 tokens take 0.96 to 0.97 of a single CTA's time, 0.97 to
0.98 in a step, and of 1,024 tokens 0.99 to 1.02, 1.03 in a step; under a bf16 query drawn lengths
0.97 (H200, 2026-11-28, the same file; other cards are not timed).

A single request may have a build that holds two mainloops (`dual_of`). Two builds, each launched
for lengths that the other leaves out, cost more than they gain: a launch that ends at once takes
2.9 to 4.9 us (H200, 2026-11-24, `data/notes/kernel_attempts.jsonl`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from ..core.gpu import Gpu
from ..core.problem import Problem
from .config import KernelConfig
from .cost import makespan
from .formula import WHOLE_BLOCKS, counts, most_splits, times_of
from .gate import DUAL_ROWS, LEAST_DUAL_ROWS, MOST_DUAL_ROWS, dual_gate
from .kernel_costs import recorded_costs
from .launch_modes import E4M3, FORMATS, KEEP_AB_PERSISTENT, QUERY_HI_LO, SIXTEEN_BIT
from .pricing import TILE_KV, Candidate, candidates, mergeable
from .search import memory_time, tile_times
from .self_schedule import COSTS, self_schedule
from .tile import Plan

#: mean lengths that a call may have, in blocks of 64 tokens: 512 to 65536 tokens
BLOCKS = (8, 16, 32, 64, 128, 256, 1024)
#: microseconds by which a launch that schedules itself exceeds the model, whose constants are those
#: of plans in memory: it compares lengths with those that it found its tiles from last
SCHEDULE_US = 0.4
#: of drawn lengths, tokens that none exceeds and the step from a request's quantile to the next
#: one's, which makes neighbours unlike
MOST_TOKENS, STEP = 131072, 0.6180339887


#: prices that are as good as equal: the model's error on a call is 3.7 % in the median
#: (`data/runtime/kernel_costs.txt`)
EQUAL = 1.015
#: row tiles of 128 rows, all requests' together, from which many take the cluster of two
MANY_ROW_TILES = 32


@dataclass(frozen=True)
class Selection:
    """A build for calls of any lengths."""

    config: KernelConfig
    #: the most pieces of a request in a formula; 0 where workers find their tiles
    num_splits: int
    #: predicted microseconds of each of the `profiles`
    us: tuple[float, ...] = ()
    #: price over that of the best build for a length: mean of logarithms, and the most
    regret: float = 1.0
    worst: float = 1.0
    #: of a dual build, see `gate`
    gate: int = 0


def select(
    problem: Problem,
    gpu: Gpu,
    able: Callable[[KernelConfig], bool] | None = None,
    ragged: bool = False,
) -> Selection | None:
    """The build for calls of this batch, these rows and formats; lengths are not looked at. None
    where no family has one. With `able` the best whose kernel can be had, where any can.

    Where query lengths of several requests are `ragged`, rows are no more than a bound, which a
    formula would have to believe: there it is a walk where there is one. A single request has all
    query tokens of its call.
    """
    found = list(all_selections(problem, gpu))
    if able is not None:
        found = [each for each in found if able(each.config)] or found
    if ragged and problem.batch > 1:
        found = [each for each in found if each.num_splits == 0] or found
    return found[0] if found else None


def dual_option(problem: Problem) -> int:
    """The option `dual` of a build for a single request of 16 bits, 0 of other calls."""
    formats = FORMATS.get((problem.q_dtype, problem.kv_format))
    if problem.batch != 1 or formats != SIXTEEN_BIT or not 0 < problem.rows[0] <= MOST_DUAL_ROWS:
        return 0
    return 1 if problem.q_lens == (1,) else 2


def dual_of(
    one: Selection, problem: Problem, gpu: Gpu, able: Callable[[KernelConfig], bool]
) -> Selection:
    """`one`, or for a single request of 16 bits, where that is keep_ab or rows are many enough
    (`LEAST_DUAL_ROWS`), the build that holds swap_ab for short requests beside it, if it can be
    had. Of a plain call: the build has no features."""
    dual = dual_option(problem)
    if not dual:
        return one
    rows, found = int(problem.rows[0]), [one]
    if rows >= LEAST_DUAL_ROWS:
        found += all_selections(problem, gpu)
    walks = [each for each in found if each.config.kernel == KEEP_AB_PERSISTENT.kernel]
    if not walks:
        return one
    options = (*walks[0].config.options, ("dual", dual))
    config = replace(walks[0].config, tile_rows=64, cluster=1, options=options)
    gate = dual_gate(dual, rows, gpu.sms)
    return replace(walks[0], config=config, gate=gate) if able(config) else one


@lru_cache(maxsize=256)
def all_selections(problem: Problem, gpu: Gpu) -> tuple[Selection, ...]:
    """Every build that can take such calls, the best first."""
    found: list[Selection] = []
    for tile in candidates(problem, gpu, recorded_costs()):
        found += _formulas(tile) if tile.config.option("grid") else [_walk(tile)]
    if not found:
        return ()
    times = np.array([each.us for each in found])
    over = times / times.min(axis=0)
    means = np.exp(np.log(over).mean(axis=1))
    ordered = [
        replace(found[i], regret=float(means[i]), worst=float(over[i].max()))
        for i in np.argsort(means, kind="stable").tolist()
    ]
    return tuple(_settled(ordered, problem))


def _settled(found: list[Selection], problem: Problem) -> list[Selection]:
    """`found`, its first one that of two kernels with equal prices which has the lesser worst
    length, or of keep_ab's two tiles that which many requests over eight bits take."""
    first, rows = found[0], max(problem.q_lens) * problem.heads
    alike = [each for each in found[1:] if each.regret <= first.regret * EQUAL]
    if rows <= DUAL_ROWS:
        others = [each for each in alike if each.config.kernel != first.config.kernel]
        preferred = [each for each in others[:1] if each.worst < first.worst]
    elif (first.config.kernel, first.config.cluster) == (KEEP_AB_PERSISTENT.kernel, 1):
        many = problem.batch * -(-rows // (2 * TILE_KV)) >= MANY_ROW_TILES
        eight_bits = FORMATS.get((problem.q_dtype, problem.kv_format)) in (E4M3, QUERY_HI_LO)
        wide = [each for each in alike if each.config.tile_rows == 2 * TILE_KV]
        preferred = wide if many and eight_bits else []
    else:
        preferred = []
    if not preferred:
        return found
    return [preferred[0], *(each for each in found if each is not preferred[0])]


def profiles(problem: Problem) -> list[Problem]:
    """`problem` with all requests of one length, and with lengths of an exponential distribution,
    for each mean.
    """
    batch = problem.batch
    quantile = (np.arange(batch) * STEP + 0.5) % 1.0
    drawn = -np.log1p(-(np.argsort(np.argsort(quantile)) + 0.5) / batch)
    shapes = [np.ones(batch)] if batch == 1 else [np.ones(batch), drawn]
    return [
        replace(problem, kv_lens=_tokens(shape * blocks * TILE_KV, problem))
        for shape in shapes
        for blocks in BLOCKS
    ]


def _tokens(lengths: np.ndarray, problem: Problem) -> tuple[int, ...]:
    """Whole lengths, no shorter than a request's query tokens."""
    tokens = np.clip(lengths.astype(np.int64), 1, MOST_TOKENS)
    return tuple(np.maximum(tokens, problem.q_lens).tolist())


def _walk(tile: Candidate) -> Selection:
    """The way in which workers find their tiles."""
    times, model = [], tile.model
    for sized in profiles(tile.problem):
        sizes, shape = (sized.q_lens, sized.kv_lens, sized.heads, sized.top_k), tile.shape(sized)
        plan = _found_plan(*sizes, tile.rows, shape.workers, tile.family.mode)
        each, memory = tile_times(shape, model, plan.tiles), memory_time(shape, model)
        took = makespan(model, plan.tiles, each, plan.worker_begin, memory)
        times.append(took / 1e3 + SCHEDULE_US)
    return Selection(tile.config, 0, tuple(times))


@lru_cache(maxsize=256)
def _found_plan(
    q_lens: tuple[int, ...],
    kv_lens: tuple[int, ...],
    heads: int,
    top_k: int,
    rows: int,
    workers: int,
    mode: str,
) -> Plan:
    """What workers find, which no format, page size or feature changes."""
    problem = Problem(q_lens, kv_lens, heads, top_k=top_k)
    return self_schedule(problem, tile_rows=rows, num_workers=workers, costs=COSTS[mode])


def _formulas(tile: Candidate) -> list[Selection]:
    """The mode by formula with each count of pieces as the most; none where it does not fit."""
    shapes = [tile.shape(sized) for sized in profiles(tile.problem)]
    longest = shapes[len(BLOCKS) - 1]
    most = most_splits(longest, tile.problem.batch, tile.cluster, tile.pair)
    tried = mergeable(tile, longest, counts(most))
    prices = []
    for shape in shapes if tried else ():
        pieces = np.minimum(np.array(tried)[:, None], shape.blocks)
        pieces = np.where(shape.blocks <= WHOLE_BLOCKS, 1, pieces)
        prices.append(times_of(shape, tile.model, pieces) / 1e3)
    columns = np.array(prices).T.tolist()
    return [Selection(tile.config, n, tuple(us)) for n, us in zip(tried, columns, strict=True)]
