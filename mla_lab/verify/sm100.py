"""The SM100 kernel on the CPU, emulated with all checks, as a record; it has not run on a card.

Two lists. The 396 configurations of FlashInfer's pull request 2743 (see `published`), cut down:
dtype, page size, 128 heads and query tokens are theirs. Batches of 2 and more become 2 requests,
and 1 where 4 query tokens meet a batch below 16. A length of 1,024 or 4,096 becomes 2 splits of 3
KV tiles of 128 tokens, 8,192 becomes 3, less 1 to 127 tokens; every second configuration has
requests of unlike lengths. All row tiles and splits are for 1 or 2 workers, so that each pair of
CTAs has two work tiles at least. Every tenth also runs under four other schedules.

And features in pairs: formats, page sizes, heads, query tokens, masks, sinks, scales in memory,
lengths, splits. Inputs hold NaN where a correct call does not read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

from ..core.problem import Problem
from ..core.revision import Revision
from ..emulate import EmulatedKernel, Fault, Options
from ..emulate.calls import is_right, make_call, problem_for
from ..jit import Artifact
from ..jit import compile as compiled
from ..plan.config import KernelConfig
from .emulated import digest
from .pairwise import Case, cover
from .published import HEADS, configurations
from .record import Row, head_row, read, write

ARCH = "sm_100a"
KV_TILE, TILES_A_SPLIT = 128, 3
#: every so many configurations other schedules run too
EVERY = 10
SCHEDULES = ("greedy", "random", "late", "adverse")
FACTORS: dict[str, tuple[str, ...]] = {
    "format": ("bf16", "fp16", "e4m3", "bf16 on e4m3"),
    "page": ("16", "32", "64", "128"),
    "heads": ("1", "16", "40", "128"),
    "q_len": ("1", "3", "8"),
    "build": ("plain", "sinks", "scales", "tree"),
    "lengths": ("none and few", "a tile", "long"),
    "splits": ("1", "2", "3", "found"),
    "schedule": ("fair", "random", "adverse"),
}
LENGTHS = {"none and few": (0, 5), "a tile": (128, 65), "long": (700, 391)}
Say = Callable[[str], None]


@dataclass(frozen=True)
class Run:
    """One call of one build; `splits` 0: workers find their tiles from the lengths."""

    name: str
    config: KernelConfig
    problem: Problem
    splits: int
    workers: int
    seed: int
    schedules: tuple[str, ...] = field(default=("fair",))


def build_of(q_dtype: str, kv_format: str, page_size: int, build: str = "plain") -> KernelConfig:
    """The configuration of a build: plain, or with sinks, scales in memory, a packed mask."""
    options = {"plain": (), "sinks": (("features", 1),), "scales": (("scales", 1),), "tree": ()}
    return KernelConfig(
        "cute/mla_sm100",
        q_dtype=q_dtype,
        kv_format=kv_format,
        out_dtype="fp16" if q_dtype == "fp16" else "bf16",
        page_size=page_size,
        tile_rows=128,
        cluster=2,
        mask="tree" if build == "tree" else "none",
        options=(*options[build], ("shaped", 1)),
    )


def published_runs() -> Iterator[Run]:
    """The 396 configurations, cut down."""
    for index, c in enumerate(configurations()):
        splits = 3 if c.kv_len == 8192 else 2
        whole, missing = splits * TILES_A_SPLIT * KV_TILE, 1 + 13 * index % (KV_TILE - 1)
        lengths = [whole - missing]
        if c.batch >= (16 if c.q_len == 4 else 2):
            lengths.append(whole - (KV_TILE - missing if index % 2 else missing))
        config = build_of(c.dtype, c.dtype, c.page_size)
        problem = problem_for(config, tuple(lengths), HEADS, c.q_len)
        items = len(lengths) * c.q_len * splits
        schedules = ("fair", *SCHEDULES) if index % EVERY == 0 else ("fair",)
        yield Run(c.name, config, problem, splits, min(2, items // 2), index, schedules)


def _allowed(case: Any) -> bool:
    """Several rows of many heads take long: they are proved where lengths are short."""
    rows = int(case.get("heads", 1)) * int(case.get("q_len", 1))
    return rows <= 384 or case.get("lengths") != "long"


def feature_runs() -> Iterator[Run]:
    """Features in pairs."""
    cases: list[Case] = cover(FACTORS, _allowed)
    for index, case in enumerate(cases):
        q_dtype, _, kv = case["format"].partition(" on ")
        config = build_of(q_dtype, kv or q_dtype, int(case["page"]), case["build"])
        lengths = LENGTHS[case["lengths"]]
        problem = problem_for(config, lengths, int(case["heads"]), int(case["q_len"]))
        splits = 0 if case["splits"] == "found" else int(case["splits"])
        name = "_".join(value.replace(" ", "-") for value in case.values())
        yield Run(name, config, problem, splits, 0, index, (case["schedule"],))


def run_one(artifact: Artifact, wanted: Run) -> Row:
    """The row of a run: "ok", "wrong", "found" by a check, or "fault"."""
    began, status, found = perf_counter(), "ok", []
    errors = [0.0, 0.0]
    for schedule in wanted.schedules:
        call = make_call(
            wanted.config, wanted.problem, wanted.splits, wanted.seed, workers=wanted.workers
        )
        options = Options(check=True, schedule=schedule, seed=wanted.seed)
        kernel = EmulatedKernel.of(artifact, options)
        try:
            kernel(*call.args)
            errors = [max(pair) for pair in zip(errors, call.errors(), strict=True)]
            if not is_right(call):
                status = "wrong"
        except Fault as fault:
            status = "fault"
            found.append(f"{schedule}: {fault}")
        found += [f"{schedule}: {finding}" for finding in kernel.run.findings]
    row: Row = {
        "kind": "case",
        "name": wanted.name,
        "status": "found" if found and status == "ok" else status,
        "kv_lens": wanted.problem.kv_lens,
        "splits": wanted.splits,
        "schedules": wanted.schedules,
        "out_error": errors[0],
        "lse_error": errors[1],
        "build": wanted.config.name(),
        "ptx": digest(artifact),
        "commit": Revision.here().commit,
        "seconds": round(perf_counter() - began, 2),
    }
    return {**row, "findings": found} if found else row


def run(path: Path, part: str, seconds: float, say: Say) -> list[Row]:
    """Run what is not "ok" in the record with this PTX, until the time is over.

    part: "published", "features" or both ("").
    """
    lists = {"published": published_runs, "features": feature_runs}
    wanted = [r for name, runs in lists.items() if part in ("", name) for r in runs()]
    rows = {row["name"]: row for row in read(path)[1:]} if path.exists() else {}
    until = perf_counter() + seconds
    for each in wanted:
        if perf_counter() > until:
            break
        artifact = compiled(each.config, ARCH)
        earlier = rows.get(each.name, {})
        if earlier.get("status") == "ok" and earlier["ptx"] == digest(artifact):
            continue
        row = rows[each.name] = run_one(artifact, each)
        say(f"{row['status']} {row['name']} {row['seconds']} s")
        write(path, [head_row("sm100", "cpu", len(wanted)), *rows.values()])
    return [head_row("sm100", "cpu", len(wanted)), *rows.values()]
