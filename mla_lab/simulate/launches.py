"""Launches of ours out of a benchmark's record, each with the plan that was timed."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from ..bench.records import problem_of, results
from ..errors import InvalidInput
from ..gpu import H200 as CARD
from ..plan.choose import choose
from ..plan.config import KernelConfig
from ..plan.kernel_costs import recorded_costs
from ..plan.schedule import make_plan
from ..plan.tile import Plan
from ..plan.ways import way_of
from ..problem import Problem

OURS = "mla-lab"
#: below this floor (seconds) fixed costs decide, whatever side of the roofline a problem is on
LATENCY = 15e-6
REGIMES = ("latency", "memory", "compute")
#: fields and options in the name of a kernel's configuration (`KernelConfig.name`)
_FIELDS = re.compile(r"_(tile_rows|cluster)-(\d+)")
_OPTIONS = re.compile(r"_(fused_merge|grid|pair)(\d+)")


@dataclass(frozen=True)
class Launch:
    """One case: the plan of its launch, CTAs of a worker, microseconds (mean over the parts)."""

    name: str
    plan: Plan
    cluster: int
    us: float

    @property
    def kernel(self) -> str:
        """The family whose constants it tells."""
        return self.plan.config.kernel if self.plan.config else "cute/q_m"

    @property
    def problem(self) -> Problem:
        return self.plan.problem


def launches(rows: Iterable[dict[str, Any]], peer: str = OURS) -> list[Launch]:
    """Timed launches of dense problems whose plan can be made again; see `remade`."""
    timed: dict[str, list[dict[str, Any]]] = {}
    for row in results(rows, "ok"):
        if row["peer"] == peer and not row["problem"]["top_k"] and not row["features"]:
            timed.setdefault(row["case"], []).append(row)
    found = []
    for name, parts in timed.items():
        plan = remade(problem_of(parts[0]), parts[0].get("notes", {}))
        if plan is not None and plan.config is not None:
            us = sum(row["us"] for row in parts) / len(parts)
            found.append(Launch(name, plan, plan.config.cluster, us))
    return found


def remade(problem: Problem, notes: dict[str, Any]) -> Plan | None:
    """The plan that a record notes, of a kernel that `choose` knows; None where it would be cut
    otherwise today. Without notes, the plan that `choose` makes now.
    """
    if "kernel" not in notes:
        return choose(problem, CARD).plan(problem)
    config = config_of(notes["kernel"])
    try:
        made = _formula if notes["schedule"] == "grid" else _costed
        plan = made(problem, config, notes)
    except InvalidInput:
        return None
    same = {"tiles": plan.num_tiles, "workers": plan.num_workers, "partials": plan.num_slots}
    return plan if all(notes[key] == value for key, value in same.items()) else None


def config_of(name: str) -> KernelConfig:
    """What the simulator needs of a configuration, out of its name."""
    fields = {key: int(value) for key, value in _FIELDS.findall(name)}
    options = tuple((key, int(value)) for key, value in _OPTIONS.findall(name))
    kernel = "cute/kv_m" if name.startswith("cute_kv_m") else "cute/q_m"
    return KernelConfig(kernel, **fields, options=options)  # type: ignore[arg-type]


def _formula(problem: Problem, config: KernelConfig, notes: dict[str, Any]) -> Plan:
    """Every request in even pieces, as many as there are workers for a row tile."""
    row_tiles = max(1, -(-int(problem.rows.max()) // config.tile_rows))
    splits = notes["workers"] // (problem.batch * row_tiles)
    plan = make_plan(
        problem,
        tile_rows=config.tile_rows,
        num_workers=notes["workers"],
        policy="fixed",
        schedule="grid",
        num_splits=splits,
    )
    return replace(plan, config=config)


def _costed(problem: Problem, config: KernelConfig, notes: dict[str, Any]) -> Plan:
    """The cost policy's cuts for this kernel and tile, with the constants recorded now."""
    costs = tuple(c for c in recorded_costs() if c.key == (config.kernel, way_of(config)))
    plan = choose(problem, CARD, costs=costs or None).plan(problem)
    return replace(plan, config=config) if plan.tile_rows == config.tile_rows else plan
