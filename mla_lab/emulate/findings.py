"""What the emulator reports: a fault that ends a run, or a finding that a check noted."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..core.errors import MlaLabError
from .parts import GangLike
from .ptx import Place


class Fault(MlaLabError, RuntimeError):
    """The kernel did what no kernel may: it cannot go on. `finding` says what, where and who."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(str(finding))
        self.finding = finding


@dataclass(frozen=True)
class Finding:
    """One defect: its kind, the source line, who did it, and what to look at."""

    kind: str
    place: Place
    who: str
    text: str
    #: further lines that took part, as (role, place)
    others: tuple[tuple[str, Place], ...] = ()
    instruction: str = field(default="", compare=False)

    def __str__(self) -> str:
        lines = [f"{self.place}: {self.kind}: {self.text} ({self.who})"]
        if self.instruction:
            lines.append(f"    {self.instruction[:110]}")
        lines += [f"    {role}: {place}" for role, place in self.others]
        return "\n".join(lines)


def finding(
    g: GangLike, pc: int, kind: str, text: str, others: tuple[tuple[str, Place], ...] = ()
) -> Finding:
    """A finding about instruction `pc` of the threads of `g`."""
    instruction = g.cta.program.kernel.code[pc]
    return Finding(kind, instruction.place, g.name, text, others, instruction.text)


def fault(g: GangLike, pc: int, kind: str, text: str) -> Fault:
    """The same as an exception."""
    return Fault(finding(g, pc, kind, text))
