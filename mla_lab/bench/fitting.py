"""From a sweep's record to the constants of the cost model, and how well they choose.

A choice is judged by its regret: the time of the variant that the model takes for the best, over
the time of the best that was measured. To see what the model says of cases that it was not fitted
on, the cases are dealt into two halves, each judged with the constants of the other.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from ..errors import invalid
from ..plan import KernelCosts
from ..plan.calibrate import FITTED, Measured, fit, predictions
from ..plan.ways import way_of
from .peers.variant import Variant
from .records import Row, problem_of, results

#: a choice this close to the best counts as right
CLOSE = 1.03
#: what else a sweep tells: how merges grow, merges apart, and clusters that divide the keys
TOLD = (
    *FITTED,
    "head_start",
    "fill",
    "partial_ns",
    "merge_split_ns",
    "merge_kernel_ns",
    "merge_kernel_rate",
    "cluster_ns",
    "cluster_rate",
)


@dataclass(frozen=True)
class Launch:
    """One measured variant of a case."""

    case: str
    #: of the costs that are its own: kernel and way
    key: tuple[str, str]
    measured: Measured


@dataclass(frozen=True)
class Quality:
    """Of some constants on some launches."""

    #: median of |predicted / measured - 1|
    error: float
    #: share of cases whose choice is within `CLOSE` of the best, and the regrets' mean and worst
    close: float
    mean_regret: float
    worst_regret: float
    cases: int

    def __str__(self) -> str:
        return (
            f"error {self.error:.1%} median, choice within {CLOSE - 1:.0%} of the best in "
            f"{self.close:.0%} of {self.cases} cases, {self.mean_regret - 1:.1%} over it in the "
            f"mean, {self.worst_regret - 1:.0%} at worst"
        )


def launches(rows: Iterable[Row]) -> list[Launch]:
    """Every variant that a record measured. Raises InvalidInput if its plans are made otherwise
    now: then its times belong to other plans.
    """
    found = []
    for row in results(rows, "ok"):
        notes = row.get("notes", {})
        if "costs" not in notes:
            continue  # a peer that is no variant
        variant = Variant.from_notes(notes)
        plan = variant.plan(problem_of(row))
        made = {"tiles": plan.num_tiles, "partials": plan.num_slots}
        if any(notes[name] != value for name, value in made.items()):
            had = {name: notes[name] for name in made}
            raise invalid("record", f"{row['case']} {row['peer']}: {had}", f"plans as now: {made}")
        measured = Measured(plan, row["us"], variant.config.cluster, variant.fused)
        key = variant.config.kernel, way_of(variant.config)
        found.append(Launch(row["case"], key, measured))
    # of equals the first wins, as in `plan.choose`: the tile that reads each KV block once
    found.sort(key=lambda launch: -launch.measured.plan.tile_rows)
    if not found:
        raise invalid("record", "no variants", "a record that `mla-lab bench sweep` wrote")
    return found


def fit_all(found: Sequence[Launch], start: Sequence[KernelCosts]) -> list[KernelCosts]:
    """`start`, with the families that were measured fitted to their launches."""
    keys = {launch.key for launch in found}
    fitted = []
    for costs in start:
        own = [launch.measured for launch in found if launch.key == costs.key]
        fitted.append(fit(costs, own, TOLD) if costs.key in keys else costs)
    return fitted


def quality(costs: Sequence[KernelCosts], found: Sequence[Launch]) -> Quality:
    """How well `costs` predict and choose among `found`."""
    by_key = {family.key: family for family in costs}
    predicted = np.array([float(predictions(by_key[x.key], [x.measured])[0]) for x in found])
    us = np.array([launch.measured.us for launch in found])
    cases = np.array([launch.case for launch in found])
    regrets = []
    for case in dict.fromkeys(cases.tolist()):
        own = np.flatnonzero(cases == case)
        regrets.append(float(us[own[predicted[own].argmin()]] / us[own].min()))
    return Quality(
        error=float(np.median(np.abs(predicted / us - 1))),
        close=float(np.mean([regret <= CLOSE for regret in regrets])),
        mean_regret=float(np.mean(regrets)),
        worst_regret=max(regrets),
        cases=len(regrets),
    )


def held_out(found: Sequence[Launch], start: Sequence[KernelCosts]) -> list[Quality]:
    """Each half of the cases, judged with the constants of the other half."""
    names = list(dict.fromkeys(launch.case for launch in found))
    halves = [
        [launch for launch in found if launch.case in set(names[first::2])] for first in (0, 1)
    ]
    if not all(halves):
        return []
    return [quality(fit_all(halves[1 - i], start), halves[i]) for i in (0, 1)]


def write(
    path: Path, costs: Sequence[KernelCosts], source: str, keys: Iterable[tuple[str, str]]
) -> None:
    """`data/kernel_costs.json`: the constants, those of `keys` with their new source."""
    fitted = set(keys)
    told = [replace(c, source=source) if c.key in fitted else c for c in costs]
    rows = [
        {
            name: float(f"{value:.4g}") if isinstance(value, float) else value
            for name, value in asdict(family).items()
        }
        for family in told
    ]
    path.write_text(json.dumps({"costs": rows}, indent=2) + "\n", encoding="utf-8")


def source_of(rows: Sequence[Row], found: Sequence[Launch]) -> str:
    """In words: card, date, commit, and how many launches of how many cases."""
    run = next(row for row in rows if row["kind"] == "run")
    env = run["environment"]
    card = env["card"]["name"] if env["card"] else "CPU"
    cases = len({launch.case for launch in found})
    commit = (env["commit"] or "unknown")[:9]
    return f"{card}, {run['time'][:10]}, commit {commit}, {len(found)} launches of {cases} cases"
