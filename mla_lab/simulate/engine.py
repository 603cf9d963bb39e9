"""Discrete events of a whole plan on a card.

A worker (CTA or cluster) takes a lane as soon as one is free, sets up, and walks its tiles:
attend, write, and, as the last arriver of a split row tile, merge. All tiles that attend at the
same moment progress at one common rate, the least of three: what a CTA's own loop allows, what
HBM gives, what L2 gives. A common rate makes shared bandwidth exact with one heap: tiles end in
the order of *progress* (blocks done since the launch), whatever the rate does in between.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field, replace

import numpy as np

from ..errors import invalid
from ..plan.tile import Plan
from .constants import H200, Constants
from .pipeline import block_us
from .timeline import Event, Timeline

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


class _Engine:
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
        width = 4 if tile[6] >= 0 else 2
        megabytes = self.share.rows * self.plan.problem.latent_dim * width / 1e6
        exchange = self.c.cluster_us * (self.share.kv_ways > 1)
        return self.c.write_us + exchange + megabytes / self.share.kv_ways / self.c.store_tbps

    def merge_us(self, num_splits: int) -> float:
        row_bytes = self.plan.problem.latent_dim * 4 + 4
        megabytes = num_splits * self.plan.tile_rows * row_bytes / 1e6
        return self.c.merge_us + megabytes / self.cluster / self.c.merge_tbps

    # -- events ------------------------------------------------------------------------------
    def later(self, delay: float, kind: str, worker: int) -> None:
        run = self.run
        run.order += 1
        heapq.heappush(run.timed, (run.time + delay, run.order, kind, worker))

    def span(self, worker: int, role: str, tile: int) -> None:
        """Closes a span that began at `since[worker]`."""
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
            self.span(worker, "merge", self.at[worker])
            self.advance(worker)

    def arrive(self, worker: int) -> None:
        tile = self.tiles[self.at[worker]]
        if tile[7] >= 0:
            self.arrived[tile[7]] += 1
            if self.fused and self.arrived[tile[7]] == tile[5]:
                self.later(self.merge_us(tile[5]), "merged", worker)
                return
        self.advance(worker)

    def advance(self, worker: int) -> None:
        self.at[worker] += 1
        if self.at[worker] == self.begin[worker + 1]:
            self.leave(worker)
        else:
            self.later(self.c.switch_us, "filled", worker)

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


def simulate(
    plan: Plan, constants: Constants = H200, *, cluster: int = 1, fused_merge: bool = True
) -> Timeline:
    """Predicts one launch of `plan`: a `Timeline` in us from the launch.

    `cluster` is the number of CTAs of a worker. With `fused_merge` the last arriver of a split
    row tile merges; without, a second launch does, its rows spread over the whole card.
    """
    if cluster < 1:
        raise invalid("cluster", cluster, "1 or more CTAs")
    constants = settle(plan, constants, cluster)
    engine = _Engine(plan, constants, cluster, fused_merge)
    events = engine.go()
    lanes = constants.lanes(cluster)
    events.append(Event(0, -1, "launch", 0.0, constants.launch_us, -1))
    if not fused_merge and plan.num_groups:
        events += _merge_launch(plan, engine, lanes)
    return Timeline.from_events(events, lanes)


def settle(plan: Plan, constants: Constants, cluster: int = 1) -> Constants:
    """`constants` at the clock that this plan leaves them: a trial run tells its matrix load."""
    if not constants.burst_ghz:
        return constants
    trial = replace(constants, clock_ghz=constants.burst_ghz, burst_ghz=0.0)
    end = max(e.end for e in _Engine(plan, trial, cluster, True).go())
    share = Share.of(plan, cluster)
    blocks = plan.tiles[:, 3].astype(np.int64) - plan.tiles[:, 2]
    clocks = trial.matrix_clocks(share.rows, plan.tile_kv) * float(
        -(-blocks // share.kv_ways).sum() * cluster
    )
    return constants.at_load(clocks / (trial.clock_ghz * 1e3 * trial.sms * end))


def _merge_launch(plan: Plan, engine: _Engine, lanes: int) -> list[Event]:
    """The second launch: one block a query row, the rows dealt out evenly over the lanes."""
    c = engine.c
    begin = max(e.end for e in engine.events) + c.relaunch_us
    rows = plan.num_groups * plan.tile_rows
    megabytes = plan.num_slots * plan.tile_rows * (plan.problem.latent_dim * 4 + 4) / 1e6
    users = min(lanes, rows)
    read = max(megabytes / users / c.sm_read_tbps, megabytes / c.merge_launch_tbps)
    end = begin + c.merge_us + read
    return [Event(lane, -1, "merge", begin, end, -1) for lane in range(users)]


def bounds(plan: Plan, constants: Constants = H200, *, cluster: int = 1) -> dict[str, float]:
    """Times in us that no schedule of these tiles beats, by what they rest on.

    `matrix`: all blocks over all lanes; `read`: the KV once from HBM; `longest`: the largest
    single tile.
    """
    constants = settle(plan, constants, cluster)
    share = Share.of(plan, cluster)
    problem = plan.problem
    alone, _ = block_us(constants, share.rows, plan.tile_kv, problem.kv_token_bytes)
    blocks = plan.tiles[:, 3].astype(np.int64) - plan.tiles[:, 2]
    local = -(-blocks // share.kv_ways)
    return {
        "matrix": float(local.sum()) * alone / constants.lanes(cluster),
        "read": problem.total_kv * problem.kv_token_bytes / 1e6 / constants.read_tbps,
        "longest": float(local.max(initial=0)) * alone,
    }
