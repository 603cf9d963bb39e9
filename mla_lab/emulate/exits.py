"""Who uses a CTA's shared memory, and whether its exit is ordered behind that.

A CTA is there until its last warp exits. Its warps must have seen every access of another CTA and
every copy into its memory before they exit: by a barrier that completed behind those, or by a
cluster barrier, be it relaxed, at which the others arrived behind them.
"""

from __future__ import annotations

import numpy as np

from .gang import Gang
from .machine import Machine
from .parts import CheckerLike, CtaLike
from .shadow import SEEN

Row = np.ndarray


class Exits:
    """Watches one launch beside its `Checker`."""

    def __init__(self, checker: CheckerLike, machine: Machine) -> None:
        self.checker = checker
        #: of each CTA, what its warps had seen when they exited
        self._seen = {id(cta): np.zeros(checker.size, np.int32) for cta in machine.ctas}
        #: and the last use of each agent that is not its own: (warp, instruction, clock)
        self._uses: dict[int, dict[int, tuple[Gang, int, int]]] = {id(c): {} for c in machine.ctas}

    def uses(self, g: Gang, cta: CtaLike, access: tuple[int, int], pc: int) -> None:
        """A warp, or a copy that it issued, uses a CTA's shared memory: (agent, clock)."""
        agent, clock = access
        if cta is not g.cta or agent >= self.checker.barriers:
            self._uses[id(cta)][agent] = g, pc, clock

    def reached(self, vector: Row | None, g: Gang) -> Row:
        """`vector` plus what warp `g`, which arrives, has done, visible to others or not."""
        mine: Row = self.checker.vectors[g.agent, SEEN]
        return mine.copy() if vector is None else np.maximum(vector, mine)

    def outlives(self, g: Gang, vector: Row | None) -> None:
        """A warp's CTA is still there, `vector` having happened."""
        there = self._seen[id(g.cta)]
        np.maximum(there, there if vector is None else vector, out=there)

    def at_exit(self, g: Gang) -> None:
        """All threads of a warp have exited."""
        self.outlives(g, self.checker.vectors[g.agent, SEEN])

    def finish(self, machine: Machine) -> None:
        """The launch is over."""
        for cta in machine.ctas:
            for agent, (g, pc, clock) in self._uses[id(cta)].items():
                if self._seen[id(cta)][agent] < clock:
                    text = f"shared memory of CTA {cta.name} is used, and its exit is not ordered"
                    self.checker.note(g, pc, "exited", f"{text} behind")
