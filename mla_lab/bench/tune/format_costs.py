"""Fit of the cost model's constants for builds over an fp8 cache.

The sweep in 16 bits determines the constants that all launch modes share (`fitting`). A sweep over
other formats is small, so its fit starts from the constants recorded for these formats, or else
from those of 16 bits.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ...plan import KernelCosts
from ...plan.kernel_costs import recorded_costs, recorded_formats
from ..records import grouped
from . import fitting
from .fitting import Launch, Quality

Formats = tuple[str, str]


def by_formats(found: Iterable[Launch]) -> dict[Formats, list[Launch]]:
    """Launches by (query, cache)."""
    return grouped(found, _formats_of)


def _formats_of(launch: Launch) -> Formats:
    problem = launch.measured.plan.problem
    return problem.q_dtype, problem.kv_format


def start_of(found: Sequence[Launch]) -> list[KernelCosts]:
    """Recorded constants for the launch modes and formats of these launches."""
    problem, keys = found[0].measured.plan.problem, {launch.key for launch in found}
    return [costs.of(problem) for costs in recorded_costs() if costs.key in keys]


def fit_formats(
    dealt: Mapping[Formats, Sequence[Launch]],
) -> tuple[dict[Formats, list[KernelCosts]], list[str]]:
    """Constants by formats, and their quality in words."""
    made: dict[Formats, list[KernelCosts]] = {}
    said = []
    for formats, found in dealt.items():
        start = start_of(found)
        # the result for earlier formats is a second start: from a single one the fit may get stuck
        starts = [start, *(_of_keys(other, start) for other in made.values())]
        ends = [(fitting.fit_all(found, one), one) for one in starts]
        fitted, begun = min(ends, key=lambda end: _score(end[0], found))
        steps = {"before": start, "fitted": fitted}
        made[formats] = fitted
        name = ":".join(formats)
        said += [f"{name} {step:7} {fitting.quality(c, found)}" for step, c in steps.items()]
        parts: Quality | None = fitting.held_out(found, begun)
        said += [f"{name} held out in parts  {parts}"] if parts else []
    return made, said


def _of_keys(costs: Sequence[KernelCosts], like: Sequence[KernelCosts]) -> list[KernelCosts]:
    """`like`, with the families of `costs` in place of those of the same kernel and launch mode."""
    known = {family.key: family for family in costs}
    return [known.get(family.key, family) for family in like]


def _score(costs: Sequence[KernelCosts], found: Sequence[Launch]) -> tuple[float, float]:
    judged = fitting.quality(costs, found)
    return judged.mean_regret, judged.error


def write(path: Path, made: Mapping[Formats, Sequence[KernelCosts]], source: str) -> None:
    """Write `data/runtime/kernel_costs_eight_bits.json` with `made` in place of the constants of
    the same formats and launch modes.
    """
    rows = []
    for formats in dict.fromkeys([*recorded_formats(), *made]):
        fresh = {c.key: (c, source) for c in made.get(formats, ())}
        kept = {c.key: (c, c.source) for c in recorded_formats().get(formats, ())}
        for costs, origin in (kept | fresh).values():
            row = fitting.row_of(costs)
            rows.append({"formats": ":".join(formats), **row, "source": origin})
    path.write_text(json.dumps({"costs": rows}, indent=2) + "\n", encoding="utf-8")
