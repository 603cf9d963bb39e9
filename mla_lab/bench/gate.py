"""Regression gate between two records: a verdict for each case and peer, given the noise.

A change counts if it exceeds the threshold and the noise of the two records. The noise of a pair is
the larger of two figures from the raw rounds: the uncertainty of the two medians, and the spread of
repetitions of the list within a record.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import geometric_mean, median

from ..core.errors import invalid
from .records import Row, grouped, pair_of, results

#: a smaller change is never a verdict: reruns differ by 0.6 % in the median, 1.9 % at the
#: 90th percentile (H200, 2026-11-20)
THRESHOLD = 0.03
#: uncertainty of a median in standard errors; 2.6 leaves about 1 chance in 100
CONFIDENCE = 2.6
#: standard deviation over the median absolute deviation, and of a median over that of a mean
MAD_TO_SIGMA = 1.4826
MEDIAN_TO_MEAN = 1.2533

#: verdicts that fail the gate; the others are "same", "faster" and "new"
FAILING = ("slower", "broken", "missing")


@dataclass(frozen=True)
class Verdict:
    """One case and peer in two records. change: (candidate - baseline) / baseline."""

    case: str
    peer: str
    verdict: str
    baseline_us: float | None = None
    candidate_us: float | None = None
    change: float | None = None
    noise: float | None = None
    reason: str | None = None


@dataclass(frozen=True)
class _Sample:
    us: float
    noise: float


def compare(
    baseline: Iterable[Row],
    candidate: Iterable[Row],
    threshold: float = THRESHOLD,
    peers: Sequence[str] = (),
) -> list[Verdict]:
    """Verdicts in the baseline's order, then what is new. peers: only these. Raises InvalidInput
    where a case of both records is not the same problem."""
    before, after = _by_pair(baseline, peers), _by_pair(candidate, peers)
    for pair in before.keys() & after.keys():
        if before[pair][0]["problem"] != after[pair][0]["problem"]:
            got = f"another problem by the name {pair[0]} than the baseline's"
            raise invalid("candidate", got, "records whose cases are the same")
    verdicts = [
        _verdict(case, peer, rows, after.get((case, peer), []), threshold)
        for (case, peer), rows in before.items()
        if _ok(rows)
    ]
    fresh = [pair for pair, rows in after.items() if _ok(rows) and not _ok(before.get(pair, []))]
    return verdicts + [
        Verdict(*pair, "new", candidate_us=_sample(after[pair]).us) for pair in fresh
    ]


def passes(verdicts: Iterable[Verdict]) -> bool:
    """True if no verdict is slower, broken or missing."""
    return not any(v.verdict in FAILING for v in verdicts)


def geometric_mean_change(verdicts: Iterable[Verdict]) -> float | None:
    """The mean change over pairs that both records measured."""
    ratios = [1 + v.change for v in verdicts if v.change is not None]
    return geometric_mean(ratios) - 1 if ratios else None


def _by_pair(rows: Iterable[Row], peers: Sequence[str]) -> dict[tuple[str, str], list[Row]]:
    chosen = (row for row in results(rows) if not peers or row["peer"] in peers)
    return grouped(chosen, pair_of)


def _ok(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if row["status"] == "ok"]


def _verdict(
    case: str, peer: str, before: Sequence[Row], after: Sequence[Row], threshold: float
) -> Verdict:
    old = _sample(_ok(before))
    if not after:
        return Verdict(case, peer, "missing", old.us, reason="not in the candidate")
    bad = next((row for row in after if row["status"] != "ok"), None)
    if bad is not None:
        return Verdict(case, peer, "broken", old.us, reason=f"{bad['status']}: {bad['reason']}")
    new = _sample(after)
    change = new.us / old.us - 1
    noise = math.hypot(old.noise, new.noise)
    limit = max(threshold, noise)
    name = "slower" if change > limit else "faster" if change < -limit else "same"
    return Verdict(case, peer, name, old.us, new.us, change, noise)


def _sample(rows: Sequence[Row]) -> _Sample:
    """Mean over the parts of each part's median, and its relative noise."""
    ok = _ok(rows)
    parts = [median(row["rounds"]["us"]) for row in ok]
    us = sum(parts) / len(parts)
    errors = [_median_error(row["rounds"]["us"]) for row in ok]
    within = CONFIDENCE * math.sqrt(sum(e * e for e in errors)) / len(errors)
    between = max(parts) - min(parts)
    return _Sample(us, max(within, between) / us)


def _median_error(rounds: Sequence[float]) -> float:
    """Standard error of the median of raw rounds, robust against a few stragglers."""
    middle = median(rounds)
    deviation = median(abs(value - middle) for value in rounds)
    return MEDIAN_TO_MEAN * MAD_TO_SIGMA * deviation / math.sqrt(len(rounds))
