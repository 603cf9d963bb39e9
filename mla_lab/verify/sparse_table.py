"""Tables of sparse calls beside FlashMLA, over 656-byte tokens and over bf16: the plain call, and
both of our kernels that fetch tokens one by one, swap_ab with 16 to 64 rows a tile and keep_ab with
64.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import geometric_mean

from ..backends.cute.keep_ab_gather import takes
from ..bench.records import Row, problem_of, results
from ..core.markdown import markdown_table
from ..core.problem import Problem
from .record import table_of

RECORD = "records/h200_sparse.jsonl"
BF16 = "records/h200_sparse_bf16.jsonl"
H100 = "records/h100_sparse.jsonl"
POWER = "records/h200_sparse_power.jsonl"
#: peers of the record, by the name of a column
PEERS = {
    "FlashMLA": "flashmla",
    "swap_ab": "mla-lab-cute-gathered",
    "keep_ab": "mla-lab-cute-keep-ab-gather",
    "plain call": "mla-lab-plain",
}
#: columns of the table; each also with what the case takes in a step, where the record has that
COLUMNS, STEP = ("FlashMLA", "swap_ab", "keep_ab"), ", in a step"
#: FlashMLA's time over ours in each case, by chosen tokens and heads
Figures = dict[tuple[int, int], list[float]]


def made() -> str:
    """The table of the record in `data/`."""
    return table_of(RECORD, table)


def of_bf16() -> str:
    """The table of the record over bf16 in `data/`."""
    return table_of(BF16, table)


def on_h100() -> str:
    """The ratios of an H100's record in `data/`."""
    return table_of(H100, summary)


def cases(rows: Sequence[Row]) -> Iterator[tuple[Problem, dict[str, float]]]:
    """Each case with its microseconds by column, those in a step too, in the order of the table."""
    found: dict[str, tuple[Problem, dict[str, float]]] = {}
    columns = {peer: name for name, peer in PEERS.items()}
    for row in results(rows, "ok"):
        us = found.setdefault(row["case"], (problem_of(row), {}))[1]
        name = columns[row["peer"]]
        us[name] = row["us"]
        if row.get("us_in_step"):
            us[name + STEP] = row["us_in_step"]
    yield from sorted(found.values(), key=lambda case: _place(case[0]))


def _place(p: Problem) -> tuple[int, ...]:
    return (-p.top_k, p.heads, max(p.q_lens), p.batch)


def speedup(p: Problem, us: Mapping[str, float], where: str = "") -> float:
    """FlashMLA's time over that of the kernel that the plain call takes; `where` is "" or STEP."""
    return us["FlashMLA" + where] / us[taken(p) + where]


def table(rows: Sequence[Row]) -> str:
    """A line for each case, then `summary`."""
    lines = []
    for p, us in cases(rows):
        cells = [*_cells(p, us), *_cells(p, us, STEP)]
        lines.append((p.top_k, p.heads, max(p.q_lens), p.batch, *cells))
    names = ["chosen tokens:", "heads:", "query tokens:", "batch:"]
    for where in ("", STEP):
        names += [f"{name}{where} us:" for name in COLUMNS] + [f"FlashMLA / ours{where}:"]
    return f"{markdown_table(names, lines)}\n\n{summary(rows)}"


def summary(rows: Sequence[Row]) -> str:
    """FlashMLA's time over that of the kernel in bold, in the mean and at least."""
    means = []
    for where in ("", STEP):
        figures: Figures = {}
        for p, us in cases(rows):
            if COLUMNS[0] + where in us:
                figures.setdefault((p.top_k, p.heads), []).append(speedup(p, us, where))
        means += [f"{where[2:]} {_means(figures)}".strip()] if figures else []
    return _sentence(rows, "; ".join(means))


def _cells(p: Problem, us: Mapping[str, float], where: str = "") -> list[str]:
    """Microseconds by column, the kernel that is taken in bold, and the ratio."""
    if COLUMNS[0] + where not in us:
        return [""] * (len(COLUMNS) + 1)
    marks = ["**" if name == taken(p) else "" for name in COLUMNS]
    cells = [f"{m}{us[name + where]:.1f}{m}" for name, m in zip(COLUMNS, marks, strict=True)]
    return [*cells, f"{speedup(p, us, where):.2f}"]


def _means(figures: Figures) -> str:
    return "; ".join(
        f"{top_k} tokens, {heads} heads {geometric_mean(found):.2f} (least {min(found):.2f})"
        for (top_k, heads), found in figures.items()
    )


def taken(problem: Problem) -> str:
    """The kernel that "cute" takes for a case."""
    return "keep_ab" if takes(problem.heads) else "swap_ab"


def _sentence(rows: Sequence[Row], means: str) -> str:
    runs = [row for row in rows if row["kind"] == "run"]
    head = runs[0]
    made = [f"{run['time'][:10]}, commit {run['environment']['commit'][:9]}" for run in runs]
    where = f"{head['environment']['card']['name']}, {' and '.join(dict.fromkeys(made))}"
    version = next(p["version"] for p in head["peers"] if p["name"] == PEERS["FlashMLA"])
    return (
        f"Time of FlashMLA ({version}, combine included, metadata kernel excluded) over that of "
        f"the kernel that the plain call takes (in tables in bold), geometric means: {means}. "
        f"{where}: one process, CUDA graph, peers in turns, medians of {head['method']['rounds']} "
        "rounds, every output checked."
    )


def power() -> str:
    """Watts and joules without a pause, of the record in `data/`."""
    return table_of(POWER, power_table)


def power_table(rows: Sequence[Row]) -> str:
    """A line for each case and side: microseconds as in the benchmark, then sustained."""
    lines = []
    found = {
        (problem_of(row).heads, problem_of(row).batch, row["peer"]): row for row in sides(rows)
    }
    for (heads, batch, peer), row in sorted(found.items(), key=lambda item: item[0][:2]):
        seen, side = row["power"], "FlashMLA" if peer == PEERS["FlashMLA"] else "the plain call"
        us = (f"{row['us']:.1f}", f"{seen['us']:.1f}")
        load = (f"{seen['watts']:.0f}", f"{1e3 * seen['joules']:.1f}", f"{seen['sm_mhz']:.0f}")
        lines.append((heads, batch, side, *us, *load))
    head = next(row for row in rows if row["kind"] == "run")
    where = f"{head['environment']['card']['name']}, {head['time'][:10]}"
    commit = str(head["environment"]["commit"])[:9]
    figures = ("us in turns:", "us sustained:", "W:", "mJ:", "SM MHz:")
    shown = markdown_table(("heads:", "batch:", "side", *figures), lines)
    return f"{shown}\n\n2,048 chosen tokens. {where}, commit {commit}."


def sides(rows: Sequence[Row]) -> Iterator[Row]:
    """Rows of the plain call and of FlashMLA."""
    shown = (PEERS["FlashMLA"], PEERS["plain call"])
    yield from (row for row in results(rows, "ok") if row["peer"] in shown)
