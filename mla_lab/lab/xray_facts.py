"""Facts of compiled kernels: from an artifact that is here, else as recorded in
data/runtime/xray.json.

Compiling the large kernels takes tens of seconds, so a notebook does not: it inspects an artifact
in the cache, or else shows the recorded facts with their date.

    python -m mla_lab.lab.xray_facts     compile what is missing, write data/runtime/xray.json anew
"""

from __future__ import annotations

import datetime
import json
import re
import sys
from collections import Counter
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

from ..backends.cute.families import config_for
from ..core.errors import BuildError, MlaLabError, invalid
from ..core.resources import data_dir
from ..jit.build import compile, find
from ..jit.source import source_hash
from ..plan.config import KernelConfig
from ..plan.launch_modes import KEEP_AB_PERSISTENT, SWAP_AB_CLUSTER, SWAP_AB_LL, LaunchMode
from ..xray import KernelReport, inspect
from .source import Source

RECORD = "runtime/xray.json"
ARCH = "sm_90a"


def _shipped(mode: LaunchMode, rows: int, cluster: int) -> KernelConfig:
    config = config_for(mode, (rows, cluster))
    return replace(config, options=(*config.options, ("shaped", 1)))


#: builds that the notebook shows, by short name
KERNELS = {
    "empty": KernelConfig("cute/empty"),
    "swap_ab, 16 rows": _shipped(SWAP_AB_LL, 16, 1),
    "swap_ab, 16 rows, cluster 8": _shipped(SWAP_AB_CLUSTER, 16, 8),
    "keep_ab, 64 rows": _shipped(KEEP_AB_PERSISTENT, 64, 1),
    "keep_ab, 128 rows, cluster 2": _shipped(KEEP_AB_PERSISTENT, 128, 2),
    "planner": KernelConfig("cuda/planner"),
}


@dataclass(frozen=True)
class Counted:
    """Compiled code: registers a thread, spills, SASS instructions."""

    registers: int
    spills: int
    classes: dict[str, int]
    opcodes: dict[str, int]

    def count(self, prefix: str) -> int:
        """Instructions whose opcode begins with `prefix`: "HGMMA", "UTMALDG"."""
        return sum(n for opcode, n in self.opcodes.items() if opcode.startswith(prefix))


@dataclass(frozen=True)
class Facts(Counted):
    """One kernel: resources as reported by the compiler, and an excerpt of its SASS."""

    kernel: str
    stack: int
    static_shared: int
    dynamic_shared: int
    #: MUFU.EX2 by part of the kernel: "mainloop", "merge"
    exponentials: dict[str, int]
    #: the code around the first instruction of its widest matrix product
    sass: list[str]
    source: Source


def inspected(config: KernelConfig) -> tuple[KernelReport, ...] | None:
    """The kernels of an artifact that is compiled here; None without one or a disassembler."""
    try:
        artifact = find(config, ARCH)
    except MlaLabError:
        return None
    report = inspect(artifact) if artifact else None
    return report.kernels if report and report.has_sass else None


def recorded_source(kernel: str, date: str, compiler: str, recorded_hash: str) -> Source:
    """Source of recorded facts; notes whether the kernel's files have changed since."""
    fresh = recorded_hash == source_hash(kernel)
    return Source("recorded", ARCH, date, compiler if fresh else f"{compiler}, earlier sources")


@cache
def facts(kernel: str) -> Facts:
    """Facts of a kernel of `KERNELS`: compiled here, else recorded; BuildError where neither is."""
    if kernel not in KERNELS:
        raise invalid("kernel", repr(kernel), tuple(KERNELS))
    config = KERNELS[kernel]
    if found := inspected(config):
        return _facts(kernel, found[0], Source("measured", detail="compiled here"))
    row = _record().get(kernel)
    if row is None:
        raise BuildError(
            f"kernel: got {kernel!r}, neither compiled here nor recorded; "
            "supported: after `mla-lab compile`"
        )
    source = recorded_source(config.kernel, row["date"], row["compiler"], row["source_hash"])
    return Facts(**row["facts"], source=source)


def _facts(kernel: str, report: KernelReport, source: Source) -> Facts:
    r = report.resources
    return Facts(
        kernel=kernel,
        registers=r.registers,
        stack=r.stack,
        static_shared=r.static_shared,
        dynamic_shared=r.dynamic_shared or 0,
        spills=report.spills,
        classes=dict(report.classes),
        opcodes=dict(report.opcodes),
        exponentials=_exponentials(report),
        sass=_excerpt(report),
        source=source,
    )


def _exponentials(report: KernelReport) -> dict[str, int]:
    found: Counter[str] = Counter()
    for instruction in report.instructions:
        if instruction.opcode.startswith("MUFU.EX2"):
            file = instruction.source[0] if instruction.source else ""
            found["merge" if "merge" in file else "mainloop"] += 1
    return dict(found)


def _excerpt(report: KernelReport) -> list[str]:
    """Lines around the first matrix product of the most columns; the first lines without one."""
    products = [i for i, x in enumerate(report.instructions) if x.kind == "matrix"]
    shape = re.compile(r"\.\d+x(\d+)x")

    def columns(at: int) -> int:
        found = shape.search(report.instructions[at].opcode)
        return int(found[1]) if found else 0

    first = max(products, key=lambda at: (columns(at), -at), default=3)
    return [str(x) for x in report.instructions[first - 3 : first + 9]]


@cache
def _record() -> dict[str, Any]:
    path = data_dir() / RECORD
    return dict(json.loads(path.read_text())) if path.exists() else {}


def record() -> None:
    """Writes the facts of every kernel that compiles here; others keep their row, with its date."""
    path = data_dir() / RECORD
    rows = dict(_record())
    for name, config in KERNELS.items():
        try:
            report = inspect(compile(config, ARCH)).kernels[0]
        except BuildError as error:
            sys.stderr.write(f"{name} keeps its row: {error}\n")
            continue
        found = asdict(_facts(name, report, Source("measured")))
        del found["source"]
        rows[name] = {
            "date": datetime.date.today().isoformat(),
            "compiler": "nvcc" if config.kernel.startswith("cuda/") else "CuTe DSL",
            "source_hash": source_hash(config.kernel),
            "facts": found,
        }
    path.write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    record()
