"""Which module builds which CuTe kernel, and for which architectures.

Importing this file imports no cutlass: a kernel's module is imported when it is compiled, in
a process of its own. That module has `entry(config) -> CuteEntry`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..core.errors import invalid
from ..plan.config import KernelConfig

#: of `cute.compile`, for every kernel; an artifact's key has them
OPTIONS = "--enable-tvm-ffi --generate-line-info"


@dataclass(frozen=True)
class CuteEntry:
    """What `cute.compile` needs: the `@cute.jit` object and fake arguments, stream last.

    `function` is the name under which the library exports it, `options` are further
    `cute.compile` options.
    """

    jit: Callable[..., Any]
    args: tuple[Any, ...]
    function: str
    options: str = ""


@dataclass(frozen=True)
class CuteKernel:
    """A line of the registry: module under `mla_lab.cute`, architectures it is written for.

    `ignores` names fields of `KernelConfig` and values of each that mean the same code:
    configurations that differ there alone share one artifact.
    """

    module: str
    archs: tuple[str, ...]
    ignores: tuple[tuple[str, tuple[Any, ...]], ...] = ()


#: kernel name -> module and architectures; one line a kernel
KERNELS: dict[str, CuteKernel] = {
    "cute/empty": CuteKernel("empty", ("sm_90a", "sm_100a", "sm_120a")),
    "cute/found_tiles": CuteKernel("found_tiles", ("sm_90a",)),
    "cute/rank_exchange": CuteKernel("rank_exchange", ("sm_90a",)),
    "cute/rank_mask": CuteKernel("rank_mask", ("sm_90a",)),
    "cute/rank_merge": CuteKernel("rank_merge", ("sm_90a",)),
    "cute/swap_ab_sm90": CuteKernel("swap_ab_sm90", ("sm_90a",)),
    "cute/keep_ab_sm90": CuteKernel(
        "keep_ab_sm90", ("sm_90a",), ignores=(("mask", ("none", "causal")),)
    ),
    "cute/mla_sm100": CuteKernel(
        "mla_sm100", ("sm_100a", "sm_103a"), ignores=(("mask", ("none", "causal")),)
    ),
}


def lookup(kernel: str) -> CuteKernel:
    """The registry's line for a kernel name ("cute/...")."""
    if kernel not in KERNELS:
        raise invalid("kernel", repr(kernel), tuple(KERNELS))
    return KERNELS[kernel]


def entry(config: KernelConfig) -> CuteEntry:
    """The entry of a kernel, from its module, which is imported here, and cutlass with it."""
    module = importlib.import_module(f"mla_lab.cute.{lookup(config.kernel).module}")
    return module.entry(config)
