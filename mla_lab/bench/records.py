"""Measurements as JSON lines: appended to, never rewritten, valid at every moment.

Rows, told apart by `kind`: a `run` opens a session of measuring (environment, method, ceilings),
each `result` is one case and one peer, `end` closes it (ceilings again, rerun spread, or that
it was interrupted). The schema is `data/runtime/bench_record.schema.json`; keys that readers index
are checked on reading, by the tables below.
"""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from ..core import files
from ..core.errors import InvalidInput, invalid
from ..core.problem import Problem
from ..core.resources import data_dir
from ..core.revision import check_record
from .cases import Case

SCHEMA_VERSION = 1
#: how every row begins
BEGIN = b'{"schema"'
SCHEMA_FILE = "runtime/bench_record.schema.json"
#: status of a result. wrong: it ran, and its output was not accepted
STATUSES = ("ok", "refused", "wrong", "failed")
#: significant digits of a measured number
DIGITS = 6

#: keys that readers index, and their types; the schema requires each of them
COMMON: files.Keys = {"schema": int, "time": str, "kind": str}
KINDS: dict[str, files.Keys] = {
    "run": {"environment": dict, "method": dict, "peers": list},
    "result": {"case": str, "peer": str, "part": int, "status": str, "problem": dict},
}
PROBLEM: files.Keys = {
    "batch": int,
    "q_lens": (int, list),
    "kv_lens": (int, list),
    "heads": int,
    "q_dtype": str,
    "kv_format": str,
    "page_size": int,
    "top_k": int,
}
MEASURED: files.Keys = {"us": (int, float), "rounds": dict}

Row = dict[str, Any]
T = TypeVar("T")
K = TypeVar("K")


@dataclass(frozen=True)
class Key:
    """Identity of a result row; `part` counts repetitions of the whole list in one run."""

    case: str
    peer: str
    part: int


class Record:
    """A JSON-lines file. Opening one that exists continues it; no row of it is ever rewritten.

    The file is locked until `close` or garbage collection. Raises InvalidInput for a second writer,
    and for a file in `data/` if the code is not of a clean commit (`check_record`). An incomplete
    last line, from a killed process, is removed.
    """

    def __init__(self, path: Path) -> None:
        check_record(path)
        self.path = path
        self.rows: list[Row] = []
        self._descriptor: int | None = None
        self._finalizer: Callable[[], object] = lambda: None
        if path.exists():
            with _refused(path):
                self._hold(_locked(path))
                try:
                    self._mend()
                except BaseException:
                    self.close()
                    raise
            self.rows = list(read(path))

    def append(self, row: Row) -> None:
        """Write one row to the disk, so that an interrupted run keeps it.

        Raises InvalidInput where the file cannot be written; a row cut short by a full disk is
        removed.
        """
        stamped = _rounded({"schema": SCHEMA_VERSION, "time": _now(), **row})
        line = (json.dumps(stamped, allow_nan=False) + "\n").encode()
        with _refused(self.path):
            descriptor = self._descriptor
            if descriptor is None:
                descriptor = self._hold(_locked(self.path))
            files.append(descriptor, line)
        self.rows.append(stamped)

    def close(self) -> None:
        """Release the lock; another `append` takes it again."""
        self._descriptor = None
        self._finalizer()

    def _hold(self, descriptor: int) -> int:
        self._descriptor = descriptor
        self._finalizer = weakref.finalize(self, os.close, descriptor)
        return descriptor

    def _mend(self) -> None:
        """Remove an incomplete last line, and end a complete one with a newline. A file that does
        not begin as records do stays as it is: InvalidInput.

        A new file replaces the old one, so that a killed process loses nothing; until then no
        other process can lock the old one.
        """
        text = self.path.read_bytes()
        if not (text.startswith(BEGIN) or BEGIN.startswith(text)):
            raise invalid("record", f"{self.path}, which holds something else", "a record, or none")
        keep = text.rfind(b"\n") + 1
        if keep == len(text) or self._descriptor is None:
            return
        try:
            files.parse_json(text[keep:], "record")
        except InvalidInput:
            with files.replacing(self.path) as new:
                new.write(text[:keep])
            self.close()
            self._hold(_locked(self.path))
        else:
            files.append(self._descriptor, b"\n")

    def done(self, keep_failed: bool = False) -> set[Key]:
        """Keys of results that need no second measurement: those that ran or were refused.

        keep_failed: also those that failed or were wrong.
        """
        settled = STATUSES if keep_failed else ("ok", "refused")
        return {key(row) for row in results(self.rows) if row["status"] in settled}


