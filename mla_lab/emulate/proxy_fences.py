"""What a fence.proxy.async of some lanes shows to asynchronous units: what lies before these lanes.

That is what others did and a barrier handed to the warp, what the warp did until its threads last
met, and since then what these lanes did themselves, and those that met one of them.
"""

from __future__ import annotations

import numpy as np

from .arithmetic import some
from .gang import Gang, Mask, member_lanes
from .parts import CheckerLike
from .shadow import AGENTS, FENCED, SEEN, Shadow, lane_bits, since

Row = np.ndarray


class ProxyFences:
    """Proxy fences of one launch, beside its `Checker`."""

    def __init__(self, checker: CheckerLike) -> None:
        self.checker = checker
        #: of a warp's agent, fences that did not show all that it had done: the clock of each, and
        #: up to which clock it shows what lanes did: (clock, lanes)
        self._partial: dict[int, list[tuple[int, list[tuple[int, int]]]]] = {}

    def fence(self, g: Gang, m: Mask, pc: int) -> None:
        """Threads of a warp execute the fence."""
        own, clock = AGENTS * g.agent, self.checker.tick(g, pc)
        mine, fences = self.checker.vectors[g.agent], self._partial.get(own, [])
        before = int(mine[FENCED, own])
        np.maximum(mine[FENCED], mine[SEEN], out=mine[FENCED])
        self.checker.shows_barriers(g)
        if m is True:
            return
        shown = self._shown(g, clock, lane_bits(g.lane[m]))
        every = [pair for _, pairs in fences for pair in pairs] + shown
        recent = self.checker.recent[g.agent]
        loose = next((c for c, lanes in recent if lanes & ~since(every, c)), 0)
        if loose:
            mine[FENCED, own] = max(before, loose - 1)
            known = int(self.checker.vectors[:, FENCED, own].min())
            kept = [fence for fence in fences if fence[0] > known]
            self._partial[own] = [*kept, (clock, shown)]

    def _shown(self, g: Gang, clock: int, lanes: int) -> list[tuple[int, int]]:
        """Up to which clock a fence of `lanes` shows what they and those that met them did."""
        shown = [(clock, lanes)]
        for members, met, _ in reversed(self.checker.parts_met[g.agent]):
            if members & lanes:
                shown.append((met, members))
                lanes |= members
        return shown

    def shows(self, g: Gang, shadow: Shadow, cells: Row) -> Row:
        """Whether a cell's last write is of a lane whose fence this warp has seen, though that was
        none of the writer's whole warp."""
        writer, when, lane = (
            x[cells].reshape(-1) for x in (shadow.writer, shadow.when, shadow.lane)
        )
        found, seen = np.zeros(len(writer), bool), self.checker.vectors[g.agent, SEEN]
        for own, fences in self._partial.items():
            for clock, shown in fences if some(writer == own) else ():
                for until, lanes in shown if clock <= seen[own] else ():
                    inside = np.append(member_lanes(lanes), False)[lane]
                    found |= inside & (writer == own) & (when <= until)
        return found
