"""How a request's neighbours decide where it is cut, and a policy that does not look at them."""

from __future__ import annotations

from typing import Any

import ipywidgets as widgets

from ...core.problem import Problem
from ...plan import Plan, make_plan
from .. import explorer
from ..source import formula
from ..svg import Cell, Svg, box, document, label, tint

#: the request that is watched, always first in its batch
KV_LEN = 8192
TILE_KV = 64
#: workers of a 128-head step on 132 SMs: one bundle of two row tiles each
PARTS = 66
OVERHEAD = 5
_STRIP = (980.0, 40.0)


def first_request_plan(policy: str, neighbours: int, length: int) -> Plan:
    """The plan of one 8192-token request beside `neighbours` others of `length` tokens."""
    problem = Problem((1,) * (1 + neighbours), (KV_LEN,) + (length,) * neighbours, heads=64)
    knobs: dict[str, Any] = {"parts": PARTS, "overhead": OVERHEAD} if policy == "greedy" else {}
    return make_plan(problem, num_workers=PARTS, tile_kv=TILE_KV, policy=policy, **knobs)


def pieces(plan: Plan) -> list[tuple[int, int]]:
    """Block ranges of request 0, in split order."""
    mine = plan.tiles[(plan.tiles[:, 0] == 0) & (plan.tiles[:, 1] == 0)]
    return [(int(t[2]), int(t[3])) for t in sorted(mine.tolist(), key=lambda t: t[4])]


class NeighbourExplorer(explorer.Explorer):
    """The cuts of one request as coloured strips, one strip a policy."""

    name = "lab.NeighbourExplorer"
    source = formula("plan")
    frames_over = "neighbours"

    def controls(self) -> dict[str, widgets.Widget]:
        counts = (0, 1, 2, 3, 7, 15, 31, 63, 127)
        return {
            "neighbours": explorer.steps("neighbours", counts, 0, "300px"),
            "length": explorer.steps("of length", (512, 1024, 2048, 4096, 8192), 8192, "280px"),
            "policy": explorer.choice("policy", ["greedy", "fa3", "uniform", "cost"], "greedy"),
        }

    def figure(self, state: dict[str, Any]) -> Svg:
        policies = (state["policy"], "fixed_size")
        plans = [first_request_plan(p, state["neighbours"], state["length"]) for p in policies]
        parts, counts = [], []
        for row, (policy, plan) in enumerate(zip(policies, plans, strict=True)):
            cuts = pieces(plan)
            counts.append(f"{policy} {len(cuts)}")
            parts.append(_strip(20 + row * 92, policy, cuts))
        finding = f"8192 tokens beside {state['neighbours']} others: splits " + ", ".join(counts)
        parts.insert(0, label(0, 10, finding, size=16, anchor="start"))
        return document(_STRIP[0] + 10, 210, "".join(parts), finding)


def _strip(y: float, policy: str, cuts: list[tuple[int, int]]) -> str:
    """One request as a bar of 128 blocks, one fill a split."""
    scale = _STRIP[0] / (KV_LEN // TILE_KV)
    parts = [
        label(
            0,
            y + 20,
            f"{policy}: {len(cuts)} split{'s' * (len(cuts) > 1)}",
            size=14,
            anchor="start",
        )
    ]
    for i, (begin, end) in enumerate(cuts):
        width = (end - begin) * scale
        cell = Cell(
            str(i) if width > 20 else "", tint(i), f"split {i}: blocks {begin} to {end - 1}"
        )
        parts.append(box(begin * scale, y + 34, width, _STRIP[1], cell))
    return "".join(parts)
