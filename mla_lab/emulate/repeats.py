"""Spins that store in their loop: a machine that is twice in one state is in it for ever.

What a round does follows from registers, memory, barriers and where threads stand alone, once the
schedule draws no lots. So a kernel whose state comes again under these turns never ends, and one
that ends is never in one state twice, however long it runs. A state is kept at rounds that are
powers of two, and where none is; those of later rounds are compared with it, one in `EVERY`.

Not found are spins that count, for as long as the count does not come again, those that ask for the
time, and those with products or cp.async copies under way or tensor memory in use.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np

from .barriers import NamedBarrier
from .gang import Fragment, Gang
from .parts import CtaLike, MachineLike

#: round at which the first state is kept, and how often states are looked at
FIRST, EVERY = 128, 16


class Repeats:
    """Watches the rounds of one launch."""

    def __init__(self) -> None:
        self._kept: list[Any] = []
        self._at = 0

    def found(self, machine: MachineLike, ctas: list[Any]) -> int:
        """After how many rounds the state of a launch's CTAs came again; 0 if it has not."""
        now = machine.clock
        if now < FIRST or now % EVERY:
            return 0
        if self._kept and machine.timed < self._at and _same(self._kept, _state(machine, ctas)):
            return 0 if _under_way(ctas) else now - self._at
        if not self._kept or now & now - 1 == 0:
            self.forget()  # before another is made
            if not _under_way(ctas):
                self._kept, self._at = copy.deepcopy(list(_state(machine, ctas))), now
        return 0

    def forget(self) -> None:
        """Something else than threads will change the state."""
        self._kept = []


def _same(kept: list[Any], state: Iterator[Any]) -> bool:
    """Piece by piece; the first has the number of all others in it."""
    return all(np.array_equal(*pair) for pair in zip(kept, state, strict=False))


def _under_way(ctas: list[Any]) -> bool:
    """Whether products or copies are, which a state does not hold."""
    gangs: list[Gang] = [g for cta in ctas for g in cta.gangs]
    pending = any(g.issued or g.copies or any(g.copy_groups) for g in gangs)
    pending = pending or any(g.done < len(g.groups) for g in gangs)
    return pending or any(cta.tensor for cta in ctas)


def _state(machine: MachineLike, ctas: list[Any]) -> Iterator[Any]:
    """The rest of the state in pieces, those first that are small and change most."""
    gangs: list[Gang] = [g for cta in ctas for g in cta.gangs]
    yield [f.block for g in gangs for f in (*g.fragments, Fragment(-1, True))]
    yield len(machine.jobs)
    yield repr([[_stands(g, f) for f in g.fragments] for g in gangs])
    for g in gangs:
        yield from g.files
    for cta in ctas:
        yield repr(_barriers(cta))
        yield cta.shared.bytes
    yield machine.memory.bytes


def _stands(g: Gang, f: Fragment) -> tuple[Any, ...]:
    """Which threads, and what they wait for; phases by their distance from the barrier's."""
    ticket: Any = f.ticket
    if isinstance(ticket, tuple) and isinstance(ticket[0], NamedBarrier):
        ticket = ticket[0].number, ticket[0].generation - ticket[1]
    waits = [(bar.cta.name, bar.offset, bar.phase - since) for bar, since in f.waits.items()]
    phase = g.cluster_phase if g.cluster_phase < 0 else g.cta.cluster.phase - g.cluster_phase
    return b"" if f.mask is True else f.mask.tobytes(), ticket, waits, phase


def _barriers(cta: CtaLike) -> list[Any]:
    found: list[Any] = [
        (at, bar.expected, bar.pending, bar.bytes, bar.phase & 1)
        for at, bar in cta.mbarriers.items()
    ]
    for at, bar in cta.named.items():
        # of the open generation, and of those that threads may still have to take
        flags = [bar.flags, *(taken for _, _, taken in bar.completed)]
        rows = [[row.tobytes() for row in each] for each in flags]
        found.append((at, bar.arrived, bar.wanted, rows))
    return [*found, cta.cluster.threads, cta.cluster.arrived, cta.cluster.left]
