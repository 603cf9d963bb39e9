"""Every shipped CuTe build on the CPU, with all checks: five small problems each, as a record.

Inputs hold NaN where a correct call does not read. A record names the digest of each build's PTX,
so that a later run goes on where an earlier one ended. It runs again what was compiled anew, what
was not "ok", and what ran other cases than today's.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter, time
from typing import Any

from ..core.problem import Problem
from ..core.revision import Revision
from ..emulate import EmulatedKernel, Fault, Options
from ..emulate.calls import is_right, make_call, problem_for
from ..emulate.ptx import shorten
from ..jit import Artifact, build
from ..jit import compile as compiled
from ..jit.build import Built, no_count
from ..jit.shipped import CUTE
from ..plan.config import KernelConfig
from .record import Continued, Progress, Row, not_ok


@dataclass(frozen=True)
class Case:
    """A small problem; `tiles` row tiles of heads; `splits` pieces a request, 0 where workers find
    their pieces from the lengths, `workers` those of a plan, 0 for one a piece; who runs next by
    `schedule`, of `Options`."""

    kv_lens: tuple[int, ...]
    q_len: int = 1
    tiles: int = 1
    splits: int = 1
    workers: int = 0
    schedule: str = "fair"


#: an adverse schedule's
SEED = 3
#: the fourth goes round the ring of KV stages where one CTA takes a piece; in the last a CTA takes
#: work tile after work tile, and warps run as far ahead of each other as the barriers let them. Its
#: empty request is never a CTA's first work tile: `query_hi_lo` reads what lies in Q's stage then,
#: for nobody
CASES = (
    Case((200, 77)),
    Case((130, 0), q_len=2, splits=2),
    Case((140,), tiles=2, splits=3),
    Case((800,)),
    Case((130, 0, 70, 200, 65, 300, 90, 64, 5, 129, 77, 190), splits=0, schedule="adverse"),
)
#: of dual builds: whole, and with one query token split, by swap_ab; split by keep_ab. The gate is
#: at 7 blocks of a build for one token, else at 5 of 64 rows and at 3 of 128
DUAL_CASES = (
    Case((200,), splits=0),
    Case((100,), q_len=2, splits=0),
    Case((380,), splits=0),
    Case((1100,), q_len=2, splits=0),
    Case((470,), q_len=2, splits=0, schedule="adverse"),
)
#: of builds of batch-invariant calls, whose workers find their pieces: in the first, of lengths
#: that are alike, they run whole items, two of them two each; in the second, workers have more
#: pieces than slots, and write a slot again once all others have read it. An empty request is never
#: a CTA's first work tile, as above
PIECE_CASES = (
    Case(
        (192, 130, 150, 64, 0, 129, 170, 100, 65, 190, 128, 191, 66, 140, 180, 111, 185, 131),
        splits=0,
    ),
    Case((700, 1, 64, 900, 0, 2300, 65, 1100), splits=0, schedule="random"),
    Case((140,), q_len=2, tiles=2, splits=0),
    Case((800, 130, 0), splits=0, schedule="adverse"),
    Case((513, 130, 0, 300), q_len=2, splits=0, schedule="adverse"),
)
#: requests of the last where the grid has CTAs for each piece, and all of them are under way
MOST_AT_ONCE = 4
MOST_HEADS = 128


def builds(part: str = "") -> list[KernelConfig]:
    """Shipped attention builds whose names contain `part`; those already compiled come first."""
    found = [c for c in CUTE if c.kernel != "cute/empty" and part in c.name()]
    return sorted(found, key=lambda c: build.find(c, "sm_90a") is None)


def cases(config: KernelConfig) -> Iterator[Case]:
    """Cases of a build, with several query tokens where its mask allows them."""
    dual, pieces = config.option("dual"), config.option("pieces")
    several = config.mask != "none" or config.kernel == "cute/keep_ab_sm90"
    if dual:
        several = dual == 2
    for each in DUAL_CASES if dual else PIECE_CASES if pieces else CASES:
        case = each if several else replace(each, q_len=1)
        if case.splits == 0 and config.option("grid"):
            few = case.kv_lens[: MOST_AT_ONCE if config.cluster < 8 else 2]
            case = replace(case, splits=2, kv_lens=few)
        yield case


def run_build(artifact: Artifact) -> Row:
    """The row of a build: "ok", "wrong", "found" by a check, or "fault", with every problem."""
    config = artifact.config
    rows = [_run(artifact, case) for case in cases(config)]
    statuses = [row["status"] for row in rows]
    status = next((s for s in ("fault", "wrong", "found") if s in statuses), "ok")
    return {
        "kind": "case",
        "name": config.name(),
        "status": status,
        "ptx": digest_of_code(artifact.ptx.read_text()),
        "commit": Revision.here().commit,
        "problems": rows,
    }


def digest(artifact: Artifact) -> str:
    """Of a build's PTX, as recordings keep it."""
    return digest_of(shorten(artifact.ptx.read_text()))


