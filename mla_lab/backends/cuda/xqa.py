"""The CUDA C++ decode kernel (kernels/xqa) on a device: its builds and its launch.

One kernel body serves MLA and GQA (`plan.xqa` has its builds and cuts). Up to eight splits of a row
tile form a cluster that merges them, where all clusters are resident at once; otherwise the last
CTA to arrive merges, and none waits for another, so that any grid is legal.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import jit
from ...call.decode_args import DecodeArgs
from ...call.feature_operands import LOG2_E
from ...call.gqa_args import GqaArgs
from ...call.workspace import Workspace
from ...core.errors import invalid
from ...core.gpu import Gpu
from ...jit import toolchain
from ...plan import KernelConfig
from ...plan.xqa import KERNEL, Cuts
from ..base import current, fill_with_nan, refuse_capture

#: architectures with programmatic dependent launch
PROGRAMMATIC = ("sm_90a", "sm_100a", "sm_120a")
#: what vector loads need
PLACES = "data, tokens and pages at multiples of 16 bytes"


def arch_of(gpu: Gpu) -> str | None:
    """The architecture to build for `gpu`; None where there is none."""
    same = [arch for arch in jit.ARCHS if arch.removesuffix("a") == gpu.arch.removesuffix("a")]
    return same[0] if same else None


def build_reason(config: KernelConfig, arch: str) -> str | None:
    """None where the kernel is compiled or a compiler is here, else what is missing."""
    if jit.find(config, arch) is None and (why := toolchain.missing(KERNEL)):
        return f"{config.name()} is not compiled here, and cannot be: {why}"
    return None


@cache
def kernel(config: KernelConfig, device: torch.device) -> jit.Kernel:
    """The loaded kernel, compiled at its first use on a device."""
    refuse_capture("decode", f"the first use of {config.name()}", device)
    return jit.kernel(config, jit.device_arch(device.index))


@lru_cache(maxsize=256)
def at_once(config: KernelConfig, device: torch.device, sms: int) -> int:
    """Resident blocks of the kernel on a device with `sms` SMs."""
    occupancy = kernel(config, device).function("occupancy")
    with current(device):
        return max(1, int(occupancy())) * sms


class Operands(NamedTuple):
    """The tensors of one call; None where it has none."""

    query: Tensor
    keys: Tensor
    values: Tensor
    out: Tensor
    lse: Tensor | None
    block_tables: Tensor
    seq_lens: Tensor
    q_begin: Tensor | None
    mask: Tensor | None
    sinks: Tensor | None
    bmm1_scale: float | Tensor
    bmm2_scale: float | Tensor

    @classmethod
    def of(
        cls, args: DecodeArgs | GqaArgs, keys: Tensor, values: Tensor, out: Tensor, lse: Any
    ) -> Operands:
        """The tensors of checked arguments."""
        tables, begins = args.block_tables, args.cum_seq_lens_q
        tensors = (args.query, keys, values, out, lse, tables, args.seq_lens, begins, args.mask)
        return cls(*tensors, args.sink, args.bmm1_scale, args.bmm2_scale)


@dataclass(frozen=True)
class Settings:
    """Numbers and flags that calls of one form share."""

    #: query tokens of a request, or a bound of them
    q_len: int
    #: requests may have more than `q_len`, whose rows are NaN then
    believed: bool = False
    lse_base2: bool = False
    window_left: int = -1
    nhd: bool = False
    programmatic_launch: bool = True


class XqaLaunch:
    """A prepared launch; calling it enqueues the kernel for the tensors of a call."""

    def __init__(
        self, cuts: Cuts, settings: Settings, workspace: Workspace, device: torch.device
    ) -> None:
        self.cuts, self.settings, self.device = cuts, settings, device
        self.launch: Callable[..., Any] = kernel(cuts.config, device).launch
        self._no_floats = torch.empty(0, dtype=torch.float32, device=device)
        self._no_ints = torch.empty(0, dtype=torch.int32, device=device)
        self._no_mask = torch.empty(0, dtype=torch.uint16, device=device)
        self._between = (self._no_floats, self._no_floats, self._no_ints)
        if cuts.max_splits > 1:
            names = ("partial_out", "partial_lse", "counters")
            self._between = tuple(workspace[name] for name in names)  # type: ignore[assignment]
        self._last = (
            settings.q_len,
            settings.window_left,
            cuts.max_splits,
            cuts.split_tokens,
            settings.nhd,
            settings.programmatic_launch,
        )
        self._lse_scale = LOG2_E if settings.lse_base2 else 1.0

    def __call__(self, o: Operands) -> None:
        """Enqueue on the tensors' device. Raises InvalidInput where the kernel's entry refuses a
        tensor.
        """
        with current(self.device):
            self._enqueue(o)

    def _enqueue(self, o: Operands) -> None:
        if self.settings.believed:
            fill_with_nan(o.out, o.lse)
        scale1, tensor1 = self._scale(o.bmm1_scale)
        scale2, tensor2 = self._scale(o.bmm2_scale)
        try:
            self.launch(
                o.query,
                o.keys,
                o.values,
                o.out,
                self._no_floats if o.lse is None else o.lse,
                *self._between,
                o.block_tables,
                o.seq_lens,
                self._no_ints if o.q_begin is None else o.q_begin,
                self._no_mask if o.mask is None else o.mask,
                self._no_floats if o.sinks is None else o.sinks,
                tensor1,
                tensor2,
                scale1,
                scale2,
                self._lse_scale,
                *self._last,
            )
        except ValueError as error:
            got = f"tensors that the kernel refuses ({error})"
            raise invalid("query, kv_cache, out", got, PLACES) from None

    def _scale(self, scale: float | Tensor) -> tuple[float, Tensor]:
        """A number, and a tensor that overrides it where it has an element."""
        if isinstance(scale, Tensor):
            return 0.0, scale.view(1)
        return float(scale), self._no_floats
