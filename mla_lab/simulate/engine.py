"""Discrete-event simulation of a whole plan on a card.

A worker (CTA or cluster) occupies a lane (an SM or a cluster's SMs) as soon as one is free, sets
up, and runs its tiles: attend, write. After its last tile it merges its part of each row tile of
which it computed a split, as soon as all partials of that row tile are written. All tiles in their
mainloop progress at one common rate, limited by the CTA's own loop, HBM and L2. With a common rate
one heap models shared bandwidth exactly: tiles end in the order of *progress* (steps since the
launch, see `work`), independent of how the rate changes in between.
"""

from __future__ import annotations

import heapq

import numpy as np

from ..plan.tile import Plan
from .constants import Constants
from .timeline import Event
from .work import Work

#: value of the option fused_merge for the LL merge
LL_MERGE = 3


class Engine:
    """One launch of a plan: `go` returns its events."""

    def __init__(self, plan: Plan, constants: Constants, cluster: int, fused_merge: bool) -> None:
        self.c, self.fused = constants, fused_merge
        self.work = Work(plan, constants, cluster)
        self.cluster = cluster
        self.ll = plan.config is not None and plan.config.option("fused_merge") == LL_MERGE
        self.tiles = plan.tiles.tolist()
        self.begin = plan.worker_begin.tolist()
        self.arrived = [0] * plan.num_groups
        #: split tiles whose merge a worker still has to do, next one last
        self.owed: list[list[int]] = [[] for _ in range(plan.num_workers)]
        #: workers that wait for the last partial of a group
        self.waiting: list[list[int]] = [[] for _ in range(plan.num_groups)]
        self.at = list(self.begin[:-1])
        self.lane = [-1] * plan.num_workers
        self.since = [0.0] * plan.num_workers
        #: traffic of the tile that a worker attends
        self.traffic = [(0.0, 0.0)] * plan.num_workers
        self.events: list[Event] = []
        self.time = self.progress = 0.0
        #: (time, order, kind, worker) and (progress at the end, order, worker)
        self.timed: list[tuple[float, int, str, int]] = []
        self.loops: list[tuple[float, int, int]] = []
        self.order = 0
        #: HBM and L2 bytes (MB) of a step, summed over the tiles in their mainloop
        self.hbm = self.l2 = 0.0
        #: workers without a lane yet, next one last
        self.queue = list(range(plan.num_workers))[::-1]

    # -- events ------------------------------------------------------------------------------
    def later(self, delay: float, kind: str, worker: int) -> None:
        self.order += 1
        heapq.heappush(self.timed, (self.time + delay, self.order, kind, worker))

    def span(self, worker: int, role: str, tile: int) -> None:
        """Closes a span that began at `since[worker]`: the next one begins now."""
        begin = self.since[worker]
        self.events.append(Event(self.lane[worker], worker, role, begin, self.time, tile))
        self.since[worker] = self.time

    def demand(self, worker: int, sign: int) -> None:
        """Add or remove the memory traffic per step of a worker's tile."""
        hbm, l2 = self.traffic[worker]
        self.hbm = max(0.0, self.hbm + sign * hbm)
        self.l2 = max(0.0, self.l2 + sign * l2)

    def place(self, worker: int, lane: int) -> None:
        self.lane[worker] = lane
        self.since[worker] = self.time
        self.later(self.c.setup_us, "setup", worker)

    def attend(self, worker: int) -> None:
        tile = self.tiles[self.at[worker]]
        if not self.work.blocks(tile):
            self.later(0.0, "attended", worker)
            return
        steps = self.work.steps(tile)
        self.traffic[worker] = self.work.traffic(tile, steps)
        self.demand(worker, +1)
        self.order += 1
        heapq.heappush(self.loops, (self.progress + steps, self.order, worker))

    def handle(self, kind: str, worker: int) -> None:
        if kind == "setup":
            self.span(worker, "setup", -1)
            if self.at[worker] == self.begin[worker + 1]:
                self.leave(worker)
            else:
                mine = self.tiles[self.begin[worker] : self.begin[worker + 1]]
                self.later(self.work.fill_us(mine), "filled", worker)
        elif kind == "filled":
            self.attend(worker)
        elif kind == "attended":
            self.span(worker, "attend", self.at[worker])
            self.later(self.work.write_us(self.tiles[self.at[worker]]), "written", worker)
        elif kind == "written":
            self.span(worker, "write", self.at[worker])
            self.arrive(worker)
        else:
            self.span(worker, "merge", self.owed[worker].pop())
            self.next_share(worker)

    def arrive(self, worker: int) -> None:
        """A tile is written: start the next one, or the merge after the last."""
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
        """Start the next merge, or wait for its partials; end the worker where none is left."""
        if not self.owed[worker]:
            self.leave(worker)
            return
        tile = self.tiles[self.owed[worker][-1]]
        if self.arrived[tile[7]] == tile[5]:
            self.since[worker] = self.time
            self.later(self.work.merge_us(self.ll), "merged", worker)
        else:
            self.waiting[tile[7]].append(worker)

    def leave(self, worker: int) -> None:
        """End a worker; its lane runs the launch's next one, if one waits."""
        if self.queue:
            self.place(self.queue.pop(), self.lane[worker])

    def go(self) -> list[Event]:
        """Run until no event is left."""
        self.time = self.c.launch_us
        for lane in range(min(self.c.lanes(self.cluster), len(self.queue))):
            self.place(self.queue.pop(), lane)
        while self.timed or self.loops:
            rate = self.work.rate(self.hbm, self.l2) if self.loops else 0.0
            ends = self.time + (self.loops[0][0] - self.progress) / rate if self.loops else np.inf
            if self.timed and self.timed[0][0] <= ends:
                when, _, kind, worker = heapq.heappop(self.timed)
                self.progress += (when - self.time) * rate if self.loops else 0.0
                self.time = when
                self.handle(kind, worker)
            else:
                goal, _, worker = heapq.heappop(self.loops)
                self.time, self.progress = ends, goal
                self.demand(worker, -1)
                self.handle("attended", worker)
        return self.events
