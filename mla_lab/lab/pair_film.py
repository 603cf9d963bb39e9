"""A film of the SM100 kernel's leader CTA: warps, products, and what tensor memory holds.

One request of a recorded call of `cute/mla_sm100`, 128 heads, a pair of CTAs, emulated with all
checks. Time is counted in instruction slots as `emulate.observe` does: it orders what happened and
predicts no microseconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..core.errors import invalid
from ..core.resources import data_dir
from ..emulate import Finding, Options
from ..emulate.observe import Event, Recorder
from ..emulate.recorded import Recording, load, recordings
from ..emulate.tensor_checks import TensorChecks
from .film import barrier_name, numbered
from .tile_homes import O_COLUMN, S_COLUMNS

if TYPE_CHECKING:
    from ..emulate.barriers import Mbarrier
    from ..emulate.gang import Gang
    from ..emulate.machine import Machine

ARCHIVE = "runtime/emulate_notebook56.zip"
TILE, LEADER, WARPS = 128, 0, 6
ROLES = ("softmax", "softmax", "softmax", "softmax", "MMA", "producer")
#: tensor memory by region: first column, and one behind the last
REGIONS = {
    "S0": (0, S_COLUMNS),
    "S1": (S_COLUMNS, 2 * S_COLUMNS),
    "O": (O_COLUMN, O_COLUMN + 256),
}
#: mbarriers of the kernel in the order of shared memory, 8 bytes each
BARRIERS = numbered(
    ("q.full",), ("q.empty",), ("k.full", 3), ("k.empty", 3), ("v.full", 4), ("v.empty", 4),
    ("s_full", 2), ("p_full",), ("o_full",), ("work_full", 3),
)  # fmt: skip


@cache
def recording() -> Recording:
    """The recorded call."""
    archive = data_dir() / ARCHIVE
    (name,) = recordings(archive=archive)
    return load(name, archive)


def named(words: str) -> str:
    """A barrier of the emulator's events by its name in the kernel."""
    parts = words.split()
    return barrier_name(int(parts[1]), BARRIERS) if parts[0] == "mbarrier" else words


class Use(NamedTuple):
    """An access of tensor memory of the leader: region, kind, when, and by which warp."""

    region: str
    kind: str
    begin: int
    end: int
    warp: int


class Held(NamedTuple):
    """A time in which a region is in one state: being written, unread, or read."""

    begin: int
    end: int
    state: str
    what: str


def region_of(column: int) -> str:
    """The region that a column of tensor memory belongs to."""
    for name, (first, last) in REGIONS.items():
        if first <= column < last:
            return name
    raise invalid("column", column, REGIONS)


