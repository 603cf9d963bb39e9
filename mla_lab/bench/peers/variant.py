"""One way of ours to run a case: kernel, tile, workers and cuts given, not chosen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ... import backends
from ...core.errors import invalid
from ...core.problem import Problem
from ...plan import KernelConfig, KernelCosts, Plan, make_plan
from ...plan.kernel_costs import recorded_of
from ...plan.ways import ROWS, way_of
from ..rotation import Rotation
from .base import Contestant, Prepared
from .ours import describe_plan, prepared_launch


@dataclass(frozen=True)
class Variant(Contestant):
    """A peer that runs `policy`'s plan on `config`; its notes say how to make the plan again."""

    config: KernelConfig
    workers: int
    policy: str
    knobs: tuple[tuple[str, int], ...]
    #: weigh the tiles when they are given to workers, and cut them where policy is "cost"
    costs: KernelCosts
    backend: str = "cute"

    @property
    def name(self) -> str:
        """Kernel, rows x cluster, way, policy with its knobs, and the merge where it is apart."""
        config = self.config
        parts = [
            config.kernel.removeprefix("cute/").removesuffix("_sm90"),
            f"{config.tile_rows}x{config.cluster}",
        ]
        parts += [way_of(config)] if way_of(config) != ROWS.name else []
        parts += [self.policy, *(str(value) for _, value in self.knobs)]
        return "-".join(parts + ([] if self.fused else ["apart"]))

    @property
    def fused(self) -> bool:
        """True if the attention kernel merges its own partials."""
        return bool(self.config.option("fused_merge", 1))

    def plan(self, problem: Problem) -> Plan:
        """The plan of `problem`, for this kernel."""
        config = self.config
        shape = (config.tile_rows, config.tile_kv, config.cluster, self.fused)
        knobs: dict[str, Any] = dict(self.knobs)
        plan = make_plan(
            problem,
            tile_rows=config.tile_rows,
            tile_kv=config.tile_kv,
            num_workers=self.workers,
            policy=self.policy,
            schedule="grid" if config.option("grid") else "persistent",
            model=self.costs.model(problem, *shape),
            **knobs,
        )
        return replace(plan, config=config)

    def available(self, device: torch.device) -> str | None:
        """As `Peer.available`."""
        known = backends.MODULES
        return None if self.backend in known else f"backend: got {self.backend}, have {list(known)}"

    def prepare(self, rotation: Rotation) -> Prepared:
        """As `Peer.prepare`."""
        plan = self.plan(rotation.case.problem)
        launches = [
            prepared_launch(copy, rotation.case, plan, self.backend) for copy in rotation.copies
        ]
        return Prepared(tuple(launches), notes=self.notes(plan))

    def notes(self, plan: Plan) -> dict[str, Any]:
        """Fields from which `from_notes` makes the variant, and counts to check its plan by."""
        return {
            **describe_plan(plan),
            "config": self.config.as_dict(),
            "workers": self.workers,
            "knobs": dict(self.knobs),
            # they cut where the policy is "cost", and elsewhere only weigh
            "costs": vars(self.costs) if self.policy == "cost" else None,
        }

    @classmethod
    def from_notes(cls, notes: Mapping[str, Any]) -> Variant:
        """The variant that wrote `notes`, where it did not cut by costs with those recorded now.

        Raises InvalidInput where it did, by a cost model that is no more.
        """
        config = KernelConfig.from_dict(notes["config"])
        key = config.kernel, way_of(config)
        recorded = vars(recorded_of(key))
        noted = notes["costs"] or recorded
        if set(noted) != set(recorded):
            raise invalid("record", "constants of another cost model", "a sweep with today's")
        return cls(
            config=config,
            workers=notes["workers"],
            policy=notes["policy"],
            knobs=tuple(notes["knobs"].items()),
            costs=KernelCosts(**noted),
        )
