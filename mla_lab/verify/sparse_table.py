"""Table of sparse calls over 656-byte tokens beside FlashMLA: the plain call, and both of our
kernels that fetch tokens one by one, swap_ab with 16 or 32 rows a tile and keep_ab with 64.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import geometric_mean

from ..backends.cute.keep_ab_gather import takes
from ..bench.records import Row, problem_of, results
from ..core.markdown import markdown_table
from ..core.problem import Problem
from .record import table_of

RECORD = "records/h200_sparse.jsonl"
POWER = "records/h200_sparse_power.jsonl"
#: peers of the record, by the name of a column
PEERS = {
    "FlashMLA": "flashmla",
    "swap_ab": "mla-lab-cute-gathered",
    "keep_ab": "mla-lab-cute-keep-ab-gather",
    "plain call": "mla-lab-plain",
}
#: columns that are shown in a step too, where the record has that, by their name there
IN_STEP = {"FlashMLA": "FlashMLA, in a step", "plain call": "plain call, in a step"}
#: FlashMLA's time over ours in each case, by chosen tokens and heads
Figures = dict[tuple[int, int], list[float]]


def made() -> str:
    """The table of the record in `data/`."""
    return table_of(RECORD, table)


def cases(rows: Sequence[Row]) -> Iterator[tuple[Problem, dict[str, float]]]:
    """Each case with its microseconds by column, those in a step too, in the order of the table."""
    found: dict[str, tuple[Problem, dict[str, float]]] = {}
    columns = {peer: name for name, peer in PEERS.items()}
    for row in results(rows, "ok"):
        us = found.setdefault(row["case"], (problem_of(row), {}))[1]
        name = columns[row["peer"]]
        us[name] = row["us"]
        if name in IN_STEP and row.get("us_in_step"):
            us[IN_STEP[name]] = row["us_in_step"]
    yield from sorted(found.values(), key=lambda case: _place(case[0]))


def _place(p: Problem) -> tuple[int, ...]:
    return (-p.top_k, p.heads, max(p.q_lens), p.batch)


def table(rows: Sequence[Row]) -> str:
    """A line for each case, then FlashMLA's time over that of the plain call."""
    lines = []
    figures: Figures = {}
    in_step: Figures = {}
    for p, us in cases(rows):
        ratio = us["FlashMLA"] / us["plain call"]
        figures.setdefault((p.top_k, p.heads), []).append(ratio)
        cells = [f"{us[name]:.1f}" if name != taken(p) else f"**{us[name]:.1f}**" for name in PEERS]
        stepped = [us.get(name) for name in IN_STEP.values()]
        more = [f"{took:.1f}" if took else "" for took in stepped]
        if stepped[0] and stepped[1]:
            in_step.setdefault((p.top_k, p.heads), []).append(stepped[0] / stepped[1])
        sizes = (p.top_k, p.heads, max(p.q_lens), p.batch)
        lines.append((*sizes, *cells, f"{ratio:.2f}", *more))
    names = ("chosen tokens:", "heads:", "query tokens:", "batch:")
    names = (*names, *(f"{name} us:" for name in PEERS), "FlashMLA / ours:")
    names = (*names, *(f"{name} us:" for name in IN_STEP.values()))
    said = _means(figures) + (f"; in a step {_means(in_step)}" if in_step else "")
    return f"{markdown_table(names, lines)}\n\n{_sentence(rows, said)}"


def _means(figures: Figures) -> str:
    return "; ".join(
        f"{top_k} tokens, {heads} heads {geometric_mean(found):.2f} (least {min(found):.2f})"
        for (top_k, heads), found in figures.items()
    )


def taken(problem: Problem) -> str:
    """The kernel that "cute" takes for a case."""
    slots = sum(problem.q_lens) * problem.top_k
    return "keep_ab" if takes(problem.heads, slots) else "swap_ab"


def _sentence(rows: Sequence[Row], means: str) -> str:
    runs = [row for row in rows if row["kind"] == "run"]
    head = runs[0]
    made = [f"{run['time'][:10]}, commit {run['environment']['commit'][:9]}" for run in runs]
    where = f"{head['environment']['card']['name']}, {' and '.join(dict.fromkeys(made))}"
    version = next(p["version"] for p in head["peers"] if p["name"] == PEERS["FlashMLA"])
    return (
        f"Time of FlashMLA ({version}, combine included, metadata kernel excluded) over that of "
        f"the plain call, geometric means: {means}. {where}: one process, CUDA graph, "
        f"peers in turns, medians of {head['method']['rounds']} rounds, every output checked."
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
