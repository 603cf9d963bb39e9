"""Random batches for the kernel `cute/found_tiles`, and its rows as a plan has them."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mla_lab.core.problem import Problem
from mla_lab.plan import Plan
from mla_lab.plan.extent import row_tiles
from mla_lab.plan.fixed_pieces import (
    MOST_PIECES,
    RING,
    PieceCuts,
    bundle_of,
    fixed_pieces,
    ring_slots,
    runs_whole,
)
from mla_lab.plan.self_schedule import Costs, Line, self_schedule
from mla_lab.plan.workspace import HELD_REQUESTS, KEPT_WORDS

#: `block_end` of a tile that ends where the keys end
REST = 2**31 - 1
UNTOUCHED = -7


@dataclass(frozen=True)
class Batch:
    """What a launch is given."""

    problem: Problem
    tile_rows: int
    workers: int
    #: of the rule, or the cuts of batch invariance
    costs: Costs | PieceCuts
    #: query tokens of every request; 0: they differ
    q_len: int

    @classmethod
    def drawn(cls, rng: random.Random, workers: tuple[int, ...], most: int) -> Batch:
        """Up to `most` requests, uniform and drawn lengths, some without keys or query tokens."""
        batch = rng.choice([1, 2, 4, 31, 32, 33, rng.randint(1, 256), rng.randint(1, most)])
        longest = rng.choice([1, 64, 700, 9000, 131_072])
        kv_lens = [rng.randint(0, longest) for _ in range(batch)]
        if rng.random() < 0.3:
            kv_lens = [longest] * batch
        ragged = rng.random() < 0.3
        q_len = rng.choice([1, 1, 2, 4, 60])
        q_lens = [rng.randint(0, 5) if ragged else q_len for _ in range(batch)]
        kv_lens = [max(n, q) if n else 0 for n, q in zip(kv_lens, q_lens, strict=True)]
        return cls(
            Problem(tuple(q_lens), tuple(kv_lens), rng.choice([16, 64, 128])),
            rng.choice([16, 64]),
            rng.choice(workers),
            Costs(rng.randint(0, 12), rng.randint(0, 12)),
            0 if ragged else q_len,
        )

    @classmethod
    def of_pieces(cls, rng: random.Random, workers: tuple[int, ...], most: int) -> Batch:
        """`drawn`, for a batch-invariant call."""
        cuts = PieceCuts(
            rng.choice([1, 8, 16, 64]), rng.choice([1, 64, 128]), rng.random() < 0.7, True
        )
        batch = replace(cls.drawn(rng, workers, most), costs=cuts)
        if rng.random() < 0.4:  # of lengths that are alike, whole items fit into the rounds
            longest = rng.choice([200, 700, 9000])
            kv_lens = [rng.randint(9 * longest // 10, longest) for _ in range(batch.problem.batch)]
            batch = replace(batch, problem=replace(batch.problem, kv_lens=tuple(kv_lens)))
        return batch

    @classmethod
    def of_dealt(cls, rng: random.Random, workers: int) -> Batch:
        """Short requests of lengths about a mean, some several times as long, that are dealt."""
        while True:
            row_tiles = rng.choice([1, 1, 2])
            batch = max(1, round(workers // row_tiles * rng.choice([0.5, 0.97, 1.9, 2, 2.9])))
            mean = rng.choice([300, 800, 1300, 2500])
            kv_lens = [max(1, int(rng.gauss(mean, mean / 4))) for _ in range(batch)]
            for _ in range(batch // 8):
                kv_lens[rng.randrange(batch)] *= rng.choice([0, 2, 3, 8])
            problem = Problem((1,) * batch, tuple(kv_lens), 16 * row_tiles)
            costs = Costs(3, rng.choice([4, 12]))
            found = cls(problem, 16, workers, costs, rng.choice([0, 1]))
            if batch <= HELD_REQUESTS and found.kind == "dealt":
                return found

    def of_tiles(self, most: int) -> Batch:
        """The first requests, and of 16 heads, where the plan of all would have more tiles."""
        batch = self
        if len(batch.plan.tiles) > most:
            batch = replace(batch, problem=replace(batch.problem, heads=16))
        while len(batch.plan.tiles) > most:
            half = slice(batch.problem.batch // 2)
            q_lens, kv_lens = batch.problem.q_lens[half], batch.problem.kv_lens[half]
            batch = replace(batch, problem=replace(batch.problem, q_lens=q_lens, kv_lens=kv_lens))
        return batch

    @property
    def whole(self) -> bool:
        """Rounds have whole items."""
        assert isinstance(self.costs, PieceCuts)
        tiles = np.where(
            self.costs.takes(self.problem.rows), row_tiles(self.problem, self.tile_rows), 0
        )
        lanes = bundle_of(tiles, self.workers)
        blocks = np.maximum(-(-np.array(self.problem.kv_lens) // 64), 1)
        items = np.minimum(tiles, 1) if lanes > 1 else tiles
        return runs_whole(items, blocks, self.costs.pieces(blocks), self.workers // lanes)

    @property
    def kind(self) -> str:
        """How the line is cut, by the rule of `self_schedule`."""
        assert isinstance(self.costs, Costs)
        blocks = -(-np.array(self.problem.kv_lens) // 64)
        tiles = row_tiles(self.problem, self.tile_rows)
        return Line.of(blocks, tiles, self.workers, self.costs).kind

    @property
    def plan(self) -> Plan:
        """The rule's."""
        if isinstance(self.costs, PieceCuts):
            return fixed_pieces(
                self.problem, tile_rows=self.tile_rows, num_workers=self.workers, cuts=self.costs
            )
        return self_schedule(
            self.problem, tile_rows=self.tile_rows, num_workers=self.workers, costs=self.costs
        )


