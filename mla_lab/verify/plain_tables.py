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
    PUBLIC_IN_STEP,
    all_times,
    headline,
    origin,
    public_over_ours,
    times_table,
)
from ..core.errors import invalid
from ..core.markdown import markdown_table
from ..core.problem import Problem
from ..core.resources import data_dir

PAGES, UNIFORM = "records/h200_plain_pages.jsonl", "records/h200_plain_uniform.jsonl"
#: shapes that no constant of the rule or of a choice was fitted to, beside public peers
HELD_OUT = "records/h200_plain_heldout.jsonl"
#: least and most requests of its lines
BATCHES = ((1, 4), (5, 16), (17, 64), (65, 256))
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
    """Tables of the best public peer's time over that of the plain call, alone and in a step, on
    the shapes of the record in `data/`: by number of requests, where it has peers, and by shape.
    """
    rows = list(read(data_dir() / HELD_OUT))
    us = {case: times for case, times in all_times(rows).items() if PUBLIC_IN_STEP in times}
    batches = {row["case"]: problem_of(row).batch for row in results(rows, "ok")}
    lines = []
    for low, high in BATCHES:
        times = {case: us[case] for case in us if low <= batches[case] <= high}
        if not times:
            continue
        alone = {c: ratio for c, found in times.items() if (ratio := public_over_ours(found))}
        in_step = [found[PUBLIC_IN_STEP] / found[IN_STEP] for found in times.values()]
        worst = min(alone, key=lambda case: alone[case])
        ratios = [geometric_mean(alone.values()), alone[worst]]
        ratios += [geometric_mean(in_step), min(in_step)]
        cells = (f"{ratio:.2f}" for ratio in ratios)
        lines.append((f"{low} to {high}", len(times), *cells, worst))
    names = ["requests", "cases:", "best public / ours, mean:", "least:"]
    names += ["in a step, mean:", "in a step, least:", "case of the least, alone"]
    short = [markdown_table(names, lines)] if lines else []
    return "\n\n".join([f"{origin(rows)}.", *short, times_table(rows, "heldout")])
