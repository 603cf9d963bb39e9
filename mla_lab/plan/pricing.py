"""A candidate: one tile of one way, cut by one rule, and its price.

The price is the cost model's time. A plan is cut by the model's own search, as FlashMLA cuts, or in
an even count of pieces.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..core.gpu import H200, Gpu
from ..core.problem import Problem
from .config import KernelConfig
from .cost import CostModel
from .cuts import Shape
from .formula import counts, fits_mail, makespans, most_splits, whole_pairs
from .gate import LONGEST_BLOCKS, WORKERS
from .kernel_costs import KernelCosts
from .schedule import make_plan
from .search import Trial, best_trial, even_trials, try_greedy
from .tile import Plan
from .ways import EIGHT, FORMATS, ROWS, Way, find_way, in_waves, rows_tiles, way_of

TILE_KV = 64
#: even counts of pieces that a plan may have, and how many of them are priced
SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
EVEN_TRIALS = 3
#: keys of one piece that the matrix unit alone may add up in e4m3: of 8,192 the error is 1.04 times
#: that of torch with the same rounding, of 65,536 2.5 times (H200, see `cute.keep_ab_sm90.fp8`)
LONGEST = LONGEST_BLOCKS * TILE_KV


@dataclass(frozen=True)
class Choice:
    """A way to run one problem, and why."""

    config: KernelConfig
    num_workers: int
    policy: str
    knobs: tuple[tuple[str, int], ...]
    model: CostModel
    predicted_us: float
    reason: str
    schedule: str = "persistent"

    def plan(self, problem: Problem) -> Plan:
        """The plan that this choice means."""
        knobs: dict[str, Any] = dict(self.knobs)
        plan = make_plan(
            problem,
            tile_rows=self.config.tile_rows,
            tile_kv=self.config.tile_kv,
            num_workers=self.num_workers,
            policy=self.policy,
            schedule=self.schedule,
            model=self.model,
            **knobs,
        )
        return replace(plan, config=self.config)

    def __str__(self) -> str:
        return f"{label(self)}: {self.reason}"


def candidates(problem: Problem, way: Way) -> list[tuple[int, int]]:
    """(tile rows, cluster) worth pricing for `way`."""
    rows = problem.heads if problem.top_k else max(problem.rows.tolist())
    tiles = way.tiles_for(problem.q_dtype, problem.kv_format)
    if way is ROWS and tiles:
        # of equals the first wins: a cluster reads each KV block once where two CTAs read it twice
        if too_long(problem):
            return []
        built = rows_tiles(problem.q_dtype, problem.kv_format, problem.page_size)
        return [(64, 1)] if rows <= 64 or len(built) == 1 else [(128, 2), (64, 1)]
    # each row tile reads all keys: 8 rows up to two of them, or to eight where a cluster divides
    # the keys; 32 where two of 16 would do; pairs where there are two. A page of less than a tile
    # is a copy of its own, which two row tiles would ask for twice
    alone = 16 if problem.page_size >= TILE_KV else 8
    return [
        (height, cluster)
        for height, cluster in tiles
        if (height > 8 or rows <= (alone if cluster == 1 else 64))
        and height < max(17, 2 * rows)
        and (way.pair == 1 or height < rows)
    ]


def too_long(problem: Problem) -> bool:
    """Whether e4m3 with the query rows on the M side would add up pieces of more than `LONGEST`
    keys.
    """
    if FORMATS.get((problem.q_dtype, problem.kv_format)) != EIGHT:
        return False
    keys = problem.kv_lens
    return min(max(keys, default=0), sum(keys) // WORKERS) > LONGEST


def price(
    problem: Problem,
    gpu: Gpu,
    family: KernelCosts,
    rows: int,
    cluster: int,
    fused_merge: bool = True,
) -> Choice:
    """One candidate with the cost policy's best cuts."""
    shape = Shape.of(problem, rows, TILE_KV, gpu.workers(cluster))
    model = model_of(problem, gpu, family, rows, cluster, fused_merge)
    config = config_of(problem, family, rows, cluster)
    if not fused_merge:
        config = replace(config, options=(("fused_merge", 0),))
    choice = Choice(config, shape.workers, "cost", (), model, model.launch_ns / 1e3, "")
    if not shape.batch:
        return choice
    return _priced(choice, best_trial(shape, model))


def price_others(
    problem: Problem, gpu: Gpu, family: KernelCosts, rows: int, cluster: int
) -> list[Choice]:
    """The same tile cut by the published walk, and in the even counts that look best."""
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
    """`choice` with the model's price of its cuts."""
    return replace(choice, predicted_us=trial.makespan_ns / 1e3)


def model_of(
    problem: Problem,
    gpu: Gpu,
    family: KernelCosts,
    rows: int,
    cluster: int,
    fused_merge: bool = True,
) -> CostModel:
    """The cost model of a tile on this card."""
    model = family.model(problem, rows, TILE_KV, cluster, fused_merge)
    return replace(model, card_rate=card_rate_of(family, gpu))


def price_formula(
    problem: Problem, gpu: Gpu, family: KernelCosts, rows: int, cluster: int
) -> list[Choice]:
    """One candidate with the best number of pieces; none where its workers do not fit at once."""
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
        # what a wave reads is its own requests' keys
        lengths = zip(problem.q_lens, problem.kv_lens, strict=True)
        q_lens, kv_lens = zip(*[both for both in lengths if both[0]][::waves], strict=True)
        wave = replace(problem, q_lens=q_lens, kv_lens=kv_lens)
        priced = Shape.of(wave, rows, TILE_KV, shape.workers)
    # pairs spare reads of L2 where a few requests are read by all: whole requests were never faster
    tried = [n for n in counts(most) or [1] if n > 1 or pair == 1 or in_waves(config)]
    if config.option("fused_merge", 1) == 3:
        groups, latent = problem.batch * shape.max_row_tiles, problem.latent_dim
        tried = [n for n in tried if n == 1 or fits_mail(groups * n, rows, n, latent)]
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
    way = find_way(*family.key)
    causal = way is not ROWS or (max(problem.q_lens, default=0) > 1 and not problem.top_k)
    return KernelConfig(
        kernel=family.kernel,
        q_dtype=problem.q_dtype,
        kv_format=problem.kv_format,
        out_dtype=problem.out_dtype,
        tile_rows=rows,
        tile_kv=TILE_KV,
        page_size=problem.page_size,
        cluster=cluster,
        # one query token is the causal rule's plainest case: with KV on M one kernel has both
        mask="causal" if causal else "none",
        options=way.options if way else (),
    )


def card_rate_of(family: KernelCosts, gpu: Gpu) -> float:
    """Bytes per ns that the family reads on this card; as on an H200 where its rate is unknown."""
    rate = family.card_rate * gpu.read_tbps / H200.read_tbps
    return rate if rate == rate else family.card_rate


def label(choice: Choice) -> str:
    """Kernel, way, tile and cuts in words."""
    config = choice.config
    way = way_of(config) if config.option("fused_merge", 1) else "merge kernel"
    tile = f"{config.tile_rows} rows, cluster {config.cluster}"
    pieces = dict(choice.knobs).get("num_splits")
    cuts = f"{pieces} pieces" if pieces else f"policy {choice.policy}"
    return f"{config.kernel} {way}, {tile}, {cuts}"
