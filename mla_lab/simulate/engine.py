"""Discrete events of a whole plan on a card.

A worker (CTA or cluster) takes a lane as soon as one is free, sets up, and walks its tiles:
attend, write. Behind its last tile it merges a share of each row tile that it has helped to split,
as soon as all of that row tile's partials are written. All tiles that attend at the same moment
progress at one common rate, the least of three: what a CTA's own loop allows, what HBM gives, what
L2 gives. A common rate makes shared bandwidth exact with one heap: tiles end in the order of
*progress* (blocks done since the launch), whatever the rate does in between.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import numpy as np

from ..plan.tile import Plan
from .constants import Constants
from .pipeline import block_us
from .timeline import Event

#: rows that one CTA holds; taller tiles are shared by the CTAs of a cluster
CTA_ROWS = 64


@dataclass(frozen=True)
class Share:
    """How a work tile falls on its worker's CTAs."""

    rows: int
    #: CTAs that divide the KV blocks of the tile
    kv_ways: int

    @classmethod
    def of(cls, plan: Plan, cluster: int) -> Share:
        """Row halves first, then KV, over the `cluster` CTAs of a worker."""
        row_ways = min(cluster, max(1, plan.tile_rows // CTA_ROWS))
        return cls(plan.tile_rows // row_ways, cluster // row_ways)


@dataclass
class _Run:
    """The moving state of one simulation."""

    time: float = 0.0
    progress: float = 0.0
    #: (time, order, kind, worker) and (progress at the end, order, worker)
    timed: list[tuple[float, int, str, int]] = field(default_factory=list)
    loops: list[tuple[float, int, int]] = field(default_factory=list)
    order: int = 0
    #: sum over attending tiles of HBM and L2 bytes (MB) per unit of progress
    hbm: float = 0.0
    l2: float = 0.0


class Engine:
    """One launch of a plan: `go` returns its events."""

    def __init__(self, plan: Plan, constants: Constants, cluster: int, fused_merge: bool) -> None:
        self.plan, self.c, self.fused = plan, constants, fused_merge
        self.share = Share.of(plan, cluster)
        self.cluster = cluster
        self.tiles = plan.tiles.tolist()
        self.begin = plan.worker_begin.tolist()
        problem = plan.problem
        self.block_mb = plan.tile_kv * problem.kv_token_bytes / 1e6
        self.alone, self.first = block_us(
            constants, self.share.rows, plan.tile_kv, problem.kv_token_bytes
        )
        row_tiles = np.maximum(1, -(-problem.rows // plan.tile_rows))
        #: HBM reads per block: the first row tile of a request pays, the others find it in L2
        self.hbm_share = (1.0 / row_tiles).tolist()
        self.arrived = [0] * plan.num_groups
        #: split tiles whose share of the merge a worker still owes, next one last
        self.owed: list[list[int]] = [[] for _ in range(plan.num_workers)]
        #: workers that wait for the last partial of a group
        self.waiting: list[list[int]] = [[] for _ in range(plan.num_groups)]
        #: TB/s at which a CTA leaves and takes partials while every worker with one does
        users = min(plan.num_slots, constants.lanes(cluster)) * cluster
        self.exchange_tbps = constants.exchange_tbps / max(1, users)
        self.at = list(self.begin[:-1])
        self.lane = [-1] * plan.num_workers
        self.since = [0.0] * plan.num_workers
        self.events: list[Event] = []
        self.run = _Run()

    # -- durations ---------------------------------------------------------------------------
    def rate(self) -> float:
        """Blocks per us of each attending CTA now."""
        run = self.run
        rate = 1.0 / self.alone
        if run.hbm:
            rate = min(rate, self.c.read_tbps / run.hbm)
        if run.l2:
            rate = min(rate, self.c.l2_tbps / run.l2)
        return rate

    def write_us(self, tile: list[int]) -> float:
        fixed = self.c.write_us + self.c.cluster_us * (self.share.kv_ways > 1)
        if tile[6] >= 0:
            return fixed + self.partial_mb() / min(self.c.store_tbps, self.exchange_tbps)
        megabytes = self.share.rows * self.plan.problem.latent_dim * 2 / 1e6
        return fixed + megabytes / self.share.kv_ways / self.c.store_tbps

    def merge_us(self) -> float:
        """A share: as many bytes as the CTA's own partial has, of all partials of its rows."""
        return self.c.merge_us + self.partial_mb() / min(self.c.merge_tbps, self.exchange_tbps)

    def partial_mb(self) -> float:
        """Of one CTA."""
        row_bytes = self.plan.problem.latent_dim * 4 + 4
        return self.plan.tile_rows * row_bytes / self.cluster / 1e6

    # -- events ------------------------------------------------------------------------------
    def later(self, delay: float, kind: str, worker: int) -> None:
        run = self.run
        run.order += 1
        heapq.heappush(run.timed, (run.time + delay, run.order, kind, worker))

    def span(self, worker: int, role: str, tile: int) -> None:
        """Closes a span that began at `since[worker]`: the next one begins now."""
        run = self.run
        self.events.append(
            Event(self.lane[worker], worker, role, self.since[worker], run.time, tile)
        )
        self.since[worker] = run.time

    def demand(self, tile: list[int], sign: int) -> None:
        """Adds or takes away what a tile asks of the memories per unit of progress."""
        megabytes = self.block_mb * self.share.kv_ways
        self.run.hbm = max(0.0, self.run.hbm + sign * megabytes * self.hbm_share[tile[0]])
        # CTAs of a cluster that hold other rows of the same tile get the block by multicast
        self.run.l2 = max(0.0, self.run.l2 + sign * megabytes)

    def place(self, worker: int, lane: int) -> None:
        self.lane[worker] = lane
        self.since[worker] = self.run.time
        self.later(self.c.setup_us, "setup", worker)

    def attend(self, worker: int) -> None:
        run = self.run
        tile = self.tiles[self.at[worker]]
        blocks = -(-(tile[3] - tile[2]) // self.share.kv_ways)
        if not blocks:
            self.later(0.0, "attended", worker)
            return
        self.demand(tile, +1)
        run.order += 1
        heapq.heappush(run.loops, (run.progress + blocks, run.order, worker))

    def handle(self, kind: str, worker: int) -> None:
        if kind == "setup":
            self.span(worker, "setup", -1)
            if self.at[worker] == self.begin[worker + 1]:
                self.leave(worker)
            else:
                self.later(self.first - self.alone, "filled", worker)
        elif kind == "filled":
            self.attend(worker)
        elif kind == "attended":
            self.span(worker, "attend", self.at[worker])
            self.later(self.write_us(self.tiles[self.at[worker]]), "written", worker)
        elif kind == "written":
            self.span(worker, "write", self.at[worker])
            self.arrive(worker)
        else:
            self.span(worker, "merge", self.owed[worker].pop())
            self.next_share(worker)

    def arrive(self, worker: int) -> None:
        """A tile is written: on to the next one, and to the merge behind the last."""
        tile, group = self.at[worker], self.tiles[self.at[worker]][7]
        if group >= 0 and self.fused:
            self.owed[worker].insert(0, tile)
            self.arrived[group] += 1
            if self.arrived[group] == self.tiles[tile][5]:
                for other in self.waiting[group]:
                    self.next_share(other)
        self.at[worker] += 1
        if self.at[worker] == self.begin[worker + 1]:
            self.next_share(worker)
        else:
            self.later(self.c.switch_us, "filled", worker)

    def next_share(self, worker: int) -> None:
        """Merges the next share, or waits for its partials; leaves where none is owed."""
        if not self.owed[worker]:
            self.leave(worker)
            return
        tile = self.tiles[self.owed[worker][-1]]
        if self.arrived[tile[7]] == tile[5]:
            self.since[worker] = self.run.time
            self.later(self.merge_us(), "merged", worker)
        else:
            self.waiting[tile[7]].append(worker)

    def leave(self, worker: int) -> None:
        """The lane takes the next worker of the launch, if one waits."""
        if self.queue:
            self.place(self.queue.pop(), self.lane[worker])

    def go(self) -> list[Event]:
        """Runs until nothing is left to happen."""
        lanes = self.c.lanes(self.cluster)
        run = self.run
        run.time = self.c.launch_us
        workers = list(range(self.plan.num_workers))
        #: workers that no lane has taken yet, next one last
        self.queue = workers[lanes:][::-1]
        for worker in workers[:lanes]:
            self.place(worker, worker)
        while run.timed or run.loops:
            rate = self.rate()
            ends = run.time + (run.loops[0][0] - run.progress) / rate if run.loops else np.inf
            if run.timed and run.timed[0][0] <= ends:
                when, _, kind, worker = heapq.heappop(run.timed)
                run.progress += (when - run.time) * rate if run.loops else 0.0
                run.time = when
                self.handle(kind, worker)
            else:
                goal, _, worker = heapq.heappop(run.loops)
                run.time, run.progress = ends, goal
                self.demand(self.tiles[self.at[worker]], -1)
                self.handle("attended", worker)
        return self.events
