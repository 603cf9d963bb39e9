"""Vectorised cost model over measured launches, and Gauss-Newton over its constants."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ...plan.cost import CostModel
from ...plan.cuts import Shape
from ...plan.kernel_costs import KernelCosts
from ...plan.search import sharing
from ...plan.tile import Plan

#: constants that a sweep on one card determines
FITTED = (
    "tile_ns",
    "block_ns",
    "block_row_ns",
    "copy_rate",
    "exchange_rate",
    "merge_ns",
    "card_rate",
)
#: the largest change of a logarithm in one step
MAX_STEP = 0.5


@dataclass(frozen=True)
class Measured:
    """One timed launch: its plan, how the kernel was built, microseconds."""

    plan: Plan
    us: float
    cluster: int = 1
    fused_merge: bool = True


class Launches:
    """Launches of one family as arrays. Predictions equal those of `predicted_us`, except that tile
    times are not rounded to whole nanoseconds.
    """

    def __init__(self, cases: Sequence[Measured]) -> None:
        plans = [case.plan for case in cases]
        self._rows = np.array([plan.tile_rows for plan in plans])
        self._cluster = np.array([case.cluster for case in cases])
        self._fused = np.array([case.fused_merge for case in cases])
        self._latent = np.array([plan.problem.latent_dim for plan in plans])
        self._token = np.array([plan.problem.kv_token_bytes for plan in plans])
        self._tile_kv = plans[0].tile_kv
        self._workers = np.array([max(1, plan.num_workers) for plan in plans])
        self._tiles = np.array([plan.num_tiles for plan in plans])
        self._slots = np.array([plan.num_slots for plan in plans])
        self._splits = np.array([plan.tiles[:, 5].max(initial=1) for plan in plans])
        self._keys, self._taken, self._streams = np.array([_reads(plan) for plan in plans]).T
        kv_ways = np.asarray(self.model(KernelCosts.of_ones()).kv_ways).tolist()
        kinds = [_workers(plan, n) for plan, n in zip(plans, kv_ways, strict=True)]
        most = max(map(len, kinds))
        # padded with idle workers
        padded = np.stack([np.pad(kind, ((0, most - len(kind)), (0, 0))) for kind in kinds])
        self._walked, self._steps, self._long, self._cut = np.moveaxis(padded, 2, 0)

    def model(self, costs: KernelCosts) -> CostModel:
        """One model for all launches, its fields arrays."""
        return CostModel(
            **costs.constants(
                tile_rows=self._rows,
                tile_kv=self._tile_kv,
                cluster=self._cluster,
                fused_merge=self._fused,
                latent_dim=self._latent,
                token_bytes=self._token,
            )
        )

    def predict(self, costs: KernelCosts) -> np.ndarray:
        """Predicted microseconds of each launch under `costs`, float64."""
        model = self.model(costs)
        start = np.asarray(model.start_time(self._streams))
        partial = model.partial_time(self._slots, self._workers)
        steps = self._steps - model.head_start * self._long
        chains = self._walked * start[:, None] + steps * np.asarray(model.block_ns)[:, None]
        chains = chains + self._cut * partial[:, None]
        last = chains.max(axis=1)
        ready = np.where(self._cut > 0, chains, 0.0).max(axis=1)
        merge = model.merge_time(self._slots, self._splits)
        ready = np.where(self._fused, ready, last)
        memory = model.memory_time(self._keys, self._taken)
        took = model.launch_ns + model.ends(last, ready, merge, memory)
        return np.asarray(np.where(self._tiles > 0, took, model.launch_ns)) / 1e3


def _reads(plan: Plan) -> tuple[float, float, float]:
    """KV blocks read from HBM, those read from L2, and workers that read different blocks at a
    time.
    """
    workers = max(1, plan.num_workers)
    shape = Shape.of(plan.problem, plan.tile_rows, plan.tile_kv, workers)
    taken = float((shape.blocks * shape.row_tiles).sum())
    return float(shape.blocks.sum()), taken, min(plan.num_tiles, workers) * sharing(shape)


def _workers(plan: Plan, kv_ways: int) -> np.ndarray:
    """Kinds of worker, float64 [kinds, 4]: tiles, steps, tiles of several steps, partials."""
    tiles, begins = plan.tiles, plan.worker_begin
    workers = len(begins) - 1
    worker = np.repeat(np.arange(workers), np.diff(begins))
    steps = -(-(tiles[:, 3] - tiles[:, 2]) // kv_ways)
    columns = (np.ones(len(tiles)), steps, steps > 1, tiles[:, 5] > 1)
    sums = [np.bincount(worker, weights=column, minlength=workers) for column in columns]
    return np.unique(np.stack(sums, axis=1), axis=0) if len(tiles) else np.zeros((1, 4))


def gauss_newton(
    residuals: Callable[[np.ndarray], np.ndarray], start: np.ndarray, rounds: int
) -> np.ndarray:
    """The point near `start` where the sum of squares is least, float64 like `start`."""
    point = start.copy()
    for _ in range(rounds):
        here = residuals(point)
        slopes = [(residuals(point + step) - here) / 1e-3 for step in 1e-3 * np.eye(len(point))]
        move = np.linalg.lstsq(np.stack(slopes, axis=1), -here, rcond=1e-6)[0]
        move = np.clip(move, -MAX_STEP, MAX_STEP)
        # halve the step until the loss falls: predictions have kinks where another term becomes the
        # limit
        scales = [
            s for s in 0.5 ** np.arange(6) if _loss(residuals(point + s * move)) < _loss(here)
        ]
        if not scales:
            break
        point = point + scales[0] * move
    return point


def _loss(residual: np.ndarray) -> float:
    return float(residual @ residual)
