"""Figures behind the targets, each computed from a record in `data/`.

Times are medians over a record's parts. Peers: the best public peer of each case. Several cases
give a geometric mean, or the worst case. "Keys" of a case are those in its name, the mean of ragged
lengths.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import geometric_mean as mean
from statistics import median

from ..bench import power
from ..bench.measure import FAR
from ..bench.records import Row, medians, problem_of, read, results
from ..bench.report import PUBLIC, best_times, headline, origin, public_over_ours
from ..core.errors import invalid
from ..core.resources import data_dir
from . import plain_tables, sparse_table
from .tables import where

ANCHOR, TRACES, FORMATS = (
    "records/h200_anchor.jsonl",
    "records/h200_traces.jsonl",
    "records/h200_formats.jsonl",
)
#: the plain call: anchors beside public peers, steps of traces, eight-bit caches
PLAIN, PLAIN_TRACES, PLAIN_EIGHT_BITS = (
    "records/h200_plain.jsonl",
    "records/h200_plain_traces.jsonl",
    "records/h200_plain_eight_bits.jsonl",
)
#: host time of calls, a line a host; in it, the call that users make and what it is compared with
HOST = "records/host_cost.jsonl"
PLAIN_CALL, ADD = "contract's name, no plan", "torch.add(out=)"
#: sparse calls over 656-byte tokens beside FlashMLA
SPARSE = sparse_table.RECORD
#: 97 % of the read bandwidth counts as much as a speedup of 1.05 over the best peer
READ_INSTEAD, SPEEDUP_INSTEAD = 0.97, 1.05
#: 16-bit query and cache: 16-bit weights, and lse from fp32 sums
SIXTEEN = r"(bf16|fp16)( to (bf16|fp16))?"
Span = tuple[float, float]
ALL: Span = (0, math.inf)


@dataclass(frozen=True)
class Figure:
    """A value with a remark and its number format."""

    value: float
    note: str = ""
    form: str = ".2f"

    def show(self, value: float) -> str:
        """`value` in this figure's number format."""
        return format(value, self.form)

    def __str__(self) -> str:
        return self.show(self.value) + (f" ({self.note})" if self.note else "")


@cache
def rows_of(name: str) -> tuple[Row, ...]:
    """A record of `data/`. Raises InvalidInput where there is none."""
    path: Path = data_dir() / name
    if not path.is_file():
        raise invalid("record", name, "a file in data/")
    return tuple(read(path))


def _lines(name: str) -> list[Row]:
    """The rows of a record that is not of `mla-lab bench`."""
    return [json.loads(line) for line in (data_dir() / name).read_text("utf-8").splitlines()]


def origin_of(name: str) -> str:
    """Card, date and commit of a record's last run."""
    if name == HOST:
        last = _lines(name)[-1]
        return f"{last['card']}, {last['date']}, commit {last['commit'][:9]}"
    rows = _lines(name)
    return origin(rows) if "time" in rows[0] else where(rows)


def speedups(record: str, batch: Span, rows: Span, keys: Span, heads: Span) -> dict[str, float]:
    """Best public peer over ours, by case."""
    times = best_times(rows_of(record))
    shapes = {row["case"]: row for row in results(rows_of(record), "ok")}
    found = {}
    for case, us in times.items():
        problem = problem_of(shapes[case])
        ratio = public_over_ours(us)
        nominal = re.search(r"_kv(\d+)", case)
        kv = int(nominal[1]) if nominal else sum(problem.kv_lens) / problem.batch
        sizes = (problem.batch, max(problem.rows.tolist()), kv, problem.heads)
        spans = (batch, rows, keys, heads)
        inside = all(low <= x <= high for x, (low, high) in zip(sizes, spans, strict=True))
        if ratio is not None and inside:
            found[case] = ratio
    if not found:
        raise invalid("cases", "none", f"some of {record} with ours and a public peer")
    return found


def speedup(record: str = ANCHOR, batch: Span = ALL, rows: Span = ALL, keys: Span = ALL) -> Figure:
    """Geometric mean of the best public peer's time over ours."""
    found = speedups(record, batch, rows, keys, ALL)
    worst = min(found, key=lambda case: found[case])
    return Figure(mean(found.values()), f"{len(found)} cases, least {found[worst]:.2f}")


def least_speedup(record: str = ANCHOR, heads: Span = ALL) -> Figure:
    """Best public peer over ours in the worst case."""
    found = speedups(record, ALL, ALL, ALL, heads)
    worst = min(found, key=lambda case: found[case])
    return Figure(found[worst], f"{_short(worst)}, of {len(found)}")


def sparse_speedup(
    heads: Span = ALL,
    batch: Span = ALL,
    top_k: int = 2048,
    record: str = SPARSE,
    least: bool = False,
) -> Figure:
    """FlashMLA's time over that of the plain sparse call: geometric mean and least, or (`least`)
    the least alone."""
    found = {}
    for problem, us in sparse_table.cases(rows_of(record)):
        inside = heads[0] <= problem.heads <= heads[1] and batch[0] <= problem.batch <= batch[1]
        if inside and problem.top_k == top_k:
            case = f"b{problem.batch}_q{max(problem.q_lens)}_h{problem.heads}"
            found[case] = us["FlashMLA"] / us["plain call"]
    worst = min(found, key=lambda case: found[case])
    if least:
        return Figure(found[worst], f"{worst}, of {len(found)}")
    return Figure(mean(found.values()), f"{len(found)} cases, least {found[worst]:.2f}, {worst}")


