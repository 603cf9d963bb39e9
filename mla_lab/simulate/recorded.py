"""The constants that were fitted to a record, and what they say of regimes they have not seen."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from ..core.resources import data_dir
from .constants import H200, KV_M, Constants

RECORD = "runtime/simulator.json"
#: where each family begins; what its records cannot tell stays there
STARTS = {"cute/keep_ab_sm90": replace(H200, burst_ghz=1.98), "cute/swap_ab_sm90": KV_M}
#: tiles of more rows are those of `cute/keep_ab_sm90`
KV_M_ROWS = 32


@dataclass(frozen=True)
class Judgement:
    """Relative errors on cases that were not fitted, of the simulator and of two numbers."""

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
    #: by what was held out: the constants fitted to the rest
    held_out: dict[str, dict[str, Constants]]
    judgements: tuple[Judgement, ...]


def write(fitted: Fitted, path: Path) -> None:
    """Stores fitted constants beside where they come from."""
    values = {
        "origin": fitted.origin,
        "constants": {k: _plain(c) for k, c in fitted.constants.items()},
        "held_out": {
            name: {k: _changes(c, fitted.constants[k]) for k, c in constants.items()}
            for name, constants in fitted.held_out.items()
        },
        "judgements": [vars(j) for j in fitted.judgements],
    }
    path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def read(path: Path | None = None) -> Fitted:
    """Fitted constants by kernel family; the starts, unjudged, where none are recorded."""
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
    """Fitted constants of the kernel family that has tiles of so many rows."""
    kernel = "cute/swap_ab_sm90" if tile_rows <= KV_M_ROWS else "cute/keep_ab_sm90"
    return recorded().constants[kernel]


def error_table(judgements: tuple[Judgement, ...] | list[Judgement]) -> str:
    """The judgements as Markdown."""
    lines = [
        "| held out | cases | median error | worst | worst case | constant + bytes / bandwidth |",
        "|---|---:|---:|---:|---|---:|",
    ]
    lines += [
        f"| {j.held_out} | {j.cases} | {j.median:.1%} | {j.worst:.1%} | {j.worst_case} | "
        f"{j.baseline_median:.1%} |"
        for j in judgements
    ]
    return "\n".join(lines) + "\n"


def _plain(constants: Constants) -> dict[str, Any]:
    return {f.name: getattr(constants, f.name) for f in fields(constants)}


def _changes(constants: Constants, base: Constants) -> dict[str, Any]:
    """The fields that differ from `base`."""
    plain, known = _plain(constants), _plain(base)
    return {name: value for name, value in plain.items() if value != known[name]}


def _constants(values: dict[str, Any]) -> Constants:
    clusters = tuple((size, count) for size, count in values["clusters"])
    return Constants(**{**values, "clusters": clusters})
