"""Which kernel, which tile, which cuts: a few candidates a problem, priced, and the reason kept.

Two families of kernel compete, each in its ways (see `ways`). With KV on the M side (`cute/kv_m`)
a tile has 8, 16 or 32 rows: no row is padded, partials are small, and heads may be spread over
CTAs that read the same keys from L2. It runs grid plans that are a formula (see `formula`), where
all their workers fit on the card at once, and walks others, which balance ragged lengths. With the
query rows on the M side (`cute/q_m`) a tile has 64 rows, or 128 rows over a cluster of two that
share each KV block: the matrix unit is full.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..errors import unsupported
from ..gpu import H200, Gpu
from ..problem import Problem
from .config import KernelConfig
from .cost import CostModel
from .cuts import Shape
from .formula import counts, fits_mail, makespans, most_splits, whole_pairs
from .kernel_costs import Q_M, KernelCosts, recorded_costs
from .schedule import make_plan
from .search import best_trial
from .tile import Plan
from .ways import ROWS, WALK, Way, find_way, in_waves, way_of

TILE_KV = 64
#: how batch invariance cuts (see `policies.fixed_size`), for requests of up to 16 query rows, of up
#: to 64 heads, and of more, whose row tiles fill the card sooner: in the largest pieces with which
#: 64 requests do, since a batch of 128 pays 8 us for every further one. Small batches lose by it:
#: with 8192 keys each and 16 or 128 heads, one request takes 10.4 or 6.5 times as long as by
#: default on an H200, 16 of them 2.2 or 1.7 times (data/h200_invariant.jsonl).
INVARIANT_CUTS = {
    16: {"split_blocks": 16, "max_splits": 32, "half_blocks": 64},
    64: {"split_blocks": 32, "max_splits": 32, "half_blocks": 64},
    128: {"split_blocks": 64, "max_splits": 32, "half_blocks": 128},
}
#: query rows of a request up to which KV goes on the M side under batch invariance
INVARIANT_ROWS = 16
#: what a plan made anew on the device costs a launch: median of `us_with_plan - us` (17 to 67) over
#: the persistent plans of data/h200_anchor.jsonl
PLANNER_US = 29.0


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
        return f"{_label(self)}, policy {self.policy}: {self.reason}"


def choose(
    problem: Problem,
    gpu: Gpu = H200,
    batch_invariant: bool = False,
    costs: tuple[KernelCosts, ...] | None = None,
    separate_merge: bool = False,
    on_device: bool = False,
    able: Callable[[KernelConfig], bool] | None = None,
) -> Choice:
    """The cheapest candidate by the cost model; `costs` are the families that may be used. With
    `on_device` no host makes the plan, so that all but a formula pay for a planner kernel. With
    `able` the cheapest whose kernel can be had, or the cheapest of all where none can.

    With `separate_merge` a merge kernel behind the attention kernel is priced as well, which the
    config then asks for by the option fused_merge = 0.

    With `batch_invariant`, kernel, tile and cuts of a request depend on heads, formats, page size
    and that request's own lengths alone: nothing is priced, and the mask code is always there.
    Raises Unsupported where requests of one call want kernels of both kinds: no plan holds that.
    """
    costs = costs or recorded_costs()
    if batch_invariant:
        kinds = invariant_kinds(problem, gpu, costs)
        if len(kinds) > 1:
            got = f"requests of up to {INVARIANT_ROWS} query rows and of more with batch_invariant"
            raise unsupported("q_lens", got, "one kind in a plan; a call without a plan takes both")
        return kinds[0].choice
    found = []
    for family in costs:
        way = find_way(*family.key)
        if way is None:
            continue
        family = family.of(problem)
        for rows, cluster in candidates(problem, way):
            if way.formula:
                found += price_formula(problem, gpu, family, rows, cluster)
                continue
            apart = separate_merge and way is ROWS
            for fused in (True, False) if apart else (True,):
                found.append(price(problem, gpu, family, rows, cluster, fused))
    if not found:
        small = "grids of more workers than run at once"
        raise unsupported("problem", small, "fewer requests, or a family that walks plans")
    if on_device:
        found = [c if c.schedule == "grid" else _planned_on_device(c) for c in found]
    found.sort(key=lambda choice: choice.predicted_us)
    first = next((i for i, c in enumerate(found) if able(c.config)), 0) if able else 0
    least = "least" if not first else f"{first} cheaper ones are not compiled here,"
    best, others = found[first], found[first + 1 : first + 3]
    reason = f"{best.predicted_us:.1f} us predicted, {least} of {len(found)}"
    if others:
        reason += "; next " + ", ".join(f"{_label(c)} {c.predicted_us:.1f} us" for c in others)
    return replace(best, reason=f"{reason} ({regime(problem, gpu)})")


def regime(problem: Problem, gpu: Gpu) -> str:
    """In words: what limits this problem on this card."""
    floor = gpu.roofline_time(problem) * 1e6
    side = "matrix" if gpu.bound(problem) == "compute" else "memory"
    if floor < 15:
        return f"latency regime, {side} floor {floor:.1f} us"
    return f"{side} bound, floor {floor:.1f} us"


def candidates(problem: Problem, way: Way) -> list[tuple[int, int]]:
    """(tile rows, cluster) worth pricing for `way`."""
    rows = problem.heads if problem.top_k else max(problem.rows.tolist())
    tiles = way.tiles_for(problem.q_dtype, problem.kv_format)
    if way is ROWS and tiles:
        # of equals the first wins: a cluster reads each KV block once where two CTAs read it twice
        return [(64, 1)] if rows <= 64 else [(128, 2), (64, 1)]
    # each row tile reads all keys: 8 rows up to two of them, or to eight where a cluster divides
    # the keys; 32 where two of 16 would do; pairs where there are two
    return [
        (height, cluster)
        for height, cluster in tiles
        if (height > 8 or rows <= (16 if cluster == 1 else 64))
        and height < max(17, 2 * rows)
        and (way.pair == 1 or height < rows)
    ]


def price(
    problem: Problem,
    gpu: Gpu,
    family: KernelCosts,
    rows: int,
    cluster: int,
    fused_merge: bool = True,
) -> Choice:
    """One candidate with the cost policy's best cuts."""
    workers = gpu.workers(cluster)
    model = family.model(problem, rows, TILE_KV, cluster, fused_merge)
    model = replace(model, card_rate=_card_rate(family, gpu))
    shape = Shape.of(problem, rows, TILE_KV, workers)
    time = best_trial(shape, model).makespan_ns if shape.batch else model.launch_ns
    config = _config(problem, family, rows, cluster)
    if not fused_merge:
        config = replace(config, options=(("fused_merge", 0),))
    return Choice(config, workers, "cost", (), model, time / 1e3, "")