def read_share(
    record: str = ANCHOR, batch: Span = ALL, rows: Span = ALL, keys: Span = ALL
) -> Figure:
    """Share of the run's read bandwidth in the worst case."""
    inside = speedups(record, batch, rows, keys, ALL)
    shares = {case: share for case, share in _read_shares(record).items() if case in inside}
    each = ", ".join(f"{share:.1%}" for share in sorted(shares.values()))
    return Figure(min(shares.values()), each, ".1%")


def trace_speedup(heads: int, record: str = TRACES) -> Figure:
    """The least figure over the samples of a trace, where a sample counts by the larger of two: the
    best peer's time over ours, and the share of the read bandwidth scaled so that 97 % is 1.05.
    """
    speed, share = speedups(record, ALL, ALL, ALL, (heads, heads)), _read_shares(record)
    counted = SPEEDUP_INSTEAD / READ_INSTEAD
    score = {c: max(speed[c], counted * share[c]) for c in speed if c.startswith("trace")}
    worst = min(score, key=lambda case: score[case])
    note = f"{_short(worst)}: {speed[worst]:.2f} of the best peer, {share[worst]:.1%} of read"
    ranges = f"all {min(speed[c] for c in score):.2f} to {max(speed[c] for c in score):.2f}"
    return Figure(score[worst], f"{note}; {ranges}")


def trace_over_uniform(heads: int, record: str = TRACES) -> Figure:
    """The worst sample's time over that of a uniform batch of as many tokens."""
    ours = our_times(record)
    problems = {row["case"]: problem_of(row) for row in results(rows_of(record), "ok")}
    tokens = {c: sum(problems[c].kv_lens) for c in ours if problems[c].heads == heads}
    uniform = {tokens[c]: ours[c] for c in tokens if not c.startswith("trace")}
    ratios = {}
    for case in tokens:
        if case.startswith("trace"):
            nearest = min(uniform, key=lambda n: abs(n - tokens[case]))
            # lengths are whole numbers, so a uniform batch may differ by a few tokens
            ratios[case] = ours[case] / uniform[nearest] * nearest / tokens[case]
    worst = max(ratios, key=lambda case: ratios[case])
    return Figure(ratios[worst], f"{_short(worst)}, of {len(ratios)} samples")


def step_over_uniform(heads: int, record: str = plain_tables.UNIFORM) -> Figure:
    """The plain call: the worst trace step's time over that of its uniform twin, and the mean."""
    steps = [s for s in plain_tables.steps(rows_of(record)) if s.heads == heads]
    if not steps:
        raise invalid("cases", "none", f"trace steps of {heads} heads in {record}")
    worst = max(steps, key=lambda step: step.ratio)
    average = mean(step.ratio for step in steps)
    note = f"{worst.trace.partition('_')[0]} {worst}; mean {average:.3f} of {len(steps)}"
    return Figure(worst.ratio, note, ".3f")


def beside(
    record: str,
    suffixes: Sequence[str],
    batch: Span = ALL,
    inverse: bool = False,
    heads: Span = ALL,
) -> Figure:
    """The largest ratio of a case's time with a name suffix to that of the same case without it;
    with `inverse` the least inverse ratio.
    """
    ours = our_times(record)
    ratios = {}
    for case in ours:
        ending = next((suffix for suffix in suffixes if case.endswith(suffix)), None)
        plain = case.removesuffix(ending) if ending else None
        shape = re.match(r"b(\d+)_q\d+_h(\d+)_", case)
        spans = zip(shape.groups(), (batch, heads), strict=True) if shape else ()
        if plain in ours and all(low <= int(size) <= high for size, (low, high) in spans):
            ratios[case] = ours[case] / ours[plain]
    worst = max(ratios, key=lambda case: ratios[case])
    shown = 1 / ratios[worst] if inverse else ratios[worst]
    average = 1 / mean(ratios.values()) if inverse else mean(ratios.values())
    return Figure(shown, f"{worst}; mean {average:.3f} of {len(ratios)}", ".3f")


def over_planned(record: str = PLAIN, planned: str = ANCHOR, worst: bool = False) -> Figure:
    """The plain call's time over that of the call with a host plan, of another run and card:
    geometric mean, or the worst case, with the least such ratio of a public peer in that case."""
    ours, before = our_times(record), our_times(planned)
    ratios = {case: us / before[case] for case, us in ours.items() if case in before}
    most = max(ratios, key=lambda case: ratios[case])
    now, then = best_times(rows_of(record))[most], best_times(rows_of(planned))[most]
    peers = [now[name] / then[name] for name in PUBLIC if name in now and name in then]
    peer = f", a public peer's {min(peers):.3f}" if peers else ""
    note = f"{most}{peer}" if worst else f"{len(ratios)} cases"
    return Figure(ratios[most] if worst else mean(ratios.values()), note, ".3f")


