"""What this machine can do: Python, torch, GPU, compilers, cache, backends, and why not.

`examine()` looks without importing a compiler and without needing anything to be there.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..core.errors import MlaLabError
from ..core.installed import version_of


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. `there` is False where something optional is missing."""

    topic: str
    name: str
    there: bool
    detail: str


def examine() -> list[Finding]:
    """Everything that the doctor looks at, in reading order."""
    topics = (_packages, _device, _compilers, _places, _backends)
    return [finding for topic in topics for finding in topic()]


def _package(distribution: str, otherwise: str) -> Finding:
    version = version_of(distribution)
    return Finding("packages", distribution, version is not None, version or otherwise)


def _packages() -> Iterator[Finding]:
    version = f"{platform.python_version()} ({sys.executable})"
    yield Finding("packages", "Python", True, version)
    yield _package("mla-lab", "runs from a checkout that is not installed")
    yield _package("numpy", "needed by everything: pip install numpy")
    yield _package("torch", "needed by every call: pip install torch")
    yield _package("jupyterlab", "needed by the workbook: make lab of a clone installs it")
    yield _package("nvidia-cutlass-dsl", "needed to compile CuTe kernels, not to launch them")
    yield _package("apache-tvm-ffi", "needed to compile and to launch kernels")


def _device() -> Iterator[Finding]:
    if importlib.util.find_spec("torch") is None:
        yield Finding("device", "CPU", False, f"{os.cpu_count()} cores, and no torch to use them")
        return
    import torch

    cpu = f"{os.cpu_count()} cores, torch uses {torch.get_num_threads()}"
    yield Finding("device", "CPU", True, cpu)
    if not torch.cuda.is_available():
        build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "a CPU build"
        reason = f"none that torch ({build}) can use; the CPU runs every call"
        yield Finding("device", "GPU", False, reason)
        return
    for index in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(index)
        detail = (
            f"{card.name}, compute capability {card.major}.{card.minor}, "
            f"{card.multi_processor_count} SMs, {card.total_memory / 1e9:.0f} GB"
        )
        yield Finding("device", f"GPU {index}", True, detail)


def _compilers() -> Iterator[Finding]:
    from ..jit import toolchain

    def nvcc() -> str:
        path = toolchain.find_nvcc()
        major, minor = toolchain.nvcc_release(path)
        return f"CUDA {major}.{minor} ({path})"

    def cute() -> str:
        return ", ".join(f"{k} {v}" for k, v in toolchain.cute_versions().items())

    yield _try("compilers", "g++", lambda: str(toolchain.find_cxx()))
    yield _try("compilers", "ninja", lambda: str(toolchain.find_ninja()))
    yield _try("compilers", "nvcc", nvcc)
    yield _try("compilers", "CuTe DSL", cute)
    for name in ("nvdisasm", "cuobjdump"):
        yield _try("compilers", name, partial(_disassembler, name))


def _disassembler(name: str) -> str:
    from ..jit import toolchain

    packaged = toolchain.nvidia_file(f"cu*/bin/{name}")
    way_out = f"`pip install nvidia-cuda-{name}` to read SASS"
    return str(packaged or toolchain.find_program(name, way_out))


def _try(topic: str, name: str, look: Callable[[], str]) -> Finding:
    try:
        return Finding(topic, name, True, look())
    except MlaLabError as error:
        return Finding(topic, name, False, str(error))


def _places() -> Iterator[Finding]:
    from ..core.resources import data_dir, kernels_dir
    from ..jit.cache import default_root

    yield _try("places", "kernels", lambda: str(kernels_dir()))
    yield _try("places", "data", lambda: str(data_dir()))
    yield _cache(default_root())


def _takes_files(folder: Path) -> bool:
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError:
        return False
    return True


def _cache(root: Path) -> Finding:
    nearest = next(p for p in (root, *root.parents) if p.exists())
    if not (os.access(nearest, os.W_OK) and _takes_files(nearest)):
        detail = f"{root} cannot be written: set MLA_LAB_CACHE_DIR to a folder of yours"
        return Finding("places", "cache", False, detail)
    free = shutil.disk_usage(nearest).free / 1e9
    entries = len(list(root.glob("*/metadata.json"))) if root.is_dir() else 0
    detail = f"{root}, {entries} artifacts, {free:.0f} GB free"
    return Finding("places", "cache", True, detail)


def _backends() -> Iterator[Finding]:
    """What each backend says to a plain call: one request, bf16, 128 heads."""
    if importlib.util.find_spec("torch") is None:
        return
    import torch

    from .decode import explain

    device = "cuda" if torch.cuda.is_available() else "cpu"
    numbers: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
    query, cache = torch.zeros(1, 1, 128, 576, **numbers), torch.zeros(1, 64, 576, **numbers)
    table = torch.zeros(1, 1, dtype=torch.int32, device=device)
    for verdict in explain(query, cache, table, torch.full_like(table[0], 64)):
        fits = f"runs a plain call on {device}" + (", and auto takes it" if verdict.taken else "")
        detail = verdict.reason or fits + (f" ({verdict.note})" if verdict.note else "")
        yield Finding("backends", f"backend {verdict.name}", verdict.reason is None, detail)
