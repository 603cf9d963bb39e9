"""A serving day as decode steps: who decodes when, and what a step of it is predicted to take."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from ..bench import records
from ..core.errors import invalid
from ..core.gpu import Gpu
from ..core.models import Model
from ..core.problem import Problem
from ..plan import choose
from ..workload import DecodeStep, Trace, replay
from .lengths import open_trace
from .measuring import runs
from .predicted import PLAIN, planned

#: split policies that are compared, and last what a call does without a plan
POLICIES = ("none", "fa3", "greedy", "cost", PLAIN)
#: query and cache formats, each with its words
FORMATS = {
    "bf16": ("bf16", "bf16"),
    "KV e4m3": ("bf16", "e4m3"),
    "KV 656 B": ("bf16", "fp8_656"),
    "e4m3": ("e4m3", "e4m3"),
}
DRAFTS = (0, 1, 2, 3, 4)
CARDS = ("H200", "H100")
#: moments at which the batch of a trace is counted
MOMENTS = 120
#: steps of serving traces on a card, and the peer whose times they are: what an engine captures
RECORD, PEER = "h200_plain_traces.jsonl", "mla-lab-plain"


@dataclass(frozen=True)
class Errors:
    """Recorded time over predicted of steps of serving traces: the middle, and nine of ten."""

    low: float
    middle: float
    high: float
    steps: int
    card: str
    date: str


@lru_cache(maxsize=16)
def batches(path: str, step_ms: float) -> tuple[np.ndarray, np.ndarray]:
    """Moments of a trace, s, to the end of its last token, and how many requests decode at each."""
    trace = open_trace(path)
    end = float((trace.arrival_s + trace.output_lens * step_ms / 1e3).max())
    moments = np.linspace(0.0, end, MOMENTS)
    return moments, np.array([len(replay(trace, t, step_ms / 1e3)) for t in moments])


def step_at(path: str, share: float, step_ms: float) -> DecodeStep:
    """The decode step at a share of the trace's time, or at the nearest moment that has one."""
    trace: Trace = open_trace(path)
    return replay(trace, moment_at(path, share, step_ms)[0], step_ms / 1e3)


def moment_at(path: str, share: float, step_ms: float) -> tuple[float, bool]:
    """The moment of `step_at`, s, and whether requests decode at the share itself. Raises
    InvalidInput for a trace of which no request decodes at any of the moments.
    """
    moments, counts = batches(path, step_ms)
    busy = np.flatnonzero(counts)
    if not busy.size:
        got = f"{open_trace(path).name}: no request decodes at any of {MOMENTS} moments of its time"
        raise invalid("trace", got, "output tokens, and requests that are less far apart")
    wanted = share * (len(moments) - 1)
    nearest = busy[int(np.abs(busy - wanted).argmin())]
    return float(moments[nearest]), bool(counts[round(wanted)])


def problem_of(
    step: DecodeStep, model: Model, tensor_parallel: int, drafts: int = 0, kind: str = "bf16"
) -> Problem:
    """One layer's call of a step on one rank."""
    q_dtype, kv_format = FORMATS[kind]
    return step.problem(
        model, drafts + 1, tensor_parallel=tensor_parallel, q_dtype=q_dtype, kv_format=kv_format
    )


@lru_cache(maxsize=512)
def chosen_us(problem: Problem, card: str) -> float:
    """Predicted us of one layer's call as `choose` would launch it."""
    return choose(problem, Gpu.preset(card)).predicted_us


def policy_us(problem: Problem) -> dict[str, float]:
    """Predicted us of one layer's call by policy, one kernel and an H200 for all."""
    return {policy: planned(problem, policy)[1].makespan for policy in POLICIES}


@cache
def errors() -> Errors:
    """How far recorded steps of serving traces lie from what `chosen_us` says of them."""
    ratios, run = [], None
    for run in runs(RECORD):
        for row in records.results(run.rows, "ok"):
            if row["peer"] == PEER and row["family"] == "trace":
                ratios.append(row["us"] / chosen_us(records.problem_of(row), "H200"))
    if run is None or not ratios:
        return Errors(1.0, 1.0, 1.0, 0, "", "")
    low, middle, high = np.quantile(ratios, (0.05, 0.5, 0.95))
    return Errors(float(low), float(middle), float(high), len(ratios), run.source.card, run.date)


def token_us(problem: Problem, drafts: int, accepted: float, card: str) -> float:
    """Predicted us of a layer's call for each token that a step yields, where each draft is
    accepted with a chance, one behind the other."""
    tokens = sum(accepted**i for i in range(drafts + 1))
    return chosen_us(problem, card) / tokens


def write_step(step: DecodeStep, path: Path) -> None:
    """The step as JSON lines in Mooncake's schema: each request at time 0, one token to come, so
    that a replay at 0 s has these lengths."""
    rows = [
        {"timestamp": 0, "input_length": n - 1, "output_length": 1, "hash_ids": []}
        for n in step.kv_lens
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def commands(file: str, state: dict[str, Any], batch: int) -> tuple[str, str]:
    """What takes the written step: one call here, and a measurement on a card."""
    q_dtype, kv_format = FORMATS[state["kind"]]
    call = (
        f"mla-lab decode --model {state['model']} --tp {state['tp']} --trace {file} --mode replay "
        f"--at 0 --q-len {state['drafts'] + 1} --dtype {q_dtype} --kv-format {kv_format}"
    )
    bench = (
        f"mla-lab bench run record.jsonl --cases trace --trace {file} --model {state['model']} "
        f"--requests {batch}"
    )
    return call, bench
