"""The CUDA backend: warp-level mma in CUDA C++ (kernels/xqa), on Hopper and, compiled, beyond.

It takes what the CuTe kernels leave: caches of eight bits whose tokens are fetched one by one, or
under an fp16 query, and cards that are not Hopper. Lengths never leave the device; kernel and cuts
follow from a call's form, so that a captured graph stays right when lengths change. On a card that
nobody has proved the first call of each configuration is compared with the torch backend
(`self_check`).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ...call.decode_args import Arguments, Call, Features
from ...call.workspace import Workspace
from ...core.errors import BuildError
from ...core.gpu import Gpu
from ...core.problem import Problem
from ...jit import ARCHS
from ...plan import KernelConfig
from ...plan.xqa import (
    FORMATS,
    MAX_BLOCKS,
    MLA_DIMS,
    PAGE_SIZES,
    Cuts,
    Rows,
    config_for,
    cut,
    row_tiles_for,
)
from .. import self_check
from ..base import gpu_of
from . import xqa
from .xqa import Operands, Settings, XqaLaunch

#: features that the kernel does not have, and their names in a call
MISSING = {
    "sparse": "sparse_mla_top_k: sparse calls",
    "skip_softmax": "skip_softmax_threshold_scale_factor",
    "context_parallel": "enable_dcp: decode context parallel",
    "planned": "plan: it cuts each request by a formula of its own",
}


class CudaBackend:
    """MLA decode by the CUDA C++ kernel."""

    name = "cuda"
    reads_lengths = False

    def supports(self, features: Features, problem: Problem, gpu: Gpu | None) -> str | None:
        """Hardware first, then what the kernel lacks, then whether it can be had here."""
        if gpu is None:
            return "the tensors are on a CPU; its kernel runs on a GPU"
        arch = xqa.arch_of(gpu)
        if arch is None:
            return f"the GPU is {gpu.arch}; its kernel is for {ARCHS}"
        reason = _feature_reason(features, arch) or _format_reason(problem)
        return reason or xqa.build_reason(_config(features, problem, arch), arch)

    def plan(self, call: Call, gpu: Gpu | None) -> Cuts:
        """Cuts for calls within this one's bounds; a length's bound counts as the next power of
        two, so that it may grow step by step without effect.
        """
        arch = xqa.arch_of(gpu) if gpu is not None else None
        if gpu is None or arch is None:
            raise BuildError("plan: got no GPU that the kernel runs on; supported: one of its own")
        bounds, device = call.form.bounds, call.form.device
        config = _config(call.features, bounds, arch)
        longest = 1 << (max(call.problem.kv_lens) - 1).bit_length()
        rows = Rows(bounds.batch, 1, _q_len(call) * bounds.heads, min(longest, bounds.kv_lens[0]))
        invariant = call.features.batch_invariant
        at_once = 1 if invariant else xqa.at_once(config, device, gpu.sms)
        return cut(config, rows, bounds.latent_dim, at_once, invariant)

    def run(self, call: Call, plan: Cuts, workspace: Workspace) -> MlaLaunch | None:
        """Enqueues the call; returns what repeats it for equal calls."""
        launch = MlaLaunch(
            XqaLaunch(plan, _settings(call), workspace, call.form.device),
            separate=call.features.separate_tables,
        )
        gpu = gpu_of(call.form.device)
        if gpu is None or self_check.proved(gpu):
            launch(call.given, call.out, call.lse)
        else:
            check = self_check.mla_check(call, plan.config, gpu)
            check.around(lambda: launch(call.given, call.out, call.lse))
        # without max_q_len the grid follows from lengths that were read for this call alone
        return None if call.form.max_q_len is None else launch


@dataclass(frozen=True)
class MlaLaunch:
    """Repeats a launch for calls of the same form, cuts and workspace."""

    launch: XqaLaunch
    separate: bool

    def __call__(self, given: Arguments, out: Tensor, lse: Tensor | None) -> None:
        """Enqueue one call's tensors."""
        sinks = given.sinks
        self.launch(
            Operands(
                query=given.query,
                keys=given.kv_cache,
                values=given.kv_cache,
                out=out,
                lse=lse,
                block_tables=given.block_tables,
                seq_lens=given.seq_lens,
                q_begin=given.cum_seq_lens_q,
                mask=given.mask,
                sinks=sinks if sinks is None or isinstance(sinks, Tensor) else sinks[0],
                bmm1_scale=given.bmm1_scale,
                bmm2_scale=given.bmm2_scale,
            )
        )


def _config(features: Features, bounds: Problem, arch: str) -> KernelConfig:
    """The build for calls within `bounds`; under batch invariance heads alone decide its tile."""
    invariant, separate = features.batch_invariant, features.separate_tables
    formats = (bounds.q_dtype, bounds.kv_format)
    tiles = row_tiles_for(
        bounds.heads * (1 if invariant else max(bounds.q_lens)),
        formats,
        arch,
        separate=separate,
        requests=None if invariant else bounds.batch,
    )
    return config_for(MLA_DIMS, formats, arch, separate=separate, row_tiles=tiles)


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
        lse_base2=call.given.return_lse_base == "base2",
        programmatic_launch=call.given.enable_pdl is not False and arch in xqa.PROGRAMMATIC,
    )


def _feature_reason(features: Features, arch: str) -> str | None:
    for name, words in MISSING.items():
        if getattr(features, name):
            return f"its kernel has no {words}"
    if features.pdl and arch not in xqa.PROGRAMMATIC:
        return f"enable_pdl=True: {arch} has no programmatic dependent launch"
    return None


def _format_reason(problem: Problem) -> str | None:
    dims = (problem.latent_dim + problem.rope_dim, problem.latent_dim)
    if dims != MLA_DIMS:
        return f"latent and rope dims {(dims[1], problem.rope_dim)}; its kernel has (512, 64)"
    formats = (problem.q_dtype, problem.kv_format)
    if formats not in FORMATS:
        return f"query {formats[0]} over cache {formats[1]}; its kernel takes {FORMATS}"
    if problem.page_size not in PAGE_SIZES:
        return f"pages of {problem.page_size}; its kernel takes {PAGE_SIZES}"
    if problem.batch > MAX_BLOCKS:
        return f"a batch of {problem.batch}; its kernel takes up to {MAX_BLOCKS}"
    return None
