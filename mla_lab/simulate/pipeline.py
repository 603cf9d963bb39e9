"""One CTA's mainloop, block by block: producer, tensor cores, softmax warps, pipeline stages.

The tensor cores run MMAs in program order: QK runs `lookahead` blocks ahead of PV, so that softmax
of one block overlaps with the QK of the next. The waits:

    load i      waits for the release of block i - stages          (empty barrier)
    QK i        waits for the arrival of block i                   (full barrier)
    softmax i   waits for the scores of block i
    PV i        waits for the probabilities of block i, then releases the stage
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ..core.errors import invalid
from .constants import Constants
from .timeline import Event, Timeline

#: blocks after which a loop counts as in steady state
WARM_BLOCKS = 24
ROLES = ("load", "qk", "softmax", "pv")


@dataclass(frozen=True)
class Pipeline:
    """Clocks that each role spends on a KV block; stages of the ring; blocks that QK runs ahead."""

    load: float
    latency: float
    qk: float
    softmax: float
    pv: float
    release: float = 0.0
    stages: int = 3
    lookahead: int = 1

    def __post_init__(self) -> None:
        if self.stages < 1:
            raise invalid("stages", self.stages, "1 or more")
        if not 0 <= self.lookahead < self.stages:
            raise invalid(
                "lookahead",
                f"{self.lookahead} blocks ahead with {self.stages} stages",
                "fewer than the stages: QK would wait for a stage that only a later PV frees",
            )

    @classmethod
    def of(cls, constants: Constants, rows: int, tokens: int, token_bytes: int) -> Pipeline:
        """Mainloop over `rows` x `tokens` blocks, its loads as fast as one SM can take them."""
        matrix = constants.matrix_clocks(rows, tokens)
        scale = max(rows, constants.min_rows) * tokens / 4096
        per_us = constants.clock_ghz * 1e3
        megabytes = tokens * token_bytes / 1e6
        gap = constants.gap_clocks
        return cls(
            load=megabytes / constants.sm_read_tbps * per_us,
            latency=constants.load_latency_us * per_us,
            qk=matrix * 576 / 1088 + gap / 2,
            softmax=constants.softmax_clocks * scale,
            pv=matrix * 512 / 1088 + gap / 2,
            release=constants.release_clocks,
            stages=constants.stages,
            lookahead=min(constants.lookahead, constants.stages - 1),
        )


@dataclass(frozen=True, eq=False)
class Spans:
    """Starts and ends of each role, clocks [2, blocks]; `free`: releases of stages [blocks]."""

    load: np.ndarray
    qk: np.ndarray
    softmax: np.ndarray
    pv: np.ndarray
    free: np.ndarray

    def steady(self) -> float:
        """Clocks per block with all stages full; not the last block, which has no QK beside it."""
        ends = self.pv[1][:-1]
        half = len(ends) // 2
        return float((ends[-1] - ends[half]) / (len(ends) - 1 - half))

    def timeline(self, us_per_clock: float) -> Timeline:
        """The spans as a `Timeline` with one lane a role."""
        events = []
        for lane, role in enumerate(ROLES):
            us = getattr(self, role).T * us_per_clock
            events += [Event(lane, 0, role, a, b, i) for i, (a, b) in enumerate(us.tolist())]
        return Timeline.from_events(events, lanes=4)


def run_pipeline(pipeline: Pipeline, num_blocks: int) -> Spans:
    """Spans of `num_blocks` blocks; every wait is the one `max` below."""
    if num_blocks < 1:
        raise invalid("num_blocks", num_blocks, "1 or more")
    n, p = num_blocks, pipeline
    spans = {role: np.zeros((2, n)) for role in ROLES}
    free = np.zeros(n)
    #: when each unit is done with its last block
    done = dict.fromkeys(("copy engine", "tensor cores", "softmax warps"), 0.0)

    def run(role: str, i: int, unit: str, after: float, clocks: float) -> None:
        start = max(done[unit], after)
        done[unit] = start + clocks
        spans[role][:, i] = start, done[unit]

    def load(i: int) -> None:
        run("load", i, "copy engine", free[i - p.stages] if i >= p.stages else 0.0, p.load)
        spans["load"][1, i] += p.latency

    def score(i: int) -> None:
        run("qk", i, "tensor cores", spans["load"][1, i], p.qk)
        run("softmax", i, "softmax warps", done["tensor cores"], p.softmax)

    for i in range(min(p.stages, n)):
        load(i)
    for i in range(min(p.lookahead, n)):
        score(i)
    for i in range(n):
        if i + p.lookahead < n:
            score(i + p.lookahead)
        run("pv", i, "tensor cores", spans["softmax"][1, i], p.pv)
        free[i] = done["tensor cores"] + p.release
        if i + p.stages < n:
            load(i + p.stages)
    return Spans(**spans, free=free)


@dataclass(frozen=True)
class Loop:
    """Mainloop of one CTA alone on the card, us."""

    #: a block in steady state; the load of one block at the rate of one SM
    steady: float
    load: float
    #: QK, softmax and PV of one block without overlap
    chain: float
    #: ends of the first blocks, relative to that of the first one
    ends: tuple[float, ...]

    def alone(self, blocks: int) -> float:
        """From the first byte on: the load of the first block, then blocks without overlap."""
        if not blocks:
            return 0.0
        known = len(self.ends)
        return self.load + self.ends[min(blocks, known) - 1] + max(0, blocks - known) * self.steady


@lru_cache(maxsize=512)
def loop_of(constants: Constants, rows: int, tokens: int, token_bytes: int) -> Loop:
    """Mainloop of a kernel over blocks of `rows` x `tokens`."""
    pipeline = Pipeline.of(constants, rows, tokens, token_bytes)
    spans = run_pipeline(pipeline, WARM_BLOCKS + 1)
    us = 1 / (constants.clock_ghz * 1e3)
    ends = (spans.pv[1][:-1] - spans.pv[1][0]) * us
    chain = (pipeline.qk + pipeline.softmax + pipeline.pv) * us
    return Loop(spans.steady() * us, pipeline.load * us, chain, tuple(ends.tolist()))
