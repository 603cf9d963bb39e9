"""Choice of kernel, tile and splits: candidates -> predicted time -> the cheapest, with a reason.

Two kernel families compete, each in its launch modes (see `launch_modes`). swap_ab has KV on the M
side of the MMA and 8, 16 or 32 query rows (64 in e4m3) on the N side: no padded rows, small
partials, and heads may be spread over CTAs that read the same keys from L2. It runs static grids
(see `formula`), whose workers must all be resident at once if they split a row tile, and persistent
plans, which balance ragged lengths. keep_ab has the query rows on the M side, 64 of them, or 128
over a cluster of two CTAs that share each KV block by multicast, and so fills the tensor cores.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from ..core.errors import unsupported
from ..core.gpu import H200, Gpu
from ..core.problem import Problem
from .config import KernelConfig
from .fixed_pieces import INVARIANT_ROWS, MOST_PIECES, PieceCuts
from .kernel_costs import KernelCosts, recorded_costs
from .launch_modes import (
    E4M3,
    FORMATS,
    KEEP_AB_PERSISTENT,
    QUERY_HI_LO,
    SWAP_AB_PERSISTENT,
)
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

#: splits under batch invariance (arguments of `policies.fixed_size`), for requests of up to 16
#: query rows, of up to 64 heads, and of more. Of five settings each timed on 18 steps of two traces
#: and the 20 cases of `h200_plain_invariant.jsonl`, with 64 heads on these cases alone, beside the
#: default call (H200, 2026-11-24, `data/notes/kernel_attempts.jsonl`): long pieces suit many equal
#: requests, since each further piece cost a batch of 128 requests 8 us (CTAs did not run whole
#: items then, see `fixed_pieces`); short ones suit the steps, whose requests differ. Few requests
#: lose by any: a step of 16 takes 1.2 to 4.3 times the default.
INVARIANT_CUTS = {
    16: {"split_blocks": 16, "max_splits": MOST_PIECES, "half_blocks": 64},
    64: {"split_blocks": 16, "max_splits": MOST_PIECES, "half_blocks": 64},
    128: {"split_blocks": 32, "max_splits": MOST_PIECES, "half_blocks": 128},
}
#: further splits of a tile are priced where its first price is within this factor of the least
PROMISING = 1.2
#: over an fp8 cache the cluster of two CTAs is chosen where it is priced within this factor of one
#: CTA's tile, as the model has no price for the L2 reads it saves. Over 20 calls of 128 heads
#: (data/records/h200_sweep_eight_bits.jsonl) the choice is in the mean 0.15 % slower than the best,
#: 0.29 % without this factor
PAIR_EDGE = 1.012


def choose(
    problem: Problem,
    gpu: Gpu = H200,
    batch_invariant: bool = False,
    costs: tuple[KernelCosts, ...] | None = None,
    on_device: bool = False,
    able: Callable[[KernelConfig], bool] | None = None,
) -> Choice:
    """The candidate with the least predicted time.

    costs: the kernel families and launch modes that may be used. on_device: the plan is made on the
    device, so that a tile's price is that of the cost policy alone. able: True for a config whose
    kernel is available; the cheapest such candidate wins, or the cheapest of all where there is
    none.

    batch_invariant: kernel, tile and splits of a request depend on heads, formats, page size and
    that request's own lengths alone; nothing is priced, and mask code is always compiled in. Raises
    Unsupported where requests of one call need kernels of both families, as a plan has one kernel.
    """
    costs = costs or recorded_costs()
    if batch_invariant:
        kinds = invariant_kinds(problem, gpu, costs)
        if len(kinds) > 1:
            got = f"requests of up to {INVARIANT_ROWS} query rows and of more with batch_invariant"
            raise unsupported("q_lens", got, "one kind in a plan; a call without a plan takes both")
        return kinds[0].choice
    found = _all_candidates(problem, gpu, costs, on_device)
    if not found:
        small = "static grids of more workers than are resident at once"
        raise unsupported("problem", small, "fewer requests, or a persistent launch mode")
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
    """Sort key of candidates: predicted us, scaled by `PAIR_EDGE` where that applies."""
    operands = FORMATS.get((problem.q_dtype, problem.kv_format))
    shared = (choice.config.kernel, choice.config.cluster) == (KEEP_AB_PERSISTENT.kernel, 2)
    edge = PAIR_EDGE if shared and operands in (QUERY_HI_LO, E4M3) else 1.0
    return choice.predicted_us / edge


def _all_candidates(
    problem: Problem, gpu: Gpu, costs: tuple[KernelCosts, ...], on_device: bool
) -> list[Choice]:
    """Every tile with its best static grid or the cost policy's splits; promising tiles with
    others.
    """
    found, planned = [], []
    for tile in candidates(problem, gpu, costs):
        if tile.config.option("grid"):
            found += price_formula(tile)
        else:
            planned.append((price(tile), tile))
    found += [choice for choice, _ in planned]
    if on_device:
        return found
    least_us = min((choice.predicted_us for choice in found), default=0.0)
    for choice, tile in planned:
        if choice.predicted_us <= PROMISING * least_us:
            found += price_others(tile)
    return found


def regime(problem: Problem, gpu: Gpu) -> str:
    """The resource that limits this problem on this card, in words."""
    floor = gpu.roofline_time(problem) * 1e6
    if math.isnan(floor):
        return f"no floor: the rates of {gpu.name} are unknown"
    side = "matrix" if gpu.bound(problem) == "compute" else "memory"
    if floor < 15:
        return f"latency regime, {side} floor {floor:.1f} us"
    return f"{side} bound, floor {floor:.1f} us"


@dataclass(frozen=True)
class Kind:
    """A choice under batch invariance, for requests of least_rows to most_rows query rows."""

    choice: Choice
    least_rows: int = 1
    most_rows: int | None = None

    @property
    def cuts(self) -> PieceCuts:
        """How the requests are cut, for kernels that find their pieces."""
        knobs = dict(self.choice.knobs)
        few, many = self.least_rows <= INVARIANT_ROWS, self.most_rows is None
        return PieceCuts(knobs["split_blocks"], knobs["half_blocks"], few, many)


def invariant_cuts(heads: int, tile_rows: int) -> PieceCuts:
    """How kernels with row tiles of so many rows cut a batch-invariant call without a plan."""
    split = INVARIANT_CUTS[INVARIANT_ROWS if tile_rows <= INVARIANT_ROWS else _cuts_of(heads)]
    return PieceCuts(split["split_blocks"], split["half_blocks"])


def _cuts_of(heads: int) -> int:
    """Key into `INVARIANT_CUTS` of requests of more than INVARIANT_ROWS query rows."""
    return 64 if heads <= 64 else 128


def invariant_kinds(
    problem: Problem, gpu: Gpu, costs: tuple[KernelCosts, ...], ragged: bool = False
) -> list[Kind]:
    """Kernel choices of a batch-invariant call: heads and a request's q_len decide the tile, its
    KV length the splits. Never a static grid, whose split count depends on the batch size.

    Returns the kinds that requests of `problem` belong to; with `ragged`, those that any request
    up to the longest may belong to. One kind where `costs` lacks swap_ab_persistent.
    """
    persistent = next((c for c in costs if c.key == SWAP_AB_PERSISTENT.key), None)
    rows = set(problem.rows.tolist()) - {0} or {problem.heads}
    small = persistent is not None and problem.heads <= INVARIANT_ROWS and not problem.top_k
    formats = (problem.q_dtype, problem.kv_format)
    # over an fp8 cache only swap_ab_persistent ships with scales in memory and draft masks, and a
    # request's kernel must not depend on the call's other features
    fp8 = FORMATS.get(formats) in (E4M3, QUERY_HI_LO)
    keep_ab = bool(KEEP_AB_PERSISTENT.tiles_for(*formats)) and not fp8
    kinds = []
    if small and persistent is not None and (ragged or min(rows) <= INVARIANT_ROWS):
        why = f"{INVARIANT_ROWS} query rows or fewer"
        choice = _invariant(problem, gpu, persistent, INVARIANT_ROWS, why)
        kinds.append(Kind(choice, most_rows=INVARIANT_ROWS))
    if not small or max(rows) > INVARIANT_ROWS:
        family = next((c for c in costs if c.key == KEEP_AB_PERSISTENT.key), costs[0])
        if persistent is not None and not keep_ab:
            family = persistent
        cuts = _cuts_of(problem.heads)
        choice = _invariant(problem, gpu, family, cuts, f"{problem.heads} heads")
        kinds.append(Kind(choice, least_rows=INVARIANT_ROWS + 1 if small else 1))
    return kinds


def invariant_tile(
    problem: Problem, gpu: Gpu, family: KernelCosts, tile: tuple[int, int], why: str
) -> Kind:
    """The batch-invariant rule with one build for every request: `tile` of `family`, (rows, CTAs of
    a cluster), and the cuts by heads.
    """
    return Kind(_invariant(problem, gpu, family, _cuts_of(problem.heads), why, tile))


def _invariant(
    problem: Problem,
    gpu: Gpu,
    family: KernelCosts,
    cuts: int,
    why: str,
    tile: tuple[int, int] | None = None,
) -> Choice:
    formats = (problem.q_dtype, problem.kv_format)
    swap_ab = family.key == SWAP_AB_PERSISTENT.key
    # formats without a kernel of 64 rows: the torch backend runs the plan
    tiles = (
        SWAP_AB_PERSISTENT.tiles_for(*formats)
        if swap_ab
        else KEEP_AB_PERSISTENT.tiles_for(*formats) or KEEP_AB_PERSISTENT.tiles
    )
    # the taller tile of swap_ab_persistent, where keep_ab has none for these formats
    rows, cluster = tile or (tiles[-1] if swap_ab and cuts > INVARIANT_ROWS else tiles[0])
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
