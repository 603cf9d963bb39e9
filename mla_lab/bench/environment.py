"""Environment of a measurement: card, driver, libraries, commit."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from pathlib import Path
from typing import Any

import torch

from ..core.installed import output_of, version_of
from ..core.revision import Revision
from ..core.version import __version__
from .telemetry import smi_name

#: distributions whose version is noted where they are installed
LIBRARIES = ("torch", "triton", "numpy", "apache-tvm-ffi", "nvidia-cutlass-dsl")
SMI_FIELDS = ("name", "driver_version", "vbios_version", "power.limit", "clocks.max.sm")


def environment(device: torch.device | str = "cpu") -> dict[str, Any]:
    """Plain values for a record's first row; None where unknown."""
    revision = Revision.here()
    return {
        "device": str(device),
        "card": _card(device),
        "smi": _smi(smi_name(device)),
        "host": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()},
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "libraries": {name: v for name in LIBRARIES if (v := version_of(name)) is not None},
        "mla_lab": __version__,
        "commit": revision.commit,
        "dirty": revision.dirty,
        "command": command_line(),
    }


def command_line() -> list[str]:
    """Of this process; `python -m mla_lab` counts as `mla-lab`."""
    program = Path(sys.argv[0])
    ours = (program.parent.name, program.name) == ("mla_lab", "__main__.py")
    return ["mla-lab" if ours else program.name, *sys.argv[1:]]


def _card(device: torch.device | str) -> dict[str, Any] | None:
    if torch.device(device).type != "cuda":
        return None
    found = torch.cuda.get_device_properties(device)
    return {
        "name": found.name,
        "sms": found.multi_processor_count,
        "memory_bytes": found.total_memory,
        "l2_bytes": found.L2_cache_size,
        "capability": f"{found.major}.{found.minor}",
    }


def _smi(card: str) -> dict[str, str] | None:
    if not shutil.which("nvidia-smi"):
        return None
    query = f"--query-gpu={','.join(SMI_FIELDS)}"
    text = output_of("nvidia-smi", query, "--format=csv,noheader", "-i", card)
    if text is None:
        return None
    return dict(zip(SMI_FIELDS, (field.strip() for field in text.split(",")), strict=False))
