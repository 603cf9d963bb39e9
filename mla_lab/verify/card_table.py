"""The plain call card by card: the best public kernel over it, and what batch invariance costs."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import geometric_mean as mean

from ..bench.report import origin
from ..core.markdown import markdown_table
from .target_figures import ALL, PLAIN, PLAIN_TRACES, Span, our_times, rows_of, speedups

H100_PLAIN, H100_PLAIN_TRACES = "records/h100_plain.jsonl", "records/h100_plain_traces.jsonl"
H100_EIGHT_BITS = "records/h100_plain_eight_bits.jsonl"
#: by card: anchors, steps of traces
RECORDS = {"H200": (PLAIN, PLAIN_TRACES), "H100": (H100_PLAIN, H100_PLAIN_TRACES)}
#: of the default call and, with a suffix, the batch-invariant one
INVARIANT = "records/h200_plain_invariant.jsonl"
SUFFIX = "_invariant"
#: what is averaged: name, place in the tuple above, batch, heads
SETS: tuple[tuple[str, int, Span, Span], ...] = (
    ("anchors", 0, ALL, ALL),
    ("of these, 1 and 4 requests", 0, (1, 4), ALL),
    ("steps of traces, 16 heads", 1, ALL, (16, 16)),
    ("steps of traces, 128 heads", 1, ALL, (128, 128)),
)


def cells() -> Iterator[tuple[str, ...]]:
    """A line for each set: its cases, and by card the geometric mean and the least."""
    for name, place, batch, heads in SETS:
        found = [speedups(of[place], batch, ALL, ALL, heads) for of in RECORDS.values()]
        figures = [f"{x:.2f}" for each in found for x in (mean(each.values()), min(each.values()))]
        yield (name, str(len(found[0])), *figures)


def invariance() -> str:
    """Microseconds by default and batch invariant, and the latter over the former."""
    us = our_times(INVARIANT)
    pairs = {case.removesuffix(SUFFIX): us[case] for case in us if case.endswith(SUFFIX)}
    lines = [
        (case, f"{us[case]:.3g}", f"{own:.3g}", f"{own / us[case]:.3f}")
        for case, own in pairs.items()
    ]
    average = mean(own / us[case] for case, own in pairs.items())
    lines.append(("geometric mean", "", "", f"{average:.3f}"))
    table = markdown_table(("case", "default us:", "batch invariant us:", "ratio:"), lines)
    return f"{origin(rows_of(INVARIANT))}.\n\n{table}"


def made() -> str:
    """The table of the records in `data/`."""
    origins = dict.fromkeys(origin(rows_of(name)) for of in RECORDS.values() for name in of)
    names = [f"{card}, {what}:" for card in RECORDS for what in ("mean", "least")]
    return "; ".join(origins) + ".\n\n" + markdown_table(("set", "cases:", *names), cells())
