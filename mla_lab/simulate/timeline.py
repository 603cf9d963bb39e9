"""Events of predicted and of measured time, and figures that follow from them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

ROLES = ("launch", "setup", "load", "attend", "qk", "softmax", "pv", "write", "wait", "merge")
_ROLE_INDEX = {role: i for i, role in enumerate(ROLES)}
#: us; spans closer than this are adjacent, as recorded times are rounded to a nanosecond
SAME_US = 1e-3


class Event(NamedTuple):
    """A span of one worker: role, lane, begin and end (us from the launch), work tile."""

    sm: int
    worker: int
    role: str
    start: float
    end: float
    #: row of `Plan.tiles`, -1 where the span belongs to none
    tile: int


@dataclass(frozen=True, eq=False, repr=False)
class Timeline:
    """Events as columns, sorted by lane and start. `lanes`: number of lanes of the card."""

    sm: np.ndarray
    worker: np.ndarray
    #: indices into `ROLES`
    role: np.ndarray
    start: np.ndarray
    end: np.ndarray
    tile: np.ndarray
    lanes: int

    @classmethod
    def from_events(cls, events: Iterable[Event], lanes: int) -> Timeline:
        """Columns from events in any order."""
        rows = list(events)
        sm, worker, role, start, end, tile = (
            zip(*rows, strict=True) if rows else ((), (), (), (), (), ())
        )
        lane, begin, stop = np.asarray(sm, np.int32), np.asarray(start), np.asarray(end)
        order = np.lexsort((stop, begin, lane))
        return cls(
            lane[order],
            np.asarray(worker, np.int32)[order],
            np.asarray([_ROLE_INDEX[r] for r in role], np.int8)[order],
            begin[order].astype(np.float64),
            stop[order].astype(np.float64),
            np.asarray(tile, np.int32)[order],
            lanes,
        )

    def __repr__(self) -> str:
        return f"<Timeline: {len(self)} events on {self.lanes} lanes, {self.makespan:.1f} us>"

    def __len__(self) -> int:
        return len(self.start)

    def __iter__(self) -> Iterator[Event]:
        columns = (self.sm, self.worker, self.role, self.start, self.end, self.tile)
        for sm, worker, role, start, end, tile in zip(*(c.tolist() for c in columns), strict=True):
            yield Event(sm, worker, ROLES[role], start, end, tile)

    def only(self, role: str) -> np.ndarray:
        """Positions of the events of one role."""
        return np.flatnonzero(self.role == _ROLE_INDEX[role])

    @property
    def makespan(self) -> float:
        """From the launch to the last event's end, us."""
        return float(self.end.max(initial=0.0))

    def busy(self, role: str = "attend") -> float:
        """Lane time in one role, us, summed over the lanes."""
        at = self.only(role)
        return float((self.end[at] - self.start[at]).sum())

    def utilisation(self) -> float:
        """Time in `attend` over the time of all lanes, 0 to 1."""
        return self.busy() / (self.lanes * self.makespan) if self.makespan else 0.0

    def last_busy(self) -> np.ndarray:
        """End of each lane's last event, us [lanes]; 0 for a lane without work."""
        result = np.zeros(self.lanes)
        np.maximum.at(result, self.sm, self.end)
        return result

    def tail(self) -> float:
        """Mean time that a lane waits for the slowest one, us."""
        return self.makespan - float(self.last_busy().mean())

    def critical_path(self) -> list[Event]:
        """The chain of spans that ends last: a longer span on it makes the call longer.

        The predecessor of a span is the one on its own lane that ends where it begins. Without
        one, the span waited for another lane (a merge for its last partial): for the span that
        ended last.
        """
        path: list[int] = []
        open_ = np.ones(len(self), dtype=bool)
        at = int(self.end.argmax()) if len(self) else -1
        while at >= 0:
            path.append(at)
            open_[at] = False
            before = np.flatnonzero(open_ & (self.end <= self.start[at] + SAME_US))
            beside = before[self.sm[before] == self.sm[at]]
            beside = beside[self.end[beside] >= self.start[at] - SAME_US]
            found = beside if beside.size else before
            at = int(found[self.end[found].argmax()]) if found.size else -1
        events = list(self)
        return [events[i] for i in reversed(path)]
