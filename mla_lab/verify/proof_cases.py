"""The cases of `mla-lab doctor --prove`, and the builds that they launch.

Three lists: "kernels", every pair of levels that the CuTe kernels of the card run, from the choices
of `cases`; "contract", every pair of the contract's; "published", every `EVERY`-th of the 396
configurations of `published`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial

import torch

from ..backends.cute import blackwell, proofs
from ..backends.cute.catalogue import build_for
from ..backends.rank_mask import masked
from ..core.gpu import Gpu
from ..jit.shipped import shipped
from ..plan.config import KernelConfig
from . import cases, published
from .check import Outcome, run_case
from .pairwise import Case, cover

#: of the published configurations; it shares no factor with the 396, so that all levels occur
EVERY = 7


@dataclass(frozen=True)
class Check:
    """One case of the proof; `backend` is the one that must run it ("": any)."""

    part: str
    name: str
    backend: str
    run: Callable[[], Outcome]


def has_sm100_kernel(case: Mapping[str, str], arch: str = "sm_100a") -> bool:
    """True if the SM100 kernel runs the case (some of its levels may be open)."""
    full = cases.whole({"page_size": "64", **cases.for_kernels(case)})
    # the planner of batch-invariant calls is CUDA C++, which has no build for sm_103a
    if full["invariant"] == "yes" and arch != "sm_100a":
        return False
    return blackwell.refusal(cases.form_features(full), cases.problem_of(full)) is None


@lru_cache(maxsize=4)
def kernel_cases(gpu: Gpu) -> tuple[Case, ...]:
    """Cases in which every pair of levels that this card's CuTe kernels run occurs."""
    ours: Callable[[Mapping[str, str]], bool] = cases.has_kernel
    if blackwell.is_blackwell(gpu):
        ours = partial(has_sm100_kernel, arch=proofs.arch(gpu))
    return tuple(cover(cases.FACTORS, lambda case: cases.allowed(case) and ours(case)))


def builds(gpu: Gpu) -> list[KernelConfig]:
    """What the lists launch on this card, to be compiled ahead by several processes."""
    arch = proofs.arch(gpu)
    if not blackwell.is_blackwell(gpu):
        return shipped(arch)
    found = [_build(case) for case in kernel_cases(gpu)]
    found += [_build(_plain(c)) for c in published.configurations()[::EVERY]]
    if any(case["invariant"] == "yes" for case in kernel_cases(gpu)):
        found.append(KernelConfig("cuda/planner"))
    return list(dict.fromkeys(found))


def _plain(c: published.Configuration) -> Case:
    return cases.whole({"format": c.dtype, "page_size": str(c.page_size), "heads": "128"})


def _build(case: Case) -> KernelConfig:
    features = masked(cases.form_features(case))
    problem = cases.problem_of(case)
    return build_for(blackwell.config_for(problem), problem, None, features)


class Lists:
    """The cases of a card, with the buffers that they share."""

    def __init__(self, gpu: Gpu, device: str) -> None:
        self.gpu, self.device = gpu, device
        self.ours = "cute" if blackwell.is_blackwell(gpu) else ""
        self._pool: published.Pool | None = None
        self.workspace = torch.zeros(cases.CARD_WORKSPACE_BYTES, dtype=torch.uint8, device=device)

    def checks(self) -> list[Check]:
        """All cases, those of the kernels first."""
        lists = (
            ("kernels", kernel_cases(self.gpu), self.ours),
            ("contract", cover(cases.FACTORS, cases.allowed), ""),
        )
        found = []
        for part, chosen, backend in lists:
            for index, case in enumerate(chosen):
                name = "_".join(case.values()).replace(" ", "-")
                found.append(
                    Check(part, name, backend, partial(run_case, case, index, self.workspace))
                )
        for c in published.configurations()[::EVERY]:
            found.append(Check("published", c.name, self.ours, partial(self._published, c)))
        return found

    def _published(self, c: published.Configuration) -> Outcome:
        if self._pool is None or self._pool.dtype != c.dtype:
            same = [o for o in published.configurations()[::EVERY] if o.dtype == c.dtype]
            self._pool = None  # one dtype at a time lies in memory
            most = max(o.batch * o.kv_len for o in same)
            self._pool = published.Pool(c.dtype, most, self.device)
        return published.run(c, self._pool, self.workspace)
