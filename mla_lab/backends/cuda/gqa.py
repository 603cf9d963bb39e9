"""GQA calls on the CUDA C++ kernel: MLA's kernel body with other head dims."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ...call.gqa_args import CheckedGqaCall, GqaForm
from ...call.workspace import Workspace
from ...core.errors import BuildError, Unsupported
from ...core.gpu import Gpu
from ...jit import ARCHS
from ...plan import KernelConfig
from ...plan.launch_modes import PAGE_SIZES
from ...plan.xqa import DIMS, FORMATS, MAX_BLOCKS, Cuts, Rows, config_for, cut, row_tiles_for
from .. import self_check
from ..base import believes_max_q_len, gpu_of, not_taken
from ..self_check import SelfCheck
from ..torch import gqa as by_torch
from . import xqa

#: features of a call that the kernel takes
TAKES = frozenset(("mask", "sinks", "lse", "window", "separate_tables", "pdl", "batch_invariant"))
HEAD_DIMS = tuple(key for key, value in DIMS if key == value)


def reason(form: GqaForm, gpu: Gpu | None) -> str | None:
    """None if the kernel can run such a call on `gpu` (None: a CPU), else why not."""
    if gpu is None:
        return "the tensors are on a CPU; its kernel runs on a GPU"
    arch = xqa.arch_of(gpu)
    if arch is None:
        return f"the GPU is {gpu.arch}; its kernel is for {ARCHS}"
    missing = not_taken(sorted(form.features), TAKES, "its kernel has")
    if missing:
        return missing
    if "pdl" in form.features and arch not in xqa.PROGRAMMATIC:
        return f"enable_pdl=True: {arch} has no programmatic dependent launch"
    wrong = _format_reason(form)
    if wrong:
        return wrong
    config = _config(form, arch)
    try:  # what a call with lengths at their bounds would raise
        _cuts(config, _rows(form, form.longest_q or 1), form.head_dim, 1, _invariant(form))
    except Unsupported as error:
        return str(error)
    return xqa.build_reason(config, arch)


def _format_reason(form: GqaForm) -> str | None:
    formats = (form.q_dtype, form.kv_format)
    limits = {
        f"head_dim {form.head_dim}": (form.head_dim in HEAD_DIMS, HEAD_DIMS),
        f"query {formats[0]} over cache {formats[1]}": (formats in FORMATS, FORMATS),
        f"pages of {form.page_size}": (form.page_size in PAGE_SIZES, PAGE_SIZES),
        f"a batch of {form.batch}": (form.batch <= MAX_BLOCKS, f"up to {MAX_BLOCKS}"),
    }
    for got, (fits, supported) in limits.items():
        if not fits:
            return f"{got}; its kernel takes {supported}"
    return None


def run(call: CheckedGqaCall) -> None:
    """Enqueue the call; on a GPU without tests the first one of a kind is checked."""
    form, gpu = call.form, gpu_of(call.form.device)
    arch = xqa.arch_of(gpu) if gpu else None
    if gpu is None or arch is None:
        raise BuildError("decode: got no GPU that the kernel runs on; supported: one of its own")
    config = _config(form, arch)
    q_len = form.longest_q or max(call.q_lens or (1,))
    invariant = _invariant(form)
    at_once = 1 if invariant else xqa.at_once(config, form.device, gpu.sms)
    cuts = _cuts(config, _rows(form, q_len), form.head_dim, at_once, invariant)
    workspace = Workspace.of(cuts.workspace, call.args.workspace_buffer, form.device)
    settings = xqa.Settings(
        q_len=q_len,
        believed=believes_max_q_len(form.ragged, form.max_q_len, form.total_q),
        window_left=_window(call),
        nhd=call.args.kv_layout == "NHD",
        programmatic_launch=call.args.enable_pdl is not False and arch in xqa.PROGRAMMATIC,
    )
    launch = xqa.XqaLaunch(cuts, settings, workspace, form.device)
    if self_check.proved(gpu):
        launch(_operands(call))
    else:
        _self_check(call, config, gpu).around(lambda: launch(_operands(call)))


def _window(call: CheckedGqaCall) -> int:
    """-1 for one that hides no key which the block table can name: the kernel subtracts the others
    from positions in int32.
    """
    window, named = call.args.window_left, call.args.block_tables.shape[-1] * call.form.page_size
    return window if window < named else -1


def _rows(form: GqaForm, q_len: int) -> Rows:
    """The longest request counts as the next power of two, so that a bound may grow from step to
    step without a new cut.
    """
    longest = 1 << max(form.longest - 1, 0).bit_length()
    return Rows(form.batch, form.kv_heads, q_len * form.group, longest)


def _invariant(form: GqaForm) -> bool:
    return "batch_invariant" in form.features


@lru_cache(maxsize=256)
def _cuts(
    config: KernelConfig, rows: Rows, head_dim: int, at_once: int, batch_invariant: bool
) -> Cuts:
    return cut(config, rows, head_dim, at_once, batch_invariant)


def _config(form: GqaForm, arch: str) -> KernelConfig:
    """The build; if batch invariant, its tile depends on heads alone."""
    invariant = _invariant(form)
    q_len = 1 if invariant else form.longest_q or form.total_q
    requests = None if invariant else form.batch * form.kv_heads
    dims, formats = (form.head_dim, form.head_dim), (form.q_dtype, form.kv_format)
    tiles = row_tiles_for(q_len * form.group, formats, arch, requests=requests)
    return config_for(dims, formats, arch, row_tiles=tiles)


def _operands(call: CheckedGqaCall) -> xqa.Operands:
    return xqa.Operands.of(call.args, call.keys, call.values, call.out, call.lse)


def _self_check(call: CheckedGqaCall, config: KernelConfig, gpu: Gpu) -> SelfCheck:
    form = call.form
    return SelfCheck(
        key=(gpu.name, config, form.features, form.out_dtype, form.page_size, form.group),
        where=f"{config.name()} on {gpu.name}",
        device=form.device,
        limits=self_check.limits(form.q_dtype, form.out_dtype),
        errors=lambda: _errors(call),
    )


def _errors(call: CheckedGqaCall) -> tuple[float, float]:
    """Errors of the results in `call` against the torch backend on the same tensors."""
    out = torch.empty_like(call.out)
    lse: Tensor | None = None if call.lse is None else torch.empty_like(call.lse)
    by_torch.run_into(call, out, lse)
    return self_check.differences((call.out, call.lse), (out, lse))
