"""The CUDA backend: warp-level mma in CUDA C++ (kernels/xqa), on Hopper and, compiled, beyond.

It runs what the CuTe kernels do not: tables of their own for values, queries whose rows lie apart,
a `bmm1_scale` that is a number of 0 or less, an fp16 query over e4m3, and GPUs other than Hopper.
Lengths stay on the device; kernel and cuts follow from a call's form, so that a captured graph
stays right when lengths change. On a GPU on which the kernel was not tested, the first call of each
configuration is compared with the torch backend (`self_check`).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ...call.bind import Call
from ...call.decode_args import DecodeArgs
from ...call.form import Features
from ...call.workspace import Workspace
from ...core.errors import BuildError, Unsupported
from ...core.gpu import Gpu
from ...core.problem import Problem
from ...jit import ARCHS
from ...plan import KernelConfig
from ...plan.launch_modes import PAGE_SIZES
from ...plan.xqa import (
    FORMATS,
    MAX_BLOCKS,
    MLA_DIMS,
    SMALL_PAGES,
    Cuts,
    Rows,
    config_for,
    cut,
    row_tiles_for,
)
from .. import self_check
from ..base import SKIPS_NOTHING, Replay, believes_max_q_len, gpu_of, not_taken
from ..rank_mask import RankMask, repeated, with_mask
from . import xqa
from .xqa import Operands, Settings, XqaLaunch

#: features of a call that the kernel takes; it skips no tile, which skip_softmax leaves it free to
TAKES = frozenset(
    (
        *("ragged", "causal", "mask", "sinks", "lse", "skip_softmax", "tensor_scales"),
        *("nonpositive_scale", "separate_tables", "context_parallel", "batch_invariant"),
        *("strided_query", "strided_pages", "strided_tables", "pdl", "no_pdl", "planned"),
    )
)
#: of a call with a plan of the caller's
OWN_CUTS = "the plan is not followed: each request is cut by a formula"


class CudaBackend:
    """MLA decode by the CUDA C++ kernel."""

    name = "cuda"
    reads_lengths = False
    follows_plans = False

    def supports(self, features: Features, problem: Problem, gpu: Gpu | None) -> str | None:
        """Reasons by hardware first, then by features and formats, then by missing builds."""
        if gpu is None:
            return "the tensors are on a CPU; its kernel runs on a GPU"
        arch = xqa.arch_of(gpu)
        if arch is None:
            return f"the GPU is {gpu.arch}; its kernel is for {ARCHS}"
        reason = _feature_reason(features, arch) or _format_reason(problem, features)
        if reason:
            return reason
        config = _config(features, problem, arch)
        try:  # what a call with lengths at their bounds would raise
            _cut(config, problem, max(problem.q_lens), problem.kv_lens[0], 1, features)
        except Unsupported as error:
            return str(error)
        return xqa.build_reason(config, arch)

    def note(self, features: Features, problem: Problem, gpu: Gpu | None) -> str | None:
        """That the kernel skips no tile, and cuts requests by its formula."""
        said = [SKIPS_NOTHING] if features.skip_softmax else []
        said += [OWN_CUTS] if features.planned else []
        return "; ".join(said) or None

    def plan(self, call: Call, gpu: Gpu | None) -> Cuts:
        """Cuts for calls within this one's bounds. max_seq_len counts as the next power of two, so
        that it may grow from step to step.
        """
        arch = xqa.arch_of(gpu) if gpu is not None else None
        if gpu is None or arch is None:
            raise BuildError("plan: got no GPU that the kernel runs on; supported: one of its own")
        bounds, device = call.form.bounds, call.form.device
        config = _config(call.features, bounds, arch)
        longest = 1 << max(max(call.problem.kv_lens) - 1, 0).bit_length()
        at_once = 1 if call.features.batch_invariant else xqa.at_once(config, device, gpu.sms)
        return _cut(config, bounds, _q_len(call), longest, at_once, call.features)

    def run(self, call: Call, plan: Cuts, workspace: Workspace) -> Replay | None:
        """Enqueue the call; returns what launches it again for other tensors."""
        if call.features.context_parallel:
            again = self.run(with_mask(call), plan, workspace)
            RankMask.of(call).hide_longer(call.args, call.out, call.lse)
            return again and repeated(call, again)
        launch = MlaLaunch(
            XqaLaunch(plan, _settings(call), workspace, call.form.device),
            separate=call.features.separate_tables,
        )
        gpu = gpu_of(call.form.device)
        if gpu is None or self_check.proved(gpu):
            launch(call.args, call.out, call.lse)
        else:
            check = self_check.mla_check(call, plan.config, gpu)
            check.around(lambda: launch(call.args, call.out, call.lse))
        # without max_q_len the grid follows from lengths that were read for this call alone
        return None if call.form.max_q_len is None else launch


@dataclass(frozen=True)
class MlaLaunch:
    """A launch for calls of the same form, cuts and workspace."""

    launch: XqaLaunch
    separate: bool

    def __call__(self, args: DecodeArgs, out: Tensor, lse: Tensor | None) -> None:
        """Enqueue one call's tensors."""
        self.launch(Operands.of(args, args.kv_cache, args.kv_cache, out, lse))


