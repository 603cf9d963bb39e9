"""Every way of ours to run a case, timed in one run: what the cost model is fitted to.

For each way to launch a kernel (see `plan.ways`) and tile that fits a case: whole requests, several
fixed counts of splits, the greedy walk and the cost model's own cuts; with partials, merged by the
kernel itself and apart. A kernel that follows a formula takes counts of splits alone. Plans that
are equal are timed once; of each way and tile, the few that the model likes best.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from .. import backends
from ..backends.cute.families import FAMILIES, config_for, costs
from ..bench.cases import Case
from ..bench.harness import Bench
from ..bench.measure import Method
from ..bench.peers import Peer
from ..bench.peers.variant import Variant
from ..core.errors import InvalidInput
from ..core.gpu import H200, Gpu
from ..core.problem import Problem
from ..plan import KernelCosts, Plan, predicted_us
from ..plan.cuts import Shape
from ..plan.formula import counts, fits_mail, most_splits
from ..plan.pricing import SPLITS
from ..plan.ways import FORMATS, ROWS, STORED, Way, find_way, rows_tiles

#: a sweep wants many launches, each well enough: the fit averages over them. Variants differ by
#: less than what it costs a replay of few launches to follow another kernel's, hence the lead
METHOD = Method(rounds=7, warmups=0, leads=1, isolated=False, planned=False)
#: variants of a kernel and tile at most, and how far above the best prediction of a case all but
#: the best of a tile may be predicted
PER_TILE, HOPELESS = 4, 1.6


class Sweep(Bench):
    """A run in which each case meets its own variants, and the peers that all cases share."""

    #: who runs the variants, and how many of a kernel and tile
    backend = "cute"
    per_tile = PER_TILE

    def _peers(self, case: Case, here: Sequence[Peer]) -> list[Peer]:
        gpu = backends.gpu_of(self.device) or H200
        own = variants(case.problem, gpu, self.per_tile)
        return [*(replace(variant, backend=self.backend) for variant in own), *here]


def variants(problem: Problem, gpu: Gpu = H200, per_tile: int = PER_TILE) -> list[Variant]:
    """Variants of `problem` to time, the best predicted of each tile."""
    tiles = []
    for way_costs in (family.of(problem) for family in costs()):
        way = find_way(*way_costs.key)
        if way is None:
            continue
        for tile in fitting_tiles(problem, way):
            every = _of_tile(problem, way, way_costs, gpu, tile)
            tiles.append(_ranked(problem, every)[:per_tile])
    most = HOPELESS * min(own[0][0] for own in tiles if own)
    return [variant for own in tiles for i, (us, variant) in enumerate(own) if not i or us <= most]


def _ranked(problem: Problem, every: Iterator[Variant]) -> list[tuple[float, Variant]]:
    """Variants of one tile with different plans, and their predictions, the best first."""
    timed: dict[Any, tuple[float, Variant]] = {}
    for variant in every:
        try:
            plan = variant.plan(problem)
        except InvalidInput:  # a walk that does not fit the workers
            continue
        timed.setdefault(_key(variant, plan), (_predicted(variant, plan), variant))
    return sorted(timed.values(), key=lambda pair: pair[0])


def fitting_tiles(problem: Problem, way: Way) -> list[tuple[int, int]]:
    """(rows, cluster) of `way` of which a request's rows fill more than half, or its least; where
    row tiles go in pairs, those of which a request has two.
    """
    rows = problem.heads if problem.top_k else max(problem.rows.tolist())
    built = way.tiles_for(problem.q_dtype, problem.kv_format)
    if way is ROWS:
        built = rows_tiles(problem.q_dtype, problem.kv_format, problem.page_size)
    least = min((height for height, _ in built), default=0)
    tiles = [tile for tile in built if tile[0] < 2 * rows or tile[0] == least]
    return [tile for tile in tiles if way.pair == 1 or tile[0] < rows]


def _of_tile(
    problem: Problem, way: Way, way_costs: KernelCosts, gpu: Gpu, tile: tuple[int, int]
) -> Iterator[Variant]:
    """Every policy on one tile shape; those that split also with the merge apart, where a build
    ships for that.
    """
    if way.formula:
        yield from _by_formula(problem, way, way_costs, gpu, tile)
        return
    family = FAMILIES[way.kernel]
    config = config_for(way, tile)
    if way is ROWS and max(problem.q_lens) > 1 and not problem.top_k:
        config = replace(config, mask="causal")
    built = [config]
    # merges apart are shipped for operands that are stored as they are used
    if family.apart and FORMATS.get((problem.q_dtype, problem.kv_format)) == STORED:
        built.append(replace(config, options=(("fused_merge", 0),)))
    workers = gpu.workers(tile[1])
    blocks = -(-max(problem.kv_lens) // family.tile_kv)
    yield Variant(config, workers, "none", (), way_costs)
    ways: list[tuple[str, tuple[tuple[str, int], ...]]] = [("cost", ()), ("greedy", ())]
    ways += [("fixed", (("num_splits", splits),)) for splits in SPLITS[1:] if splits <= blocks]
    for policy, knobs in ways:
        for one in built:
            yield Variant(one, workers, policy, knobs, way_costs)


def _by_formula(
    problem: Problem, way: Way, way_costs: KernelCosts, gpu: Gpu, tile: tuple[int, int]
) -> Iterator[Variant]:
    """Every count of splits with which all workers run at once, the largest one included, and whose
    partials there is room for.
    """
    config = config_for(way, tile)
    at_once = gpu.workers(config.cluster * way.pair) * way.pair
    shape = Shape.of(problem, config.tile_rows, config.tile_kv, at_once)
    most = most_splits(shape, problem.batch, config.cluster, way.pair)
    by_mail, groups = config.option("fused_merge") == 3, problem.batch * shape.max_row_tiles
    for splits in counts(most):
        room = fits_mail(groups * splits, config.tile_rows, splits, problem.latent_dim)
        if by_mail and splits > 1 and not room:
            continue
        workers = problem.batch * shape.max_row_tiles * splits
        yield Variant(config, workers, "fixed", (("num_splits", splits),), way_costs)


def _predicted(variant: Variant, plan: Plan) -> float:
    config, costs = variant.config, variant.costs
    shape = (config.tile_rows, config.tile_kv, config.cluster, variant.fused)
    return predicted_us(plan, costs.model(plan.problem, *shape))


def _key(variant: Variant, plan: Plan) -> tuple[Any, ...]:
    """Equal for launches that do the same: without partials nobody merges."""
    config = variant.config
    if not plan.num_slots:
        options = [(name, value) for name, value in config.options if name != "fused_merge"]
        config = replace(config, options=tuple(options))
    return config, plan.tiles.tobytes(), plan.worker_begin.tobytes()
