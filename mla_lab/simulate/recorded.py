"""The simulator's constants as fitted to a record, and their errors on held-out regimes."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from ..core.markdown import markdown_table
from ..core.resources import data_dir
from .constants import H200, SWAP_AB, Constants

RECORD = "runtime/simulator.json"
#: start values of each family's fit; constants that no record determines keep them
STARTS = {"cute/keep_ab_sm90": replace(H200, burst_ghz=1.98), "cute/swap_ab_sm90": SWAP_AB}
#: tiles of more rows are those of `cute/keep_ab_sm90`
SWAP_AB_ROWS = 32


@dataclass(frozen=True)
class Judgement:
    """Relative errors on held-out cases, of the simulator and of the two-number baseline."""

    held_out: str
    cases: int
    median: float
    worst: float
    worst_case: str
    baseline_median: float


@dataclass(frozen=True)
class Fitted:
    """Contents of `data/runtime/simulator.json`."""

    origin: str
    constants: dict[str, Constants]
    #: constants fitted without a held-out set, by the name of that set
    held_out: dict[str, dict[str, Constants]]
    judgements: tuple[Judgement, ...]


def write(fitted: Fitted, path: Path) -> None:
    """Write fitted constants and their origin."""
    values = {
        "origin": fitted.origin,
        "constants": {k: vars(c) for k, c in fitted.constants.items()},
        "held_out": {
            name: {k: _changes(c, fitted.constants[k]) for k, c in constants.items()}
            for name, constants in fitted.held_out.items()
        },
        "judgements": [vars(j) for j in fitted.judgements],
    }
    path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def read(path: Path | None = None) -> Fitted:
    """Fitted constants by kernel family; the start values where none are recorded."""
    path = path or data_dir() / RECORD
    if not path.exists():
        return Fitted("", dict(STARTS), {}, ())
    values = json.loads(path.read_text(encoding="utf-8"))
    constants = {kernel: _constants(c) for kernel, c in values["constants"].items()}
    held_out = {
        name: {k: replace(constants[k], **changes) for k, changes in by_kernel.items()}
        for name, by_kernel in values["held_out"].items()
    }
    judgements = tuple(Judgement(**j) for j in values["judgements"])
    return Fitted(values["origin"], constants, held_out, judgements)


@cache
def recorded() -> Fitted:
    """`read`, once a process."""
    return read()


def constants_for(tile_rows: int) -> Constants:
    """Fitted constants of the kernel family with tiles of so many rows."""
    kernel = "cute/swap_ab_sm90" if tile_rows <= SWAP_AB_ROWS else "cute/keep_ab_sm90"
    return recorded().constants[kernel]


def error_table(judgements: tuple[Judgement, ...] | list[Judgement]) -> str:
    """The judgements as Markdown."""
    errors = ("median error:", "worst:", "worst case", "constant + bytes / bandwidth:")
    lines = (
        (j.held_out, j.cases, f"{j.median:.1%}", f"{j.worst:.1%}", j.worst_case,
         f"{j.baseline_median:.1%}")
        for j in judgements
    )  # fmt: skip
    return markdown_table(("held out", "cases:", *errors), lines) + "\n"


def _changes(constants: Constants, base: Constants) -> dict[str, Any]:
    """The fields that differ from `base`."""
    known = vars(base)
    return {name: value for name, value in vars(constants).items() if value != known[name]}


def _constants(values: dict[str, Any]) -> Constants:
    clusters = tuple((size, count) for size, count in values["clusters"])
    return Constants(**{**values, "clusters": clusters})
