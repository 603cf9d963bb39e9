"""The ladder's figures for the notebook: gains as recorded, and its x-ray step by step.

python -m mla_lab.lab.ladder_facts     compile the ladder, write data/runtime/ladder_xray.json anew
"""

from __future__ import annotations

import datetime
import json
from collections import Counter
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

from ..backends.cuda.ladder import CONFIG, STEPS, shared_bytes
from ..bench import ladder
from ..bench.cases import Case
from ..bench.ladder import CASES, Rung
from ..bench.peers.ladder_step import LadderStep
from ..bench.records import Row, results
from ..core.errors import BuildError, invalid
from ..core.resources import data_dir, kernels_dir
from ..jit.build import compile
from ..jit.source import source_hash
from ..xray import KernelReport, inspect
from .measuring import Figure, live_row
from .session import gpu_name
from .source import Source
from .tables import Table, table
from .xray_facts import ARCH, Counted, inspected, recorded_source

RECORD = "runtime/ladder_xray.json"
#: namespaces of each step's kernels, where they are not the step's own
KERNELS = {
    4: ("step4::attend<mla::ladder::step4::Plain>",),
    5: ("step4::attend<mla::ladder::step5::Swizzled>",),
    7: ("step7::attend<4, mla::ladder::step6::Fetch>", "step7::merge"),
    8: ("step7::attend<2, mla::ladder::step6::Fetch>", "step7::merge"),
    9: ("step7::attend<2, mla::ladder::step9::FetchAhead>", "step7::merge"),
}


@dataclass(frozen=True)
class StepFacts(Counted):
    """Compiled code of a step: instructions of all kernels, registers of the kernel with most."""

    step: int
    shared_bytes: int


def case_of(name: str) -> Case:
    """A case of the ladder by its name."""
    for case in CASES:
        if case.name == name:
            return case
    raise invalid("case", repr(name), [case.name for case in CASES])


@cache
def rungs(name: str) -> list[Rung]:
    """Each step in the case called `name`: predicted, and recorded if there is a record."""
    return ladder.rungs(ladder.recorded(), case_of(name))


@cache
def recorded_rows() -> list[Row]:
    """Result rows of the record, each with its accuracy."""
    return [row for row in results(ladder.recorded()) if row["peer"].startswith("ladder-")]


def source() -> Source | None:
    """Card and date of the record, None where there is none."""
    runs = [row for row in ladder.recorded() if row["kind"] == "run"]
    if not runs:
        return None
    return Source("recorded", runs[-1]["environment"]["card"]["name"], str(runs[-1]["time"])[:10])


def code(step: int, begin: str, end: str) -> str:
    """Lines of a step's file from the first that holds `begin` to the next that holds `end`."""
    lines = (kernels_dir() / "ladder" / STEPS[step].file).read_text().splitlines()
    first = next((i for i, line in enumerate(lines) if begin in line), None)
    last = next((i for i in range(first or 0, len(lines)) if end in lines[i]), None)
    if first is None or last is None:
        raise invalid("begin, end", f"{begin!r}, {end!r}", f"text of {STEPS[step].file}")
    return "\n".join(lines[first : last + 1])


@cache
def facts() -> tuple[tuple[StepFacts, ...], Source]:
    """The x-ray of every step: compiled here, else recorded; BuildError where neither is."""
    if found := inspected(CONFIG):
        return _facts(found), Source("measured", detail="compiled here")
    path = data_dir() / RECORD
    if not path.exists():
        raise BuildError("ladder: neither compiled here nor recorded; supported: with nvcc")
    row = json.loads(path.read_text())
    steps = tuple(StepFacts(**step) for step in row["steps"])
    return steps, recorded_source(CONFIG.kernel, row["date"], "nvcc", row["source_hash"])


def _facts(kernels: tuple[KernelReport, ...]) -> tuple[StepFacts, ...]:
    by_name = {kernel.name.split("ladder::", 1)[1]: kernel for kernel in kernels}
    found = []
    for step in STEPS:
        own = tuple(name for name in by_name if name.startswith(f"step{step.number}::"))
        mine = [by_name[name] for name in KERNELS.get(step.number, own)]
        classes = sum((kernel.classes for kernel in mine), Counter[str]())
        opcodes = sum((kernel.opcodes for kernel in mine), Counter[str]())
        found.append(
            StepFacts(
                step=step.number,
                registers=max(kernel.resources.registers for kernel in mine),
                shared_bytes=shared_bytes(step.number),
                spills=sum(kernel.spills for kernel in mine),
                classes=dict(sorted(classes.items())),
                opcodes=dict(sorted(opcodes.items())),
            )
        )
    return tuple(found)


def gains_table(name: str) -> Table:
    """One case as a table: predicted and recorded times, and gains over the step before."""
    rows: list[tuple[Any, ...]] = []
    for rung in rungs(name):
        step = STEPS[rung.step]
        cells = (rung.predicted_us, rung.predicted_gain, rung.us, rung.gain)
        shown = ["" if value is None else value for value in cells]
        rows.append((f"{step.number} {step.name}", *shown, rung.limit))
    columns = (
        "step",
        "predicted us",
        "gain, predicted",
        "recorded us",
        "gain, recorded",
        "limit on paper",
    )
    return table(columns, rows, source=source())


def last_step(name: str) -> Figure:
    """The last step on the case called `name`: timed now where a GPU is, else as recorded."""
    case, last = case_of(name), STEPS[-1].number
    if not gpu_name():
        return Figure(case.name, rungs(name)[last].us, source())
    row = live_row(case, peer=LadderStep(last))
    us = row["us"] if row["status"] == "ok" else None
    return Figure(case.name, us, Source("measured", card=gpu_name(), detail="now"))


def record() -> None:
    """Compile the ladder for Hopper and write its x-ray."""
    artifact = compile(CONFIG, ARCH)
    document = {
        "arch": ARCH,
        "compiler": artifact.toolchain["nvcc"],
        "date": datetime.date.today().isoformat(),
        "source_hash": source_hash(CONFIG.kernel),
        "steps": [asdict(step) for step in _facts(inspect(artifact).kernels)],
    }
    (data_dir() / RECORD).write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    record()