def launch(
    kernel: Callable[..., Any],
    batch: Batch,
    schedule: Tensor,
    device: str = "cpu",
    q_begin: list[int] | None = None,
    tokens: int | None = None,
) -> list[list[list[int]]]:
    """Rows that each worker found, as a plan has them. `schedule`: int32, what the CTAs keep;
    `q_begin` and query `tokens` in place of those that follow from the batch."""
    problem = batch.problem
    most = max(1, int(np.diff(batch.plan.worker_begin).max(initial=0)))
    rows = torch.full((batch.workers, most, 8), UNTOUCHED, dtype=torch.int32, device=device)
    counts = torch.full((batch.workers,), UNTOUCHED, dtype=torch.int32, device=device)
    lengths = torch.tensor(problem.kv_lens, dtype=torch.int32, device=device)
    begin = q_begin or [0, *np.cumsum(problem.q_lens).tolist()]
    kernel(
        lengths, torch.tensor(begin, dtype=torch.int32, device=device),
        torch.zeros(0, 8, dtype=torch.int32, device=device),
        schedule[: batch.workers * KEPT_WORDS], rows, counts,
        problem.heads, batch.q_len, batch.costs.packed, batch.tile_rows,
        problem.total_q if tokens is None else tokens,
    )  # fmt: skip
    blocks = -(-np.array(problem.kv_lens) // 64)
    found = zip(rows.tolist(), counts.tolist(), strict=True)
    return [[_as_planned(row, blocks) for row in mine[:count]] for mine, count in found]


def _as_planned(row: list[int], blocks: np.ndarray) -> list[int]:
    """A kernel leaves the end of a request's last tile open."""
    last = row[3] == REST or row[4] + 1 == row[5]
    return [*row[:3], int(blocks[row[0]]) if last else row[3], *row[4:]]


def planned(batch: Batch) -> list[list[list[int]]]:
    """The rule's rows of each worker."""
    plan = batch.plan
    ends = plan.worker_begin.tolist()
    rows = plan.tiles.tolist()
    blocks = -(-np.array(batch.problem.kv_lens) // 64)
    for row in rows:
        row[3] = min(row[3], int(blocks[row[0]]))
    mine = [rows[first:last] for first, last in pairwise(ends)]
    return by_the_ring(batch, mine) if isinstance(batch.costs, PieceCuts) else mine


def by_the_ring(batch: Batch, found: list[list[list[int]]]) -> list[list[list[int]]]:
    """The rows of each worker with the slots of the ring, in its lane f mod (3 P) + split where the
    item's first piece is number f, and the round f // (3 P) + 1 for a group; or one row for all
    pieces of a whole item, with the worker's first slot and group 0."""
    assert isinstance(batch.costs, PieceCuts)
    tiles = np.where(
        batch.costs.takes(batch.problem.rows), row_tiles(batch.problem, batch.tile_rows), 0
    )
    lanes = bundle_of(tiles, batch.workers)
    bundles = batch.workers // lanes
    for worker, rows in enumerate(found):
        own = worker // lanes
        first_slot = worker % lanes * ring_slots(bundles)
        if batch.whole:
            rows[:] = [row for row in rows if row[4] == 0]
        for index, row in enumerate(rows):
            if batch.whole:
                row[3] = -(-batch.problem.kv_lens[row[0]] // 64)
            if row[5] > 1 and batch.whole:
                row[6:] = first_slot + RING * own, 0
            elif row[5] > 1:
                back = index % 2 and bundles >= MOST_PIECES
                number = (bundles - 1 - own if back else own) + index * bundles - row[4]
                row[7], place = number // (RING * bundles) + 1, number % (RING * bundles)
                row[6] = first_slot + place + row[4]
    return found
