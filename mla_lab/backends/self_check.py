"""On a GPU outside `PROVED`, the first call of each configuration is checked against torch.

The kernels were tested on the cards of `PROVED`. On others the first call of a configuration is run
by the torch backend too, on the same tensors: it waits for the device, takes the torch backend's
time once, and is logged. Where the results disagree, that call and every later one raise.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from ..call.bind import Call
from ..call.form import Lengths
from ..call.workspace import Workspace
from ..core.errors import BuildError
from ..core.gpu import Gpu
from ..plan import KernelConfig
from ..reference.tolerance import lse_error, rel_error
from .base import refuse_capture
from .torch.backend import TorchBackend

#: cards on which the tests of all that ships have run
PROVED = ("H200", "H100 SXM")
#: largest accepted relative error against the torch backend, by query dtype: twice that of a
#: benchmark
LIMITS = {"bf16": 1e-2, "fp16": 1e-2, "e4m3": 0.12}
#: the same for lse, whose weights were rounded to the dtype of the products
LSE_LIMITS = {"bf16": 5e-3, "fp16": 5e-3, "e4m3": 5e-2}

_LOG = logging.getLogger("mla_lab")
#: results of checks, by card, kernel and kind of call: None, or what disagreed
_FOUND: dict[tuple[object, ...], str | None] = {}


def proved(gpu: Gpu) -> bool:
    """Whether the tests of the kernels have run on this kind of card."""
    return gpu.name in PROVED


def clear() -> None:
    """Drop all results: every configuration is checked again."""
    _FOUND.clear()


@dataclass(frozen=True)
class SelfCheck:
    """One configuration on one card."""

    key: tuple[object, ...]
    #: kernel and card, for messages
    where: str
    device: torch.device
    #: largest accepted relative error of out, and error of lse
    limits: tuple[float, float]
    #: relative error of out and error of lse of the results that a launch has just written
    errors: Callable[[], tuple[float, float]]

    def around(self, launch: Callable[[], None]) -> None:
        """Run `launch`, the first time with a check after it. Raises BuildError where the first
        results were wrong.
        """
        if self.key in _FOUND:
            self._refuse(_FOUND[self.key])
            launch()
            return
        refuse_capture("decode", f"the self-check of {self.where}", self.device)
        launch()
        out, lse = self.errors()
        wrong = None
        if not (out <= self.limits[0] and lse <= self.limits[1]):
            limits = " and ".join(f"{limit:.1e}" for limit in self.limits)
            wrong = f"out off by {out:.1e}, lse by {lse:.1e} (limits {limits})"
        _FOUND[self.key] = wrong
        self._refuse(wrong)
        _LOG.warning(
            "%s: compiled for this card, tested on %s alone. The first call agrees with the torch "
            "backend (relative error %.1e); later calls are not compared",
            self.where,
            " and ".join(PROVED),
            out,
        )

    def _refuse(self, wrong: str | None) -> None:
        if wrong is not None:
            raise BuildError(
                f"{self.where}: got results that differ from the torch backend's, {wrong}; "
                "supported: backend='torch' on this card"
            )


def limits(q_dtype: str, out_dtype: str) -> tuple[float, float]:
    """Largest accepted errors of out and lse for calls with these dtypes."""
    kind = "e4m3" if "e4m3" in (q_dtype, out_dtype) else q_dtype
    return LIMITS[kind], LSE_LIMITS[kind]


def mla_check(call: Call, config: KernelConfig, gpu: Gpu) -> SelfCheck:
    """The check of an MLA call."""
    bounds = call.form.bounds
    return SelfCheck(
        key=(gpu.name, config, call.features, call.form.out_dtype, bounds.page_size),
        where=f"{config.name()} on {gpu.name}",
        device=call.form.device,
        limits=limits(bounds.q_dtype, bounds.out_dtype),
        errors=lambda: _mla_errors(call),
    )


def _mla_errors(call: Call) -> tuple[float, float]:
    """Errors of the results in `call` against the torch backend on the same tensors."""
    out, lse = torch.empty_like(call.out), None
    if call.lse is not None:
        lse = torch.empty_like(call.lse)
    args = replace(call.args, skip_softmax_threshold_scale_factor=None)  # kernels skip no tile
    same = replace(call, args=args, lengths=_lengths(call), out=out, lse=lse)
    backend = TorchBackend()
    plan = backend.plan(same, None)
    backend.run(same, plan, Workspace.of(plan.workspace, None, call.form.device))
    return differences((call.out, call.lse), (out, lse))


def differences(
    got: tuple[Tensor, Tensor | None], want: tuple[Tensor, Tensor | None]
) -> tuple[float, float]:
    """Relative error of out and greatest error of lse (0 where none is asked for)."""
    out = rel_error(got[0].float(), want[0].float())
    if got[1] is None or want[1] is None:
        return out, 0.0
    return out, lse_error(got[1], want[1])


def _lengths(call: Call) -> Lengths:
    """Lengths read on the host."""
    sums = call.args.cum_seq_lens_q
    q_lens = call.form.bounds.q_lens
    if sums is not None:
        q_lens = tuple(after - before for before, after in pairwise(sums.tolist()))
    return Lengths(q_lens, tuple(call.args.seq_lens.tolist()))