def _cut(
    config: KernelConfig,
    bounds: Problem,
    q_len: int,
    longest: int,
    at_once: int,
    features: Features,
) -> Cuts:
    """The cuts of calls within `bounds`, of requests with at most q_len and `longest` tokens."""
    rows = Rows(bounds.batch, 1, q_len * bounds.heads, min(longest, bounds.kv_lens[0]))
    return cut(config, rows, bounds.latent_dim, at_once, features.batch_invariant)


def _config(features: Features, bounds: Problem, arch: str) -> KernelConfig:
    """The build for calls within `bounds`; if batch invariant, its tile depends on heads alone."""
    invariant, separate = features.batch_invariant, features.separate_tables
    formats = (bounds.q_dtype, bounds.kv_format)
    tiles = row_tiles_for(
        bounds.heads * (1 if invariant else max(bounds.q_lens)),
        formats,
        arch,
        separate=separate,
        requests=None if invariant else bounds.batch,
    )
    small = bounds.page_size in SMALL_PAGES
    return config_for(
        MLA_DIMS, formats, arch, separate=separate, row_tiles=tiles, small_pages=small
    )


def _q_len(call: Call) -> int:
    """Query tokens of the longest request, or their bound where lengths stay on the device."""
    if call.form.max_q_len is None and call.lengths.q_lens is not None:
        return max(call.lengths.q_lens)
    return max(call.form.bounds.q_lens)


def _settings(call: Call) -> Settings:
    gpu = gpu_of(call.form.device)
    arch = xqa.arch_of(gpu) if gpu else None
    return Settings(
        q_len=max(1, _q_len(call)),
        believed=believes_max_q_len(call.features.ragged, call.form.max_q_len, call.form.total_q),
        lse_base2=call.args.return_lse_base == "base2",
        programmatic_launch=call.args.enable_pdl is not False and arch in xqa.PROGRAMMATIC,
    )


def _feature_reason(features: Features, arch: str) -> str | None:
    reason = not_taken(features.names(), TAKES, "its kernel has")
    if reason:
        return reason
    if features.pdl and arch not in xqa.PROGRAMMATIC:
        return f"enable_pdl=True: {arch} has no programmatic dependent launch"
    return None


def _format_reason(problem: Problem, features: Features) -> str | None:
    dims = (problem.latent_dim + problem.rope_dim, problem.latent_dim)
    if dims != MLA_DIMS:
        return f"latent and rope dims {(dims[1], problem.rope_dim)}; its kernel has (512, 64)"
    formats = (problem.q_dtype, problem.kv_format)
    if formats not in FORMATS:
        return f"query {formats[0]} over cache {formats[1]}; its kernel takes {FORMATS}"
    sizes = (*SMALL_PAGES, *PAGE_SIZES) if features.separate_tables else PAGE_SIZES
    if problem.page_size not in sizes:
        return f"pages of {problem.page_size}; its kernel takes {sizes}"
    if problem.batch > MAX_BLOCKS:
        return f"a batch of {problem.batch}; its kernel takes up to {MAX_BLOCKS}"
    return None
