"""Which kernel, which tile, which cuts: a few candidates a problem, priced, and the reason kept.

Two families of kernel compete, each in its ways (see `ways`). With KV on the M side
(`cute/swap_ab_sm90`) a tile has 8, 16 or 32 rows: no row is padded, partials are small, and heads
may be spread over CTAs that read the same keys from L2. It runs grid plans that are a formula
(see `formula`), where
all their workers fit on the card at once, and walks others, which balance ragged lengths. With the
query rows on the M side (`cute/keep_ab_sm90`) a tile has 64 rows, or 128 rows over a cluster of two
that share each KV block: the matrix unit is full.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ..core.errors import unsupported
from ..core.gpu import H200, Gpu
from ..core.problem import Problem
from .config import KernelConfig
from .kernel_costs import KEEP_AB_ROWS, KernelCosts, recorded_costs
from .pricing import (
    TILE_KV,
    Choice,
    candidates,
    config_of,
    label,
    price,
    price_formula,
    price_others,
)
from .ways import EIGHT, FORMATS, ROWS, SPLIT, WALK, find_way

#: how batch invariance cuts (see `policies.fixed_size`), for requests of up to 16 query rows, of up
#: to 64 heads, and of more, whose row tiles fill the card sooner: in the largest pieces with which
#: 64 requests do, since a batch of 128 pays 8 us for every further one. Small batches lose by it:
#: with 8192 keys each and 16 or 128 heads, one request takes 10.7 or 6.6 times as long as by
#: default on an H200, 16 of them 2.2 or 1.7 times (data/records/h200_invariant.jsonl).
INVARIANT_CUTS = {
    16: {"split_blocks": 16, "max_splits": 32, "half_blocks": 64},
    64: {"split_blocks": 32, "max_splits": 32, "half_blocks": 64},
    128: {"split_blocks": 64, "max_splits": 32, "half_blocks": 128},
}
#: other cuts of a tile are priced where its first price is within so much of the least
HOPEFUL = 1.2
#: over a cache of eight bits a pair of CTAs that share their keys is taken where it is priced
#: within so much of one CTA's tile: of 20 calls of 128 heads
#: (data/records/h200_sweep_eight_bits.jsonl) the choice is 0.15 % over the best in the mean with
#: that, 0.29 % without; what the L2 is spared has no price
PAIR_EDGE = 1.012
#: query rows of a request up to which KV goes on the M side under batch invariance
INVARIANT_ROWS = 16


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
    `on_device` no host makes the plan: a tile's price is that of the cost policy alone. With
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
    found = _all_candidates(problem, gpu, costs, separate_merge, on_device)
    if not found:
        small = "grids of more workers than run at once"
        raise unsupported("problem", small, "fewer requests, or a family that walks plans")
    found.sort(key=lambda choice: _rank(problem, choice))
    first = next((i for i, c in enumerate(found) if able(c.config)), 0) if able else 0
    least = "least" if not first else f"{first} cheaper ones are not compiled here,"
    if not first and found[0].predicted_us > min(choice.predicted_us for choice in found):
        least = "a pair next to the least"
    best, others = found[first], found[first + 1 : first + 3]
    reason = f"{best.predicted_us:.1f} us predicted, {least} of {len(found)}"
    if others:
        reason += "; next " + ", ".join(f"{label(c)} {c.predicted_us:.1f} us" for c in others)
    return replace(best, reason=f"{reason} ({regime(problem, gpu)})")


def _rank(problem: Problem, choice: Choice) -> float:
    """What candidates are sorted by, the least first."""
    operands = FORMATS.get((problem.q_dtype, problem.kv_format))
    shared = (choice.config.kernel, choice.config.cluster) == (ROWS.kernel, 2)
    edge = PAIR_EDGE if shared and operands in (SPLIT, EIGHT) else 1.0
    return choice.predicted_us / edge


def _all_candidates(
    problem: Problem,
    gpu: Gpu,
    costs: tuple[KernelCosts, ...],
    separate_merge: bool,
    on_device: bool,
) -> list[Choice]:
    """Every tile with its best formula or the cost policy's cuts, the hopeful ones with others."""
    found, planned = [], []
    for family, way in ((family, find_way(*family.key)) for family in costs):
        if way is None:
            continue
        family = family.of(problem)
        for rows, cluster in candidates(problem, way):
            if way.formula:
                found += price_formula(problem, gpu, family, rows, cluster)
                continue
            planned.append((price(problem, gpu, family, rows, cluster), family))
            if separate_merge and way is ROWS:
                found.append(price(problem, gpu, family, rows, cluster, fused_merge=False))
    found += [choice for choice, _ in planned]
    if on_device:
        return found
    least_us = min((choice.predicted_us for choice in found), default=0.0)
    for choice, family in planned:
        if choice.predicted_us <= HOPEFUL * least_us:
            config = choice.config
            found += price_others(problem, gpu, family, config.tile_rows, config.cluster)
    return found