def digest_of(text: str) -> str:
    """The first 64 bits of the SHA-256 of a shortened PTX text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def digest_of_code(text: str) -> str:
    """The same of a PTX text without the lines of source files, which move where one is edited, and
    without the names of its kernels, which spell out how they were configured.
    """
    code = re.sub(r"^\t?\.(loc|file)\b.*\n", "", text, flags=re.M)
    for place, name in enumerate(re.findall(r"\.entry\s+([\w$]+)", code)):
        code = code.replace(name, f"kernel{place}")
    return digest_of(code)


def _run(artifact: Artifact, case: Case) -> Row:
    began = perf_counter()
    config = artifact.config
    problem = _problem(config, case)
    call = make_call(config, problem, case.splits, workers=case.workers)
    options = Options(check=True, schedule=case.schedule, seed=SEED)
    kernel = EmulatedKernel.of(artifact, options)
    row = _about(problem, case)
    found: list[str] = []
    try:
        kernel(*call.args)
        right = is_right(call)
        row["out_error"], row["lse_error"] = call.errors()
        row["status"] = "wrong" if not right else "found" if kernel.run.findings else "ok"
    except Fault as fault:
        row["status"], found = "fault", [str(fault)]
    found += [str(finding) for finding in kernel.run.findings]
    if found:
        row["findings"] = found
    return {**row, "seconds": round(perf_counter() - began, 2)}


def _problem(config: KernelConfig, case: Case) -> Problem:
    heads = min(MOST_HEADS, case.tiles * config.tile_rows)
    return problem_for(config, case.kv_lens, heads, case.q_len)


def _about(problem: Problem, case: Case) -> Row:
    """What a row tells of a problem, as JSON has it."""
    return {
        "kv_lens": list(problem.kv_lens),
        "q_len": problem.q_lens[0],
        "heads": problem.heads,
        "top_k": problem.top_k,
        "splits": case.splits,
        "schedule": case.schedule,
    }


def settled(config: KernelConfig, row: Row) -> str:
    """Digest of the code with which a build need not run again, of its row in the record: ""
    where the row is not "ok", or of other cases."""
    today = [_about(_problem(config, case), case) for case in cases(config)]
    ran = [{name: one.get(name) for name in today[0]} for one in row.get("problems", ())]
    return str(row["ptx"]) if row.get("status") == "ok" and ran == today else ""


def run(
    path: Path, part: str, seconds: float, say: Progress, jobs: int = 1, count: Built = no_count
) -> list[Row]:
    """Run builds until all are done or the time is over; the record is written after each. `jobs`
    processes share the builds.
    """
    until = time() + seconds
    record = Continued(path, "emulated", [c.name() for c in CUTE if c.kernel != "cute/empty"])
    chosen = sorted(builds(part), key=lambda c: c.name() in record.rows)
    known = [(c, settled(c, record.rows.get(c.name(), {})), until) for c in chosen]

    def told(row: Row) -> None:
        say(f"{row['status']} {row['name']}")

    return record.extend(spread(run_anew, known, jobs), len(known), told, count)


def spread(
    work: Callable[..., Row | None], items: Sequence[tuple[Any, ...]], jobs: int
) -> Iterator[Row | None]:
    """Rows of items as they are done, by `jobs` processes."""
    if jobs == 1:
        yield from (work(*item) for item in items)
        return
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        for done in as_completed([pool.submit(work, *item) for item in items]):
            yield done.result()


def names(part: str) -> list[str]:
    """Names of the builds that contain `part`."""
    return [config.name() for config in builds(part)]


def run_anew(config: KernelConfig, ptx: str, until: float) -> Row | None:
    """The row of a build, None where its code is that of digest `ptx`, or the time is over."""
    if time() > until:
        return None
    artifact = compiled(config, "sm_90a")
    return None if digest_of_code(artifact.ptx.read_text()) == ptx else run_build(artifact)


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """How many of how many builds ran, and what came of them."""
    done = rows[1:]
    counts = {s: sum(row["status"] == s for row in done) for s in ("ok", "wrong", "found", "fault")}
    words = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    return f"{len(done)} of {rows[0]['cases']} shipped builds: {words}"


failed = not_ok
