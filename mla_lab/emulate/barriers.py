"""mbarriers, named barriers and cluster barriers.

PTX ISA, "Parallel Synchronization and Communication Instructions: mbarrier": a phase is complete
when no arrival and no transaction byte is pending. Bytes may complete before they are expected.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .arithmetic import some
from .findings import fault
from .gang import Fragment, Gang, Mask, lanes_of
from .memory import RESERVED
from .parts import CtaLike
from .writer import BLOCKED

Row = np.ndarray
#: bytes of an mbarrier, and the arrivals and bytes that it can count
MBARRIER_BYTES = 8
MAX_COUNT, MAX_BYTES = (1 << 20) - 1, (1 << 20) - 1


@dataclass(slots=True, eq=False)
class Mbarrier:
    """State of one mbarrier."""

    cta: CtaLike
    offset: int
    expected: int
    pending: int
    #: instruction that initialised it
    init_pc: int
    #: bytes announced and not yet here; below 0 where they came first
    bytes: int = 0
    #: phases completed
    phase: int = 0
    #: what its arrivals released (see `races`)
    agent: int = -1
    made: tuple[int, int] = (0, 0)
    #: whether a fence has shown its initialisation to asynchronous copies
    shown: bool = False
    released: Any = None
    completed: Any = None
    #: arrivals of this phase by warp: clocks, and the lanes that arrived
    arrivals: dict[int, list[tuple[int, int]]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"mbarrier {self.offset - 1024} of CTA {self.cta.name}"

    def settle(self) -> None:
        """Complete the phase if nothing is pending."""
        if self.pending == 0 and self.bytes == 0:
            self.pending = self.expected
            self.phase += 1
            machine = self.cta.machine
            machine.progress += 1
            machine.checker.completes(self)
            machine.recorder.phase(self, self.cta, self.name, self.phase)

    def complete_bytes(self, nbytes: int) -> None:
        """complete_tx: bytes of a copy have landed."""
        self.bytes -= nbytes
        self.settle()


def located(g: Gang, address: int, pc: int) -> tuple[CtaLike, int]:
    """CTA and offset of a shared address. Raises Fault for a CTA that the cluster has not."""
    rank, peers = address >> 24, g.cta.peers
    if rank >= len(peers):
        text = f"shared memory of CTA {rank} of a cluster of {len(peers)}"
        raise fault(g, pc, "out of bounds", text)
    return peers[rank], address & 0xFFFFFF


def mbarrier_at(g: Gang, address: int, pc: int) -> Mbarrier:
    """The mbarrier at a shared address. Raises Fault where none was initialised."""
    cta, offset = located(g, address, pc)
    found = cta.mbarriers.get(offset)
    if found is None:
        text = f"no mbarrier was initialised at byte {offset - 1024} of CTA {cta.name}"
        raise fault(g, pc, "barrier", text)
    g.machine.checker.uses(g, found, pc)
    return found


def each_address(g: Gang, address: Row, m: Mask) -> Iterator[tuple[int, Row]]:
    """Distinct addresses among the active threads, and who has each."""
    threads = lanes_of(g, m)
    mine = address[threads]
    if len(mine) == 1 or not some(mine != mine[0]):
        yield int(mine[0]), threads
        return
    for one in np.unique(mine):
        yield int(one), threads[mine == one]


def mbarrier_init(g: Gang, address: Row, count: Row, m: Mask, pc: int) -> None:
    """mbarrier.init"""
    for at, threads in each_address(g, address, m):
        cta, offset = located(g, at, pc)
        if not RESERVED <= offset <= cta.shared.size - MBARRIER_BYTES:
            at, size = offset - RESERVED, cta.shared.size - RESERVED
            raise fault(g, pc, "out of bounds", f"an mbarrier at byte {at} of {size} shared ones")
        if offset % MBARRIER_BYTES:
            raise fault(g, pc, "misaligned", f"an mbarrier in shared memory at {offset:#x}")
        old, n = cta.mbarriers.get(offset), int(count[threads[0]])
        if old is not None and (old.pending != old.expected or old.bytes):
            raise fault(g, pc, "barrier", f"{old.name} is initialised again in an open phase")
        if not 1 <= n <= MAX_COUNT:
            raise fault(g, pc, "barrier", f"an mbarrier of {n} arrivals")
        cta.mbarriers[offset] = made = Mbarrier(cta, offset, n, n, pc)
        g.machine.checker.initialises(g, made, pc)
    g.machine.progress += 1


def mbarrier_inval(g: Gang, address: Row, m: Mask, pc: int) -> None:
    """mbarrier.inval"""
    for at, _ in each_address(g, address, m):
        cta, offset = located(g, at, pc)
        cta.mbarriers.pop(offset, None)
        g.machine.checker.invalidates(cta, offset)


def mbarrier_expect(g: Gang, address: Row, nbytes: Row, m: Mask, pc: int) -> None:
    """mbarrier.expect_tx"""
    for at, threads in each_address(g, address, m):
        _expect(g, mbarrier_at(g, at, pc), int(nbytes[threads].astype(np.int64).sum()), pc)


def _expect(g: Gang, bar: Mbarrier, nbytes: int, pc: int) -> None:
    bar.bytes += nbytes
    if not -MAX_BYTES <= bar.bytes <= MAX_BYTES:
        raise fault(g, pc, "barrier", f"{bar.bytes} transaction bytes pending on {bar.name}")


def mbarrier_arrive(
    g: Gang, address: Row, count: Row | None, nbytes: Row | None, relaxed: bool, m: Mask, pc: int
) -> None:
    """mbarrier.arrive, and arrive.expect_tx where `nbytes` are given."""
    for at, threads in each_address(g, address, m):
        bar = mbarrier_at(g, at, pc)
        if nbytes is not None:
            _expect(g, bar, int(nbytes[threads].astype(np.int64).sum()), pc)
        arrivals = len(threads) if count is None else int(count[threads].astype(np.int64).sum())
        g.machine.checker.releases(g, bar, relaxed, pc, threads)
        count_arrivals(g, bar, arrivals, pc)


def count_arrivals(g: Gang, bar: Mbarrier, arrivals: int, pc: int) -> None:
    """Count arrivals, and complete the phase if they were the last."""
    g.machine.recorder.arrival(g, bar, pc)
    bar.pending -= arrivals
    if bar.pending < 0:
        text = f"{-bar.pending} arrivals more than the {bar.expected} that {bar.name} counts"
        raise fault(g, pc, "excess arrival", text)
    g.machine.progress += 1
    bar.settle()


def mbarrier_polled(g: Gang, address: Row, m: Mask, pc: int) -> None:
    """try_wait.parity and test_wait.parity of which nobody takes the answer: neither waits until a
    phase has ended, so that nothing is ordered behind it."""
    for at, _ in each_address(g, address, m):
        mbarrier_at(g, at, pc)


def mbarrier_wait(
    g: Gang,
    passed: Row,
    address: Row,
    parity: Row,
    m: Mask,
    after: int,
    how: tuple[int, bool, bool],
) -> int:
    """try_wait.parity and test_wait.parity; `how` is the instruction, whether it may wait, and
    whether it is relaxed: nothing is ordered behind such a one.

    Threads that pass go on, the others stay where they are.
    """
    pc, may_wait, relaxed = how
    done = np.zeros(g.n, bool)
    every = np.ones(g.n, bool) if m is True else m
    fragment = g.current
    for at, threads in each_address(g, address, m):
        bar = mbarrier_at(g, at, pc)
        ready = (parity[threads] & 1) != bar.phase & 1
        done[threads] = ready
        if may_wait:
            _watch(g, bar, fragment, not some(~ready), pc)
        if some(ready):
            if not relaxed:
                g.machine.checker.acquires(g, bar)
            g.machine.recorder.waited(g, bar, bar.name, pc)
    left = every & ~done
    if not may_wait or not some(left):
        np.copyto(passed, done, where=m)
        return after
    if not some(done & every):
        return BLOCKED
    # those that are left wait for what the fragment waited for
    g.split(fragment.block, left).waits, fragment.waits = fragment.waits, {}
    fragment.mask = every & done
    passed[fragment.mask] = True
    return after


def _watch(g: Gang, bar: Mbarrier, fragment: Fragment, ready: bool, pc: int) -> None:
    """Note which phase a fragment waits for: one that sees two phases go by waits in vain, or is
    woken by the wrong one.
    """
    since = fragment.waits.get(bar)
    if since is not None and bar.phase > since + 1:
        text = f"{bar.name} completed phases {since} to {bar.phase - 1} during a wait for {since}"
        raise fault(g, pc, "parity alias", text)
    if ready:
        fragment.waits.pop(bar, None)
    elif since is None:
        fragment.waits[bar] = bar.phase


@dataclass(slots=True)
class NamedBarrier:
    """State of one of a CTA's sixteen named barriers."""

    number: int
    arrived: int = 0
    #: threads that the first arrival of this generation names
    wanted: int = 0
    generation: int = 0
    released: Any = None
    #: of the last generations: what was released, and the flags of bar.red
    completed: deque[tuple[int, Any, list[Row]]] = field(default_factory=lambda: deque(maxlen=4))
    flags: list[Row] = field(default_factory=list)


