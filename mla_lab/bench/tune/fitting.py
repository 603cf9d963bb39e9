"""Fit of the cost model's constants to a sweep, and the quality of the choices that follow.

A choice is judged by its regret: measured time of the variant with the least predicted time, over
the least measured time of the case. So the fit weighs the differences between the variants of a
case, above all those of the fast ones, more than the times themselves. Held-out quality comes from
another sweep (`bench fit RECORD --judge OTHER`), or from the record in parts (`--parts`), each
judged with constants fitted to the other parts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ...core.errors import invalid
from ...plan import KernelCosts
from ...plan.launch_modes import mode_of
from ..peers.variant import Variant
from ..records import Row, problem_of, results
from .calibrate import FITTED, Launches, Measured, gauss_newton

#: a choice counts as right up to this regret
CLOSE = 1.03
#: further constants that a sweep determines: merges, the merge kernel, clusters that split the KV
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
    "pair_factor",
    "memory_ns",
    "l2_rate",
    "sharpness",
)
#: a variant's weight falls to 1/e where it exceeds the best of its case by this share; at least
#: `LEAST`
NEAR, LEAST = 0.12, 0.02
#: weight of a time itself, relative to that of its difference to the other times of the case
PLAIN = 0.3
#: regularisation towards the start, per unit of log change
DAMPING, ROUNDS = 0.05, 30
#: number of parts for cross-validation
PARTS = 6
Costs = Mapping[tuple[str, str], KernelCosts]


@dataclass(frozen=True)
class Launch:
    """One measured variant of a case."""

    case: str
    #: (kernel, launch mode), as in `KernelCosts.key`
    key: tuple[str, str]
    measured: Measured


@dataclass(frozen=True)
class Quality:
    """Errors of predictions, and regrets of the resulting choices."""

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
    """Every measured variant of a record. Raises InvalidInput if today's planner makes other plans
    than those that were timed.
    """
    found = []
    for row in results(rows, "ok"):
        notes = row.get("notes", {})
        if "costs" not in notes:
            continue  # a peer, not a variant
        variant = Variant.from_notes(notes)
        plan = variant.plan(problem_of(row))
        made = {"tiles": plan.num_tiles, "partials": plan.num_slots}
        if any(notes[name] != value for name, value in made.items()):
            had = {name: notes[name] for name in made}
            raise invalid("record", f"{row['case']} {row['peer']}: {had}", f"plans as now: {made}")
        measured = Measured(plan, row["us"], variant.config.cluster, variant.fused)
        key = variant.config.kernel, mode_of(variant.config)
        found.append(Launch(row["case"], key, measured))
    # on a tie the first wins, as in `plan.choose`: the tile that reads each KV block once
    found.sort(key=lambda launch: -launch.measured.plan.tile_rows)
    if not found:
        raise invalid("record", "no variants", "a record that `mla-lab bench sweep` wrote")
    return found


class Timed:
    """Measured launches as arrays, case by case."""

    def __init__(self, found: Sequence[Launch]) -> None:
        self.us = np.array([launch.measured.us for launch in found])
        names = {name: i for i, name in enumerate(dict.fromkeys(x.case for x in found))}
        self.case = np.array([names[launch.case] for launch in found])
        self.cases = [np.flatnonzero(self.case == i) for i in range(len(names))]
        self.best = np.array([self.us[own].min() for own in self.cases])
        keys = dict.fromkeys(launch.key for launch in found)
        self.own = {
            key: np.array([i for i, launch in enumerate(found) if launch.key == key])
            for key in keys
        }
        self._launches = {
            key: Launches([found[i].measured for i in own]) for key, own in self.own.items()
        }

    def predict(self, costs: Costs) -> np.ndarray:
        """Predicted microseconds of each launch under `costs`."""
        predicted = np.empty(len(self.us))
        for key, own in self.own.items():
            predicted[own] = self.predict_own(costs[key])
        return predicted

    def predict_own(self, costs: KernelCosts) -> np.ndarray:
        """Predicted microseconds of one family's launches."""
        return self._launches[costs.key].predict(costs)

    def quality(self, predicted: np.ndarray) -> Quality:
        """Quality of predicted microseconds [launches] against the measured ones."""
        regrets = [
            float(self.us[own[predicted[own].argmin()]] / best)
            for own, best in zip(self.cases, self.best, strict=True)
        ]
        return Quality(
            error=float(np.median(np.abs(predicted / self.us - 1))),
            close=float(np.mean([regret <= CLOSE for regret in regrets])),
            mean_regret=float(np.mean(regrets)),
            worst_regret=max(regrets),
            cases=len(regrets),
        )