def price_formula(
    problem: Problem, gpu: Gpu, family: KernelCosts, rows: int, cluster: int
) -> list[Choice]:
    """One candidate with the best number of pieces; none where its workers do not fit at once."""
    config = _config(problem, family, rows, cluster)
    pair = config.option("pair", 1)
    shape = Shape.of(problem, rows, TILE_KV, gpu.workers(cluster * pair) * pair)
    model = family.model(problem, rows, TILE_KV, cluster)
    model = replace(model, card_rate=_card_rate(family, gpu))
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


def _planned_on_device(choice: Choice) -> Choice:
    return replace(choice, predicted_us=choice.predicted_us + PLANNER_US)


@dataclass(frozen=True)
class Kind:
    """Of a batch-invariant call, the requests of least_rows to most_rows query rows."""

    choice: Choice
    least_rows: int = 1
    most_rows: int | None = None


def invariant_kinds(
    problem: Problem, gpu: Gpu, costs: tuple[KernelCosts, ...], ragged: bool = False
) -> list[Kind]:
    """The batch-invariant rule: heads and a request's own q_len decide its tile, its own length
    the cuts. Never a formula: its pieces depend on how many requests share the card.

    The kinds that requests of `problem` belong to, or with `ragged` those that any up to its
    longest may belong to. Without constants for a walk all are of one kind.
    """
    walk = next((c for c in costs if c.key == (WALK.kernel, WALK.name)), None)
    rows = set(problem.rows.tolist()) - {0} or {problem.heads}
    small = walk is not None and problem.heads <= INVARIANT_ROWS and not problem.top_k
    by_rows = bool(ROWS.tiles_for(problem.q_dtype, problem.kv_format))
    kinds = []
    if small and walk is not None and (ragged or min(rows) <= INVARIANT_ROWS):
        why = f"{INVARIANT_ROWS} query rows or fewer"
        choice = _invariant(problem, gpu, walk, INVARIANT_ROWS, why)
        kinds.append(Kind(choice, most_rows=INVARIANT_ROWS))
    if not small or max(rows) > INVARIANT_ROWS:
        family = next((c for c in costs if c.key == Q_M.key), costs[0])
        if walk is not None and not by_rows:
            family = walk
        cuts = 64 if problem.heads <= 64 else 128
        choice = _invariant(problem, gpu, family, cuts, f"{problem.heads} heads")
        kinds.append(Kind(choice, least_rows=INVARIANT_ROWS + 1 if small else 1))
    return kinds


def _invariant(
    problem: Problem,
    gpu: Gpu,
    family: KernelCosts,
    cuts: int,
    why: str,
) -> Choice:
    formats = (problem.q_dtype, problem.kv_format)
    walks = family.key == (WALK.kernel, WALK.name)
    # a plan of 64 rows where no kernel of these formats takes one: torch walks any
    tiles = WALK.tiles_for(*formats) if walks else ROWS.tiles_for(*formats) or ROWS.tiles
    # the taller of a walk's tiles where the rows with queries on M are missing
    rows, cluster = tiles[-1] if walks and cuts > INVARIANT_ROWS else tiles[0]
    split = INVARIANT_CUTS[cuts]
    mask = "none" if problem.top_k else "causal"
    return Choice(
        config=replace(_config(problem, family, rows, cluster), mask=mask),
        num_workers=gpu.workers(cluster),
        policy="fixed_size",
        knobs=tuple(split.items()),
        model=family.model(problem, rows, TILE_KV, cluster),
        predicted_us=float("nan"),
        reason=f"batch invariant: {why} give {rows} rows; pieces of {split} by a request's own "
        "length",
    )


def _config(problem: Problem, family: KernelCosts, rows: int, cluster: int) -> KernelConfig:
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


def _card_rate(family: KernelCosts, gpu: Gpu) -> float:
    """Bytes per ns that the family reads on this card; as on an H200 where its rate is unknown."""
    rate = family.card_rate * gpu.read_tbps / H200.read_tbps
    return rate if rate == rate else family.card_rate


def _label(choice: Choice) -> str:
    config = choice.config
    way = way_of(config) if config.option("fused_merge", 1) else "merge kernel"
    return f"{config.kernel} {way}, {config.tile_rows} rows, cluster {config.cluster}"
