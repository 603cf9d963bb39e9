"""Fits the simulator to recorded launches, and says honestly how well it then predicts.

    python -m mla_lab.simulate.fit data/RECORD.jsonl

prints the error table: each regime is predicted by constants that were fitted to the others, next
to a baseline of two numbers, `constant + bytes / bandwidth`, fitted to the same rows. It then
writes `data/simulator.json`, the constants fitted to all rows.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..bench.records import problem_of, read, results
from ..errors import invalid
from ..gpu import H200 as CARD
from ..plan.choose import choose
from ..plan.tile import Plan
from ..problem import Problem
from ..resources import data_dir
from .constants import H200, KV_M, Constants
from .launch import simulate

RECORD = "simulator.json"
#: constants that launches of one card tell, per kernel family
FITTED = (
    "clock_ghz",
    "burst_ghz",
    "first_byte_us",
    "write_us",
    "merge_us",
    "merge_tbps",
    "exchange_tbps",
    "cluster_us",
    "gap_clocks",
    "read_tbps",
)
#: relative step of the numerical derivative, pull towards the start, largest step (in log units)
STEP, DAMPING, MAX_STEP = 0.02, 0.05, 0.4
#: where each family begins; what its records cannot tell stays there
STARTS = {"cute/q_m": replace(H200, burst_ghz=1.98), "cute/kv_m": replace(KV_M, burst_ghz=2.0)}


@dataclass(frozen=True)
class Launch:
    """One timed launch of ours: its plan, its cluster, microseconds."""

    name: str
    plan: Plan
    cluster: int
    us: float

    @property
    def kernel(self) -> str:
        """The family whose constants it tells."""
        return self.plan.config.kernel if self.plan.config else "cute/q_m"

    @property
    def problem(self) -> Problem:
        return self.plan.problem


def launches(rows: Iterable[dict[str, Any]], peer: str = "mla-lab") -> list[Launch]:
    """Timed launches of dense problems, with the plan that `choose` makes for each."""
    found = []
    for row in results(rows, "ok"):
        if row["peer"] != peer or row["problem"]["top_k"]:
            continue
        problem = problem_of(row)
        choice = choose(problem, CARD)
        found.append(Launch(row["case"], choice.plan(problem), choice.config.cluster, row["us"]))
    return found


def regime(problem: Problem) -> str:
    """latency (floor below 15 us), else the side of the roofline: memory or compute."""
    if CARD.roofline_time(problem) < 15e-6:
        return "latency"
    return CARD.bound(problem)


def predict(constants: dict[str, Constants], cases: Sequence[Launch]) -> np.ndarray:
    """Microseconds that the simulator expects of each launch."""
    return np.array(
        [simulate(c.plan, constants[c.kernel], cluster=c.cluster).makespan for c in cases]
    )


def fit(cases: Sequence[Launch], rounds: int = 6) -> dict[str, Constants]:
    """Constants of each family, by damped Gauss-Newton on the logarithms of `FITTED`."""
    if not cases:
        raise invalid("records", "no timed launch of ours", "rows of the peer mla-lab")
    return {
        kernel: _fit_family(start, [c for c in cases if c.kernel == kernel], kernel, rounds)
        for kernel, start in STARTS.items()
    }


def _fit_family(start: Constants, cases: Sequence[Launch], kernel: str, rounds: int) -> Constants:
    if not cases:
        return start
    measured = np.log([c.us for c in cases])
    names = list(FITTED)

    def constants(x: np.ndarray) -> Constants:
        scaled = {n: getattr(start, n) * float(np.exp(v)) for n, v in zip(names, x, strict=True)}
        return replace(start, **scaled)

    def residual(x: np.ndarray) -> np.ndarray:
        return np.asarray(np.log(predict({kernel: constants(x)}, cases)) - measured)

    x = np.zeros(len(names))
    pull = DAMPING * np.sqrt(len(cases))
    for _ in range(rounds):
        r = residual(x)
        columns = [(residual(x + STEP * e) - r) / STEP for e in np.eye(len(names))]
        system = np.vstack([np.stack(columns, axis=1), pull * np.eye(len(names))])
        step = np.linalg.lstsq(system, -np.concatenate([r, pull * x]), rcond=None)[0]
        step = np.clip(step, -MAX_STEP, MAX_STEP)
        better = [x + step * scale for scale in (1.0, 0.5, 0.2)]
        costs = [float((residual(y) ** 2).sum() + (pull * y) @ (pull * y)) for y in better]
        if min(costs) >= float((r**2).sum() + (pull * x) @ (pull * x)):
            break
        x = better[int(np.argmin(costs))]
    return constants(x)


@dataclass(frozen=True)
class Baseline:
    """The two-number model that a simulator has to beat: constant + bytes / bandwidth."""

    constant_us: float
    tbps: float

    @classmethod
    def fit(cls, cases: Sequence[Launch]) -> Baseline:
        """Least relative squares over a grid of bandwidths."""
        size = np.array([c.problem.bytes() / 1e6 for c in cases])
        us = np.array([c.us for c in cases])
        best = (np.inf, 0.0, 1.0)
        for tbps in np.geomspace(0.1, 8.0, 80):
            rest = us - size / tbps
            constant = max(0.0, float((rest / us**2).sum() / (1 / us**2).sum()))
            loss = float((((constant + size / tbps) / us - 1) ** 2).sum())
            best = min(best, (loss, constant, float(tbps)))
        return cls(best[1], best[2])

    def predict(self, cases: Sequence[Launch]) -> np.ndarray:
        """Microseconds of each launch."""
        return np.array([self.constant_us + c.problem.bytes() / 1e6 / self.tbps for c in cases])


@dataclass(frozen=True)
class Judgement:
    """Relative errors on rows that were not fitted, simulator and baseline."""

    held_out: str
    rows: int
    median: float
    worst: float
    worst_case: str
    baseline_median: float


def judge(cases: Sequence[Launch]) -> list[Judgement]:
    """Each regime held out as a whole, then every fourth shape of all regimes."""
    splits = [
        (r, [regime(c.problem) == r for c in cases]) for r in ("latency", "memory", "compute")
    ]
    splits.append(("every fourth shape", [i % 4 == 3 for i in range(len(cases))]))
    return [_judge(name, cases, np.array(out)) for name, out in splits if any(out) and not all(out)]


def _judge(name: str, cases: Sequence[Launch], out: np.ndarray) -> Judgement:
    known = [c for c, held in zip(cases, out, strict=True) if not held]
    unseen = [c for c, held in zip(cases, out, strict=True) if held]
    us = np.array([c.us for c in unseen])
    error = np.abs(predict(fit(known), unseen) / us - 1)
    base = np.abs(Baseline.fit(known).predict(unseen) / us - 1)
    at = int(error.argmax())
    return Judgement(
        name,
        len(unseen),
        float(np.median(error)),
        float(error[at]),
        unseen[at].name,
        float(np.median(base)),
    )


def error_table(judgements: Sequence[Judgement]) -> str:
    """The judgements as Markdown."""
    lines = [
        "| held out | rows | median error | worst | worst case | constant + bytes / bandwidth |",
        "|---|---:|---:|---:|---|---:|",
    ]
    lines += [
        f"| {j.held_out} | {j.rows} | {j.median:.1%} | {j.worst:.1%} | {j.worst_case} | "
        f"{j.baseline_median:.1%} |"
        for j in judgements
    ]
    return "\n".join(lines)


def write(constants: dict[str, Constants], path: Path, origin: str) -> None:
    """Stores fitted constants beside where they come from."""
    values = {
        kernel: {f.name: getattr(c, f.name) for f in fields(c)} for kernel, c in constants.items()
    }
    path.write_text(json.dumps({"origin": origin, "constants": values}, indent=1) + "\n")


def load(path: Path | None = None) -> dict[str, Constants]:
    """Fitted constants by kernel family; the prototype's where none are recorded."""
    path = path or data_dir() / RECORD
    if not path.exists():
        return dict(STARTS)
    values = json.loads(path.read_text())["constants"]
    for constants in values.values():
        constants["clusters"] = tuple(tuple(pair) for pair in constants["clusters"])
    return {kernel: Constants(**constants) for kernel, constants in values.items()}


def main(arguments: Sequence[str]) -> int:
    """Prints the error table of the records and writes the constants fitted to all of them."""
    parser = argparse.ArgumentParser(
        prog="python -m mla_lab.simulate.fit", description=main.__doc__
    )
    parser.add_argument("records", nargs="+", type=Path, help="of `mla-lab bench run`")
    paths = parser.parse_args(arguments).records
    if missing := [str(path) for path in paths if not path.is_file()]:
        parser.error(f"records: got {', '.join(missing)}; supported: files that exist")
    cases = [case for path in paths for case in launches(read(path))]
    sys.stdout.write(error_table(judge(cases)) + "\n")
    origin = f"{len(cases)} launches of {', '.join(path.name for path in paths)}"
    write(fit(cases), data_dir() / RECORD, origin)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
