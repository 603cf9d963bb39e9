"""The ladder measured: cases, the run that fills data/records/ladder.jsonl, tables of gains."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from ..backends.cuda.ladder import LOOK_AHEAD, STEPS
from ..core.errors import invalid
from ..core.gpu import H200
from ..core.resources import data_dir
from . import ladder_model
from .cases import Case, uniform_case
from .measure import Method
from .records import Record, Row, read, results

RECORD = "records/ladder.jsonl"
#: many heads and many requests (matrix products), few heads (memory), one request (latency)
CASES = tuple(
    uniform_case(batch, 1, heads, kv_len, "ladder")
    for batch, heads, kv_len in ((64, 128, 2048), (64, 16, 4096), (1, 128, 8192))
)


@dataclass(frozen=True)
class Rung:
    """One step in one case; times in microseconds, None where there is no measurement."""

    step: int
    case: str
    predicted_us: float
    limit: str
    us: float | None
    #: over the step before; None for the first
    predicted_gain: float | None
    gain: float | None


def measure(path: Path, rounds: int, progress: Callable[[str], None]) -> None:
    """Every step on every case of `CASES`, by the benchmark's own method, appended to `path`."""
    from .harness import Bench
    from .peers.ladder_step import LadderStep

    method = Method(rounds=rounds, isolated=False, planned=False, in_step=False)
    peers = [LadderStep(step.number) for step in STEPS]
    bench = Bench(Record(path), peers, "cuda", method, progress=progress)
    bench.run(CASES)


def rungs(rows: Iterable[Row], case: Case) -> list[Rung]:
    """The steps of one case: predicted times, and measured ones where `rows` have them."""
    measured = {
        row["notes"]["step"]: row["us"]
        for row in results(rows, "ok")
        if row["case"] == case.name and row["peer"].startswith("ladder-")
    }
    found: list[Rung] = []
    for step in STEPS:
        guess = ladder_model.predict(step.number, case.problem, H200)
        us, expected, gain = measured.get(step.number), None, None
        if found:
            before = found[-1]
            expected = before.predicted_us / guess.us
            if before.us is not None and us is not None:
                gain = before.us / us
        if step.number == LOOK_AHEAD:
            expected = ladder_model.LOOK_AHEAD_GAIN
        found.append(Rung(step.number, case.name, guess.us, guess.limit, us, expected, gain))
    return found


def recorded() -> list[Row]:
    """Rows of data/records/ladder.jsonl; empty without the record."""
    path = data_dir() / RECORD
    return list(read(path)) if path.exists() else []


def tables(path: Path | None = None) -> str:
    """A table for each case: predicted and measured time, gain over the step before."""
    rows = recorded() if path is None else list(read(path))
    if not any(row.get("family") == "ladder" for row in rows):
        raise invalid("record", str(path), "one that `mla-lab ladder --record` made")
    return "\n\n".join(_table(case, rungs(rows, case)) for case in CASES)


def _table(case: Case, found: list[Rung]) -> str:
    lines = [
        case.name,
        f"{'step':16} {'predicted us':>12} {'gain':>6} {'measured us':>12} {'gain':>6}  limit",
    ]
    for rung in found:
        step = STEPS[rung.step]
        expected, gain = (
            "" if value is None else f"{value:.2f}" for value in (rung.predicted_gain, rung.gain)
        )
        us = "-" if rung.us is None else f"{rung.us:.1f}"
        lines.append(
            f"{step.number} {step.name:14} {rung.predicted_us:12.1f} {expected:>6} {us:>12} "
            f"{gain:>6}  {rung.limit}"
        )
    return "\n".join(lines)