@dataclass(frozen=True)
class PairFilm:
    """What the leader did, what was found, and whether the result is right."""

    spans: tuple[Event, ...]
    uses: tuple[Use, ...]
    findings: tuple[Finding, ...]
    right: bool
    end: int

    @property
    def tiles(self) -> int:
        """KV tiles of the call."""
        return -(-recording().problem.kv_lens[0] // TILE)

    def of(self, region: str, kind: str) -> list[Use]:
        """Accesses of a region in the order of time."""
        return sorted((u for u in self.uses if u[:2] == (region, kind)), key=lambda u: u.begin)

    def writes(self, region: str) -> list[tuple[int, int]]:
        """Begin and end of what the tensor core does for a tile, in the order of tiles."""
        mine = self.of(region, "product")
        per = 3 if region != "O" else 4
        groups = [mine[i : i + per] for i in range(0, len(mine), per)]
        return [(g[0].begin, g[-1].end) for g in groups]

    def held(self, region: str) -> list[Held]:
        """States of a region, in order."""
        reads = self.of(region, "load")
        found, writes = [], self.writes(region)
        for turn, (begin, end) in enumerate(writes):
            last = writes[turn + 1][0] if turn + 1 < len(writes) else self.end
            name = self._name(region, turn)
            found.append(Held(begin, end, "written", name))
            mine = [u.end for u in reads if end <= u.end <= last]
            done = max(mine, default=last)
            found.append(Held(end, done, "unread" if region != "O" else "sum", name))
            if mine:
                found.append(Held(done, last, "read", name))
        return [h for h in found if h.end > h.begin]

    def _name(self, region: str, turn: int) -> str:
        if region == "O":
            return f"tiles 0 to {turn}" if turn else "tile 0"
        return f"tile {2 * turn + int(region == 'S1')}"

    def at(self, region: str, slot: int) -> Held | None:
        """The state of a region at a slot, None before its first product."""
        return next((h for h in self.held(region) if h.begin <= slot < h.end), None)

    def steps(self) -> list[int]:
        """Slots at which something begins, in order."""
        return sorted({s.begin for s in self.spans} | {u.begin for u in self.uses} | {self.end})


class _Watch(TensorChecks):
    """The checks of tensor memory, and a note of each access of the leader."""

    def __init__(self, checker: Any, camera: _Camera) -> None:
        super().__init__(checker)
        self.camera = camera

    def load(self, g: Gang, lanes: np.ndarray, columns: np.ndarray, pc: int) -> None:
        """tcgen05.ld"""
        self.camera.access(g, columns, "load")
        super().load(g, lanes, columns, pc)

    def store(self, g: Gang, lanes: np.ndarray, columns: np.ndarray, pc: int) -> None:
        """tcgen05.st"""
        self.camera.access(g, columns, "store")
        super().store(g, lanes, columns, pc)

    def product(self, g: Gang, issued: Any) -> None:
        """tcgen05.mma"""
        self.camera.issued.append(issued.column)
        super().product(g, issued)


class _Camera(Recorder):
    """Notes the accesses of the leader's tensor memory while a launch runs."""

    def __init__(self) -> None:
        super().__init__()
        self.uses: list[Use] = []
        self.issued: list[int] = []
        self.leader: Any = None

    def begin(self, machine: Machine) -> None:
        super().begin(machine)
        self.leader = machine.ctas[LEADER]
        machine.checker.tensor = _Watch(machine.checker, self)

    def access(self, g: Gang, columns: Iterable[int], kind: str) -> None:
        """A warp's load or store."""
        if g.cta is self.leader:
            now, first = self.time(g), int(np.min(np.asarray(columns)))
            self.uses.append(Use(region_of(first), kind, now, now, g.first // 32))

    def tensor_products(
        self, g: Gang, barriers: list[Mbarrier], work: tuple[int, int], pc: int
    ) -> None:
        super().tensor_products(g, barriers, work, pc)
        if work[0]:
            last = self.events[-1]
            regions = {region_of(column) for column in self.issued}
            for name in sorted(regions):
                self.uses.append(Use(name, "product", last.begin, last.end, g.first // 32))
        self.issued = []


@cache
def film_of(schedule: str = "fair") -> PairFilm:
    """Run the recorded call with all checks; its film."""
    from ..emulate.calls import is_right

    call, camera = recording().call(), _Camera()
    kernel = recording().kernel(Options(check=True, trace=True, schedule=schedule))
    kernel.observe(camera, *call.args)
    mine = tuple(e for e in camera.events if e.cta == camera.leader.name)
    end = max(event.end for event in mine) + 1
    found = tuple(kernel.run.findings)
    return PairFilm(mine, tuple(camera.uses), found, is_right(call), end)


@cache
def first_scores() -> tuple[np.ndarray, np.ndarray]:
    """(S0 of both CTAs' tensor memory, fp32 [2, 128 lanes, 64 columns], when s_full[0] is complete
    for the first time; Q K^T of the first tile, fp32 [128 rows, 128 tokens])."""
    call = recording().call()
    debugger = recording().kernel().debug(*call.args)

    def is_full(_: Gang) -> bool:
        bars = debugger.barriers(LEADER)
        return any(b["phase"] for b in bars if barrier_name(b["offset"], BARRIERS) == "s_full[0]")

    debugger.run_to(is_full)
    held = [debugger.tensor_memory(0, S_COLUMNS, "fp32", cta) for cta in (0, 1)]
    inputs = call.inputs
    query = inputs.query.float().reshape(-1, inputs.query.shape[-1])
    pages = inputs.block_tables[0, : -(-TILE // recording().problem.page_size)].long()
    keys = inputs.kv_cache[pages].float().reshape(-1, query.shape[1])[:TILE]
    return np.stack(held), (query @ keys.T).numpy()
