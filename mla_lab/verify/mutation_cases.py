"""The calls in which synchronising instructions are deleted: builds of each family and format.

Requests are so long that rings wrap, and workers so few that most have several work tiles; a piece
of two KV tiles and an empty one occur, and splits are merged. Scores are so large that running
maxima rise, and accumulators are rescaled.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

from ..emulate.calls import call_of, make_call, problem_for
from ..emulate.mutate import Subject
from ..jit.shipped import CUTE, SM100
from ..plan.config import KernelConfig

#: times the scale of scores
LARGE = 8.0


class Cut(NamedTuple):
    """How a call is cut: lengths of requests, pieces a request, workers (0: one a piece), slots in
    a list of a build that gathers them.
    """

    kv_lens: tuple[int, ...]
    splits: int = 2
    workers: int = 0
    top_k: int = 0


@dataclass(frozen=True)
class Case:
    """A build and its calls."""

    family: str
    config: KernelConfig
    cuts: tuple[Cut, ...]

    @property
    def arch(self) -> str:
        """What it is compiled for."""
        return "sm_100a" if self.family == "mla_sm100" else "sm_90a"

    def calls(self) -> list[Subject]:
        """The calls."""
        return [self._call(cut) for cut in self.cuts]

    def _call(self, cut: Cut) -> Subject:
        problem = problem_for(self.config, cut.kv_lens, top_k=cut.top_k)
        inputs = make_call(self.config, problem, cut.splits, workers=cut.workers).inputs
        inputs = replace(inputs, bmm1_scale=LARGE * inputs.bmm1_scale)
        return call_of(self.config, inputs, cut.splits, cut.workers)


#: of keep_ab, of swap_ab, and of swap_ab whose workers have several tiles
KEEP = (Cut((460, 40, 40), 2, 2),)
SWAP = (Cut((660, 300, 40)),)
WALK = (Cut((660, 230, 40), 2, 2),)
SM90: dict[str, tuple[Cut, ...]] = {
    "cute_keep_ab_sm90_shaped1": KEEP,
    "cute_keep_ab_sm90_tile_rows-128_cluster-2_shaped1": KEEP,
    "cute_keep_ab_sm90_q_dtype-e4m3_kv_format-e4m3_shaped1": (Cut((700, 300, 40), 2, 2),),
    "cute_keep_ab_sm90_kv_format-fp8_656_tile_rows-128_cluster-2_shaped1": (Cut((330, 40), 2, 1),),
    "cute_swap_ab_sm90_tile_rows-8_mask-causal_fused_merge3_grid1_shaped1": (Cut((660, 230, 40)),),
    "cute_swap_ab_sm90_tile_rows-16_mask-causal_fused_merge3_grid1_pair2_shaped1": SWAP,
    "cute_swap_ab_sm90_tile_rows-8_cluster-8_mask-causal_fused_merge2_grid1_shaped1": (
        Cut((460, 40)),
    ),
    "cute_swap_ab_sm90_tile_rows-16_mask-causal_fused_merge2_shaped1": WALK,
    "cute_swap_ab_sm90_q_dtype-e4m3_kv_format-e4m3_tile_rows-16_mask-causal_fused_merge3"
    "_grid1_shaped1": SWAP,
    "cute_swap_ab_sm90_kv_format-fp8_656_tile_rows-16_mask-causal_fused_merge2_shaped1": WALK,
    "cute_swap_ab_sm90_tile_rows-16_features1_fused_merge1_gather2_grid1_shaped1": (
        Cut((660, 40), 1, top_k=640),
        Cut((300,), 1, top_k=128),
    ),
}
#: more work tiles a worker than records of them are kept, or fewer; a tail in each chunk of V
SM100_CUTS = (Cut((10, 700, 40, 80, 120), 2, 2), Cut((700, 40), 2, 2))


@cache
def cases() -> dict[str, Case]:
    """All cases by the names of their builds."""
    known = {config.name(): config for config in CUTE}
    found = {}
    for name, cuts in SM90.items():
        family = "keep_ab" if "keep_ab" in name else "swap_ab"
        found[name] = Case(family, known[name], cuts)
    found[SM100[0].name()] = Case("mla_sm100", SM100[0], SM100_CUTS)
    return found
