"""Which builds of the CuTe kernels can be had: all with a compiler, else those that were bundled.

Where nothing can be compiled, a call takes the first of these whose build is there:

1. the ways to launch it, in the order of their predicted times (`plan.choose`);
2. the kernel that fetches tokens one by one (`gather`), for pages of any size and every feature but
   skip-softmax;

and is refused by the name of the best build where none of them is. Which one runs follows from
the call's form and from what is there, never from what is in the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, lru_cache

from ... import jit
from ...call.form import Features
from ...core.errors import Unsupported
from ...core.problem import Problem
from ...jit import toolchain
from ...jit.build import canonical
from ...jit.shipped import CUTE
from ...jit.source import supported_archs
from ...plan.config import KernelConfig
from .families import arch_of, complete


def build_for(
    config: KernelConfig, problem: Problem, pdl: bool | None, features: Features
) -> KernelConfig:
    """The build of `config` for this call: `complete`, and without the causal rule where each
    request has one query token, if that build is there or none is. The rule costs 0.2 us of a short
    call (H200, 2026-11-20); under batch invariance it is there for all requests, and of a ragged
    call, whose bound of query tokens may be too small.
    """
    build = complete(config, problem, pdl, features)
    if pdl is False:
        build = without_pdl(build)
    longest = max(problem.q_lens, default=1)
    every = longest > 1 or features.ragged or features.batch_invariant
    if build.mask != "causal" or every:
        return build
    return without_rule(build)


@lru_cache(maxsize=256)
def without_pdl(build: KernelConfig) -> KernelConfig:
    """`build`, which has no programmatic dependent launch; where it is neither here nor can be
    compiled, the same with it, if that is here. Results are the same: its launch may begin while
    the kernel in front ends.
    """
    arch = arch_of(build)
    if jit.find(build, arch) is not None or toolchain.missing(build.kernel) is None:
        return build
    options = tuple(option for option in build.options if option[0] != "pdl")
    other = replace(build, options=options)
    return build if jit.find(other, arch) is None else other


@lru_cache(maxsize=256)
def without_rule(build: KernelConfig) -> KernelConfig:
    """`build` without the causal rule, or itself where that alone is there. Asked once a process:
    to look for a build takes a millisecond or two.
    """
    plain, arch = replace(build, mask="none"), arch_of(build)
    here = jit.find(plain, arch) is not None or jit.find(build, arch) is None
    return plain if here else build


def missing_for(
    config: KernelConfig, problem: Problem, features: Features, arch: str = ""
) -> str | None:
    """None where the kernels of a call by `config` are compiled or a compiler is here, else what
    is missing: a feature of the kernel, or a build; of the first architecture that the kernel is
    written for, or of `arch`.
    """
    arch = arch or arch_of(config)
    try:
        wanted = [build_for(config, problem, False if features.no_pdl else None, features)]
    except Unsupported as error:  # a feature that this kernel does not have
        return str(error)
    if features.batch_invariant and arch.startswith("sm_10"):
        wanted.append(KernelConfig("cuda/planner"))
    for build in wanted:
        if arch not in supported_archs(build.kernel):
            return f"{build.name()} is not built for {arch}"
        if jit.find(build, arch) is None and (why := toolchain.missing(build.kernel)):
            return f"{build.name()} is not compiled here, and cannot be: {why}"
    return None


@cache
def _shipped() -> frozenset[KernelConfig]:
    return frozenset(canonical(config) for config in CUTE)


def able_as_shipped(problem: Problem, features: Features) -> Callable[[KernelConfig], bool]:
    """Return the test whether a configuration's kernels ship and can be had.

    It is for optional builds: where one would have to be compiled first, another kernel serves
    the call at once.
    """

    def has(config: KernelConfig) -> bool:
        build = build_for(config, problem, False if features.no_pdl else None, features)
        return canonical(build) in _shipped() and missing_for(config, problem, features) is None

    return has


def able(problem: Problem, features: Features) -> Callable[[KernelConfig], bool]:
    """Whether the kernels of a call by some configuration can be had."""
    return lambda config: missing_for(config, problem, features) is None
