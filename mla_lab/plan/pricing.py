"""Candidates and their predicted time: one launch mode, one tile, one split policy.

Splits come from the cost model's own search, from FlashMLA's rule, or from an even split count.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ..core.gpu import H200, Gpu
from ..core.problem import Problem
from .config import KernelConfig
from .cost import CostModel
from .cuts import Shape
from .formula import counts, fits_ll_slice, makespans, most_splits, whole_pairs
from .kernel_costs import KernelCosts
from .launch_modes import (
    KEEP_AB_PERSISTENT,
    LaunchMode,
    find_mode,
    in_waves,
    keep_ab_tiles,
    mode_of,
)
from .schedule import plan_on
from .search import Trial, best_trial, even_trials, try_greedy
from .tile import Plan

TILE_KV = KernelConfig.tile_kv
#: even split counts of a plan, and how many of them are priced
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
EVEN_TRIALS = 3


@dataclass(frozen=True)
class Choice:
    """Kernel, launch and splits for one problem, with predicted time and reason."""

    config: KernelConfig
    num_workers: int
    policy: str
    knobs: tuple[tuple[str, int], ...]
    model: CostModel
    predicted_us: float
    reason: str
    schedule: str = "persistent"

    def plan(self, problem: Problem) -> Plan:
        """The plan of this choice."""
        return plan_on(
            self.config,
            problem,
            num_workers=self.num_workers,
            policy=self.policy,
            schedule=self.schedule,
            model=self.model,
            **dict(self.knobs),
        )

    def __str__(self) -> str:
        return f"{label(self)}: {self.reason}"


@dataclass(frozen=True)
class Candidate:
    """One tile of one launch mode, for a problem on a card."""

    problem: Problem
    gpu: Gpu
    #: for the problem's formats
    family: KernelCosts
    rows: int
    cluster: int

    @cached_property
    def config(self) -> KernelConfig:
        """Its kernel."""
        return config_of(self.problem, self.family, self.rows, self.cluster)

    @cached_property
    def model(self) -> CostModel:
        """Its cost model on this card."""
        model = self.family.model(self.problem, self.rows, TILE_KV, self.cluster)
        return replace(model, card_rate=card_rate_of(self.family, self.gpu))

    @property
    def pair(self) -> int:
        """Row tiles of a multicast cluster."""
        return self.config.option("pair", 1)

    def shape(self, problem: Problem) -> Shape:
        """`problem` in such tiles, with as many workers as the card runs at once."""
        workers = self.gpu.workers(self.cluster * self.pair) * self.pair
        return Shape.of(problem, self.rows, TILE_KV, workers)


def candidates(problem: Problem, gpu: Gpu, costs: tuple[KernelCosts, ...]) -> Iterator[Candidate]:
    """Every tile that is worth pricing."""
    for family in costs:
        mode = find_mode(*family.key)
        for tile in _tiles(problem, mode) if mode is not None else ():
            yield Candidate(problem, gpu, family.of(problem), *tile)


def _tiles(problem: Problem, mode: LaunchMode) -> list[tuple[int, int]]:
    """(tile rows, cluster) worth pricing for `mode`."""
    rows = problem.heads if problem.top_k else max(problem.rows.tolist())
    tiles = mode.tiles_for(problem.q_dtype, problem.kv_format)
    if mode is KEEP_AB_PERSISTENT and tiles:
        # on a tie the first wins: a cluster reads each KV block once where two CTAs read it twice
        built = keep_ab_tiles(problem.q_dtype, problem.kv_format, problem.page_size)
        return [(64, 1)] if rows <= 64 or len(built) == 1 else [(128, 2), (64, 1)]
    # each row tile reads all keys, so: 8 rows for up to two row tiles, or eight where a cluster
    # splits the KV; 32 rows where two tiles of 16 would do; multicast from two row tiles on. A
    # page shorter than a KV tile is a copy of its own, which two row tiles would issue twice
    alone = 16 if problem.page_size >= TILE_KV else 8
    return [
        (height, cluster)
        for height, cluster in tiles
        if (height > 8 or rows <= (alone if cluster == 1 else 64))
        and height < max(17, 2 * rows)
        and (mode.pair == 1 or height < rows)
    ]


def price(tile: Candidate) -> Choice:
    """The cost policy's best splits."""
    shape, model = tile.shape(tile.problem), tile.model
    choice = Choice(tile.config, shape.workers, "cost", (), model, model.launch_ns / 1e3, "")
    return _priced(choice, best_trial(shape, model)) if shape.batch else choice


