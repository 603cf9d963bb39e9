"""Errors of our kernels over an fp8 cache, beside those of torch with the same rounding."""

from __future__ import annotations

from ..core.resources import data_dir
from ..plan.pricing import LONGEST
from ..verify.record import read
from ..verify.rounding import worst_of
from .source import Source
from .tables import Table, table

RECORD = "records/h200_eight_bit_errors.jsonl"


def kernel_errors() -> Table:
    """A row for each kernel and format; pieces accumulated in the tensor cores alone are apart."""
    head, *rows = read(data_dir() / RECORD)
    here = head["environment"]
    source = Source("recorded", card=here["card"]["name"], date=here["date"])
    worst = worst_of(row for row in rows if row["status"] == "ok")
    shown = [
        (query, cache, kernel, f"beyond {LONGEST:,}" if beyond else "", f"{times:.2f}x")
        for (query, cache, kernel, beyond), times in worst.items()
    ]
    return table(("query", "cache", "kernel", "keys", "of torch's error"), shown, source=source)
