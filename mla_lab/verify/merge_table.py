"""Table of the ways to merge partials of split row tiles: who writes and merges them, what ships
each way, and the measured reason to have it.

A sweep measures one case by every launch mode, so that the fastest launch with one merge stands
beside the fastest with any other, split or not (`data/records/h200_sweep*.jsonl`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import exp, log
from statistics import mean

from ..bench.records import Row, read, results
from ..core import files
from ..core.errors import invalid
from ..core.markdown import markdown_table
from ..core.resources import data_dir
from ..jit.shipped import shipped
from ..plan.config import KernelConfig

SWEEPS = (
    "records/h200_sweep.jsonl",
    "records/h200_sweep_drawn.jsonl",
    "records/h200_sweep_heldout.jsonl",
    "records/h200_sweep_eight_bits.jsonl",
)
ATTEMPTS = "notes/kernel_attempts.jsonl"
#: kernels without partials
WITHOUT = ("cute/empty", "cute/rank_exchange", "cute/rank_mask", "cute/rank_merge", "cuda/planner")


@dataclass(frozen=True)
class MergePath:
    """One way from partials to results. `split_merge` is the member of `SplitMerge` that compiles
    it, "" for a kernel of CUDA C++; `source` the file under `mla_lab/cute` or `kernels`.
    """

    name: str
    split_merge: str
    source: str
    partials: str
    merged_by: str
    #: the reason to have it where no sweep gives one
    reason: str = ""
    #: beginnings of the log's attempts that measured it
    attempts: tuple[str, ...] = ()


PATHS = (
    MergePath(
        "keep_ab, cooperative",
        "COOPERATIVE",
        "split_merge/keep_ab_cooperative.py",
        "16-bit strips in accumulator order with a scale a row; workspace",
        "all CTAs of the row tile, a share each, once a counter has all partials",
        attempts=(
            "merge shared by all who split",
            "shares of a merge copied to shared memory",
            "a CTA leaves its own share",
            "up to 8 partials of a share",
            "the merges above in builds",
            "partials by the LL protocol",
        ),
    ),
    MergePath(
        "swap_ab, LL",
        "LL",
        "split_merge/swap_ab_ll.py",
        "fp16 fragments, each word its own flag; workspace",
        "all CTAs of the row tile, a slice each, as words arrive",
        attempts=("merge without counters", "merges of two to four pieces"),
    ),
    MergePath(
        "swap_ab, cooperative",
        "COOPERATIVE",
        "split_merge/swap_ab_cooperative.py",
        "fp32 fragments; workspace",
        "all CTAs of the row tile, a slice each, once a counter has all partials",
        attempts=("sparse: pieces of at least one block",),
    ),
    MergePath(
        "swap_ab, last CTA",
        "LAST_CTA",
        "split_merge/swap_ab_last_cta.py",
        "fp32 rows; workspace",
        "the last CTA that writes a partial",
        "batch invariance, whose grids may exceed the resident CTAs, so that no CTA may wait for "
        "another; and grids of whole requests that are too large for a cooperative launch",
        attempts=("sparse: pieces of at least one block",),
    ),
    MergePath(
        "swap_ab, cluster",
        "COOPERATIVE",
        "split_merge/swap_ab_cluster_reduce.py",
        "raw accumulators; shared memory of the peers",
        "each CTA of the cluster, its rows",
    ),
    MergePath(
        "swap_ab, cluster, then cooperative",
        "COOPERATIVE",
        "split_merge/swap_ab_merge.py",
        "fp32 fragments of a reduced cluster; workspace",
        "all clusters of the row tile, a slice each CTA, once a counter has all partials",
        "no reason: `choose` takes it in none of the sweeps' cases (2026-11-23); only a plan made "
        "by hand runs it; the builds of the line above have the code",
        attempts=("four or eight CTAs reduce",),
    ),
    MergePath(
        "xqa, cluster",
        "",
        "xqa/finish.h",
        "fp32 rows; shared memory of the peers",
        "all blocks of the cluster, its rows in turn",
        attempts=("pieces of a row tile merged by a cluster",),
    ),
    MergePath(
        "xqa, last block",
        "",
        "xqa/finish.h",
        "fp32 rows; workspace",
        "the last block that writes a partial",
        "more than eight splits, and grids whose clusters the card cannot run at once",
    ),
    MergePath(
        "mla_sm100, cooperative",
        "COOPERATIVE",
        "split_merge/keep_ab_rows.py",
        "as keep_ab, from tensor memory; workspace",
        "as keep_ab",
        "no card has run it",
    ),
    MergePath(
        "ladder, step 7",
        "",
        "ladder/step7_split.cuh",
        "fp32 rows; scratch",
        "a second launch, one warp a query row",
        "for reading: the formula alone",
    ),
)


def paths_of(config: KernelConfig) -> tuple[str, ...]:
    """Names of the paths that a build of an attention kernel has."""
    if config.kernel in WITHOUT:
        return ()
    if config.kernel == "cute/keep_ab_sm90":
        # 0 in recorded sweeps alone
        merge = "cooperative" if config.option("fused_merge", 1) else "merge kernel"
        return (f"keep_ab, {merge}",)
    if config.kernel == "cute/swap_ab_sm90":
        if config.cluster > 1:
            return "swap_ab, cluster", "swap_ab, cluster, then cooperative"
        merges = {1: "last CTA", 2: "cooperative", 3: "LL"}
        return (f"swap_ab, {merges[config.option('fused_merge', 1)]}",)
    others = {
        "cuda/xqa": ("xqa, cluster", "xqa, last block"),
        "cuda/ladder": ("ladder, step 7",),
        "cute/mla_sm100": ("mla_sm100, cooperative",),
    }
    return others[config.kernel]


def launched(notes: Row) -> str:
    """The path that a launch of a sweep took, "" where nothing was split."""
    found = paths_of(KernelConfig.from_dict(notes["config"]))
    if len(found) > 1:
        return found[1] if notes["partials"] else found[0]
    return found[0] if notes["partials"] else ""


@dataclass(frozen=True)
class Duel:
    """A case's fastest launch by one path, and the fastest by any other."""

    case: str
    us: float
    other: str
    other_us: float
    #: card and date
    where: str

    @property
    def gain(self) -> float:
        return self.other_us / self.us


