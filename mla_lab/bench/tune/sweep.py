"""Sweep: variants of our kernels timed on the same cases, to which the cost model is fitted.

Variants of a case: each launch mode (see `plan.launch_modes`) and tile that fits, with whole
requests, several fixed split counts, the policies "greedy" and "cost". A static grid takes split
counts alone. Equal plans are timed once; of each launch mode and tile only the variants with the
least predicted times.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ... import backends
from ...backends.cute.families import FAMILIES, config_for, costs
from ...core.errors import InvalidInput
from ...core.gpu import H200, Gpu
from ...core.problem import Problem
from ...plan import KernelCosts, Plan, predicted_us
from ...plan.cuts import Shape
from ...plan.formula import counts, fits_ll_slice, most_splits
from ...plan.launch_modes import KEEP_AB_PERSISTENT, LaunchMode, find_mode, keep_ab_tiles
from ...plan.pricing import SPLITS
from ..cases import Case
from ..harness import Bench
from ..measure import Method
from ..peers import Peer
from ..peers.variant import Variant

#: few rounds, as the fit averages over many launches. Untimed lead replays, as variants differ by
#: less than the cost of a short replay that follows another kernel's
METHOD = Method(rounds=7, warmups=0, leads=1, isolated=False, planned=False, in_step=False)
#: most variants of a kernel and tile; and the largest predicted time over the best of the case, for
#: all but the best variant of a tile
PER_TILE, HOPELESS = 4, 1.6


class Sweep(Bench):
    """A benchmark run in which each case has its own variants beside the peers of all cases."""

    #: backend that runs the variants, and how many of them a kernel and tile
    backend = "cute"
    per_tile = PER_TILE

    def _peers(self, case: Case, here: Sequence[Peer]) -> list[Peer]:
        gpu = backends.gpu_of(self.device) or H200
        own = variants(case.problem, gpu, self.per_tile)
        return [*(replace(variant, backend=self.backend) for variant in own), *here]


def variants(problem: Problem, gpu: Gpu = H200, per_tile: int = PER_TILE) -> list[Variant]:
    """Variants of `problem` to time, the best predicted of each tile."""
    tiles = []
    for mode_costs in (family.of(problem) for family in costs()):
        mode = find_mode(*mode_costs.key)
        if mode is None:
            continue
        for tile in fitting_tiles(problem, mode):
            every = _of_tile(problem, mode, mode_costs, gpu, tile)
            tiles.append(_ranked(problem, every)[:per_tile])
    most = HOPELESS * min(own[0][0] for own in tiles if own)
    return [variant for own in tiles for i, (us, variant) in enumerate(own) if not i or us <= most]


def _ranked(problem: Problem, every: Iterator[Variant]) -> list[tuple[float, Variant]]:
    """Variants of one tile with different plans, and their predictions, the best first."""
    timed: dict[tuple[bytes, bytes], tuple[float, Variant]] = {}
    for variant in every:
        try:
            plan = variant.plan(problem)
        except InvalidInput:  # contiguous splits that do not fit the workers
            continue
        key = (plan.tiles.tobytes(), plan.worker_begin.tobytes())
        timed.setdefault(key, (_predicted(variant, plan), variant))
    return sorted(timed.values(), key=lambda pair: pair[0])


def fitting_tiles(problem: Problem, mode: LaunchMode) -> list[tuple[int, int]]:
    """Tiles (rows, cluster) of `mode` that a request's rows fill by more than half, or its smallest
    tile; with multicast only tiles of which a request has two.
    """
    rows = problem.heads if problem.top_k else max(problem.rows.tolist())
    built = mode.tiles_for(problem.q_dtype, problem.kv_format)
    if mode is KEEP_AB_PERSISTENT:
        built = keep_ab_tiles(problem.q_dtype, problem.kv_format, problem.page_size)
    least = min((height for height, _ in built), default=0)
    tiles = [tile for tile in built if tile[0] < 2 * rows or tile[0] == least]
    return [tile for tile in tiles if mode.pair == 1 or tile[0] < rows]


def _of_tile(
    problem: Problem, mode: LaunchMode, mode_costs: KernelCosts, gpu: Gpu, tile: tuple[int, int]
) -> Iterator[Variant]:
    """Every policy on one tile shape."""
    if mode.formula:
        yield from _by_formula(problem, mode, mode_costs, gpu, tile)
        return
    family = FAMILIES[mode.kernel]
    config = config_for(mode, tile)
    if mode is KEEP_AB_PERSISTENT and max(problem.q_lens) > 1 and not problem.top_k:
        config = replace(config, mask="causal")
    workers = gpu.workers(tile[1])
    blocks = -(-max(problem.kv_lens) // family.tile_kv)
    yield Variant(config, workers, "none", (), mode_costs)
    policies: list[tuple[str, tuple[tuple[str, int], ...]]] = [("cost", ()), ("greedy", ())]
    policies += [("fixed", (("num_splits", splits),)) for splits in SPLITS[1:] if splits <= blocks]
    for policy, knobs in policies:
        yield Variant(config, workers, policy, knobs, mode_costs)


def _by_formula(
    problem: Problem, mode: LaunchMode, mode_costs: KernelCosts, gpu: Gpu, tile: tuple[int, int]
) -> Iterator[Variant]:
    """Every split count with which all workers are resident at once, the largest included, and
    whose partials fit the workspace.
    """
    config = config_for(mode, tile)
    at_once = gpu.workers(config.cluster * mode.pair) * mode.pair
    shape = Shape.of(problem, config.tile_rows, config.tile_kv, at_once)
    most = most_splits(shape, problem.batch, config.cluster, mode.pair)
    by_ll, groups = config.option("fused_merge") == 3, problem.batch * shape.max_row_tiles
    for splits in counts(most):
        room = fits_ll_slice(groups * splits, config.tile_rows, splits, problem.latent_dim)
        if by_ll and splits > 1 and not room:
            continue
        workers = problem.batch * shape.max_row_tiles * splits
        yield Variant(config, workers, "fixed", (("num_splits", splits),), mode_costs)


def _predicted(variant: Variant, plan: Plan) -> float:
    config, costs = variant.config, variant.costs
    shape = (config.tile_rows, config.tile_kv, config.cluster, variant.fused)
    return predicted_us(plan, costs.model(plan.problem, *shape))