def price_others(tile: Candidate) -> list[Choice]:
    """The same tile with FlashMLA's splits, and with the even split counts of the least bounds."""
    shape, model = tile.shape(tile.problem), tile.model
    if not shape.batch:
        return []
    plain = Choice(tile.config, shape.workers, "greedy", (), model, 0.0, "")
    found = [_priced(plain, try_greedy(shape, model))]
    for splits, trial in even_trials(shape, model, SPLITS, EVEN_TRIALS):
        policy, knobs = ("fixed", (("num_splits", splits),)) if splits > 1 else ("none", ())
        found.append(_priced(replace(plain, policy=policy, knobs=knobs), trial))
    return found


def _priced(choice: Choice, trial: Trial) -> Choice:
    """`choice` with the predicted time of `trial`."""
    return replace(choice, predicted_us=trial.makespan_ns / 1e3)


def price_formula(tile: Candidate) -> list[Choice]:
    """One static grid with the best split count; none where its workers are not all resident."""
    problem, config, pair = tile.problem, tile.config, tile.pair
    shape, model = tile.shape(problem), tile.model
    most = most_splits(shape, problem.batch, tile.cluster, pair)
    waves, priced = 1, shape
    if shape.batch and not most:
        if not in_waves(config):
            return []
        waves, most = -(-problem.batch * whole_pairs(shape.max_row_tiles, pair) // shape.workers), 1
        # a wave reads the keys of its own requests
        lengths = zip(problem.q_lens, problem.kv_lens, strict=True)
        q_lens, kv_lens = zip(*[both for both in lengths if both[0]][::waves], strict=True)
        priced = tile.shape(replace(problem, q_lens=q_lens, kv_lens=kv_lens))
    # multicast saves L2 reads where all CTAs read a few requests; with whole requests it was never
    # faster
    tried = [n for n in counts(most) or [1] if n > 1 or pair == 1]
    if in_waves(config):
        tried = [1]
    tried = mergeable(tile, shape, tried)
    if not tried:
        return []
    times = makespans(priced, model, most) if most else np.array([model.launch_ns])
    times = model.launch_ns + waves * (times - model.launch_ns)
    times = times[np.array(tried) - 1]
    splits = tried[int(times.argmin())]
    return [
        Choice(
            config=config,
            num_workers=max(1, problem.batch * shape.max_row_tiles * splits),
            policy="fixed",
            knobs=(("num_splits", splits),),
            model=model,
            predicted_us=float(times.min()) / 1e3,
            reason="",
            schedule="grid",
        )
    ]


def mergeable(tile: Candidate, shape: Shape, splits: list[int]) -> list[int]:
    """Split counts whose partials a static grid has room for."""
    if tile.config.option("fused_merge", 1) != 3:
        return splits
    groups, latent = tile.problem.batch * shape.max_row_tiles, tile.problem.latent_dim
    return [n for n in splits if n == 1 or fits_ll_slice(groups * n, tile.rows, n, latent)]


def config_of(problem: Problem, family: KernelCosts, rows: int, cluster: int) -> KernelConfig:
    """The kernel that a family launches on this tile of the problem."""
    mode = find_mode(*family.key)
    causal = mode is not KEEP_AB_PERSISTENT or (
        max(problem.q_lens, default=0) > 1 and not problem.top_k
    )
    return KernelConfig(
        kernel=family.kernel,
        q_dtype=problem.q_dtype,
        kv_format=problem.kv_format,
        out_dtype=problem.out_dtype,
        tile_rows=rows,
        tile_kv=TILE_KV,
        page_size=problem.page_size,
        cluster=cluster,
        # swap_ab has one build for both: one query token is a case of the causal mask
        mask="causal" if causal else "none",
        options=mode.options if mode else (),
    )


def card_rate_of(family: KernelCosts, gpu: Gpu) -> float:
    """Bytes a nanosecond that the family reads on this card; the H200's rate if unknown."""
    rate = family.card_rate * gpu.read_tbps / H200.read_tbps
    return rate if rate == rate else family.card_rate


def label(choice: Choice) -> str:
    """Launch mode, tile and splits in words."""
    config = choice.config
    tile = f"{config.tile_rows} rows, cluster {config.cluster}"
    pieces = dict(choice.knobs).get("num_splits")
    splits = f"{pieces} splits" if pieces else f"policy {choice.policy}"
    return f"{mode_of(config)}, {tile}, {splits}"
