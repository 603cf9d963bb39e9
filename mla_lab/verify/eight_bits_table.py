"""Table of calls over an fp8 cache: kernel, time, and speedup over bf16.

`data/records/h200_eight_bits.jsonl` holds the formats of a shape one after the other.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from statistics import geometric_mean as mean

from ..bench.records import Row, grouped, problem_of, results
from ..bench.report import headline, origin
from ..core.markdown import markdown_table

RECORD = "records/h200_eight_bits.jsonl"
#: (query, cache) in words, in the table's order
FORMATS = {
    ("bf16", "bf16"): "bf16",
    ("e4m3", "e4m3"): "e4m3",
    ("bf16", "e4m3"): "bf16 over e4m3",
    ("bf16", "fp8_656"): "bf16 over 656 bytes",
}
#: the peer that both records of the plain call have
PLAIN_CALL = "mla-lab-plain"
#: suffix of the names of the e4m3 twins
TWIN = "_e4m3_p32"


def table(rows: Sequence[Row]) -> str:
    """A line for each format and count of heads, a column for each batch; then the twins."""
    own = headline(rows)
    ours = [row for row in results(rows, "ok") if row["peer"] == own]
    us = {row["case"]: row["us"] for row in ours}
    listed = [row for row in ours if row["family"] != "twin"]
    batches = sorted({problem_of(row).batch for row in listed if not problem_of(row).top_k})
    named = any(row["notes"].get("kernel") for row in listed)
    names = ["formats", "heads:", *(["kernel, largest batch"] if named else []), "error:"]
    names += [f"batch {batch} us:" for batch in batches]
    lines: list[tuple[object, ...]] = []
    for sparse in (False, True):
        some = [r for r in listed if bool(problem_of(r).top_k) == sparse]
        lines += _lines(some, us, batches, named)
    return "\n".join([markdown_table(names, lines), *_twins(us)])


def apart(first: Sequence[Row], second: Sequence[Row]) -> str:
    """A sentence on the dense call of 128 heads and the largest batch whose time by one kernel
    differs most, in its ratio, between two records of the plain call."""
    again = {_call_of(row): row["us"] for row in results(second, "ok")}
    both = [
        (problem_of(row), row["us"], again[_call_of(row)])
        for row in results(first, "ok")
        if row["peer"] == PLAIN_CALL and _call_of(row) in again
    ]
    dense = [call for call in both if call[0].heads == 128 and not call[0].top_k]
    p, us, then = max(dense, key=lambda call: (call[0].batch, abs(math.log(call[1] / call[2]))))
    origins = "; ".join(dict.fromkeys([origin(first), origin(second)]))
    return (
        f"{p.batch} requests took {us:.0f} us for {FORMATS[p.q_dtype, p.kv_format]} in the first "
        f"record, and {then:.0f} us in the second, by the same kernel with the same bound "
        f"({origins})."
    )


def _call_of(row: Row) -> tuple[str, str, str | None]:
    """Case, peer, which sets the bound, and kernel."""
    return row["case"], row["peer"], row["notes"].get("kernel")


def plain_of(case: str) -> str:
    """Case name of the same shape in bf16 throughout."""
    return re.sub(r"(_bf16)?_(e4m3|fp8_656)", "", case)


def _lines(
    rows: Iterable[Row], us: dict[str, float], batches: Sequence[int], named: bool
) -> Iterator[tuple[object, ...]]:
    """Lines of dense calls, or of sparse ones, which say so; with the kernel where rows name it."""
    groups = grouped(rows, _line_of)
    for heads, q_len, formats in sorted(groups, key=lambda k: (k[0], k[1], _order(k[2]))):
        own = groups[heads, q_len, formats]
        cells = {problem_of(row).batch: _cell(row, us) for row in own}
        top_k = problem_of(own[0]).top_k
        what = formats + (f", sparse {top_k}" if top_k else "")
        what += f", {q_len} query tokens" if q_len > 1 else ""
        worst = max(row["rel_error"] for row in own)
        largest = max(own, key=lambda row: problem_of(row).batch)
        times = (cells.get(batch, "") for batch in batches)
        yield what, heads, *([_kernel(largest)] if named else []), f"{worst:.1e}", *times


def _line_of(row: Row) -> tuple[int, int, str]:
    """What the calls of a line have in common: heads, query tokens, formats."""
    p = problem_of(row)
    return p.heads, max(p.q_lens), FORMATS[p.q_dtype, p.kv_format]


def _order(formats: str) -> int:
    return list(FORMATS.values()).index(formats)


def _kernel(row: Row) -> str:
    """Kernel and rows, as "keep_ab, 128 rows"; the backend's name for other backends."""
    found = re.match(r"cute_(keep_ab|swap_ab)", row["notes"].get("kernel") or "")
    if not found:
        return str(row["notes"].get("backend"))
    return f"{found[1]}, {row['notes']['tile_rows']} rows"


def _cell(row: Row, us: dict[str, float]) -> str:
    own, plain = us[row["case"]], plain_of(row["case"])
    shown = f"{own:.0f}" if own >= 100 else f"{own:.1f}"
    beside = plain != row["case"] and plain in us
    return f"{shown} ({us[plain] / own:.2f}x)" if beside else shown


def _twins(us: dict[str, float]) -> list[str]:
    """A sentence on the e4m3 twins of a published table, beside those in bf16."""
    ratios = {
        case: us[plain_of(case)] / us[case]
        for case in us
        if case.endswith(TWIN) and plain_of(case) in us
    }
    if not ratios:
        return []
    least, most = min(ratios, key=lambda c: ratios[c]), max(ratios, key=lambda c: ratios[c])
    short = {case: case.removesuffix(TWIN) for case in (least, most)}
    return [
        "",
        f"The {len(ratios)} shapes of the tables in FlashInfer's pull request 2743 (128 heads, "
        f"pages of 32) run {mean(ratios.values()):.2f} times as fast in e4m3 as in bf16, geometric "
        "mean; "
        f"{ratios[least]:.2f} ({short[least]}) to {ratios[most]:.2f} ({short[most]}).",
    ]
