"""Candidates and their predicted time: one launch mode, one tile, one split policy.

Splits come from the cost model's own search, from FlashMLA's rule, or from an even split count.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

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


def candidates(problem: Problem, mode: LaunchMode) -> list[tuple[int, int]]:
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


def price(problem: Problem, gpu: Gpu, family: KernelCosts, rows: int, cluster: int) -> Choice:
    """One candidate with the cost policy's best splits."""
    shape = Shape.of(problem, rows, TILE_KV, gpu.workers(cluster))
    model = model_of(problem, gpu, family, rows, cluster)
    config = config_of(problem, family, rows, cluster)
    choice = Choice(config, shape.workers, "cost", (), model, model.launch_ns / 1e3, "")
    if not shape.batch:
        return choice
    return _priced(choice, best_trial(shape, model))


def price_others(
    problem: Problem, gpu: Gpu, family: KernelCosts, rows: int, cluster: int
) -> list[Choice]:
    """The same tile with FlashMLA's splits, and with the even split counts of the least bounds."""
    shape = Shape.of(problem, rows, TILE_KV, gpu.workers(cluster))
    if not shape.batch:
        return []
    model = model_of(problem, gpu, family, rows, cluster)
    config = config_of(problem, family, rows, cluster)
    plain = Choice(config, shape.workers, "greedy", (), model, 0.0, "")
    found = [_priced(plain, try_greedy(shape, model))]
    for splits, trial in even_trials(shape, model, SPLITS, EVEN_TRIALS):
        policy, knobs = ("fixed", (("num_splits", splits),)) if splits > 1 else ("none", ())
        found.append(_priced(replace(plain, policy=policy, knobs=knobs), trial))
    return found


def _priced(choice: Choice, trial: Trial) -> Choice:
    """`choice` with the predicted time of `trial`."""
    return replace(choice, predicted_us=trial.makespan_ns / 1e3)


def model_of(problem: Problem, gpu: Gpu, family: KernelCosts, rows: int, cluster: int) -> CostModel:
    """The cost model of a tile on this card."""
    model = family.model(problem, rows, TILE_KV, cluster)
    return replace(model, card_rate=card_rate_of(family, gpu))


def price_formula(
    problem: Problem, gpu: Gpu, family: KernelCosts, rows: int, cluster: int
) -> list[Choice]:
    """One static grid with the best split count; none where its workers are not all resident."""
    config = config_of(problem, family, rows, cluster)
    pair = config.option("pair", 1)
    shape = Shape.of(problem, rows, TILE_KV, gpu.workers(cluster * pair) * pair)
    model = model_of(problem, gpu, family, rows, cluster)
    most = most_splits(shape, problem.batch, cluster, pair)
    waves, priced = 1, shape
    if shape.batch and not most:
        if not in_waves(config):
            return []
        waves, most = -(-problem.batch * whole_pairs(shape.max_row_tiles, pair) // shape.workers), 1
        # a wave reads the keys of its own requests
        lengths = zip(problem.q_lens, problem.kv_lens, strict=True)
        q_lens, kv_lens = zip(*[both for both in lengths if both[0]][::waves], strict=True)
        wave = replace(problem, q_lens=q_lens, kv_lens=kv_lens)
        priced = Shape.of(wave, rows, TILE_KV, shape.workers)
    # multicast saves L2 reads where all CTAs read a few requests; with whole requests it was never
    # faster
    tried = [n for n in counts(most) or [1] if n > 1 or pair == 1]
    if in_waves(config):
        tried = [1]
    if config.option("fused_merge", 1) == 3:
        groups, latent = problem.batch * shape.max_row_tiles, problem.latent_dim
        tried = [n for n in tried if n == 1 or fits_ll_slice(groups * n, rows, n, latent)]
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
