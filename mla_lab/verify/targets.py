"""Targets: bounds for the kernels, beside the figures of today's records.

`data/notes/targets.jsonl` has one line a target: its figure and record, the
bound, the attempts to reach it (rows of `data/notes/kernel_attempts.jsonl`, as "kernel: change"),
and why it was missed. It holds no measured figure: figures are computed from the records.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from inspect import signature
from pathlib import Path
from typing import Any

from ..core.errors import invalid
from ..core.markdown import markdown_table
from ..core.resources import data_dir
from .target_figures import FIGURES, Figure, origin_of

FILE, ATTEMPTS = "notes/targets.jsonl", "notes/kernel_attempts.jsonl"


@dataclass(frozen=True)
class Target:
    """One line of the file; `figure` is a name in `FIGURES` and `of` its arguments."""

    name: str
    figure: str
    of: dict[str, Any]
    #: the bound: at least this, or with `most` at most
    asked: float
    most: bool = False
    stretch: float | None = None
    attempts: tuple[str, ...] = ()
    reason: str = ""

    def measure(self) -> Figure:
        """The figure from today's records."""
        return FIGURES[self.figure](**self.of)

    @property
    def record(self) -> str:
        """The record that the figure is computed from."""
        default = signature(FIGURES[self.figure]).parameters["record"].default
        return str(self.of.get("record", default))

    def met(self, figure: Figure) -> bool:
        """True if the figure meets the bound."""
        return figure.value <= self.asked if self.most else figure.value >= self.asked


@dataclass(frozen=True)
class Verdict:
    """A target beside its figure."""

    target: Target
    figure: Figure

    @property
    def met(self) -> bool:
        """True if the figure meets the bound."""
        return self.target.met(self.figure)


def load() -> list[Target]:
    """Targets of the file. Raises InvalidInput for a figure or an attempt that does not exist."""
    lines = (data_dir() / FILE).read_text(encoding="utf-8").splitlines()
    targets = [_target(json.loads(line)) for line in lines]
    known = attempts()
    for target in targets:
        if target.figure not in FIGURES:
            raise invalid(f"figure of {target.name!r}", target.figure, tuple(FIGURES))
        for name in target.attempts:
            if known.count(name) != 1:
                found = f"{name!r}, {known.count(name)} times in {ATTEMPTS}"
                raise invalid(f"attempt of {target.name!r}", found, '"kernel: change" of one row')
    return targets


def attempts() -> list[str]:
    """Every attempt on record, as targets name them."""
    lines = (data_dir() / ATTEMPTS).read_text(encoding="utf-8").splitlines()
    return [f"{row['kernel']}: {row['change']}" for row in map(json.loads, lines)]


def judge(targets: Sequence[Target]) -> list[Verdict]:
    """Each target with today's figure, with a digit more where a missed one would read as met."""
    found = [Verdict(target, target.measure()) for target in targets]
    return [replace(v, figure=finer(v.figure, v.target.asked)) if not v.met else v for v in found]


def finer(figure: Figure, asked: float) -> Figure:
    """`figure` with as many decimals as tell it from `asked`, up to two more."""
    places, kind = int(figure.form[1:-1]), figure.form[-1]
    forms = [f".{places + more}{kind}" for more in range(3)]
    told = [f for f in forms if format(figure.value, f) != format(asked, f)]
    return replace(figure, form=(told or forms)[0])


def made() -> str:
    """The table of the targets of the file; card, date and commit of each record."""
    verdicts = judge(load())
    records = dict.fromkeys(verdict.target.record for verdict in verdicts)
    origins = [f"- `data/{name}`: {origin_of(name)}" for name in records]
    return "\n".join([table(verdicts), "", "The records:", "", *origins])


def table(verdicts: Sequence[Verdict]) -> str:
    """Markdown table: target, figure, met; then the missed targets and why."""
    lines = []
    for verdict in verdicts:
        target, figure = verdict.target, verdict.figure
        tried = "" if verdict.met else str(len(set(target.attempts)))
        met = "yes" if verdict.met else "no"
        asked, record = _asked(target, figure), Path(target.record).stem
        lines.append((target.name, asked, figure, record, met, tried))
    missed = [v.target for v in verdicts if not v.met]
    why = [f"- {t.name}: {t.reason or 'no reason on record'}" for t in missed]
    shown = markdown_table(("target", "asked:", "measured", "record", "met", "attempts:"), lines)
    return "\n".join([shown, "", *why]).rstrip()


def _asked(target: Target, figure: Figure) -> str:
    """The bound, in the number format of `figure`."""
    return f"{'at most' if target.most else 'at least'} {figure.show(target.asked)}"


def _target(row: dict[str, Any]) -> Target:
    kept: dict[str, Callable[[Any], Any]] = {"attempts": tuple}
    try:
        return Target(**{name: kept.get(name, lambda x: x)(value) for name, value in row.items()})
    except TypeError as error:
        raise invalid(FILE, str(error), list(Target.__dataclass_fields__)) from error