def error_over_peers(record: str = ANCHOR) -> Figure:
    """The largest ratio of our relative error to the least of the public peers', over the cases."""
    peers = ("flashmla", "flashinfer-fa3", "fa3-qv", "fa3-qv-32")
    errors: dict[str, dict[str, float]] = {}
    for row in results(rows_of(record), "ok"):
        errors.setdefault(row["case"], {}).setdefault(row["peer"], row["rel_error"])
    ours = headline(rows_of(record))
    ratios = {
        case: own[ours] / min(own[peer] for peer in peers if peer in own)
        for case, own in errors.items()
        if ours in own and any(peer in own for peer in peers)
    }
    worst = max(ratios, key=lambda case: ratios[case])
    fine = sum(ratio <= 1 for ratio in ratios.values())
    note = f"{worst}; at most 1 in {fine} of {len(ratios)}, mean {mean(ratios.values()):.3f}"
    return Figure(ratios[worst], note, ".3f")


def lse_error(record: str = "records/pairwise.jsonl", formats: str = SIXTEEN) -> Figure:
    """Largest error of lse, relative to max(1, |lse|), in calls whose format matches `formats` and
    that return lse, wrong ones included.
    """
    errors = [
        row["lse_error"]
        for row in _lines(record)
        if row["kind"] == "case" and row["backend"] == "cute" and row["status"] in ("ok", "wrong")
        and row["case"]["lse"] != "none" and re.fullmatch(formats, row["case"]["format"])
    ]  # fmt: skip
    return Figure(max(errors), f"{len(errors)} calls", ".0e")


def choices(record: str = "records/h200_sweep_heldout.jsonl") -> Figure:
    """Share of a sweep's cases whose choice is within 3 % of our fastest variant."""
    from ..bench.tune.fitting import launches, quality
    from ..plan.kernel_costs import recorded_costs

    found = quality(recorded_costs(), launches(rows_of(record)))
    note = f"{found.cases} cases, {found.mean_regret - 1:.1%} over the best in the mean"
    return Figure(found.close, note, ".0%")


def powered(record: str = ANCHOR) -> Figure:
    """Share of compute-bound rows with watts and joules: ours, and peers of similar speed."""
    us = {(row["case"], row["peer"]): row["us"] for row in _first(record)}
    quickest = {case: min(t for (c, _), t in us.items() if c == case) for case, _ in us}
    bound = [
        row
        for row in _first(record)
        if power.worthwhile(problem_of(row)) and row["us"] <= 0.95 * FAR * quickest[row["case"]]
    ]
    there = [row for row in bound if row.get("power")]
    return Figure(len(there) / len(bound), f"{len(bound)} rows", ".0%")


def _first(record: str) -> list[Row]:
    return [row for row in results(rows_of(record), "ok") if row["part"] == 0]


def our_times(record: str) -> dict[str, float]:
    """Microseconds of our call by case: of the record's headline."""
    ours = headline(rows_of(record))
    return {case: us for (case, peer), us in medians(rows_of(record)).items() if peer == ours}


def _read_shares(record: str) -> dict[str, float]:
    """Our calls' bytes a second over the read bandwidth of the same run."""
    rates: dict[str, list[float]] = {}
    read_tbps, ours = None, headline(rows_of(record))
    for row in rows_of(record):
        if row["kind"] == "run":
            read_tbps = (row["ceilings"] or {}).get("read_tbps")
        elif row.get("status") == "ok" and row["peer"] == ours and read_tbps:
            rates.setdefault(row["case"], []).append(row["tbps"] / read_tbps)
    return {case: median(shares) for case, shares in rates.items()}


def _short(case: str) -> str:
    """`trace_azure_llm_2023_conv_deepseek-v3_n128_s0` as `azure s0`."""
    found = re.match(r"trace_([a-z]+).*_(s\d+)$", case)
    return f"{found[1]} {found[2]}" if found else case


def host_time(record: str = HOST) -> Figure:
    """Host time of the contract's call without a plan over that of torch's `add(out=)`, in the
    newest line that has both."""
    found = [row for row in _lines(record) if {PLAIN_CALL, ADD} <= row["host_us"].keys()]
    if not found:
        raise invalid("cases", "none", f"a line of {record} with {PLAIN_CALL!r} and {ADD!r}")
    ours, add = (found[-1]["host_us"][name] for name in (PLAIN_CALL, ADD))
    note = f"{ours:.1f} us beside {add:.1f} us, commit {found[-1]['commit'][:9]}"
    return Figure(ours / add, note)


FIGURES: dict[str, Callable[..., Figure]] = {
    function.__name__: function
    for function in (
        speedup,
        least_speedup,
        sparse_speedup,
        read_share,
        trace_speedup,
        trace_over_uniform,
        step_over_uniform,
        beside,
        over_planned,
        error_over_peers,
        lse_error,
        choices,
        powered,
        host_time,
    )
}
