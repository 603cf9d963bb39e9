"""The CuTe backend: kernels of `mla_lab/cute` on a Hopper card, by way of prebuilt libraries.

With a `plan` its words are copied to the device once. Without one, the device derives the work from
lengths that never leave it. On a static grid each worker computes its piece from the length of its
own request; in a persistent launch each CTA computes its tiles, or the pieces of a batch-invariant
call, from all lengths. Kernel, tile and bounds are chosen from what a call's form tells, so that a
captured graph stays right when lengths change.

Where nothing can be compiled, the choice is among the builds that are there (see `builds`).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

from ...call.bind import Call
from ...call.form import Features
from ...call.workspace import Workspace
from ...core.errors import BuildError, Unsupported, unsupported
from ...core.gpu import H200, Gpu
from ...core.problem import Problem
from ...plan import KernelConfig
from ...plan.choose import Kind, invariant_kinds, invariant_tile
from ...plan.kernel_costs import recorded_of
from ...plan.launch_modes import (
    E4M3,
    FORMATS,
    KEEP_AB_PERSISTENT,
    OUTS,
    QUERY_HI_LO,
    SWAP_AB_PERSISTENT,
    LaunchMode,
)
from ...plan.pricing import config_of
from ...plan.selection import Selection, dual_of, select
from .. import self_check
from ..base import SKIPS_NOTHING, Replay, gpu_of, not_taken
from ..rank_mask import RankMask, masked, repeated, width_was_read, with_mask
from . import blackwell, keep_ab_gather, proofs
from .catalogue import able, able_as_shipped, missing_for
from .device_plan import Formula, PlanOnDevice, SelfScheduled, check_bundles, of_selection
from .families import FAMILIES, SM100, costs, size_reason
from .launch import Launch, rows_were_read
from .token_gather import configs_for, formula_for, gathers, most_tokens_of_a_page

#: features of a call that some Hopper kernel takes
TAKES = frozenset(
    (
        *("ragged", "causal", "mask", "sinks", "lse", "sparse", "top_k_lens", "skip_softmax"),
        *("tensor_scales", "context_parallel", "batch_invariant", "strided_pages"),
        *("strided_tables", "pdl", "no_pdl", "planned"),
    )
)
#: query tokens with which a request of any heads counts as one of many rows
MOST_TOKENS = 64
#: features that a build is made for
COMPILED = ("mask", "sinks", "tensor_scales", "skip_softmax", "no_pdl")


class CuteBackend:
    """MLA decode by CuTe kernels."""

    name = "cute"
    reads_lengths = False
    follows_plans = True

    def supports(self, features: Features, problem: Problem, gpu: Gpu | None) -> str | None:
        """Hardware first, then what the kernels lack, then whether they can be had here."""
        if gpu is None:
            return "the tensors are on a CPU; its kernels run on a GPU"
        features = masked(features)
        if blackwell.is_blackwell(gpu):
            return blackwell.no_consent(gpu) or sm100_reason(problem, features, gpu)
        reason = common_reason(features, problem, gpu)
        if reason:
            return reason
        if not _by_token(problem, gpu, features):
            configs = _configs(problem, gpu, features)
            return _few_workers(configs, gpu, features) or _missing(configs, problem, features)
        here, invariant = able(problem, features), features.batch_invariant
        try:  # of a ragged call the fewest query tokens that it may have
            fewest = max(problem.q_lens) if features.ragged else problem.total_q
            formula_for(problem, fewest, gpu, invariant, here)
        except Unsupported as error:
            return str(error)
        return _missing(list(configs_for(problem, invariant, here)), problem, features)

    def note(self, features: Features, problem: Problem, gpu: Gpu | None) -> str | None:
        """The SM100 kernel's mark where no proof of it counts; that no tile is skipped, which no
        build that fetches tokens one by one does.
        """
        if gpu is None or blackwell.is_blackwell(gpu) or not features.skip_softmax:
            return blackwell.mark(gpu)
        return SKIPS_NOTHING if _by_token(problem, gpu, masked(features)) else None

    def plan(self, call: Call, gpu: Gpu | None) -> PlanOnDevice | SelfScheduled | Formula:
        """A plan that the device makes in each launch, within the call's bounds, or a formula.

        A bound counts as the next power of two, so that it may grow step by step without effect.
        """
        if gpu is None:
            raise BuildError("plan: got a CPU; supported: a GPU")
        problem, features = call.problem, masked(call.features)
        if not problem.top_k:
            longest = min(1 << (max(problem.kv_lens) - 1).bit_length(), call.form.bounds.kv_lens[0])
            problem = replace(problem, kv_lens=(longest,) * problem.batch)
        if blackwell.is_blackwell(gpu):
            return blackwell.plan(problem, call.form.total_q, gpu, features)
        return _plan(problem, call.form.total_q, gpu, features)

    def run(self, call: Call, plan: Any, workspace: Workspace) -> Replay | None:
        """Enqueues the call; returns what repeats it for equal calls, where there are any."""
        if call.features.context_parallel:
            launch = repeated(call, self.launch(with_mask(call), plan, workspace))
            RankMask.of(call).hide_longer(call.args, call.out, call.lse)
        else:
            launch = self.launch(call, plan, workspace)
        return None if width_was_read(call) or rows_were_read(call, plan) else launch

    def launch(self, call: Call, plan: Any, workspace: Workspace) -> Replay:
        """As `run`, of a call that is not context parallel. On a Blackwell card the first one of a
        configuration is compared with the torch backend (`self_check`).
        """
        gpu = gpu_of(call.form.device) or H200
        launch = Launch.of(call, plan, workspace, gpu)
        if blackwell.is_blackwell(gpu):
            check = self_check.mla_check(call, launch.config, gpu)
            check.around(lambda: launch(call.args, call.out, call.lse))
        else:
            launch(call.args, call.out, call.lse)
        return launch.repeat


def sm100_reason(problem: Problem, features: Features, gpu: Gpu) -> str | None:
    """Why the SM100 kernel does not run a call on a Blackwell card, consent aside."""
    reason, arch = blackwell.refusal(features, problem), proofs.arch(gpu)
    return reason or missing_for(blackwell.config_for(problem), problem, features, arch)


def common_reason(features: Features, problem: Problem, gpu: Gpu) -> str | None:
    """What no kernel of ours takes, hardware first; None where some kernel may."""
    reason = _gpu_reason(gpu) or not_taken(features.names(), TAKES, "its kernels have")
    return reason or _format_reason(problem)


def _gpu_reason(gpu: Gpu) -> str | None:
    archs = {arch: None for family in FAMILIES.values() for arch in family.archs}
    if gpu.arch in archs:
        return None
    return f"the GPU is {gpu.arch}; its kernels are for {(*archs, *SM100.archs)}"


def _format_reason(problem: Problem) -> str | None:
    """What no family has; formats that no mode is compiled for are told with those that are."""
    reason = size_reason(problem)
    if reason:
        return reason
    most = most_tokens_of_a_page(problem)
    if problem.page_size > most:
        return f"pages of {problem.page_size} tokens; its kernels take up to {most}"
    operands = FORMATS.get((problem.q_dtype, problem.kv_format))
    if operands is not None and problem.out_dtype in OUTS[operands]:
        return None
    taken = ", ".join(f"{q} over {kv} (out {', '.join(OUTS[o])})" for (q, kv), o in FORMATS.items())
    return (
        f"query {problem.q_dtype}, cache {problem.kv_format}, out {problem.out_dtype}; its kernels "
        f"take {taken}"
    )


def _missing(configs: list[KernelConfig], problem: Problem, features: Features) -> str | None:
    reasons = (missing_for(config, problem, features) for config in configs)
    return next(filter(None, reasons), None)


def _few_workers(configs: list[KernelConfig], gpu: Gpu, features: Features) -> str | None:
    """Why a batch-invariant call without a plan cannot be cut into pieces on `gpu`."""
    if not features.batch_invariant or features.planned:
        return None
    try:
        for config in configs:
            check_bundles(gpu.workers(config.cluster), gpu)
    except Unsupported as error:
        return str(error)
    return None


def _choice(problem: Problem, gpu: Gpu, features: Features) -> Selection:
    """By what a build depends on alone, so that calls which differ otherwise share it: by no
    length.
    """
    compiled = {name: getattr(features, name) for name in COMPILED}
    shortest = replace(problem, kv_lens=tuple(max(1, q_len) for q_len in problem.q_lens))
    return _chosen(shortest, gpu, Features(**compiled), features.ragged)


@lru_cache(maxsize=1024)
def _chosen(problem: Problem, gpu: Gpu, features: Features, ragged: bool) -> Selection:
    if features.skip_softmax:
        mode, rows = _skipping(problem)
        return Selection(config_of(problem, recorded_of(mode.key), rows, 1), 0)
    found = select(problem, gpu, able(problem, features), ragged)
    if found is None:
        raise unsupported("query", f"{problem.batch} requests", "a call that some kernel takes")
    if ragged or features.mask or features.sinks or features.tensor_scales:
        return found
    return dual_of(found, problem, gpu, able_as_shipped(problem, features))


def _skipping(problem: Problem) -> tuple[LaunchMode, int]:
    """Launch mode and rows of the kernel with skip-softmax: of 16 bits where products are what
    takes the time, and in the one tile with registers for it. Over eight bits a persistent one: of
    32 rows of e4m3, which have no registers for the entries of several pages a tile, else of 16.
    """
    operands = FORMATS[problem.q_dtype, problem.kv_format]
    if operands not in (E4M3, QUERY_HI_LO):
        return KEEP_AB_PERSISTENT, 64
    small = problem.page_size < KernelConfig.tile_kv
    return SWAP_AB_PERSISTENT, 16 if small or operands == QUERY_HI_LO else 32


def _configs(problem: Problem, gpu: Gpu, features: Features) -> list[KernelConfig]:
    """Kernels that take whole pages, for a call that such a kernel can run."""
    if features.batch_invariant:
        # of any request with so many heads, lest the others decide which builds are wanted
        any_rows = replace(problem, q_lens=(1, MOST_TOKENS), kv_lens=(MOST_TOKENS,) * 2)
        return [kind.choice.config for kind in _kinds(any_rows, gpu, features)]
    return [_choice(problem, gpu, features).config]


def _kinds(problem: Problem, gpu: Gpu, features: Features) -> list[Kind]:
    """The builds of a batch-invariant call and the requests of each; of skip-softmax there is one
    build for all.
    """
    if features.skip_softmax:
        mode, rows = _skipping(problem)
        kinds = [invariant_tile(problem, gpu, recorded_of(mode.key), (rows, 1), "skip-softmax")]
    else:
        kinds = invariant_kinds(problem, gpu, costs(), features.ragged)
    if features.planned:
        return kinds
    return [replace(kind, choice=replace(kind.choice, config=in_pieces(kind))) for kind in kinds]


def in_pieces(kind: Kind) -> KernelConfig:
    """The build of a kind whose CTAs find their pieces, where no plan is given."""
    config = kind.choice.config
    return replace(config, options=(*config.options, ("pieces", 1)))


@lru_cache(maxsize=256)
def _by_token(problem: Problem, gpu: Gpu, features: Features) -> bool:
    """Whether tokens are fetched one by one: where they must be, and where only that build, which
    takes pages of any size and skips no tile, is here.
    """
    if gathers(problem):
        return True
    if features.planned:
        return False
    if _missing(_configs(problem, gpu, features), problem, features) is None:
        return False
    here = able(problem, features)
    return all(map(here, configs_for(problem, features.batch_invariant, here)))


@lru_cache(maxsize=256)
def _plan(
    problem: Problem, total_q: int, gpu: Gpu, features: Features
) -> PlanOnDevice | SelfScheduled | Formula:
    if _by_token(problem, gpu, features):
        if keep_ab_gather.is_ahead(problem, total_q, gpu, features):
            return keep_ab_gather.plan(problem, gpu)
        here = able(problem, features)
        return formula_for(problem, total_q, gpu, features.batch_invariant, here)
    if features.batch_invariant:
        kinds = _kinds(problem, gpu, features)
        return SelfScheduled.of_kinds(kinds, gpu, problem, total_q)
    planned = of_selection(_choice(problem, gpu, features), problem, gpu)
    return replace(planned, any_bound=True)