def key(row: Row) -> Key:
    """The key of a result row."""
    return Key(row["case"], row["peer"], row["part"])


def read(path: Path) -> Iterator[Row]:
    """Rows of a record. Raises InvalidInput, with file and line, for a file that cannot be read
    and a line that is no row; an incomplete last line of a killed process is skipped.
    """
    torn: InvalidInput | None = None
    for number, line in files.lines_of(path, "record"):
        if torn is not None:
            raise torn
        if not line.strip():
            continue
        try:
            row = files.parse_json(line, f"record {path}:{number}")
        except InvalidInput as error:
            torn = error
        else:
            yield _checked(row, f"record {path}:{number}")
    if torn is not None and line.endswith(b"\n"):
        raise torn


def _checked(row: Any, argument: str) -> Row:
    """`row` if it has the keys that readers of its kind index."""
    files.check(row, COMMON, argument)
    if row["schema"] != SCHEMA_VERSION:
        raise invalid(argument, f"schema {row['schema']}", f"rows with schema {SCHEMA_VERSION}")
    if row["kind"] in KINDS:
        files.check(row, KINDS[row["kind"]], argument)
    if row["kind"] == "result":
        files.check(row["problem"], PROBLEM, f"{argument}, problem")
        if row["status"] == "ok":
            files.check(row, MEASURED, argument)
            files.check(row["rounds"], {"us": list}, f"{argument}, rounds")
    return row


def results(rows: Iterable[Row], status: str | None = None) -> list[Row]:
    """Result rows, all or of one status. Of rows with one key the last one counts."""
    last = {key(row): row for row in rows if row["kind"] == "result"}
    return [row for row in last.values() if status in (None, row["status"])]


def grouped(rows: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Rows by their keys, in the order of each key's first row."""
    found: dict[K, list[T]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found


def pair_of(row: Row) -> tuple[str, str]:
    """Case and peer of a result row."""
    return row["case"], row["peer"]


def _parts(rows: Iterable[Row]) -> dict[tuple[str, str], list[float]]:
    """(case, peer) -> us of each part of a run."""
    by_pair = grouped(results(rows, "ok"), pair_of)
    return {pair: [row["us"] for row in parts] for pair, parts in by_pair.items()}


def medians(rows: Iterable[Row]) -> dict[tuple[str, str], float]:
    """(case, peer) -> us: the median over the parts of a run of each part's median."""
    return {pair: median(values) for pair, values in _parts(rows).items()}


def rerun_spread(rows: Iterable[Row]) -> dict[str, float] | None:
    """Spread of the parts of a run, |a - b| / mean: median, 90th percentile, largest."""
    spreads = sorted(
        (max(values) - min(values)) / (sum(values) / len(values))
        for values in _parts(rows).values()
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
    lengths = {"q_lens": _short(p.q_lens), "kv_lens": _short(p.kv_lens)}
    return {
        "case": case.name,
        "family": case.family,
        "problem": {"batch": p.batch, **asdict(p), **lengths},
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


@contextmanager
def _refused(path: Path) -> Iterator[None]:
    """An operating-system error about the file as an InvalidInput."""
    try:
        yield
    except OSError as error:
        got = f"{path}: {error.strerror}"
        raise invalid("record", got, "a writable file on a disk with room") from error


def _locked(path: Path) -> int:
    """The file, open for appending and locked. Raises InvalidInput while another process has it."""
    while True:
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        if not files.lock(descriptor):
            os.close(descriptor)
            raise invalid("record", f"{path}, which another process writes", "one writer at a time")
        if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
            return descriptor
        os.close(descriptor)  # another process replaced the file in the meantime


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
