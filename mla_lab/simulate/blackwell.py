"""Times of an MLA decode kernel on a B200, from four constants: a prediction, never a measurement.

A pair of SMs takes 128 query rows of a request and walks its KV in blocks of 128 tokens. A block
costs the same time whatever the batch: the published times are those of the matrix units and of
what stands between them, since a block of 128 rows needs 36 MFLOP for 147 KB of keys. A launch
costs the same each time, and so does the merge behind one that splits any request. Pairs take work
tiles in the order of the requests, the next one when they are done.

The constants are fitted, by linear least squares, to the two published tables of equal lengths and
judged on the two of drawn lengths (FlashInfer's pull request 2743, `data/published`). The script's
seed is not published, so drawn lengths are of the same distribution, not the same
(`bench.cases.blackwell_twins`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from heapq import heapreplace

import numpy as np

from ..bench.cases import Case, blackwell_twins
from ..core.dims import LATENT_DIM, ROPE_DIM
from ..core.gpu import Gpu
from ..core.markdown import markdown_table
from ..core.problem import Problem
from ..core.resources import data_dir
from ..plan.cuts import Shape, number
from ..plan.policies import uniform_cuts, uniform_splits
from ..plan.self_schedule import COSTS, self_schedule

RECORD = "published/published_blackwell.jsonl"
#: pairs of SMs of a B200 (148 SMs), rows of a work tile, tokens of a block
PAIRS, TILE_ROWS, TILE_KV = Gpu.preset("B200").sms // 2, 128, 128
#: peers of the record, and the one whose design this is
PEERS, LIKE_OURS = ("cute-dsl", "trtllm-gen"), "cute-dsl"


@dataclass(frozen=True)
class Constants:
    """Microseconds of a launch, of a block in each format, and of a merge."""

    launch_us: float
    bf16_block_us: float
    e4m3_block_us: float
    merge_us: float

    def block_us(self, problem: Problem) -> float:
        """Of 128 rows and 128 tokens."""
        return self.e4m3_block_us if problem.kv_format == "e4m3" else self.bf16_block_us

    def published(self, problem: Problem) -> float:
        """Microseconds of the published kernel."""
        return self._total(problem, *published_work(problem))

    def ours(self, problem: Problem) -> float:
        """Microseconds of the same blocks in our schedule. No gain is counted for the merge, which
        is no launch of its own.
        """
        return self._total(problem, *our_work(problem))

    def _total(self, problem: Problem, blocks: float, merged: bool) -> float:
        return self.launch_us + blocks * self.block_us(problem) + self.merge_us * merged


NOTHING = Constants(0.0, 0.0, 0.0, 0.0)


@cache
def published_work(problem: Problem) -> tuple[float, bool]:
    """Blocks of the busiest pair of SMs, and whether requests are split: one count of splits for
    the batch.
    """
    shape = Shape.of(problem, TILE_ROWS, TILE_KV, PAIRS)
    splits = uniform_splits(shape.batch, shape.max_row_tiles, shape.max_blocks, 2 * PAIRS)
    tiles, _ = number(shape, uniform_cuts(shape, splits))
    return in_order((tiles[:, 3] - tiles[:, 2]).tolist(), PAIRS), splits > 1


@cache
def our_work(problem: Problem) -> tuple[float, bool]:
    """As `published_work` where every pair finds its share from the lengths (see
    `plan.self_schedule`).
    """
    costs = COSTS["keep_ab_persistent"]
    plan = self_schedule(problem, tile_rows=TILE_ROWS, num_workers=PAIRS, costs=costs)
    sums = np.concatenate([[0], np.cumsum(plan.tiles[:, 3] - plan.tiles[:, 2])])
    most = int(np.diff(sums[plan.worker_begin]).max())
    return most * plan.tile_kv / TILE_KV, plan.num_slots > 0


def in_order(blocks: Sequence[int], workers: int) -> int:
    """Blocks of the busiest worker where each takes the next work tile when it is done."""
    busy = [0] * workers
    for count in blocks:
        heapreplace(busy, busy[0] + count)
    return max(busy)


#: of one SM, in a clock: operations of the matrix unit with 16-bit operands, exponentials, bytes
#: of shared memory (as the datasheet's rates have it, and as on Hopper)
MATRIX_FLOP, EXPONENTIALS, SHARED_BYTES = 8192, 16, 128


def counts_table() -> str:
    """What one SM of a pair does in a block of 128 rows and 128 tokens, Markdown: clocks of the
    unit that each work keeps busy.
    """
    rows, head, latent = TILE_ROWS // 2, LATENT_DIM + ROPE_DIM, LATENT_DIM
    columns = latent // 2
    flop = 2 * rows * TILE_KV * (head + latent)
    keys, values = TILE_KV // 2 * head, TILE_KV * columns
    lines = []

    def line(name: str, clocks: Callable[[int], float]) -> None:
        lines.append((name, f"{clocks(2):,.0f}", f"{clocks(1):,.0f}"))

    line("QK and PV on the matrix unit", lambda size: flop / MATRIX_FLOP * size / 2)
    line(
        "Q, K, P and V from shared memory to the matrix unit",
        lambda size: (rows * (head + TILE_KV) + keys + values) * size / SHARED_BYTES,
    )
    line("K and V into shared memory", lambda size: (keys + values) * size / SHARED_BYTES)
    line("P into shared memory", lambda size: rows * TILE_KV * size / SHARED_BYTES)
    line("exponentials", lambda size: rows * TILE_KV / EXPONENTIALS)
    return markdown_table(("of one SM", "bf16, clocks:", "e4m3, clocks:"), lines)


@cache
def published() -> Mapping[str, Mapping[str, float]]:
    """Microseconds by case and peer."""
    found: dict[str, dict[str, float]] = {}
    with (data_dir() / RECORD).open(encoding="utf-8") as file:
        for row in map(json.loads, file):
            found.setdefault(row["case"], {})[row["peer"]] = row["us"]
    return found


def tables() -> tuple[list[Case], list[Case]]:
    """Cases of the two tables of equal lengths, and of the two of drawn ones."""
    found: tuple[list[Case], list[Case]] = ([], [])
    for case in blackwell_twins():
        drawn = len(set(case.problem.kv_lens)) > 1 or "_var" in case.name
        found[drawn].append(case)
    return found


@cache
def fit(peer: str = LIKE_OURS) -> Constants:
    """The constants with the least squares of relative errors over the tables of equal lengths, in
    which times are linear.
    """
    rows = []
    for case in tables()[0]:
        us = published()[case.name][peer]
        terms = [
            replace(NOTHING, **{name: 1.0}).published(case.problem) / us for name in vars(NOTHING)
        ]
        rows.append(terms)
    values = np.linalg.lstsq(np.array(rows), np.ones(len(rows)), rcond=None)[0]
    return Constants(*values.tolist())


def errors(cases: Sequence[Case], peer: str = LIKE_OURS) -> list[float]:
    """Predicted over published time, less 1, of each case."""
    constants = fit(peer)
    return [
        constants.published(case.problem) / published()[case.name][peer] - 1.0 for case in cases
    ]


def table() -> str:
    """Published, predicted and our predicted microseconds, Markdown."""
    constants = fit()
    lines = []
    for case in (case for part in tables() for case in part):
        us, of = published()[case.name][LIKE_OURS], constants.published(case.problem)
        cells = (f"{us:.1f}", f"{of:.1f}", f"{of / us - 1:+.0%}")
        lines.append((f"`{case.name}`", *cells, f"{constants.ours(case.problem):.1f}"))
    names = ("case", "cute-dsl, published, us:", "predicted, us:", "error:", "ours, predicted, us:")
    return markdown_table(names, lines)


def note() -> str:
    """The constants and their errors in one paragraph."""
    sentences = []
    for peer in PEERS:
        constants, (fitted, judged) = fit(peer), tables()
        worst = [max(map(abs, errors(cases, peer))) for cases in (fitted, judged)]
        sentences.append(
            f"{peer}: a launch {constants.launch_us:.1f} us, a block of 128 rows and 128 tokens "
            f"{constants.bf16_block_us:.2f} us in bf16 and {constants.e4m3_block_us:.2f} us in "
            f"e4m3, a merge {constants.merge_us:.1f} us; largest error {worst[0]:.0%} over the "
            f"{len(fitted)} fitted cases, {worst[1]:.0%} over the {len(judged)} judged ones."
        )
    return " ".join(sentences)