def regime(problem: Problem, gpu: Gpu) -> str:
    """In words: what limits this problem on this card."""
    floor = gpu.roofline_time(problem) * 1e6
    side = "matrix" if gpu.bound(problem) == "compute" else "memory"
    if floor < 15:
        return f"latency regime, {side} floor {floor:.1f} us"
    return f"{side} bound, floor {floor:.1f} us"


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
    formats = (problem.q_dtype, problem.kv_format)
    # of eight bits the walk alone is shipped with scales in memory and draft masks, and what a
    # request is run by must not depend on what else a call asks for
    by_rows = bool(ROWS.tiles_for(*formats)) and FORMATS.get(formats) not in (EIGHT, SPLIT)
    kinds = []
    if small and walk is not None and (ragged or min(rows) <= INVARIANT_ROWS):
        why = f"{INVARIANT_ROWS} query rows or fewer"
        choice = _invariant(problem, gpu, walk, INVARIANT_ROWS, why)
        kinds.append(Kind(choice, most_rows=INVARIANT_ROWS))
    if not small or max(rows) > INVARIANT_ROWS:
        family = next((c for c in costs if c.key == KEEP_AB_ROWS), costs[0])
        if walk is not None and not by_rows:
            family = walk
        cuts = 64 if problem.heads <= 64 else 128
        choice = _invariant(problem, gpu, family, cuts, f"{problem.heads} heads")
        kinds.append(Kind(choice, least_rows=INVARIANT_ROWS + 1 if small else 1))
    return kinds


def invariant_tile(
    problem: Problem, gpu: Gpu, family: KernelCosts, tile: tuple[int, int], why: str
) -> Kind:
    """The batch-invariant rule with one build for every request: `tile` of `family`, (rows, CTAs of
    a cluster), and the cuts by heads.
    """
    return Kind(_invariant(problem, gpu, family, 64 if problem.heads <= 64 else 128, why, tile))


def _invariant(
    problem: Problem,
    gpu: Gpu,
    family: KernelCosts,
    cuts: int,
    why: str,
    tile: tuple[int, int] | None = None,
) -> Choice:
    formats = (problem.q_dtype, problem.kv_format)
    walks = family.key == (WALK.kernel, WALK.name)
    # a plan of 64 rows where no kernel of these formats takes one: torch walks any
    tiles = WALK.tiles_for(*formats) if walks else ROWS.tiles_for(*formats) or ROWS.tiles
    # the taller of a walk's tiles where the rows with queries on M are missing
    rows, cluster = tile or (tiles[-1] if walks and cuts > INVARIANT_ROWS else tiles[0])
    split = INVARIANT_CUTS[cuts]
    mask = "none" if problem.top_k else "causal"
    return Choice(
        config=replace(config_of(problem, family, rows, cluster), mask=mask),
        num_workers=gpu.workers(cluster),
        policy="fixed_size",
        knobs=tuple(split.items()),
        model=family.model(problem, rows, TILE_KV, cluster),
        predicted_us=float("nan"),
        reason=f"batch invariant: {why} give {rows} rows; pieces of {split} by a request's own "
        "length",
    )
