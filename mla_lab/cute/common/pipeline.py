"""Pipelines over rings of stages in shared memory, in CUTLASS's terms.

A pipeline has two mbarriers per stage. `full` completes a phase when the producer's data is in the
stage, `empty` when all consumers have released it. A `PipelineState` is one position in the ring:
the stage, and the parity of its barriers' phase. Consumers start at phase 0; producers start at
phase 1, which a fresh barrier passes at once.

All methods run at trace time and emit only the instructions that they name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from .barriers import MBarriers


@dataclass(frozen=True)
class LazyState:
    """A position whose phase is computed where it is used, behind the barrier's address."""

    index: Any
    make_phase: Callable[[], Any]

    @property
    def phase(self) -> Any:
        return self.make_phase()

    def opposite(self) -> LazyState:
        """The same stage with the other parity: consumer to producer and back."""
        return LazyState(self.index, lambda: self.make_phase() ^ 1)


@dataclass(frozen=True)
class PipelineState:
    """Stage `index` of a ring and the parity of its current phase."""

    index: Any
    phase: Any

    @staticmethod
    def start(phase: int = 0) -> PipelineState:
        """Stage 0: of a consumer with phase 0, of a producer with phase 1."""
        return PipelineState(Int32(0), Int32(phase))

    @staticmethod
    def of_count(count: Any, stages: int) -> PipelineState:
        """A consumer's state after `count` stages have passed, for rings used without a gap."""
        return PipelineState(count % stages, (count // stages) & 1)

    def uniform(self) -> PipelineState:
        """The same state with its stage in a uniform register."""
        return PipelineState(cute.arch.make_warp_uniform(self.index), self.phase)

    def opposite(self) -> LazyState:
        """The same stage with the other parity: consumer to producer and back."""
        return LazyState(self.index, lambda: self.phase ^ 1)

    def advance(self, stages: int) -> PipelineState:
        """The next stage of a ring of `stages`; the parity flips where the ring wraps."""
        return PipelineState(*_next(self.index, self.phase, stages))


@cute.jit
def _next(index: Int32, phase: Int32, stages: cutlass.Constexpr[int]):
    index = index + 1
    if index == stages:
        index = Int32(0)
        phase = phase ^ 1
    return index, phase


@dataclass(frozen=True)
class StagePhases:
    """Parities of several barriers in one register, bit i for barrier i: for rings whose stages do
    not all take part in each pass, and unrolled loops with static stages."""

    bits: Any

    def state(self, index: Any) -> LazyState:
        """The position in stage `index`."""
        return LazyState(index, lambda: self.phase(index))

    def phase(self, index: Any) -> Any:
        """Parity of barrier `index`."""
        return (self.bits >> index) & 1

    def uniform(self) -> StagePhases:
        """The same parities in a uniform register."""
        return StagePhases(cute.arch.make_warp_uniform(self.bits))

    def flip(self, index: Any) -> StagePhases:
        """After one more phase of barrier `index`."""
        return StagePhases(self.bits ^ (1 << index))


@dataclass(frozen=True)
class Pipeline:
    """The full and the empty barriers of a ring of stages."""

    full: MBarriers
    empty: MBarriers

    def producer_acquire(self, state: PipelineState | LazyState) -> None:
        """Wait until all consumers have released the stage."""
        self.empty.wait_for(state)

    def producer_try_acquire(self, state: PipelineState | LazyState) -> Any:
        """True if they have; returns at once."""
        return self.empty.test_for(state)

    def producer_expect_tx(self, index: Any, num_bytes: Any) -> None:
        """Arrive for a TMA copy of `num_bytes` into stage `index`, whose bytes complete the phase;
        by one thread."""
        self.full.arrive_expect_tx(index, num_bytes)

    def producer_commit(self, index: Any) -> None:
        """Arrive: the calling thread has written its part of stage `index`."""
        self.full.arrive(index)

    def consumer_wait(self, state: PipelineState | LazyState) -> None:
        """Wait until the stage is full."""
        self.full.wait_for(state)

    def consumer_try_wait(self, state: PipelineState | LazyState) -> Any:
        """True if it is; returns at once."""
        return self.full.test_for(state)

    def consumer_release(self, index: Any, cta: Any = None, count: int = 1) -> None:
        """Arrive, `count` times: the calling thread has read stage `index`; at CTA `cta` if it is
        given."""
        self.empty.arrive(index, cta, count)
