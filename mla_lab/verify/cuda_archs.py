"""What nvcc makes of CUDA C++ builds for architectures other than Hopper; no card has run them.

A row has the hash of its build's sources and the versions of its compilers, as in `shipped_builds`:
where both are today's, a test reads the row and compiles nothing.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path

from ..core.markdown import markdown_table
from ..core.resources import kernels_dir
from ..jit.arch import ARCHS, PROVED
from ..jit.cubin import read_resources
from ..jit.cuda_build import gencode
from ..jit.source import source_hash
from ..jit.toolchain import find_nvcc, versions
from ..plan.config import KernelConfig
from ..plan.xqa import MLA_DIMS, config_for
from ..xray.report import kernel_reports
from .record import Progress, Row, write_anew
from .shipped_builds import BuiltKernel, described, kernels_of, made_of, of_today

RECORD = "records/builds_cuda.jsonl"
#: compiled, not run
ELSEWHERE = tuple(arch for arch in ARCHS if arch not in PROVED)
LADDER, PLANNER = KernelConfig("cuda/ladder"), KernelConfig("cuda/planner")
#: dimensions, formats of query and cache
XQA = (
    (MLA_DIMS, ("bf16", "bf16")),
    (MLA_DIMS, ("e4m3", "e4m3")),
    (MLA_DIMS, ("bf16", "e4m3")),
    ((128, 128), ("bf16", "bf16")),
    ((128, 128), ("e4m3", "e4m3")),
    ((64, 64), ("bf16", "bf16")),
)


def builds(arch: str) -> list[KernelConfig]:
    """The builds of the record for one architecture."""
    return [LADDER, PLANNER, *(config_for(dims, formats, arch) for dims, formats in XQA)]


def cubin(config: KernelConfig, arch: str, folder: Path) -> Path:
    """Machine code alone, in `folder`: bindings are the same for every architecture.
    `CalledProcessError` where nvcc refuses it."""
    name = config.kernel.removeprefix("cuda/")
    path = folder / f"{name}.cubin"
    source = [str(kernels_dir() / name / f"{name}.cu"), "-I", str(kernels_dir()), "-o", str(path)]
    defines = [f"-DMLA_{key.upper()}={value}" for key, value in config.options]
    command = [str(find_nvcc()), "-cubin", "-std=c++17", "-O3", "--expt-relaxed-constexpr"]
    subprocess.run([*command, *gencode(arch).split(), *defines, *source], check=True)
    return path


def compiled(config: KernelConfig, arch: str, folder: Path) -> tuple[BuiltKernel, ...]:
    """What nvcc makes of a build; without opcodes where there is no nvdisasm."""
    path = cubin(config, arch, folder)
    reports = kernel_reports(path, read_resources(path.read_bytes()), {})
    return tuple(map(described, reports))


def run(path: Path, say: Progress) -> list[Row]:
    """Compile all builds for all of `ELSEWHERE`; the record is written anew."""
    rows = []
    for arch in ELSEWHERE:
        for config in builds(arch):
            say(f"compiling {config.name()} for {arch}")
            with tempfile.TemporaryDirectory(prefix="mla-lab-cubin-") as folder:
                rows.append(_row(config, arch, compiled(config, arch, Path(folder))))
    return write_anew(path, "cuda builds", rows)


def _row(config: KernelConfig, arch: str, kernels: Sequence[BuiltKernel]) -> Row:
    spilled = any(kernel.stack or kernel.local for kernel in kernels)
    return {
        "kind": "case",
        "name": config.name(),
        "arch": arch,
        "status": "wrong" if spilled else "ok",
        "source": source_hash(config.kernel),
        "toolchain": versions(config.kernel),
        "kernels": [asdict(kernel) for kernel in kernels],
    }


@cache
def current() -> dict[tuple[str, str], tuple[BuiltKernel, ...]]:
    """(build's name, architecture) -> its kernels, of rows of today's sources and compilers."""
    known = of_today(RECORD, (config for arch in ELSEWHERE for config in builds(arch)))
    return {(each["name"], each["arch"]): kernels_of(each) for each in known}


def of(config: KernelConfig, arch: str) -> tuple[BuiltKernel, ...] | None:
    """Kernels of a build by `current`; None where the record does not have it."""
    return current().get((config.name(), arch))


def table(rows: Sequence[Row]) -> str:
    """Architecture by architecture: builds, registers of a thread at most, machine code."""
    lines = []
    for arch in ELSEWHERE:
        kernels = [k for row in rows[1:] if row["arch"] == arch for k in row["kernels"]]
        lines.append(
            (
                arch,
                str(sum(row["arch"] == arch for row in rows[1:])),
                str(max(k["registers"] for k in kernels)),
                f"{max(k['code_bytes'] for k in kernels):,}",
            )
        )
    names = ("architecture", "builds:", "registers, at most:", "machine code, B, at most:")
    return f"{made_of(rows[0])}.\n\n{markdown_table(names, lines)}"
