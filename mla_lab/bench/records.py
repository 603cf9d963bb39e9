"""Measurements as JSON lines: appended to, never rewritten, valid at every moment.

Rows, told apart by `kind`: a `run` opens a session of measuring (environment, method, ceilings),
each `result` is one case and one peer, `end` closes it (ceilings again, rerun spread, or that
it was interrupted). The schema is `data/runtime/bench_record.schema.json`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from ..core.errors import invalid
from ..core.problem import Problem
from ..core.resources import data_dir
from ..core.revision import check_record
from .cases import Case

SCHEMA_VERSION = 1
SCHEMA_FILE = "runtime/bench_record.schema.json"
#: what a result can be. wrong: it ran and its output is not accepted
STATUSES = ("ok", "refused", "wrong", "failed")
#: significant digits that are kept of a measured number
DIGITS = 6

Row = dict[str, Any]


@dataclass(frozen=True)
class Key:
    """What a result row answers; `part` counts repetitions of the whole list in one run."""

    case: str
    peer: str
    part: int


class Record:
    """A JSON-lines file to append to. Opening one that exists continues it.

    Raises InvalidInput as `check_record`: a record in `data/` names a clean commit.
    """

    def __init__(self, path: Path) -> None:
        check_record(path)
        self.path = path
        self.rows: list[Row] = []
        if path.exists():
            self.rows = list(read(path))
            _cut_torn_line(path)

    def append(self, row: Row) -> None:
        """Writes one row and flushes it, so that an interrupted run keeps all before."""
        stamped = _rounded({"schema": SCHEMA_VERSION, "time": _now(), **row})
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(stamped, allow_nan=False) + "\n")
        self.rows.append(stamped)

    def done(self, keep_failed: bool = False) -> set[Key]:
        """Results that need no second measurement: whatever ran or was refused for a reason.

        keep_failed: what failed or was wrong needs none either.
        """
        settled = STATUSES if keep_failed else ("ok", "refused")
        return {key(row) for row in results(self.rows) if row["status"] in settled}


def key(row: Row) -> Key:
    """Of a result row."""
    return Key(row["case"], row["peer"], row["part"])


def read(path: Path) -> Iterator[Row]:
    """Rows of a record. Raises InvalidInput for a line that is none; a torn last line is none."""
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines):  # the process was killed while writing it
                return
            raise invalid("record", f"{path}:{number}: {error}", "one JSON object a line") from None
        if not isinstance(row, dict) or row.get("schema") != SCHEMA_VERSION:
            got = f"{path}:{number} of another form"
            raise invalid("record", got, f"rows with schema {SCHEMA_VERSION}")
        yield row


def results(rows: Iterable[Row], status: str | None = None) -> list[Row]:
    """Result rows, all or of one status. Of rows with one key the last one counts."""
    last = {key(row): row for row in rows if row["kind"] == "result"}
    return [row for row in last.values() if status in (None, row["status"])]


def medians(rows: Iterable[Row]) -> dict[tuple[str, str], float]:
    """(case, peer) -> us: the median over the parts of a run of each part's median."""
    parts: dict[tuple[str, str], list[float]] = {}
    for row in results(rows, "ok"):
        parts.setdefault((row["case"], row["peer"]), []).append(row["us"])
    return {pair: median(values) for pair, values in parts.items()}


def rerun_spread(rows: Iterable[Row]) -> dict[str, float] | None:
    """How far the parts of a run lie apart, |a - b| / mean: median, 90th percentile, worst."""
    parts: dict[tuple[str, str], list[float]] = {}
    for row in results(rows, "ok"):
        parts.setdefault((row["case"], row["peer"]), []).append(row["us"])
    spreads = sorted(
        (max(values) - min(values)) / (sum(values) / len(values))
        for values in parts.values()
        if len(values) > 1
    )
    if not spreads:
        return None
    at = int(0.9 * (len(spreads) - 1) + 0.5)
    return {
        "median": median(spreads),
        "p90": spreads[at],
        "worst": spreads[-1],
        "pairs": len(spreads),
    }


def describe_case(case: Case) -> Row:
    """A case as plain values: lengths short where they are all equal."""
    p = case.problem
    return {
        "case": case.name,
        "family": case.family,
        "problem": {
            "batch": p.batch,
            "q_lens": _short(p.q_lens),
            "kv_lens": _short(p.kv_lens),
            "heads": p.heads,
            "latent_dim": p.latent_dim,
            "rope_dim": p.rope_dim,
            "q_dtype": p.q_dtype,
            "kv_format": p.kv_format,
            "out_dtype": p.out_dtype,
            "page_size": p.page_size,
            "top_k": p.top_k,
        },
        "features": list(case.features),
        "distribution": case.distribution,
        "lengths": case.lengths,
        "flop": p.flops(),
        "bytes": p.bytes(),
    }


def problem_of(row: Row) -> Problem:
    """The Problem of a result row."""
    fields = dict(row["problem"])
    batch = fields.pop("batch")
    for name in ("q_lens", "kv_lens"):
        if isinstance(fields[name], int):
            fields[name] = (fields[name],) * batch
    return Problem(**fields)


def schema() -> Row:
    """The JSON schema of a row."""
    loaded: Row = json.loads((data_dir() / SCHEMA_FILE).read_text(encoding="utf-8"))
    return loaded


def _cut_torn_line(path: Path) -> None:
    """Removes what a killed process left of its last line, so that the next one starts anew."""
    text = path.read_text(encoding="utf-8")
    path.write_text(text[: text.rfind("\n") + 1], encoding="utf-8")


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, dict):
        return {name: _rounded(entry) for name, entry in value.items()}
    return [_rounded(entry) for entry in value] if isinstance(value, list | tuple) else value


def _short(lengths: tuple[int, ...]) -> int | list[int]:
    return lengths[0] if len(set(lengths)) == 1 else list(lengths)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
