"""Barriers of one CTA: arrays of mbarriers in shared memory, and hardware named barriers.

Trace-time wrappers: each method emits one instruction. A barrier that other threads may read data
behind is named after what is ready (`full`, `q_full`) or free (`empty`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute


@dataclass(frozen=True)
class MBarriers:
    """mbarriers that follow each other in shared memory, 8 bytes each, usually one per stage."""

    base: cute.Pointer

    def at(self, index: Any) -> cute.Pointer:
        """Pointer to barrier `index`, as TMA copies take it."""
        return self.base + index

    def offset(self, index: Any) -> MBarriers:
        """The barriers from `index` on."""
        return MBarriers(self.base + index)

    def init(self, index: Any, arrivals: Any) -> None:
        """Arrivals that complete one phase; by one thread, before `mbarrier_init_fence`."""
        cute.arch.mbarrier_init(self.at(index), arrivals)

    def wait(self, index: Any, phase: Any) -> None:
        """Wait until the phase of parity `phase` has completed; a fresh barrier passes parity 1."""
        cute.arch.mbarrier_wait(self.at(index), phase)

    def wait_for(self, state: Any) -> None:
        """Wait for the phase of a `PipelineState` or `LazyState`."""
        cute.arch.mbarrier_wait(self.at(state.index), state.phase)

    def test_for(self, state: Any) -> Any:
        """True if that phase has completed; returns at once. The result takes about 100 clocks."""
        return cute.arch.mbarrier_test_wait(self.at(state.index), state.phase)

    def arrive(self, index: Any, cta: Any = None, count: int = 1) -> None:
        """`count` arrivals by each calling thread; one, at CTA `cta` of the cluster, if that is
        given."""
        if cta is None:
            cute.arch.mbarrier_arrive(self.at(index), arrive_count=count)
        else:
            cute.arch.mbarrier_arrive(self.at(index), cta)

    def arrive_expect_tx(self, index: Any, num_bytes: Any) -> None:
        """One arrival, and `num_bytes` more to be written before the phase completes."""
        cute.arch.mbarrier_arrive_and_expect_tx(self.at(index), num_bytes)

    def expect_tx(self, index: Any, num_bytes: Any) -> None:
        """`num_bytes` more to be written before the phase completes, without an arrival."""
        cute.arch.mbarrier_expect_tx(self.at(index), num_bytes)


@dataclass(frozen=True)
class NamedBarrier:
    """A hardware barrier (`bar.sync id, threads`); ids 1 to 15, 0 is `sync_threads`."""

    barrier_id: int
    threads: int

    def sync(self) -> None:
        """Arrive, and wait until all `threads` have arrived."""
        cute.arch.barrier(barrier_id=self.barrier_id, number_of_threads=self.threads)
