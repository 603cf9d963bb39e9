"""What is on record of the SM100 kernel and of SM120, as parts of `data/notes/sm100.md`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from ..core.markdown import markdown_table
from ..core.resources import data_dir
from .record import Row, cases_of, read
from .sm100_lists import feature_runs, published_runs


def _rows(name: str) -> list[Row]:
    return cases_of(read(data_dir() / "records" / f"{name}.jsonl"))


def _minutes(rows: list[Row]) -> float:
    names = ("cpu_seconds", "seconds")
    return sum(next(float(row[n]) for n in names if n in row) for row in rows) / 60


def _words(rows: list[Row], of: int) -> str:
    """How many cases there are, how they ended, their greatest errors and time."""
    if not rows:
        return f"0 of {of}"
    statuses = Counter(row["status"] for row in rows)
    ended = ", ".join(f"{count} {status}" for status, count in statuses.items())
    out, lse = (max(row.get(name, 0.0) for row in rows) for name in ("out_error", "lse_error"))
    return (
        f"{len(rows)} of {of}: {ended}; largest error of out {out:.1e}, of lse {lse:.1e}; "
        f"{_minutes(rows):.0f} minutes of one core"
    )


def record() -> str:
    """The lists of `mla-lab verify sm100`."""
    rows = {row["name"]: row for row in _rows("sm100")}
    lines = []
    for name, runs in (("published", list(published_runs())), ("pairs", list(feature_runs()))):
        mine = [rows[run.name] for run in runs if run.name in rows]
        lines.append(f"- {name}: {_words(mine, len(runs))}")
    alone = [row for row in rows.values() if "same_alone" in row]
    same = sum(row["same_alone"] for row in alone)
    lines.append(f"- requests alone: the bits of the batch in {same} of {len(alone)} calls")
    commits = Counter(row["commit"][:7] for row in rows.values())
    lines.append("- rows by commit: " + ", ".join(f"{n} of {c}" for c, n in commits.items()))
    return "\n".join(lines)


def builds() -> str:
    """What each plain build takes of an SM."""
    kinds = ("UTCHMMA", "UTCQMMA", "LDTM", "STTM", "UTMALDG")
    figures = ["registers", *("MMA", "producer", "softmax", "shared")]
    figures += ["shared memory, B", "tensor memory, columns", *kinds]
    lines = []
    for row in _rows("sm100_builds"):
        name, arch = row["name"].split(" ")
        formats = name.removeprefix("cute_mla_sm100_").split("_tile_rows")[0]
        q, kv = ("e4m3" if f"{part}-e4m3" in formats else "bf16" for part in ("q_dtype", "format"))
        q, kv = ("fp16", "fp16") if "q_dtype-fp16" in formats else (q, kv)
        cells = [f"{q} over {kv}, {arch}", row["registers"], *row["by_role"].values()]
        cells += [f"{row['shared_bytes']:,}", row["tensor_columns"]]
        lines.append([*cells, *(row["opcodes"][kind] for kind in kinds)])
    return markdown_table(("build", *(f"{name}:" for name in figures)), lines)


def xqa() -> str:
    """The lists of `mla-lab verify xqa`."""
    rows = _rows("sm120_xqa")
    published = [row for row in rows if "stands_for" in row]
    pairs = [row for row in rows if "stands_for" not in row]
    stands = sum(row["stands_for"] for row in published)
    return "\n".join(
        [
            f"- pairs: {_words(pairs, len(pairs))}",
            f"- published, {stands} configurations: {_words(published, len(published))}",
        ]
    )


TABLES: dict[str, Callable[[], str]] = {
    "sm100-record": record,
    "sm100-builds": builds,
    "sm120-record": xqa,
}
