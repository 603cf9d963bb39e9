"""The plain call with pages of one token, of 16 and of 64, by format; on shapes that nothing was
fitted to; and steps of serving traces beside uniform batches of as many requests and tokens.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import geometric_mean

from ..bench.records import Row, grouped, medians, problem_of, read, results
from ..bench.report import (
    IN_STEP,
    OURS,
    PUBLIC,
    PUBLIC_IN_STEP,
    all_times,
    headline,
    origin,
    times_table,
)
from ..core.errors import invalid
from ..core.markdown import markdown_table
from ..core.problem import Problem
from ..core.resources import data_dir

PAGES, UNIFORM = "records/h200_plain_pages.jsonl", "records/h200_plain_uniform.jsonl"
#: shapes that no constant of the rule or of a choice was fitted to, beside public peers
HELD_OUT = "records/h200_plain_heldout.jsonl"
BATCHES = {"1 to 4": (1, 4), "5 to 16": (5, 16), "17 to 64": (17, 64), "65 to 256": (65, 256)}
#: tokens of a page; the first is what the others are compared with
SIZES = (64, 16, 1)
#: what calls of one line have in common: query, cache, heads, requests, tokens
Key = tuple[str, str, int, int, int]
#: name of a trace step: trace, model, requests, seed; the name of its twin goes on with `TWIN`
_STEP = re.compile(r"trace_(?P<trace>.+)_[^_]+_(?P<requests>n\d+)_(?P<seed>s\d+)")
TWIN = "_uniform"


def times(rows: Sequence[Row]) -> dict[Key, dict[int, float]]:
    """Microseconds by page size. Raises InvalidInput where a size is missing."""
    us, ours = medians(rows), headline(rows)
    found: dict[Key, dict[int, float]] = {}
    for row in results(rows, "ok"):
        problem = problem_of(row)
        found.setdefault(_key(problem), {})[problem.page_size] = us[row["case"], ours]
    for key, by_size in found.items():
        if set(by_size) != set(SIZES):
            raise invalid("page sizes", f"{sorted(by_size)} of {key}", sorted(SIZES))
    return found


def _key(problem: Problem) -> Key:
    tokens = max(problem.kv_lens)
    return problem.q_dtype, problem.kv_format, problem.heads, problem.batch, tokens


def pages() -> str:
    """A line for each format, number of heads and batch, of the record in `data/`."""
    rows = list(read(data_dir() / PAGES))
    lines = []
    for (query, cache, heads, batch, tokens), by_size in times(rows).items():
        one, *others = (by_size[size] for size in SIZES)
        ratios = (f"{other / one:.2f}" for other in others)
        values = (f"{us:.1f}" for us in (one, *others))
        lines.append((query, cache, heads, batch, f"{tokens:,}", *values, *ratios))
    names = (
        *("query", "cache", "heads:", "requests:", "tokens:"),
        *(f"us, pages of {size}:" for size in SIZES),
        *(f"{size} / {SIZES[0]}:" for size in SIZES[1:]),
    )
    return f"{origin(rows)}.\n\n{markdown_table(names, lines)}"


@dataclass(frozen=True)
class Step:
    """A trace step, and its time over that of its uniform twin."""

    trace: str
    requests: str
    seed: str
    heads: int
    ratio: float

    def __str__(self) -> str:
        return f"{self.requests} {self.seed}"


def steps(rows: Sequence[Row]) -> list[Step]:
    """The steps that were timed together with their twins. Raises InvalidInput without any."""
    us, ours = medians(rows), headline(rows)
    problems = {row["case"]: problem_of(row) for row in results(rows, "ok")}
    found = []
    for case, problem in problems.items():
        named, twin = _STEP.fullmatch(case), case + TWIN
        if not named or (case, ours) not in us or (twin, ours) not in us:
            continue
        if not _as_many(problem.kv_lens, problems[twin].kv_lens):
            raise invalid(twin, "other requests or tokens", f"as many as {case} has")
        ratio = us[case, ours] / us[twin, ours]
        found.append(Step(named["trace"], named["requests"], named["seed"], problem.heads, ratio))
    if not found:
        raise invalid("cases", "none", "trace steps with uniform twins, of one of our calls")
    return found


def _as_many(lengths: Sequence[int], others: Sequence[int]) -> bool:
    return (len(lengths), sum(lengths)) == (len(others), sum(others))


def uniform() -> str:
    """A line for each trace and number of heads: the mean and the worst of its steps, of the record
    in `data/`."""
    rows = list(read(data_dir() / UNIFORM))
    lines = []
    for (trace, heads), group in grouped(steps(rows), lambda s: (s.trace, s.heads)).items():
        worst = max(group, key=lambda step: step.ratio)
        mean = geometric_mean(step.ratio for step in group)
        lines.append((trace, heads, len(group), f"{mean:.3f}", f"{worst.ratio:.3f}", worst))
    names = ("trace", "heads:", "steps:", "step / uniform, mean:", "worst:", "worst step")
    return f"{origin(rows)}.\n\n{markdown_table(names, lines)}"


def held_out() -> str:
    """How the plain call stands to the best public peer on the shapes of the record in `data/`, by
    batch, alone and in a step, and each of them. Without peers, each of them alone.
    """
    rows = list(read(data_dir() / HELD_OUT))
    us = {case: times for case, times in all_times(rows).items() if PUBLIC_IN_STEP in times}
    batches = {row["case"]: problem_of(row).batch for row in results(rows, "ok")}
    lines = []
    for words, (low, high) in BATCHES.items():
        cases = [case for case in us if low <= batches[case] <= high]
        if not cases:
            continue
        alone = {
            c: min(us[c][name] for name in PUBLIC if name in us[c]) / us[c][OURS] for c in cases
        }
        in_step = [us[c][PUBLIC_IN_STEP] / us[c][IN_STEP] for c in cases]
        worst = min(alone, key=lambda case: alone[case])
        means = (geometric_mean(alone.values()), alone[worst], geometric_mean(in_step))
        ratios = (f"{ratio:.2f}" for ratio in (*means, min(in_step)))
        lines.append((words, len(cases), *ratios, worst))
    names = (
        *(
            "requests",
            "cases:",
            "best public / ours, mean:",
            "least:",
            "in a step, mean:",
            "least:",
        ),
        "case of the least, alone",
    )
    parts = [f"{origin(rows)}.", times_table(rows, "heldout")]
    if lines:
        parts.insert(1, markdown_table(names, lines))
    return "\n\n".join(parts)
