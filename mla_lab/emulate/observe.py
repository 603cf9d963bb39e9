"""What happened when: a record of waits, phases, copies and products, as a Perfetto trace.

Each warp has a clock of its own that counts the instructions which it issued. A wait that ends sets
it to the time at which the barrier's phase was complete; a copy or a product takes the time below.
So the picture shows who waits for whom; it predicts no microseconds.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .barriers import Mbarrier
from .gang import Gang
from .machine import Machine
from .parts import CtaLike

#: instruction slots that a copy takes before its first byte is here, and bytes a slot after that
COPY_LATENCY, COPY_RATE = 600, 32
#: multiply-adds a slot: what four tensor cores of an H200 do with 16-bit operands in a clock, and
#: SM100's tensor core, twice as many
PRODUCT_RATE, TENSOR_RATE = 4096, 8192


@dataclass(frozen=True)
class Event:
    """An interval of a CTA's track, in instruction slots; `place` is the source line."""

    cta: str
    track: str
    kind: str
    name: str
    begin: int
    end: int
    place: str = ""


class Recorder:
    """Collects the events of one launch."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._time: dict[int, int] = {}
        self._began: dict[int, int] = {}
        #: latest arrival in the open phase of a barrier, and when the last phase was complete
        self._arrived: dict[int, int] = {}
        self._complete: dict[Any, int] = {}

    def begin(self, machine: Machine) -> None:
        """Count instructions from here on."""
        other = machine.before_block

        def before_block(g: Gang, block: int) -> None:
            self._block(g, block)
            if other is not None:
                other(g, block)

        machine.before_block = before_block

    def _block(self, g: Gang, block: int) -> None:
        program = g.cta.program
        if not program.waits[block]:
            length = program.ends[block] - program.starts[block]
            self._time[id(g)] = self.time(g) + length

    def time(self, g: Gang) -> int:
        """A warp's clock."""
        return self._time.get(id(g), 0)

    def _keep(self, g: Gang, kind: str, name: str, begin: int, pc: int) -> None:
        track, place = g.name.split(" of ")[0], str(g.cta.program.kernel.code[pc].place)
        self.events.append(Event(g.cta.name, track, kind, name, begin, self.time(g), place))

    def _reach(self, g: Gang, when: int, name: str, pc: int) -> None:
        now = self.time(g)
        began = self._began.get(id(g), 0)
        if now > began:
            self._keep(g, "run", "run", began, pc)
        self._time[id(g)] = max(now, when)
        if when > now:
            self._keep(g, "wait", name, now, pc)
        self._began[id(g)] = self.time(g)

    def arrival(self, g: Gang, bar: Any, pc: int) -> None:
        """A warp arrives at a barrier by instruction `pc`."""
        self._arrived[id(bar)] = max(self._arrived.get(id(bar), 0), self.time(g))

    def phase(self, bar: Any, cta: CtaLike, name: str, number: int) -> None:
        """A phase of a barrier is complete."""
        when = self._arrived.pop(id(bar), self._complete.get(id(bar), 0))
        before = self._complete.get(id(bar), 0)
        self._complete[id(bar)] = when
        self.events.append(Event(cta.name, name, "phase", f"phase {number}", before, when))

    def waited(self, g: Gang, bar: Any, name: str, pc: int) -> None:
        """A wait at a barrier has ended."""
        self._reach(g, self._complete.get(id(bar), 0), name, pc)

    def copy(self, g: Gang, cta: CtaLike, bar: Mbarrier, nbytes: int, pc: int) -> None:
        """A copy was issued that completes on `bar`."""
        begin = self.time(g)
        end = begin + COPY_LATENCY + nbytes // COPY_RATE
        self._arrived[id(bar)] = max(self._arrived.get(id(bar), 0), end)
        place = str(g.cta.program.kernel.code[pc].place)
        self.events.append(Event(cta.name, "copies", "copy", f"{nbytes} bytes", begin, end, place))

    def products(self, g: Gang, count: int, multiply_adds: int, pc: int) -> None:
        """A group of products was committed; the warp's clock goes on, and a wait catches up."""
        begin = max(self.time(g), self._complete.get(("products", id(g)), 0))
        end = begin + multiply_adds // PRODUCT_RATE
        self._complete["products", id(g)] = end
        if g.first % 128 == 0:
            place = str(g.cta.program.kernel.code[pc].place)
            track = f"products of warp group {g.first // 128}"
            name = f"{count} wgmma"
            self.events.append(Event(g.cta.name, track, "product", name, begin, end, place))

    def tensor_products(
        self, g: Gang, barriers: list[Mbarrier], work: tuple[int, int], pc: int
    ) -> None:
        """A tcgen05.commit behind `work` = (products, multiply-adds in this CTA)."""
        key = ("tensor core", id(g.cta))
        begin = max(self.time(g), self._complete.get(key, 0))
        end = self._complete[key] = begin + work[1] // TENSOR_RATE
        for bar in barriers:
            self._arrived[id(bar)] = max(self._arrived.get(id(bar), 0), end)
        if work[0]:
            place, name = str(g.cta.program.kernel.code[pc].place), f"{work[0]} tcgen05.mma"
            self.events.append(Event(g.cta.name, key[0], "product", name, begin, end, place))

    def tensor_fence(self, pc: int, orders: bool) -> None:
        """A tcgen05.fence, with strict checks; `orders`: it let go something new, or took what an
        access behind it leans on.
        """

    def products_waited(self, g: Gang, pc: int) -> None:
        """wgmma.wait_group has ended."""
        self._reach(g, self._complete.get(("products", id(g)), 0), "products", pc)

    def finish(self, machine: Machine) -> None:
        """The launch is over: close the last intervals."""
        for cta in machine.ctas:
            last = len(cta.program.kernel.code) - 1
            for g in cta.gangs:
                self._reach(g, 0, "", last)

    def trace(self) -> dict[str, Any]:
        """Chrome's trace format, which Perfetto reads; a slot counts as a microsecond."""
        found: list[dict[str, Any]] = []
        tracks: dict[tuple[str, str], int] = {}
        for event in self.events:
            key = event.cta, event.track
            if key not in tracks:
                tracks[key] = len(tracks)
                found.append(_named("thread_name", key[0], tracks[key], event.track))
                found.append(_named("process_name", key[0], 0, f"CTA {key[0]}"))
            what = {"ph": "X", "name": event.name, "cat": event.kind}
            where = {"pid": key[0], "tid": tracks[key]}
            when = {"ts": event.begin, "dur": max(1, event.end - event.begin)}
            found.append({**what, **where, **when, "args": {"place": event.place}})
        return {"traceEvents": found, "displayTimeUnit": "ns"}

    def write(self, path: Path) -> None:
        """Write the trace as JSON."""
        path.write_text(json.dumps(self.trace()))


def _named(what: str, process: str, track: int, name: str) -> dict[str, Any]:
    """The name of a process or a track."""
    return {"ph": "M", "name": what, "pid": process, "tid": track, "args": {"name": name}}
