"""Benchmark of whole calls: cases, peers, method, records and a regression gate."""

from .harness import Bench
from .measure import Method
from .records import Record, read, results

__all__ = ["Bench", "Method", "Record", "read", "results"]
