"""The calls in which synchronising instructions are deleted: builds of each family and format.

Requests are so long that rings wrap, and workers so few that most have several work tiles; a piece
of two KV tiles and an empty one occur, and splits are merged. Scores are so large that running
maxima rise, and accumulators are rescaled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

from torch import Tensor

from ..emulate.calls import call_of, make_call, problem_for
from ..emulate.mutate import Subject
from ..jit.shipped import CUTE, SM100
from ..plan.config import KernelConfig
from ..plan.xqa import MLA_DIMS
from ..plan.xqa import config_for as xqa_config
from ..reference.inputs import make_inputs
from .emulated_xqa import arguments

#: times the scale of scores
LARGE = 8.0
XQA_ARCH = "sm_120a"


class Cut(NamedTuple):
    """How a call is cut: lengths of requests, pieces a request, workers (0: one a piece)."""

    kv_lens: tuple[int, ...]
    splits: int = 2
    workers: int = 0


@dataclass(frozen=True)
class Case:
    """A build and its calls; `top_k` slots in a list of a build that gathers them."""

    family: str
    config: KernelConfig
    cuts: tuple[Cut, ...]
    top_k: int = 0

    @property
    def arch(self) -> str:
        """What it is compiled for."""
        return {"mla_sm100": "sm_100a", "xqa": XQA_ARCH}.get(self.family, "sm_90a")

    def calls(self) -> list[Subject]:
        """The calls."""
        return [self._call(cut) for cut in self.cuts]

    def _call(self, cut: Cut) -> Subject:
        if self.family == "xqa":
            return XqaCall.of(self.config, cut)
        problem = problem_for(self.config, cut.kv_lens, top_k=self.top_k)
        inputs = make_call(self.config, problem, cut.splits, workers=cut.workers).inputs
        inputs = replace(inputs, bmm1_scale=LARGE * inputs.bmm1_scale)
        return call_of(self.config, inputs, cut.splits, cut.workers)


@dataclass(frozen=True)
class XqaCall:
    """A call of the CUDA C++ kernel."""

    args: tuple[Any, ...]
    written: Sequence[Tensor]
    results: Sequence[Tensor]

    @staticmethod
    def of(config: KernelConfig, cut: Cut) -> XqaCall:
        """Requests in pieces of 64 keys, `cut.splits` at most."""
        inputs = make_inputs(problem_for(config, cut.kv_lens), 0, ["lse"], workspace_bytes=64)
        inputs = replace(inputs, bmm1_scale=LARGE * inputs.bmm1_scale)
        args, out, lse = arguments(inputs, cut.splits, 64, "natural")
        return XqaCall(args, args[3:8], (out, lse))


KEEP = (Cut((460, 40, 40), 2, 2),)
SWAP = (Cut((660, 230, 40)),)
WALK = (Cut((660, 230, 40), 2, 2),)
SM90: dict[str, tuple[Cut, ...]] = {
    "cute_keep_ab_sm90_shaped1": KEEP,
    "cute_keep_ab_sm90_tile_rows-128_cluster-2_shaped1": KEEP,
    "cute_keep_ab_sm90_q_dtype-e4m3_kv_format-e4m3_shaped1": KEEP,
    "cute_keep_ab_sm90_kv_format-fp8_656_tile_rows-128_cluster-2_shaped1": (Cut((330, 40), 2, 1),),
    "cute_swap_ab_sm90_tile_rows-8_mask-causal_fused_merge3_grid1_shaped1": SWAP,
    "cute_swap_ab_sm90_tile_rows-16_mask-causal_fused_merge3_grid1_pair2_shaped1": SWAP,
    "cute_swap_ab_sm90_tile_rows-8_cluster-8_mask-causal_fused_merge2_grid1_shaped1": (
        Cut((460, 40)),
    ),
    "cute_swap_ab_sm90_tile_rows-16_mask-causal_fused_merge2_shaped1": WALK,
    "cute_swap_ab_sm90_q_dtype-e4m3_kv_format-e4m3_tile_rows-16_mask-causal_fused_merge3"
    "_grid1_shaped1": SWAP,
    "cute_swap_ab_sm90_kv_format-fp8_656_tile_rows-16_mask-causal_fused_merge2_shaped1": WALK,
    "cute_swap_ab_sm90_tile_rows-16_features1_fused_merge1_gather2_grid1_shaped1": (
        Cut((660, 40), 1),
    ),
}
#: more work tiles a worker than records of them are kept, or fewer; a tail in each chunk of V
SM100_CUTS = (Cut((10, 700, 40, 80, 120), 2, 2), Cut((700, 40), 2, 2))
TOP_K = 640


@cache
def cases() -> dict[str, Case]:
    """All cases by the names of their builds."""
    known = {config.name(): config for config in CUTE}
    found = {}
    for name, cuts in SM90.items():
        family = "keep_ab" if "keep_ab" in name else "swap_ab"
        found[name] = Case(family, known[name], cuts, TOP_K * ("gather" in name))
    found[SM100[0].name()] = Case("mla_sm100", SM100[0], SM100_CUTS)
    xqa = xqa_config(MLA_DIMS, ("bf16", "bf16"), XQA_ARCH)
    found[xqa.name()] = Case("xqa", xqa, (Cut((70,), 2),))
    return found
