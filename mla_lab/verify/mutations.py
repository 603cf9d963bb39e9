"""Synchronising instructions deleted one at a time, in each family: how many are reported.

A row a build of `mutation_cases`: by kind the deletions reported and tried, those without effect
(an arrival in a phase without a wait, an mbarrier without use, a tcgen05.fence that orders nothing
new), and the rest, each with the reason why no run can differ. None of the rest changed a result
under any of the schedules of `emulate.mutate.TRIES`. A row names the digest of the build's code.
"""

from __future__ import annotations

import linecache
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter, time
from typing import Any, NamedTuple

from ..core.revision import Revision
from ..emulate import EmulatedKernel, mutate
from ..jit import compile as compiled
from ..jit.build import Built, no_count
from .emulated import digest_of_code, spread
from .mutation_cases import Case, Cut, cases
from .record import Continued, Progress, Row

FIRST_KEYS = (
    "load_k of a work tile's first tile: load_query has waited for q.empty, at which the tensor "
    "core arrives behind the last QK of the work tile before and its reads of K (a bf16 query over "
    "e4m3 comes without load_query, and needs the wait)"
)
KEYS_COVER_P = (
    "start_qk: that P of the stage is free follows from the wait for its keys: they were loaded "
    "behind kv.empty, at which PV arrives when it has read the stage and its P"
)


class Reason(NamedTuple):
    """Why no run can differ without what is deleted behind a line of a kernel's source, of so many
    such deletions in a build."""

    kind: str
    file: str
    line: str
    why: str = ""
    times: int = 1

    def of(self, mutant: mutate.Mutant) -> bool:
        """Whether it is of this deletion."""
        file, number = mutant.near
        if mutant.kind != self.kind or not file.endswith(self.file):
            return False
        return linecache.getline(str(SOURCES / file), number).strip() == self.line


SOURCES = Path(__file__).resolve().parents[2]
FP8_SOFTMAX = "keep_ab_sm90/fp8/mainloop_qk_softmax.py"
RECORDS = "rows_on_m/work_records.py"
REASONS = (
    Reason(
        "named barrier",
        "keep_ab_sm90/mainloop_qk_softmax.py",
        "cute.copy(ld, latent[None, None, k, 0], tSrQ[None, None, k])",
        "load_q_fragments: a warp stores the rows of Q that its own quarter of the product reads. "
        "A product begins when all four warps have issued it, each behind its stores and its "
        "fence, and is done for all of them at a wait",
    ),
    *(
        Reason("mbarrier wait", FP8_SOFTMAX, line, KEYS_COVER_P)
        for line in (
            "return TileContext(index, mask_free), "
            "cute.arch.make_warp_uniform(work.end - work.begin)",
            "while tiles_left > 2:",
            "if tiles_left == 2:",
            "warpgroup.wait_group(0)",
        )
    ),
    Reason(
        "warp barrier",
        "split_merge/swap_ab_ll.py",
        "cute.arch.sync_warp()",
        "take_stats: a lane leaves zeros in messages that it alone has read; sync_warp is there "
        "for convergence",
    ),
    Reason(
        "named barrier",
        "swap_ab_sm90/shared_storage.py",
        'bars = {name: MBarriers(q_full + (first[name] - first["q_full"])) for name in names}',
        "swap_ab_kernel with multicast: the cluster barrier that all threads pass next orders the "
        "initialisation of mbarriers as well",
    ),
    Reason(
        "named barrier",
        RECORDS,
        "s.records[i, index % RECORDS] = found[i]",
        "merge, of workers with more work tiles than records: the barriers of the roles' end and "
        "of the merge before lie between the last read of a record and its next write",
    ),
    Reason(
        "warp barrier",
        RECORDS,
        "cute.arch.sync_warp()",
        "record, in a merge: a barrier of all threads follows before anybody reads the record",
    ),
    Reason(
        "mbarrier wait",
        "mla_sm100/producer.py",
        "s.k_pipe.producer_acquire(PipelineState(chunk, (tile & 1) ^ 1))",
        FIRST_KEYS,
    ),
    Reason("mbarrier wait", RECORDS, "if cute.arch.lane_idx() == 0:", FIRST_KEYS, 2),
    Reason(
        "cluster barrier",
        "rows_on_m/epilogue_store.py",
        "mLSE[work.global_row + row] = value",
        "decode_kernel: of a CTA's last tile both CTAs wait for o_full, which lies behind all "
        "arrivals and products of the pair; tcgen05.dealloc is a step of both CTAs' warps",
    ),
)
#: what stands there for the compiler's sake, and orders nothing of the program: on_word keeps the
#: steps of QK apart between those of softmax; no lane reads what another wrote
PACERS = (
    Reason(
        "warp barrier",
        FP8_SOFTMAX,
        "cute.arch.sync_warp()  # otherwise the compiler moves the steps together again",
    ),
)
#: deletions without effect, of two kinds
NO_EFFECT = (mutate.IDLE, mutate.PACING)
UNEXPLAINED = "not explained"


def run(
    path: Path, part: str, seconds: float, say: Progress, jobs: int = 1, count: Built = no_count
) -> list[Row]:
    """Builds whose row is not of this source's code and of today's calls, until the time is over;
    `jobs` processes share them.
    """
    until = time() + seconds
    record = Continued(path, "mutations", list(cases()))
    known = [(name, settled(name, record.rows.get(name, {})), until) for name in names(part)]

    def told(row: Row) -> None:
        say(f"{row['reported']} of {row['tried']} {row['name']}")

    return record.extend(spread(run_anew, known, jobs), len(known), told, count)


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
    pacing += [m for m in done if not m.noticed and any(pacer.of(m) for pacer in PACERS)]
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
            {"what": m.kind, "place": str(m.near), "text": m.text[:80], "why": why}
            for m, why in zip(rest, reasons(rest), strict=True)
        ],
    }


def reasons(rest: Sequence[mutate.Mutant]) -> list[str]:
    """Why each of a build's deletions can go without a report; of more than were argued, none."""
    used: Counter[Reason] = Counter()
    found = []
    for mutant in rest:
        known = next((r for r in REASONS if r.of(mutant) and used[r] < r.times), None)
        used.update([known] if known else [])
        found.append(known.why if known else UNEXPLAINED)
    return found


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
