"""Which options of a `KernelConfig` a kernel reads; one that it does not read is refused.

Such an option would name another artifact of equal code: `stage=2` for `stages=2` would compile the
kernel anew and change nothing.
"""

from __future__ import annotations

import re

from ..core.errors import invalid
from ..plan.config import KernelConfig
from .source import source_files

#: of both families for Hopper
_SM90 = ("features", "gather", "pdl", "pieces", "shaped", "skip", "stamps")
#: options of the CuTe kernels; those that are not here have none
CUTE = {
    "cute/swap_ab_sm90": (*_SM90, "fused_merge", "grid", "pair"),
    "cute/keep_ab_sm90": (*_SM90, "dual", "scales", "stages"),
    "cute/found_tiles": ("pieces", "single"),
    "cute/mla_sm100": ("features", "pdl", "scales", "shaped"),
}
#: how a CUDA kernel's source gives an option its default
_DEFAULT = re.compile(r"^#ifndef MLA_(\w+)", re.M)


def known_options(kernel: str) -> tuple[str, ...]:
    """Names of the options that a kernel reads, sorted."""
    if kernel.startswith("cute/"):
        return tuple(sorted(CUTE.get(kernel, ())))
    texts = [path.read_text() for path in source_files(kernel)]
    return tuple(sorted(name.lower() for text in texts for name in _DEFAULT.findall(text)))


def check_options(config: KernelConfig) -> None:
    """Raises InvalidInput for an option that the kernel does not read."""
    if not config.options:
        return
    known = known_options(config.kernel)
    unknown = [name for name, _ in config.options if name not in known]
    if unknown:
        supported = ", ".join(known) or "no option"
        raise invalid("options", f"{unknown[0]} of {config.kernel}", supported)
