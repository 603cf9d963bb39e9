"""Steps of serving traces beside uniform batches of as many requests and tokens: the plain call."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import geometric_mean

from ..bench.records import Row, medians, problem_of, read, results
from ..bench.report import headline, origin
from ..core.errors import invalid
from ..core.markdown import markdown_table
from ..core.resources import data_dir

RECORD = "records/h200_plain_uniform.jsonl"
#: name of a trace step: trace, model, requests, seed; the name of its twin goes on with `TWIN`
_STEP = re.compile(r"trace_(?P<trace>.+)_[^_]+_(?P<requests>n\d+)_(?P<seed>s\d+)")
TWIN = "_uniform"


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


def made() -> str:
    """The table of the record in `data/`."""
    return table(list(read(data_dir() / RECORD)))


def table(rows: Sequence[Row]) -> str:
    """A line for each trace and number of heads: the mean and the worst of its steps."""
    groups: dict[tuple[str, int], list[Step]] = {}
    for step in steps(rows):
        groups.setdefault((step.trace, step.heads), []).append(step)
    lines = []
    for (trace, heads), group in groups.items():
        worst = max(group, key=lambda step: step.ratio)
        mean = geometric_mean(step.ratio for step in group)
        lines.append((trace, heads, len(group), f"{mean:.3f}", f"{worst.ratio:.3f}", worst))
    names = ("trace", "heads:", "steps:", "step / uniform, mean:", "worst:", "worst step")
    return f"{origin(rows)}.\n\n{markdown_table(names, lines)}"