def fit_all(found: Sequence[Launch], start: Sequence[KernelCosts]) -> list[KernelCosts]:
    """`start`, with the measured families refitted to their launches."""
    timed = Timed(found)
    near = np.maximum(LEAST, np.exp(-(timed.us / timed.best[timed.case] - 1) / NEAR))
    weight = np.sqrt(near)
    in_case = np.bincount(timed.case, weights=near)
    keys = [costs.key for costs in start if costs.key in timed.own]
    base = {costs.key: costs for costs in start}
    varied = [(key, name) for key in keys for name in TOLD if getattr(base[key], name) > 0]
    origin = np.log([getattr(base[key], name) for key, name in varied])
    priced: dict[KernelCosts, np.ndarray] = {}

    def at(point: np.ndarray) -> dict[tuple[str, str], KernelCosts]:
        values: dict[tuple[str, str], dict[str, Any]] = {key: {} for key in keys}
        for (key, name), value in zip(varied, np.exp(point).tolist(), strict=True):
            values[key][name] = max(1.0, value) if name == "sharpness" else value
        return {key: replace(base[key], **values[key]) for key in keys}

    def residuals(point: np.ndarray) -> np.ndarray:
        costs, log = at(point), np.empty(len(timed.us))
        for key in keys:
            known = priced.get(costs[key])
            if known is None:
                known = np.log(timed.predict_own(costs[key]) / timed.us[timed.own[key]])
                priced[costs[key]] = known
            log[timed.own[key]] = known
        while len(priced) > 4 * len(varied):
            priced.pop(next(iter(priced)))
        shared = np.bincount(timed.case, weights=near * log) / in_case
        apart, itself = weight * (log - shared[timed.case]), PLAIN * weight * log
        return np.concatenate([apart, itself, DAMPING * (point - origin)])

    fitted = base | at(gauss_newton(residuals, origin, ROUNDS))
    return [fitted[costs.key] for costs in start]


def quality(costs: Sequence[KernelCosts], found: Sequence[Launch]) -> Quality:
    """How well `costs` predict and choose among `found`."""
    timed = Timed(found)
    return timed.quality(timed.predict({family.key: family for family in costs}))


def held_out(found: Sequence[Launch], start: Sequence[KernelCosts]) -> Quality | None:
    """Cross-validation: every case judged with constants fitted to the other parts; None with fewer
    cases than parts.
    """
    names = list(dict.fromkeys(launch.case for launch in found))
    if len(names) < PARTS:
        return None
    timed = Timed(found)
    predicted = np.empty(len(timed.us))
    for part in range(PARTS):
        held = set(names[part::PARTS])
        rest = [launch for launch in found if launch.case not in held]
        costs = fit_all(rest, start)
        mine = np.array([launch.case in held for launch in found])
        predicted[mine] = timed.predict({family.key: family for family in costs})[mine]
    return timed.quality(predicted)


def write(
    path: Path, costs: Sequence[KernelCosts], source: str, keys: Iterable[tuple[str, str]]
) -> None:
    """Write `data/runtime/kernel_costs.json`; the constants of `keys` get the new `source`."""
    fitted = set(keys)
    told = [replace(c, source=source) if c.key in fitted else c for c in costs]
    rows = {"costs": [row_of(family) for family in told]}
    path.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


def row_of(family: KernelCosts) -> dict[str, Any]:
    """Constants as plain values, rounded to 4 digits."""
    return {
        name: float(f"{value:.4g}") if isinstance(value, float) else value
        for name, value in vars(family).items()
    }


def source_of(rows: Sequence[Row], found: Sequence[Launch]) -> str:
    """Card, date, commit and counts of launches and cases, in words."""
    run = next(row for row in rows if row["kind"] == "run")
    env = run["environment"]
    card = env["card"]["name"] if env["card"] else "CPU"
    cases = len({launch.case for launch in found})
    commit = (env["commit"] or "unknown")[:9]
    return f"{card}, {run['time'][:10]}, commit {commit}, {len(found)} launches of {cases} cases"
