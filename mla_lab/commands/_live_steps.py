"""The steps of `mla-lab live`: what each runs, and what it needs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import MlaLabError

RECORD, SWEEP, HOST = "h200_anchor.jsonl", "h200_sweep.jsonl", "host_cost.jsonl"
#: of a short run: a few cases of each regime, one part, few rounds
SHORT_CASES = r"^b(1|16|128)_q1_h(16|128)_kv(1024|8192)$"
REFINE = 4000


class StepFailed(MlaLabError, RuntimeError):
    """A step ended with an error of its own, which stands above."""


@dataclass(frozen=True)
class Asked:
    """What a run is about: the folder that is refreshed, a short run or a whole one."""

    into: Path
    short: bool = False
    readme: Path | None = None

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
    refine = "40" if asked.short else str(REFINE)
    sweep = str(asked.into / SWEEP)
    asked.python("-m", "mla_lab", "bench", "fit", sweep, "--refine", refine)


def _host(asked: Asked) -> None:
    from datetime import UTC, datetime

    from ..bench.environment import commit

    printed = asked.python("-m", "mla_lab.bench.host_cost", capture=True)
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


def _readme(asked: Asked) -> None:
    if asked.readme is None:
        print("no README beside this package: nothing to fill")
        return
    record, readme = str(asked.into / RECORD), str(asked.readme)
    asked.python("-m", "mla_lab", "bench", "report", record, "--readme", readme)
    asked.python("-m", "mla_lab.lab.readme", readme)


#: in the order in which they depend on each other
STEPS = (
    Step("sweep", "our own variants of each case", True, _sweep),
    Step("costs", "the cost model by which a call chooses its kernel", False, _costs),
    Step("record", "whole calls beside the peers that are installed", True, _record),
    Step("host", "host time of a call", True, _host),
    Step("simulator", "the simulator's constants and its error table", False, _simulator),
    Step("notebooks", "every notebook, executed live", True, _notebooks),
    Step("readme", "the README's tables and picture", False, _readme),
)
