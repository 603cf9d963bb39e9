"""Facts of compiled kernels: from an artifact that is here, else as recorded in
data/runtime/xray.json.

Compiling the large kernels takes tens of seconds, so a notebook only looks: an artifact in the
cache is seen through now, and where there is none the recorded facts stand in, with their date.

    python -m mla_lab.lab.xray_facts     compile what is missing, write data/runtime/xray.json anew
"""

from __future__ import annotations

import datetime
import json
import sys
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from ..core.errors import BuildError, MlaLabError, invalid
from ..core.resources import data_dir
from ..jit.build import compile, find
from ..jit.source import source_hash
from ..plan.config import KernelConfig
from ..xray import KernelReport, inspect
from .source import Source

RECORD = "runtime/xray.json"
ARCH = "sm_90a"
#: what the notebook shows, by a short name
KERNELS = {
    "empty": KernelConfig("cute/empty"),
    "swap_ab, 16 rows": KernelConfig("cute/swap_ab_sm90", tile_rows=16),
    "swap_ab, 16 rows, cluster 8": KernelConfig("cute/swap_ab_sm90", tile_rows=16, cluster=8),
    "keep_ab, 64 rows": KernelConfig("cute/keep_ab_sm90"),
    "keep_ab, 128 rows, cluster 2": KernelConfig("cute/keep_ab_sm90", tile_rows=128, cluster=2),
    "merge": KernelConfig("cuda/merge"),
}


@dataclass(frozen=True)
class Facts:
    """One kernel: resources as the compiler states them, instructions counted in its SASS."""

    kernel: str
    registers: int
    stack: int
    static_shared: int
    dynamic_shared: int
    spills: int
    classes: dict[str, int]
    opcodes: dict[str, int]
    source: Source

    def count(self, prefix: str) -> int:
        """Instructions whose opcode begins with `prefix`: "HGMMA", "UTMALDG"."""
        return sum(n for opcode, n in self.opcodes.items() if opcode.startswith(prefix))


@cache
def facts(kernel: str) -> Facts:
    """Facts of a kernel of `KERNELS`: compiled here, else recorded; BuildError where neither is."""
    if kernel not in KERNELS:
        raise invalid("kernel", repr(kernel), tuple(KERNELS))
    try:
        artifact = find(KERNELS[kernel], ARCH)
    except MlaLabError:
        artifact = None
    if artifact is not None:
        report = inspect(artifact)
        if report.has_sass:
            return _facts(kernel, report.kernels[0], Source("measured", detail="compiled here"))
    row = _record().get(kernel)
    if row is None:
        raise BuildError(
            f"kernel: got {kernel!r}, neither compiled here nor recorded; "
            "supported: after `mla-lab compile`"
        )
    fresh = row["source_hash"] == source_hash(KERNELS[kernel].kernel)
    detail = row["compiler"] if fresh else f"{row['compiler']}, earlier sources"
    return Facts(**row["facts"], source=Source("recorded", ARCH, row["date"], detail))


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
        source=source,
    )


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
