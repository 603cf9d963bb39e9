"""Verification runs as JSON lines: a first row with the environment, then one row a case."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..bench.environment import environment
from ..core import files
from ..core.errors import InvalidInput, invalid
from ..core.resources import data_dir
from ..core.revision import Revision
from ..jit.build import Built
from . import costs, published
from .cases import CARD_WORKSPACE_BYTES, WORKSPACE_BYTES, pairwise_cases
from .check import Outcome, run_case

Row = dict[str, Any]
Progress = Callable[[str], None]

STATUSES = ("ok", "wrong", "refused", "failed")


def read(path: Path) -> list[Row]:
    """Rows of a record. Raises InvalidInput, with file and line, for a file that is not one."""
    rows = []
    for number, line in files.lines_of(path, "record"):
        if line.strip():
            row = files.parse_json(line, f"record {path}:{number}")
            files.check(row, {"kind": str}, f"record {path}:{number}")
            rows.append(row)
    if not rows:
        raise invalid("record", f"{path} without a row", "rows with a kind")
    return rows


def table_of(path: str, table: Callable[[Sequence[Row]], str]) -> str:
    """A table of the record `path` below `data/`."""
    return table(read(data_dir() / path))


def check_replaced(path: Path, what: str) -> None:
    """Raises InvalidInput for a file that is there and is no record of `what`: a run would replace
    it."""
    if path.exists() and path.stat().st_size:
        try:
            found = read(path)[0].get("what")
        except InvalidInput:
            found = None
        if found != what:
            got = f"{path}, which holds {f'a record of {found!r}' if found else 'something else'}"
            raise invalid("record", got, f"a record of {what!r}, an empty file, or none")


def write(path: Path, rows: Iterable[Row]) -> None:
    """Rows as JSON lines, in the place of those that the file had, whole or not at all."""
    with files.replacing(path) as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows).encode())


def write_anew(path: Path, what: str, rows: Sequence[Row]) -> list[Row]:
    """A record of `what` that was made on a CPU: its first row, then `rows`; written, returned."""
    record = [head_row(what, "cpu", len(rows)), *rows]
    write(path, record)
    return record


class Continued:
    """A record of `what` that a later run continues: rows of the cases `names`, in that order."""

    def __init__(self, path: Path, what: str, names: Sequence[str]) -> None:
        self.path, self.what, self.names = path, what, names
        earlier = read(path)[1:] if path.exists() else []
        #: by the name of the case
        self.rows = {row["name"]: row for row in earlier if row["name"] in set(names)}

    def record(self) -> list[Row]:
        """The head, and the rows that there are."""
        rows = [self.rows[name] for name in self.names if name in self.rows]
        return [head_row(self.what, "cpu", len(self.names)), *rows]

    def extend(
        self, made: Iterable[Row | None], total: int, told: Callable[[Row], None], count: Built
    ) -> list[Row]:
        """The record with what was made of `total` cases, None of those that did not run; it is
        written after each row."""
        for done, row in enumerate(made):
            count(done, total)
            if row is not None:
                self.rows[row["name"]] = row
                told(row)
                write(self.path, self.record())
        return self.record()


def pairwise_run(device: str, indices: Sequence[int] | None, progress: Progress) -> Iterator[Row]:
    """The pairwise cases (or those of `indices`) on a device. Raises InvalidInput for a number
    that no case has."""
    size = WORKSPACE_BYTES if torch.device(device).type == "cpu" else CARD_WORKSPACE_BYTES
    workspace = torch.zeros(size, dtype=torch.uint8, device=device)
    cases = pairwise_cases()
    chosen = range(len(cases)) if indices is None else indices
    unknown = next((index for index in chosen if not 0 <= index < len(cases)), None)
    if unknown is not None:
        raise invalid("case", unknown, f"0 to {len(cases) - 1}")
    yield head_row("pairwise", device, len(chosen))
    for index in chosen:
        case = cases[index]
        outcome = guarded(partial(run_case, case, index, workspace))
        _tell(progress, f"case {index}", outcome)
        yield {"kind": "case", "index": index, "case": case, **outcome.row()}


def pairwise_again(rows: Sequence[Row], device: str, progress: Progress) -> Iterator[Row]:
    """The rows of a pairwise record, with those cases run again that are not ok; a row that is run
    again names its commit. Raises InvalidInput for a record of other cases.
    """
    head, *done = rows
    cases = pairwise_cases()
    known = [cases[row["index"]] if row["index"] < len(cases) else None for row in done]
    if head.get("what") != "pairwise" or known != [row["case"] for row in done]:
        raise invalid("record", f"one of {head.get('what')!r}, or of other cases", "today's cases")
    yield head
    wanted = [row["index"] for row in done if row["status"] != "ok"]
    fresh = pairwise_run(device, wanted, progress)
    next(fresh)  # its head
    commit = Revision.here().commit
    for row in done:
        yield row if row["status"] == "ok" else {**next(fresh), "commit": commit}


def published_run(device: str, dtype: str, most_requests: int, progress: Progress) -> Iterator[Row]:
    """The published configurations of one dtype with up to `most_requests` requests."""
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    chosen = [
        c for c in published.configurations() if c.dtype == dtype and c.batch <= most_requests
    ]
    if not chosen:
        raise invalid("dtype", repr(dtype), published.DTYPES)
    tokens = max(c.batch for c in chosen) * max(published.KV_LENS)
    pool = published.Pool(dtype, tokens, device)
    yield head_row("published", device, len(chosen))
    for c in chosen:
        outcome = guarded(partial(published.run, c, pool, workspace))
        _tell(progress, c.name, outcome)
        yield {"kind": "case", "case": c._asdict(), **outcome.row()}


def costs_run(device: str, features: Sequence[str], progress: Progress) -> Iterator[Row]:
    """Costs of features on a device; `names` selects features by prefix."""
    chosen = [
        c
        for c in costs.comparisons()
        if not features or any(c.feature.startswith(name) for name in features)
    ]
    if not chosen:
        names = dict.fromkeys(c.feature for c in costs.comparisons())
        raise invalid("features", features, tuple(names))
    yield head_row("costs", device, len(chosen))
    yield from costs.run(chosen, device, progress=progress)


def head_row(what: str, device: str, cases: int) -> Row:
    """The first row of a record."""
    found = environment_today(device) | {"command": ["mla-lab", "verify", what]}
    return {"kind": "run", "what": what, "cases": cases, "environment": found}


def environment_today(device: str) -> Row:
    """The environment of a run, with its day."""
    return {**environment(device), "date": datetime.now(UTC).date().isoformat()}


def guarded(run: Callable[[], Outcome]) -> Outcome:
    """Run a case and turn an unexpected exception into the outcome "failed"."""
    try:
        return run()
    except Exception as error:
        return Outcome("failed", reason=f"{type(error).__name__}: {error}"[:300])


def cases_of(rows: Iterable[Row]) -> list[Row]:
    """Case rows of a record."""
    return [row for row in rows if row["kind"] == "case"]


def summary(rows: Iterable[Row]) -> str:
    """How many cases had each outcome."""
    counts = Counter(row["status"] for row in cases_of(rows))
    return ", ".join(f"{counts[status]} {status}" for status in STATUSES if counts[status])


def failed(rows: Iterable[Row]) -> bool:
    """Whether a case is wrong or failed, or none is ok; a refusal is neither."""
    found = {row["status"] for row in cases_of(rows)}
    return "ok" not in found or not found.isdisjoint(("wrong", "failed"))


def not_ok(rows: Iterable[Row]) -> bool:
    """Whether a case is not "ok"."""
    return any(row["status"] != "ok" for row in cases_of(rows))


def _tell(progress: Progress, name: str, outcome: Outcome) -> None:
    if outcome.status != "ok":
        progress(f"{name}: {outcome.status}: {outcome.reason}")
