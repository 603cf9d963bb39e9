"""Our launches in a benchmark record, each with the plan that was timed."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

from ..bench.records import problem_of, results
from ..core.gpu import H200 as CARD
from ..core.problem import Problem
from ..plan.choose import choose
from ..plan.config import KernelConfig
from ..plan.cost import CostModel
from ..plan.schedule import plan_on
from ..plan.tile import Plan

OURS = "mla-lab"
#: seconds; below this floor fixed costs dominate on either side of the roofline
LATENCY = 15e-6
REGIMES = ("latency", "memory", "compute")
#: fields and options in the name of a kernel's configuration (`KernelConfig.name`)
_FIELD = re.compile(r"_([a-z]+(?:_[a-z]+)*)-([a-z0-9]+)")
_OPTION = re.compile(r"_([a-z_]+?)(\d+)(?=_|$)")
KERNELS = ("cute/swap_ab_sm90", "cute/keep_ab_sm90")


@dataclass(frozen=True)
class Launch:
    """One case: the plan of its launch, CTAs of a worker, microseconds (mean over the parts)."""

    name: str
    plan: Plan
    cluster: int
    us: float

    @property
    def kernel(self) -> str:
        """The kernel family whose constants this launch is used to fit."""
        return self.plan.config.kernel if self.plan.config else "cute/keep_ab_sm90"

    @property
    def problem(self) -> Problem:
        return self.plan.problem


def launches(rows: Iterable[dict[str, Any]], peer: str = OURS) -> list[Launch]:
    """Timed launches of dense problems whose plan can be reconstructed; see `remade`."""
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
    """The plan of a recorded launch; None where its notes hold no cost model of today's form.

    Without notes of a kernel, the plan that `choose` makes now.
    """
    if "kernel" not in notes:
        return choose(problem, CARD).plan(problem)
    known = {field.name for field in fields(CostModel)}
    if "model" not in notes or not set(notes["model"]) <= known:
        return None
    config = config_of(notes["kernel"])
    plan = plan_on(
        config,
        problem,
        num_workers=notes["workers"],
        schedule=notes["schedule"],
        policy=notes["policy"],
        model=CostModel(**notes["model"]),
        **notes["knobs"],
    )
    same = {"tiles": plan.num_tiles, "workers": plan.num_workers, "partials": plan.num_slots}
    if any(notes[key] != value for key, value in same.items()):
        return None
    return plan


def config_of(name: str) -> KernelConfig:
    """Kernel, tile and cluster that a configuration's name holds."""
    kernel = next((k for k in KERNELS if name.startswith(k.replace("/", "_"))), KERNELS[1])
    rest = name.removeprefix(kernel.replace("/", "_"))
    named = dict(_FIELD.findall(rest))
    options = tuple((key, int(value)) for key, value in _OPTION.findall(_FIELD.sub("", rest)))
    return KernelConfig(
        kernel,
        tile_rows=int(named.get("tile_rows", 64)),
        cluster=int(named.get("cluster", 1)),
        options=options,
    )
