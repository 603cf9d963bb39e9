"""A variant of our kernels as a peer: kernel, tile, workers and splits are given, not chosen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ... import backends
from ...core.problem import Problem
from ...plan import KernelConfig, KernelCosts, Plan, plan_on
from ...plan.kernel_costs import recorded_of
from ...plan.launch_modes import KEEP_AB_PERSISTENT, mode_of
from ..rotation import Rotation
from .base import PeerBase, Prepared
from .ours import describe_plan, prepared_launch


@dataclass(frozen=True)
class Variant(PeerBase):
    """A peer that runs `policy`'s plan on `config`; its notes say how to make the plan again."""

    config: KernelConfig
    workers: int
    policy: str
    knobs: tuple[tuple[str, int], ...]
    #: weigh tiles in their assignment to workers; where policy is "cost" they decide the splits too
    costs: KernelCosts
    backend: str = "cute"

    @property
    def name(self) -> str:
        """Kernel, rows x cluster, launch mode, policy with knobs; "apart" with a merge kernel, as
        records of earlier sweeps have it.
        """
        config = self.config
        parts = [
            config.kernel.removeprefix("cute/").removesuffix("_sm90"),
            f"{config.tile_rows}x{config.cluster}",
        ]
        mode = mode_of(config)
        parts += [mode.removeprefix("swap_ab_")] if mode != KEEP_AB_PERSISTENT.name else []
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
        return plan_on(
            config,
            problem,
            num_workers=self.workers,
            policy=self.policy,
            schedule="grid" if config.option("grid") else "persistent",
            model=self.costs.model(problem, *shape),
            **dict(self.knobs),
        )

    def available(self, device: torch.device) -> str | None:
        known = backends.MODULES
        return None if self.backend in known else f"backend: got {self.backend}, have {list(known)}"

    def prepare(self, rotation: Rotation) -> Prepared:
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
            # they decide the splits where the policy is "cost", else the assignment alone
            "costs": vars(self.costs) if self.policy == "cost" else None,
        }

    @classmethod
    def from_notes(cls, notes: Mapping[str, Any]) -> Variant:
        """The variant that wrote `notes`; where it was not split by costs, with today's constants.

        Raises InvalidInput for constants of another cost model.
        """
        config = KernelConfig.from_dict(notes["config"])
        noted = notes["costs"]
        recorded = recorded_of((config.kernel, mode_of(config)))
        return cls(
            config=config,
            workers=notes["workers"],
            policy=notes["policy"],
            knobs=tuple(notes["knobs"].items()),
            costs=KernelCosts.from_row(noted) if noted else recorded,
        )
