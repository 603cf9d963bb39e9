"""Synchronising instructions deleted one at a time, in each family: how many are reported.

A row a build of `mutation_cases`: by kind the deletions reported and tried, those without effect
(an arrival in a phase without a wait, an mbarrier without use, a tcgen05.fence that orders nothing
new), and the rest, each with the reason why no run can differ. None of the rest changed a result
under any of the schedules of `emulate.mutate.TRIES`. A row names the digest of the build's code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter, time
from typing import Any

from ..core.revision import Revision
from ..emulate import EmulatedKernel, mutate
from ..jit import compile as compiled
from ..jit.build import Built, no_count
from .emulated import digest_of_code, spread
from .mutation_cases import Case, Cut, cases
from .record import Progress, Row, head_row, read, write

FIRST_KEYS = (
    "load_k of a work tile's first tile: load_query has waited for q.empty, at which the tensor "
    "core arrives behind the last QK of the work tile before and its reads of K (a bf16 query over "
    "e4m3 comes without load_query, and needs the wait)"
)
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
    ("mbarrier wait", "keep_ab_sm90/fp8/mainloop_qk_softmax.py"): (
        "start_qk: that P of the stage is free follows from the wait for its keys: they were "
        "loaded behind kv.empty, at which PV arrives when it has read the stage and its P"
    ),
    ("warp barrier", "split_merge/swap_ab_ll.py"): (
        "take_stats: a lane leaves zeros in messages that it alone has read; sync_warp is there "
        "for convergence"
    ),
    ("named barrier", "swap_ab_sm90/shared_storage.py"): (
        "swap_ab_kernel with multicast: the cluster barrier that all threads pass next orders the "
        "initialisation of mbarriers as well"
    ),
    ("named barrier", "rows_on_m/work_records.py"): (
        "merge, of workers with more work tiles than records: the barriers of the roles' end and "
        "of the merge before lie between the last read of a record and its next write"
    ),
    ("warp barrier", "rows_on_m/work_records.py"): (
        "record, in a merge: a barrier of all threads follows before anybody reads the record"
    ),
    ("mbarrier wait", "mla_sm100/producer.py"): FIRST_KEYS,
    ("mbarrier wait", "rows_on_m/work_records.py"): FIRST_KEYS,
    ("cluster barrier", "rows_on_m/epilogue_store.py"): (
        "decode_kernel: of a CTA's last tile both CTAs wait for o_full, which lies behind all "
        "arrivals and products of the pair; tcgen05.dealloc is a step of both CTAs' warps"
    ),
}
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
    path: Path, part: str, seconds: float, say: Progress, jobs: int = 1, count: Built = no_count
) -> list[Row]:
    """Builds whose row is not of this source's code and of today's calls, until the time is over;
    `jobs` processes share them.
    """
    rows = {row["name"]: row for row in read(path)[1:]} if path.exists() else {}
    until = time() + seconds
    chosen = names(part)
    known = [(name, settled(name, rows.get(name, {})), until) for name in chosen]
    for done, row in enumerate(spread(run_anew, known, jobs)):
        count(done, len(known))
        if row is not None:
            rows[row["name"]] = row
            say(f"{row['reported']} of {row['tried']} {row['name']}")
            write(path, _rows(rows))
    return _rows(rows)


def settled(name: str, row: Row) -> str:
    """Digest of the code of a build's row in the record, "" where it is of other calls."""
    cuts = [Cut(**{**cut, "kv_lens": tuple(cut["kv_lens"])}) for cut in row.get("calls", ())]
    return str(row["ptx"]) if tuple(cuts) == cases()[name].cuts else ""


def names(part: str) -> list[str]:
    """Names of the builds that contain `part`."""
    return [name for name in cases() if part in name]


def run_anew(name: str, ptx: str, until: float) -> Row | None:
    """The row of a build, None where its code is that of digest `ptx`, or too late."""
    if time() > until:
        return None
    case = cases()[name]
    kernel = EmulatedKernel.of(compiled(case.config, case.arch))
    digest = digest_of_code(kernel.text)
    return None if digest == ptx else run_build(case, kernel, digest)


def run_build(case: Case, kernel: EmulatedKernel, digest: str) -> Row:
    """All deletions of a build."""
    began = perf_counter()
    done = list(mutate.prove(kernel, case.calls(), strict=case.family == "mla_sm100"))
    found = {"kind": "case", "name": case.config.name(), "family": case.family, "ptx": digest}
    cuts = [cut._asdict() for cut in case.cuts]
    seconds = round(perf_counter() - began)
    return {**found, "calls": cuts, **row_of(done), "seconds": seconds}


def row_of(done: Sequence[mutate.Mutant]) -> Row:
    """What came of all deletions of a build."""
    idle, pacing = ([m for m in done if m.noticed == word] for word in NO_EFFECT)
    pacing += [m for m in done if not m.noticed and _named(m, PACERS)]
    judged = [m for m in done if m.noticed not in NO_EFFECT and m not in pacing]
    tried = Counter(m.kind for m in judged)
    seen = Counter(m.kind for m in judged if m.noticed)
    rest = [m for m in judged if not m.noticed]
    return {
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
    head = head_row("mutations", "cpu", len(cases()))
    return [head, *(found[name] for name in cases() if name in found)]


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """Counts over all builds of the record."""
    done = rows[1:]
    tried, seen = (sum(row[key] for row in done) for key in ("tried", "reported"))
    share = 100 * seen / tried if tried else 0.0
    idle = sum(len(row["nobody_waits"]) + len(row.get("pacing", ())) for row in done)
    words = f"{len(done)} of {rows[0]['cases']} builds: {seen} of {tried} deletions"
    return f"{words} reported ({share:.1f} %), {idle} without effect"


def failed(rows: Sequence[Row]) -> bool:
    """Whether a deletion is neither reported nor explained."""
    return any(left["why"] == UNEXPLAINED for row in rows[1:] for left in row["unreported"])
