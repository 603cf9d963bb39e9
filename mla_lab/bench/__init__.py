"""Benchmark of whole calls: cases, peers, method, records and a regression gate."""

from .cases import Case, anchor_cases, blackwell_twins, feature_cases, sweep_cases, trace_cases
from .gate import Verdict, compare, passes
from .harness import Bench
from .measure import Method
from .records import Record, read, results

__all__ = [
    "Bench",
    "Case",
    "Method",
    "Record",
    "Verdict",
    "anchor_cases",
    "blackwell_twins",
    "compare",
    "feature_cases",
    "passes",
    "read",
    "results",
    "sweep_cases",
    "trace_cases",
]
