"""The steps of `mla-lab live`: what each runs, and what it needs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...core.errors import MlaLabError

RECORD, SWEEP, HOST = (
    "records/h200_anchor.jsonl",
    "records/h200_sweep.jsonl",
    "records/host_cost.jsonl",
)
ANATOMY = "records/h200_anatomy.jsonl"
#: of a short run: a few cases of each regime, one part, few rounds
SHORT_CASES = r"^b(1|16|128)_q1_h(16|128)_kv(1024|8192)$"
SHORT_ANATOMY = "b1_q1_h128_kv8192"


class StepFailed(MlaLabError, RuntimeError):
    """A step ended with an error of its own, which stands above."""


@dataclass(frozen=True)
class Asked:
    """What a run is about: the folder that is refreshed, a short run or a whole one."""

    into: Path
    short: bool = False
    checkout: Path | None = None

    def python(self, *arguments: str, capture: bool = False) -> str:
        """Runs this interpreter on `arguments`, its data in `into`; what it wrote, if captured.

        Raises StepFailed where it does not end well.
        """
        done = subprocess.run(
            [sys.executable, *arguments],
            env={**os.environ, "MLA_LAB_DATA": str(self.into)},
            stdout=subprocess.PIPE if capture else None,
            text=True,
        )
        if done.returncode:
            raise StepFailed(f"live: {' '.join(arguments)} ended with code {done.returncode}")
        return done.stdout or ""


@dataclass(frozen=True)
class Step:
    """One step: what it refreshes, and whether a card is needed for it."""

    name: str
    what: str
    card: bool
    run: Callable[[Asked], None]


def _measured(
    asked: Asked, name: str, verb: str, flags: Sequence[str], short: Sequence[str]
) -> None:
    """A record measured anew beside the old one, which it replaces when it is whole."""
    new = asked.into / f"{name}.new"
    new.unlink(missing_ok=True)
    more = [*short, "--only", SHORT_CASES] if asked.short else flags
    asked.python("-m", "mla_lab", "bench", verb, str(new), "--cases", "anchor", *more)
    new.replace(asked.into / name)


def _sweep(asked: Asked) -> None:
    _measured(asked, SWEEP, "sweep", (), ("--rounds", "3", "--per-tile", "2"))


def _record(asked: Asked) -> None:
    whole = ("--parts", "2", "--power")
    _measured(asked, RECORD, "run", whole, ("--rounds", "3", "--quick", "--peers", "mla-lab"))


def _costs(asked: Asked) -> None:
    asked.python("-m", "mla_lab", "bench", "fit", str(asked.into / SWEEP))


def _anatomy(asked: Asked) -> None:
    """Rows that were taken now replace their like; those of a peer that is not here stay."""
    new, old = asked.into / f"{ANATOMY}.new", asked.into / ANATOMY
    new.unlink(missing_ok=True)
    only = ("--only", SHORT_ANATOMY) if asked.short else ()
    asked.python("-m", "mla_lab.studies.call_anatomy", str(new), *only)
    if not new.exists():
        print("no stamped builds, and no compiler to make them: the rows stay as they were")
        return
    lines = [*(old.read_text().splitlines() if old.exists() else ()), *new.read_text().splitlines()]
    rows = {_taken(json.loads(line)): line for line in lines}
    old.write_text("".join(line + "\n" for line in rows.values()))
    new.unlink()


def _taken(row: dict[str, Any]) -> tuple[Any, ...]:
    """What a row of the anatomy is of."""
    return tuple(row.get(name) for name in ("case", "peer", "kind", "lanes"))


def _host(asked: Asked) -> None:
    from datetime import UTC, datetime

    from ...bench.environment import commit

    printed = asked.python("-m", "mla_lab.studies.host_cost", capture=True)
    sys.stdout.write(printed)
    figures = json.loads(printed.strip().splitlines()[-1])
    row = {"date": datetime.now(UTC).date().isoformat(), "commit": commit(), **figures}
    with (asked.into / HOST).open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def _simulator(asked: Asked) -> None:
    asked.python("-m", "mla_lab.simulate.fit", str(asked.into / RECORD))


def _notebooks(asked: Asked) -> None:
    jobs = "6" if asked.short else "1"
    keep = str(asked.into / "executed")
    asked.python("-m", "mla_lab.lab.run_all", "--keep", keep, "--jobs", jobs)


def _pages(asked: Asked) -> None:
    if asked.checkout is None:
        print("no README beside this package: nothing to fill")
        return
    asked.python("-m", "mla_lab.lab.documents", str(asked.checkout))


#: in the order in which they depend on each other
STEPS = (
    Step("sweep", "our own variants of each case", True, _sweep),
    Step("costs", "the cost model by which a call chooses its kernel", False, _costs),
    Step("record", "whole calls beside the peers that are installed", True, _record),
    Step("anatomy", "where the time of a call goes, by stamped builds", True, _anatomy),
    Step("host", "host time of a call", True, _host),
    Step("simulator", "the simulator's constants and its error table", False, _simulator),
    Step("notebooks", "every notebook, executed live", True, _notebooks),
    Step("pages", "tables and pictures of README and data/notes/", False, _pages),
)
