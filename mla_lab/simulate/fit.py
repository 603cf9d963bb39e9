"""Fit of the simulator to recorded launches, and its errors on launches that were held out.

    python -m mla_lab.simulate.fit data/records/h200_anchor.jsonl

Each regime is predicted by constants that were fitted to the others, next to a baseline of two
numbers, `constant + bytes / bandwidth`, fitted to the same cases. The error table, the constants
of each such fit and those fitted to all cases become `data/runtime/simulator.json`; the table is
printed.

Bandwidth is not fitted: it is the ceiling that the run measured beside its launches. The clock
under MMA load starts at the run's GEMM ceiling and is fitted for `cute/keep_ab_sm90`. The *form* of
the model was designed with all cases in sight; only its constants are held-out fits.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from ..bench.records import read
from ..core.errors import MlaLabError, invalid
from ..core.gpu import H200 as CARD
from ..core.problem import Problem
from ..core.resources import data_dir
from .constants import FLOP_PER_CLOCK, Constants
from .launch import simulate
from .launches import LATENCY, REGIMES, Launch, launches
from .recorded import RECORD, STARTS, Fitted, Judgement, error_table, write

#: constants of the card's memories, which all kernel families share
SHARED = ("exchange_tbps", "l2_tbps", "lag", "sharpness")
#: constants of a family; and its clock under MMA load, for keep_ab
OWN = ("first_byte_us", "write_us", "merge_us", "ll_merge_us", "cluster_us", "gap_clocks")
CLOCK = "clock_ghz"
#: relative step of the numerical derivative, regularisation towards the start, largest log step
STEP, DAMPING, MAX_STEP = 0.02, 0.05, 0.4
#: most iterations of a family's fit
ROUNDS = 6
EVERY_FOURTH = "every fourth shape"

Family = dict[str, Constants]


def starts(rows: Iterable[dict[str, Any]]) -> Family:
    """`STARTS` with the ceilings of the card as measured by the runs among `rows`."""
    ceilings = [row["ceilings"] for row in rows if row["kind"] in ("run", "end")]
    reads = [c["read_tbps"] for c in ceilings if c and c.get("read_tbps")]
    gemms = [c["gemm_tflops"] for c in ceilings if c and c.get("gemm_tflops")]
    found = dict(STARTS)
    if reads:
        found = {kernel: replace(c, read_tbps=max(reads)) for kernel, c in found.items()}
    if gemms:
        ghz = 1e3 * max(gemms) / FLOP_PER_CLOCK / CARD.sms
        found = {k: replace(c, clock_ghz=ghz) if c.burst_ghz else c for k, c in found.items()}
    return found


def regime(problem: Problem) -> str:
    """latency (floor below 15 us), else the side of the roofline: memory or compute."""
    return "latency" if CARD.roofline_time(problem) < LATENCY else CARD.bound(problem)


def predict(constants: Family, cases: Sequence[Launch]) -> np.ndarray:
    """Predicted microseconds of each launch."""
    return np.array(
        [simulate(c.plan, constants[c.kernel], cluster=c.cluster).makespan for c in cases]
    )


def free(start: Family) -> list[tuple[tuple[str, ...], str]]:
    """Fitted values: (families that share the constant, constant)."""
    shared = [(tuple(start), name) for name in SHARED]
    own = [((kernel,), name) for kernel in start for name in OWN]
    return shared + own + [((k,), CLOCK) for k, c in start.items() if c.burst_ghz]


def moved(start: Family, x: np.ndarray) -> Family:
    """`start` with every free constant times exp(x)."""
    found = dict(start)
    for (kernels, name), value in zip(free(start), x.tolist(), strict=True):
        for kernel in kernels:
            scaled = getattr(start[kernel], name) * float(np.exp(value))
            found[kernel] = replace(found[kernel], **{name: scaled})
    return found


def fit(cases: Sequence[Launch], start: Family, rounds: int = ROUNDS) -> Family:
    """Constants of all families, by damped Gauss-Newton on the logarithms of those that are free.

    A constant that no case depends on keeps its start value.
    """
    if not cases:
        raise invalid("records", "no timed launch of ours", "rows of the peer mla-lab")
    measured = np.log([c.us for c in cases])

    @cache
    def us(case: int, constants: Constants) -> float:
        """The prediction of one case: a constant of one family leaves the cases of the others."""
        return predict({cases[case].kernel: constants}, cases[case : case + 1]).item()

    def residual(x: np.ndarray) -> np.ndarray:
        family = moved(start, x)
        found = [us(i, family[case.kernel]) for i, case in enumerate(cases)]
        return np.asarray(np.log(found) - measured)

    x = np.zeros(len(free(start)))
    pull = DAMPING * np.sqrt(len(cases))
    for _ in range(rounds):
        r = residual(x)
        columns = [(residual(x + STEP * e) - r) / STEP for e in np.eye(len(x))]
        system = np.vstack([np.stack(columns, axis=1), pull * np.eye(len(x))])
        step = np.linalg.lstsq(system, -np.concatenate([r, pull * x]), rcond=None)[0]
        step = np.clip(step, -MAX_STEP, MAX_STEP)
        better = [x + step * scale for scale in (1.0, 0.5, 0.2)]
        costs = [float((residual(y) ** 2).sum() + (pull * y) @ (pull * y)) for y in better]
        if min(costs) >= float((r**2).sum() + (pull * x) @ (pull * x)):
            break
        x = better[int(np.argmin(costs))]
    return moved(start, x)


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


def splits(cases: Sequence[Launch]) -> dict[str, np.ndarray]:
    """Held-out sets by name: each regime as a whole, then every fourth shape."""
    masks = {r: np.array([regime(c.problem) == r for c in cases], bool) for r in REGIMES}
    masks[EVERY_FOURTH] = np.arange(len(cases)) % 4 == 3
    return {name: out for name, out in masks.items() if out.any() and not out.all()}


def parts(cases: Sequence[Launch], out: np.ndarray) -> tuple[list[Launch], list[Launch]]:
    """(fitted, held-out) cases; `out` is True for cases to hold out."""
    known = [c for c, held in zip(cases, out, strict=True) if not held]
    return known, [c for c, held in zip(cases, out, strict=True) if held]


def judge(name: str, cases: Sequence[Launch], constants: Family) -> Judgement:
    """Errors of `constants`, fitted to the rest, on the split called `name`."""
    known, unseen = parts(cases, splits(cases)[name])
    us = np.array([c.us for c in unseen])
    error = np.abs(predict(constants, unseen) / us - 1)
    base = np.abs(Baseline.fit(known).predict(unseen) / us - 1)
    at = int(error.argmax())
    return Judgement(
        name,
        len(unseen),
        round(float(np.median(error)), 4),
        round(float(error[at]), 4),
        unseen[at].name,
        round(float(np.median(base)), 4),
    )


def fit_record(rows: Sequence[dict[str, Any]], origin: str) -> Fitted:
    """Contents of `data/runtime/simulator.json` for a record."""
    cases, start = launches(rows), starts(rows)
    known = {name: parts(cases, out)[0] for name, out in splits(cases).items()}
    constants = fit(cases, start)
    held_out = {name: fit(some, start) for name, some in known.items()}
    judgements = tuple(judge(name, cases, held_out[name]) for name in known)
    return Fitted(f"{len(cases)} cases of {origin}", constants, held_out, judgements)


def main(arguments: Sequence[str]) -> int:
    """Prints the error table of the records and writes the constants fitted to all of them."""
    parser = argparse.ArgumentParser(
        prog="python -m mla_lab.simulate.fit", description=main.__doc__
    )
    parser.add_argument("records", nargs="+", type=Path, help="of `mla-lab bench run`")
    parser.add_argument("--out", type=Path, help="default: data/runtime/simulator.json")
    args = parser.parse_args(arguments)
    if missing := [str(path) for path in args.records if not path.is_file()]:
        parser.error(f"records: got {', '.join(missing)}; supported: files that exist")
    out = args.out or data_dir() / RECORD
    if not out.absolute().parent.is_dir():
        parser.error(f"--out: got {out}; supported: a file in a folder that exists")
    try:
        rows = [row for path in args.records for row in read(path)]
        fitted = fit_record(rows, ", ".join(path.name for path in args.records))
    except MlaLabError as error:
        parser.error(str(error))
    sys.stdout.write(f"{fitted.origin}\n{error_table(fitted.judgements)}")
    write(fitted, out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
