"""The plain call card by card: the best public kernel over it, and what batch invariance costs."""

from __future__ import annotations

from collections.abc import Iterator

from ..bench.report import origin
from ..core.markdown import markdown_table
from .target_figures import ALL, PLAIN, PLAIN_TRACES, Span, mean, our_times, rows_of, speedups

H100_PLAIN, H100_PLAIN_TRACES = "records/h100_plain.jsonl", "records/h100_plain_traces.jsonl"
H100_EIGHT_BITS = "records/h100_plain_eight_bits.jsonl"
#: by card: anchors, steps of traces
RECORDS = {"H200": (PLAIN, PLAIN_TRACES), "H100": (H100_PLAIN, H100_PLAIN_TRACES)}
#: of these the default call and, with a suffix, the batch-invariant one
INVARIANT = {
    "H200": "records/h200_plain_invariant.jsonl",
    "H100": "records/h100_plain_invariant.jsonl",
}
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
    """Microseconds by default and batch invariant, and the latter over the former, by card."""
    times = {card: our_times(name) for card, name in INVARIANT.items()}
    names = [
        f"{card}, {what}:" for card in times for what in ("default us", "invariant us", "ratio")
    ]
    lines, ratios = [], [list[float]() for _ in times]
    for case in next(iter(times.values())):
        if not case.endswith(SUFFIX):
            continue
        figures: list[str] = []
        for of, found in zip(times.values(), ratios, strict=True):
            default, own = of[case.removesuffix(SUFFIX)], of[case]
            found.append(own / default)
            figures += [f"{default:.3g}", f"{own:.3g}", f"{own / default:.3f}"]
        lines.append((case.removesuffix(SUFFIX), *figures))
    last = [x for found in ratios for x in ("", "", f"{mean(found):.3f}")]
    origins = "; ".join(origin(rows_of(name)) for name in INVARIANT.values())
    table = markdown_table(("case", *names), [*lines, ("geometric mean", *last)])
    return f"{origins}.\n\n{table}"


def made() -> str:
    """The table of the records in `data/`."""
    origins = dict.fromkeys(origin(rows_of(name)) for of in RECORDS.values() for name in of)
    names = [f"{card}, {what}:" for card in RECORDS for what in ("mean", "least")]
    return "; ".join(origins) + ".\n\n" + markdown_table(("set", "cases:", *names), cells())
