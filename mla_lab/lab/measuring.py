"""Figures with their source: measured now on a GPU, else recorded in `data/`, else missing.

Floors use the ceilings of the plain call's run, its best read and its best GEMM (those of cache
formats: of their own run). No call of the plain call's run is faster than its floor; one of another
run, on another card, may be by a few per cent.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from ..bench.cases import Case
from ..bench.peers import Peer
from ..bench.records import Row, medians, read, results
from ..bench.report import HEADLINES
from ..core.errors import InvalidInput
from ..core.gpu import H200, PRESETS, Gpu
from ..core.resources import data_dir
from .session import gpu_name
from .source import Source
from .tables import Table, table

OURS = "mla-lab"
#: the plain call beside public kernels: the record of the README's table, of the charts of speed
#: and of the card's ceilings; the same cases called with a plan that the host made before
PLAIN, ANCHOR = "h200_plain.jsonl", "h200_anchor.jsonl"


@dataclass(frozen=True)
class Run:
    """One recorded run: the rows that one process wrote, and where."""

    file: str
    rows: tuple[Row, ...]

    @property
    def card(self) -> str:
        card = self.rows[0]["environment"]["card"]
        return str(card["name"]) if card else "CPU"

    @property
    def date(self) -> str:
        return str(self.rows[0]["time"])[:10]

    @property
    def source(self) -> Source:
        return Source("recorded", card=self.card, date=self.date)


@dataclass(frozen=True)
class Figure:
    """Microseconds of one case, or None, and their source."""

    case: str
    us: float | None
    source: Source | None

    def __str__(self) -> str:
        if self.us is None or self.source is None:
            return f"{self.case}: not recorded"
        return f"{self.case}: {self.us:.1f} us ({self.source.label})"

    def _repr_html_(self) -> str:
        if self.us is None or self.source is None:
            return f"<code>{self.case}</code>: <b>not recorded</b>"
        return f"<code>{self.case}</code>: <b>{self.us:.1f} us</b> {self.source.chip()}"


def runs(file: str = "*.jsonl", folder: Path | None = None) -> list[Run]:
    """Runs recorded in files of that name in `folder` (the package's data), oldest first; files
    that are no benchmark record are left alone.
    """
    found: list[Run] = []
    for path in sorted((folder or data_dir()).rglob(file)):
        state = path.stat()
        found += _runs_of(path, state.st_mtime_ns, state.st_size)
    return sorted(found, key=lambda run: run.date)


@lru_cache(maxsize=64)
def _runs_of(path: Path, mtime_ns: int, size: int) -> tuple[Run, ...]:
    """Runs of one file as it was then; thousands of rows are not parsed for every redraw."""
    try:
        rows = list(read(path))
    except InvalidInput:  # a trace or published figures, not a benchmark record
        return ()
    return tuple(_split(path.name, rows))


def _split(file: str, rows: list[Row]) -> Iterator[Run]:
    starts = [i for i, row in enumerate(rows) if row["kind"] == "run"]
    for begin, end in zip(starts, [*starts[1:], len(rows)], strict=True):
        yield Run(file, tuple(rows[begin:end]))


def headline_run() -> Run | None:
    """The newest run of the plain call, else the newest with a host plan, else None."""
    found = runs(PLAIN) or runs(ANCHOR)
    return found[-1] if found else None


def headline_rows() -> tuple[Row, ...]:
    """Rows of the run of the plain call (`headline_run`), the run's own first; none without."""
    found = headline_run()
    return found.rows if found else ()


def anchor_rows() -> tuple[Row, ...]:
    """Rows of the newest run with a host plan, which has clocks and watts; none without."""
    found = runs(ANCHOR)
    return found[-1].rows if found else ()


def measured_card() -> Gpu:
    """The H200 with the ceilings of the headline run; the preset without that record."""
    run = headline_run()
    found = [row["ceilings"] for row in run.rows if row.get("ceilings")] if run else []
    if run is None or not found or H200.ceilings is None:
        return H200
    read, gemm = (max(c[name] for c in found) for name in ("read_tbps", "gemm_tflops"))
    ceilings = replace(
        H200.ceilings,
        read_tbps=read,
        burst_tflops=gemm,
        sustained_tflops=(gemm, gemm),
        card=run.card,
        date=run.date,
    )
    return replace(H200, ceilings=ceilings)


def cards() -> tuple[Gpu, ...]:
    """The presets in their order, the H200 as measured."""
    return tuple(measured_card() if gpu.name == H200.name else gpu for gpu in PRESETS)


def recorded_us(case: str, peer: str = OURS) -> Figure:
    """The recorded figure of a case and peer: of the plain call's record, else of the one with a
    host plan, else the newest of another. `OURS` is the record's headline: plain before planned.
    """
    names = tuple(HEADLINES) if peer == OURS else (peer,)
    ordered = (runs(PLAIN), runs(ANCHOR), runs())
    for run in (run for group in ordered for run in reversed(group)):
        us = medians(run.rows)
        for name in names:
            if (case, name) in us:
                return Figure(case, us[case, name], run.source)
    return Figure(case, None, None)


def measure(case: Case) -> Figure:
    """Our kernel on `case`: timed now where a GPU is, else as recorded."""
    if not gpu_name():
        return recorded_us(case.name)
    row = live_row(case)
    if row["status"] != "ok":
        return Figure(case.name, None, None)
    return Figure(case.name, row["us"], Source("measured", card=gpu_name(), detail="now"))


@lru_cache(maxsize=64)
def live_us(case: Case) -> float | None:
    """Microseconds of our kernel on this machine's GPU, once a process; None where it cannot."""
    return measure(case).us if gpu_name() else None


@cache
def _device_and_timer() -> tuple[Any, Any]:
    import torch

    from ..bench.timers import timer_for

    device = torch.device("cuda" if gpu_name() else "cpu")
    return device, timer_for(device)


def live_row(
    case: Case, *, rounds: int = 9, rotation_mb: float | None = None, peer: Peer | None = None
) -> Row:
    """One result row of our own kernel, or of `peer`, measured in this process by the benchmark's
    own code; `rotation_mb` as of `mla-lab bench run`.
    """
    from ..bench.measure import CaseRun, Method
    from ..bench.peers.ours import Ours

    device, timer = _device_and_timer()
    method = Method(
        rounds=rounds,
        warmups=1,
        rotation_bytes=None if rotation_mb is None else int(rotation_mb * 1e6),
        isolated=False,
        planned=False,
        in_step=False,
        ceilings=False,
        min_launches=1 if device.type == "cpu" else Method.min_launches,
    )
    timed = peer or Ours("auto" if device.type == "cuda" else "torch")
    (row,) = CaseRun(case, method, timer, device).rows([timed])
    return {"part": 0, **row}


def run_table(found: list[Run]) -> Table:
    """The recorded runs, one row a file: card, day of the last run, commits, figures."""
    files: dict[str, list[Run]] = {}
    for run in found:
        files.setdefault(run.file, []).append(run)
    rows = [
        (
            file,
            mine[-1].card,
            mine[-1].date,
            ", ".join(dict.fromkeys((r.rows[0]["environment"]["commit"] or "?")[:9] for r in mine)),
            sum(len(results(run.rows, "ok")) for run in mine),
            sum(len(results(run.rows)) - len(results(run.rows, "ok")) for run in mine),
        )
        for file, mine in files.items()
    ]
    columns = ("record", "card", "last run", "commits", "figures", "refused or failed")
    return table(columns, rows)