def _named(g: Gang, number: Row, count: Row | None, m: Mask, pc: int) -> tuple[NamedBarrier, int]:
    first = 0 if m is True else int(m.argmax())
    n = int(number[first])
    if not 0 <= n < 16:
        raise fault(g, pc, "barrier", f"named barrier {n}; there are 0 to 15")
    wanted = int(count[first]) if count is not None else g.cta.num_threads
    if wanted % 32:
        raise fault(g, pc, "barrier", f"named barrier {n} of {wanted} threads, not whole warps")
    return g.cta.named.setdefault(n, NamedBarrier(n)), wanted


def _at_one_barrier(g: Gang, number: Row, m: Mask) -> Mask:
    """Threads at the same named barrier as the first one. Warps of a gang may be at different ones:
    the others stand at this block as a fragment of their own.
    """
    if g.n == 32:
        return m
    mine = number == number[0 if m is True else int(m.argmax())]
    active = np.ones(g.n, bool) if m is True else m
    others = active & ~mine
    if not some(others):
        return m
    g.split(g.current.block, others)
    g.current.mask = active & mine
    return g.current.mask


def _meet(g: Gang, bar: NamedBarrier, wanted: int, m: Mask, pc: int) -> None:
    """Arrive; the last one opens the barrier."""
    if bar.arrived and bar.wanted != wanted:
        text = f"named barrier {bar.number} of {wanted} threads here, of {bar.wanted} elsewhere"
        raise fault(g, pc, "barrier", text)
    bar.wanted = wanted
    bar.arrived += g.n if m is True else int(m.sum())
    bar.released = g.machine.checker.joined(bar.released, g)
    g.machine.recorder.arrival(g, bar, pc)
    if bar.arrived > wanted:
        text = f"{bar.arrived} threads at named barrier {bar.number} of {wanted}"
        raise fault(g, pc, "excess arrival", text)
    g.machine.progress += 1
    if bar.arrived == wanted:
        bar.completed.append((bar.generation, bar.released, bar.flags))
        bar.arrived, bar.generation, bar.released, bar.flags = 0, bar.generation + 1, None, []
        g.machine.recorder.phase(bar, g.cta, f"named barrier {bar.number}", bar.generation)


