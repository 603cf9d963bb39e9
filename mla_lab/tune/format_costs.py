"""Constants of the cost model for builds that read a cache of eight bits, from a sweep over them.

A sweep of 16 bits tells what all ways have in common (`fitting`); one over other formats is small,
and moves the constants of its own builds from where they are: those recorded for these formats, or
those of 16 bits.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ..plan import KernelCosts
from ..plan.kernel_costs import recorded_costs, recorded_formats
from . import fitting
from .fitting import Launch, Quality

Formats = tuple[str, str]


def by_formats(found: Iterable[Launch]) -> dict[Formats, list[Launch]]:
    """Launches by (query, cache)."""
    dealt: dict[Formats, list[Launch]] = {}
    for launch in found:
        problem = launch.measured.plan.problem
        dealt.setdefault((problem.q_dtype, problem.kv_format), []).append(launch)
    return dealt


def start_of(found: Sequence[Launch]) -> list[KernelCosts]:
    """Constants as they are recorded for the ways and the formats of these launches."""
    problem, keys = found[0].measured.plan.problem, {launch.key for launch in found}
    return [costs.of(problem) for costs in recorded_costs() if costs.key in keys]


def fit_formats(
    dealt: Mapping[Formats, Sequence[Launch]],
) -> tuple[dict[Formats, list[KernelCosts]], list[str]]:
    """Constants by formats, and how well they predict and choose, in words."""
    made: dict[Formats, list[KernelCosts]] = {}
    said = []
    for formats, found in dealt.items():
        start = start_of(found)
        # where formats before ended is a start too: from one of them the fit may find no way down
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
    """`data/runtime/kernel_costs_eight_bits.json`: `made` in place of those of its formats and
    ways."""
    rows = []
    for formats in dict.fromkeys([*recorded_formats(), *made]):
        fresh = {c.key: (c, source) for c in made.get(formats, ())}
        kept = {c.key: (c, c.source) for c in recorded_formats().get(formats, ())}
        for costs, origin in (kept | fresh).values():
            row = fitting.row_of(costs)
            rows.append({"formats": ":".join(formats), **row, "source": origin})
    path.write_text(json.dumps({"costs": rows}, indent=2) + "\n", encoding="utf-8")
