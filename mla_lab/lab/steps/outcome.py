"""What the emulator saw: a fault, findings, and the outputs beside the expected ones."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...emulate import EmulatedKernel, Fault, Finding, Options, Run
from ...emulate.ptx import Place
from .catalogue import FOLDER, Trial
from .text import module_text

#: what a stuck thread waits for, in the emulator's words
_STATE = re.compile(r"\[(mbarrier [^\]]*)\]")


@dataclass(frozen=True)
class Mismatch:
    """An output that is wrong: how much of it, and the first wrong place."""

    name: str
    share: float
    place: tuple[int, ...]
    got: float
    expected: float

    def __str__(self) -> str:
        at = ", ".join(map(str, self.place))
        return (
            f"{self.share:.0%} of `{self.name}` is wrong; {self.name}[{at}] is {self.got:.4g} and "
            f"should be {self.expected:.4g}"
        )


@dataclass
class Outcome:
    """Of one run. `fault` ended it; `wrong` is empty then, since nothing is copied back."""

    schedule: str
    fault: Finding | None = None
    findings: list[Finding] = field(default_factory=list)
    wrong: list[Mismatch] = field(default_factory=list)
    run: Run = field(default_factory=lambda: Run([]))

    @property
    def is_right(self) -> bool:
        """Right numbers, and nothing found."""
        return not (self.fault or self.findings or self.wrong)

    def hazards(self) -> list[Finding]:
        """The fault first, then findings."""
        return [*([self.fault] if self.fault else []), *self.findings]


def emulate(kernel: EmulatedKernel, trial: Trial, schedule: str) -> Outcome:
    """Run with all checks, and compare."""
    kernel.options = Options(check=True, schedule=schedule)
    args, outcome = trial.fresh(), Outcome(schedule)
    try:
        kernel(*args)
    except Fault as fault:
        outcome.fault = fault.finding
    else:
        outcome.wrong = compare(trial, args)
    outcome.run = kernel.run
    outcome.findings = list(kernel.run.findings)
    return outcome


def compare(trial: Trial, args: Sequence[Any]) -> list[Mismatch]:
    """Outputs that are further off than the trial allows."""
    pairs = ((name, args[i], want) for name, (i, want) in trial.expected.items())
    return [m for m in (_mismatch(trial, *pair) for pair in pairs) if m]


def _mismatch(trial: Trial, name: str, got: Tensor, want: Tensor) -> Mismatch | None:
    got, want = got.float(), want.float()
    near = trial.tolerance * want.abs().max().clamp(min=1.0) if trial.tolerance else 0.0
    wrong = ~((got - want).abs() <= near)
    if not wrong.any():
        return None
    place = tuple(int(i) for i in torch.nonzero(wrong)[0])
    return Mismatch(name, float(wrong.float().mean()), place, float(got[place]), float(want[place]))


def line_at(place: Place, text: str) -> str:
    """The source line of a place: of the step's `text`, or of a module that it imports."""
    path = Path(place.file)
    author = FOLDER / path.name
    lines = (module_text(author) if author.is_file() else text).splitlines()
    known = author.is_file() or path.stem.startswith("step_")
    if not known or not 0 < place.line <= len(lines):
        return ""
    return lines[place.line - 1].strip()


def words_of(finding: Finding, text: str) -> str:
    """A finding as a sentence, with its source line."""
    line = line_at(finding.place, text)
    at = f", at `{line}`" if line else ""
    # of threads that are stuck, the state of what they wait for
    states = sorted({s for role, _ in finding.others for s in _STATE.findall(role)})
    stuck = "".join(f"; {state}" for state in states[:2])
    # of a race, the warp and the line at the other side
    other = ""
    if finding.kind == "race" and finding.others:
        role, place = finding.others[0]
        line = line_at(place, text)
        other = f"; the other: {role}" + (f", at `{line}`" if line else "")
    said = finding.text.replace("the write below it", "the write")
    return f"{finding.kind}: {said}{stuck} ({finding.who}{at}{other})"