def named_arrive(g: Gang, number: Row, count: Row | None, m: Mask, after: int, pc: int) -> int:
    """bar.arrive"""
    m = _at_one_barrier(g, number, m)
    bar, wanted = _named(g, number, count, m, pc)
    _meet(g, bar, wanted, m, pc)
    return after


def named_sync(
    g: Gang,
    number: Row,
    count: Row | None,
    m: Mask,
    after: int,
    pc: int,
    red: tuple[Row, Row, bool] | None = None,
) -> int:
    """bar.sync, and bar.red with (result, flags, whether all)."""
    fragment = g.current
    if fragment.ticket is None:
        m = _at_one_barrier(g, number, m)
        bar, wanted = _named(g, number, count, m, pc)
        if red is not None:
            bar.flags.append(np.broadcast_to(red[1], g.n)[lanes_of(g, m)].copy())
        fragment.ticket = (bar, bar.generation)
        _meet(g, bar, wanted, m, pc)
    bar, generation = fragment.ticket
    if bar.generation == generation:
        return BLOCKED
    fragment.ticket = None
    _, released, flags = next(c for c in bar.completed if c[0] == generation)
    g.machine.checker.takes(g, released)
    g.machine.recorder.waited(g, bar, f"named barrier {bar.number}", pc)
    if red is not None:
        every = np.concatenate(flags)
        np.copyto(red[0], every.all() if red[2] else every.any(), where=m)
    return after


@dataclass
class ClusterBarrier:
    """The barrier of a cluster's threads; those that exit are not counted any more."""

    threads: int
    arrived: int = 0
    phase: int = 0
    #: arrived in the open phase and exited since
    left: int = 0
    released: Any = None
    completed: Any = None
    #: what those who arrived or exited had done, relaxed or not: of the open phase and before it
    done: Any = None
    done_before: Any = None

    def leave(self, g: Gang, count: int) -> None:
        """`count` threads exit: the barrier waits for them no longer."""
        self.done = g.machine.checker.exits.reached(self.done, g)
        if g.cluster_phase == self.phase:
            self.left += count
        else:
            self.threads -= count
        self.settle()

    def settle(self) -> None:
        """Complete the phase if all have arrived."""
        if self.threads and self.arrived >= self.threads:
            self.arrived, self.phase = 0, self.phase + 1
            self.threads, self.left = self.threads - self.left, 0
            self.completed, self.released = self.released, None
            self.done_before = self.done


def cluster_arrive(g: Gang, m: Mask, relaxed: bool, after: int, pc: int) -> int:
    """barrier.cluster.arrive; a relaxed one releases what a fence before it did."""
    bar = g.cta.cluster
    if g.cluster_phase == bar.phase and m is True:
        raise fault(g, pc, "excess arrival", "a second arrival in one phase of the cluster barrier")
    g.cluster_phase = bar.phase
    bar.released = g.machine.checker.joined(bar.released, g, relaxed)
    bar.done = g.machine.checker.exits.reached(bar.done, g)
    bar.arrived += g.n if m is True else int(m.sum())
    g.machine.progress += 1
    bar.settle()
    return after


def cluster_wait(g: Gang, m: Mask, after: int, pc: int) -> int:
    """barrier.cluster.wait"""
    bar = g.cta.cluster
    if g.cluster_phase < 0 and m is True:
        raise fault(g, pc, "barrier", "a wait at the cluster barrier without an arrival")
    if bar.phase <= g.cluster_phase:
        return BLOCKED
    g.machine.checker.takes(g, bar.completed)
    g.machine.checker.exits.outlives(g, bar.done_before)
    g.cluster_phase = -1 if m is True else g.cluster_phase
    return after
