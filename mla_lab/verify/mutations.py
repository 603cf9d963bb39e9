"""Synchronising instructions of the recorded builds, deleted one at a time: how many are reported.

A row a build: by kind the deletions reported and tried, those that nobody waits for (an arrival in
a phase without a wait, an mbarrier without use), and the rest, each with the reason why no run can
differ. None of the rest changed a result under any of the schedules of `emulate.mutate.TRIES`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from time import perf_counter, time
from typing import Any

from ..core.revision import Revision
from ..emulate import mutate
from ..emulate.recorded import Recording, load, recordings
from ..jit.build import Built, no_count
from .emulated import digest_of, spread
from .record import Row, head_row, read, write

Say = Callable[[str], None]
#: (what was deleted, file of the kernel's own line before it) -> why it is not reported
REASONS: dict[tuple[str, str], str] = {
    ("named barrier", "keep_ab_sm90/mainloop_qk_softmax.py"): (
        "load_q_fragments: a warp stores the rows of Q that its own quarter of the product reads. "
        "A product begins when all four warps have issued it, each behind its stores and its "
        "fence, and is done for all of them at a wait"
    ),
    ("mbarrier wait", "keep_ab_sm90/mainloop_qk_softmax.py"): (
        "acquire_p of a work tile's first tile: the keys of that stage were loaded behind "
        "kv.empty, at which PV arrives when it has read the stage and its P"
    ),
}
REASONS["warp barrier", "split_merge/swap_ab_ll.py"] = (
    "take_stats: a lane leaves zeros in messages that it alone has read; sync_warp is there for "
    "convergence"
)
#: what stands there for the compiler's sake, and orders nothing of the program
PACERS = {
    ("warp barrier", "fp8/mainloop_qk_softmax.py"): (
        "on_word: keeps the steps of QK apart between those of softmax; no lane reads what "
        "another wrote"
    ),
}
#: deletions without effect, of two kinds
NO_EFFECT = (mutate.IDLE, mutate.PACING)
UNEXPLAINED = "not explained"


def run(
    path: Path, part: str, seconds: float, say: Say, jobs: int = 1, count: Built = no_count
) -> list[Row]:
    """Builds that the record lacks, those of the least work first, until the time is over; `jobs`
    processes share them.
    """
    rows = {row["name"]: row for row in read(path)[1:]} if path.exists() else {}
    until = time() + seconds
    chosen = sorted(map(load, recordings(part)), key=_work)
    known = [(r.name, rows.get(r.name, {}).get("ptx", ""), until) for r in chosen]
    for done, row in enumerate(spread(run_anew, known, jobs)):
        count(done, len(known))
        if row is not None:
            rows[row["name"]] = row
            say(f"{row['reported']} of {row['tried']} {row['name']}")
            write(path, _rows(rows))
    return _rows(rows)


def run_anew(name: str, ptx: str, until: float) -> Row | None:
    """The row of a recorded build, None where its PTX is that of digest `ptx`, or too late."""
    recording = load(name)
    if time() > until or digest_of(recording.text) == ptx:
        return None
    return run_build(recording)


def _work(recording: Recording) -> int:
    return len(recording.text) * sum(prod(launch.grid) for launch in recording.calls)


def run_build(recording: Recording) -> Row:
    """All deletions of a build."""
    began = perf_counter()
    done = list(mutate.prove(recording.kernel(), [recording.call()]))
    return {**row_of(recording, done), "seconds": round(perf_counter() - began)}


def row_of(recording: Recording, done: Sequence[mutate.Mutant]) -> Row:
    """What came of all deletions of a build."""
    idle, pacing = ([m for m in done if m.noticed == word] for word in NO_EFFECT)
    pacing += [m for m in done if not m.noticed and _named(m, PACERS)]
    judged = [m for m in done if m.noticed not in NO_EFFECT and m not in pacing]
    tried = Counter(m.kind for m in judged)
    seen = Counter(m.kind for m in judged if m.noticed)
    rest = [m for m in judged if not m.noticed]
    return {
        "kind": "case",
        "name": recording.name,
        "ptx": digest_of(recording.text),
        "commit": Revision.here().commit,
        "tried": len(judged),
        "reported": len(judged) - len(rest),
        "by_kind": {kind: [seen[kind], tried[kind]] for kind in mutate.KINDS if tried[kind]},
        "nobody_waits": [f"{m.kind}: {m.place}" for m in idle],
        "pacing": [f"{m.kind}: {m.near}" for m in pacing],
        "unreported": [
            {"what": m.kind, "place": str(m.near), "text": m.text[:80], "why": reason(m)}
            for m in rest
        ],
    }


def reason(mutant: mutate.Mutant) -> str:
    """Why a deletion can go without a report."""
    return _named(mutant, REASONS) or UNEXPLAINED


def _named(mutant: mutate.Mutant, reasons: dict[tuple[str, str], str]) -> str:
    found = (
        why
        for (kind, file), why in reasons.items()
        if mutant.kind == kind and mutant.near.file.endswith(file)
    )
    return next(found, "")


def _rows(found: dict[str, Row]) -> list[Row]:
    names = recordings()
    head = head_row("mutations", "cpu", len(names))
    return [head, *(found[name] for name in names if name in found)]


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """Counts over all builds of the record."""
    done = rows[1:]
    tried, seen = (sum(row[key] for row in done) for key in ("tried", "reported"))
    share = 100 * seen / tried if tried else 0.0
    idle = sum(len(row["nobody_waits"]) + len(row.get("pacing", ())) for row in done)
    words = f"{len(done)} of {rows[0]['cases']} recorded builds: {seen} of {tried} deletions"
    return f"{words} reported ({share:.1f} %), {idle} without effect"