def duels(rows: Iterable[Row]) -> Iterator[tuple[str, Duel]]:
    """Each path's duel in each case that it was measured in, of one record."""
    fastest: dict[tuple[int, str], dict[str, float]] = {}
    runs: list[str] = []
    for row in rows:
        if row["kind"] == "run":
            runs.append(f"{row['environment']['card']['name']}, {row['time'][:10]}")
        for result in results([row], "ok"):
            times = fastest.setdefault((len(runs) - 1, row["case"]), {})
            name = launched(result["notes"])
            times[name] = min(result["us"], times.get(name, result["us"]))
    for (run, case), times in fastest.items():
        for own, us in times.items():
            others = [(value, name) for name, value in times.items() if name != own]
            if own and others:
                other_us, other = min(others)
                yield own, Duel(case, us, other or "unsplit", other_us, runs[run])


def made() -> str:
    """The table of paths."""
    found: dict[str, list[Duel]] = {}
    for name in SWEEPS:
        for measured, duel in duels(read(data_dir() / name)):
            found.setdefault(measured, []).append(duel)
    lines, counts = [], builds()
    for path in PATHS:
        member = f"`{path.split_merge}`" if path.split_merge else ""
        reason = _reason(path, found.get(path.name, []))
        cells = (path.name, member, counts[path.name], path.partials, path.merged_by, reason)
        lines.append(cells)
    names = ("merge", "`SplitMerge`", "builds:", "partials", "merged by", "reason")
    return markdown_table(names, lines)


def builds() -> Counter[str]:
    """Shipped builds with each path."""
    counts = Counter(dict.fromkeys((path.name for path in PATHS), 0))
    counts.update(name for config in shipped() for name in paths_of(config))
    return counts


def _reason(path: MergePath, measured: list[Duel]) -> str:
    """What was measured, then the reason that no measurement gives."""
    said = [path.reason] if path.reason else []
    if measured:
        said = [_judged(measured), *said]
    return "; ".join(said) if said else "see below"


def _judged(measured: list[Duel]) -> str:
    won = [duel for duel in measured if duel.gain > 1]
    if not won:
        nearest = max(measured, key=lambda duel: duel.gain)
        return f"fastest in none of {len(measured)} cases; nearest: {_line(nearest)}"
    by = exp(mean(log(duel.gain) for duel in won))
    most = max(won, key=lambda duel: duel.gain)
    often = f"fastest in {len(won)} of {len(measured)} cases"
    times = f"the next best takes {by:.2f} times as long on average"
    return f"{often}, where {times}; largest gain: {_line(most)}"


def _line(duel: Duel) -> str:
    times = f"{duel.us:.1f} us, next best {duel.other} {duel.other_us:.1f} us"
    return f"`{duel.case}` {times} ({duel.where})"


def attempts() -> str:
    """What the log of attempts says of each path."""
    rows = [
        files.parse_json(line, ATTEMPTS) for _, line in files.lines_of(data_dir() / ATTEMPTS, "log")
    ]
    lines = []
    for path in PATHS:
        for row in (_attempt(rows, begin) for begin in path.attempts):
            when = f"{row['card']}, {row['date']}"
            lines.append((path.name, row["change"], row["case"], row["came"], when))
    return markdown_table(("merge", "attempt", "case", "came", "card, date"), lines)


def _attempt(rows: list[Row], begin: str) -> Row:
    found = [row for row in rows if row["change"].startswith(begin)]
    if len(found) != 1:
        raise invalid("attempt", f"{len(found)} that begin with {begin!r}", "one")
    return found[0]
