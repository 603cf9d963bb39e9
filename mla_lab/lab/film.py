"""A film of one emulated launch: what each warp, barrier and stage did at every instant.

The kernel is keep_ab for 16-bit elements (`mla_lab/cute/keep_ab_sm90/kernel_bf16.py`): one CTA, 64
heads, one request, from a recorded call, so that no compiler is needed. Time is counted in
instruction slots as `emulate.observe` does: it orders what happened and predicts no microseconds.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..core.errors import invalid
from ..core.resources import data_dir
from ..emulate import Fault, Finding, Options
from ..emulate.barriers import Mbarrier
from ..emulate.memory import RESERVED
from ..emulate.observe import Event, Recorder
from ..emulate.ptx import Place
from ..emulate.recorded import Recording, load, recordings
from ..emulate.translate import Program
from .source_lines import line_of

if TYPE_CHECKING:
    from ..emulate.gang import Gang
    from ..emulate.machine import CTA, Machine
    from ..emulate.parts import CtaLike

ARCHIVE = "runtime/emulate_debugger.zip"
STAGES, CHUNKS, WARPS = 3, 3, 12


def numbered(*arrays: tuple[Any, ...]) -> tuple[str, ...]:
    """Names of the elements of arrays of (name, extents): a[0], a[1]; b[0, 0]; c."""
    return tuple(
        f"{name}{list(at)}" if extents else name
        for name, *extents in arrays
        for at in np.ndindex(*extents)
    )


#: mbarriers of the kernel in the order of shared memory, 8 bytes each
BARRIERS = numbered(
    ("kv.full", STAGES, CHUNKS),
    *((name, STAGES) for name in ("kv.empty", "p.full", "p.empty")),
    ("stats",),
)
#: role by warp group
ROLES = ("PV", "PV", "QK, softmax")
LAUNCH_REGISTERS = 168
#: what setmaxnreg divides among the warp groups: no other register of the SM
CTA_REGISTERS = 32 * WARPS * LAUNCH_REGISTERS
#: files whose lines say little about where a warp is, and how far before an instruction to look
WRAPPERS, NEAR, WINDOW = ("keep_ab_sm90/kernel.py",), 160, 90
#: what a source line calls, by the instructions that it becomes
CALLS = {
    "mbarrier.try_wait": (".wait(", ".consumer_wait(", ".producer_acquire("),
    "mbarrier.arrive": (
        ".arrive(",
        ".consumer_release(",
        ".producer_commit(",
        ".arrive_expect_tx(",
    ),
    "bar.sync": (".sync()", "sync_threads("),
}
#: a hang's film goes on for this share of its slots, so that those that wait are seen
AFTER_A_HANG = 0.12
PRODUCTS = "its wgmma-group"


@cache
def recording() -> Recording:
    """The recorded call of the debugger."""
    archive = data_dir() / ARCHIVE
    (name,) = recordings(archive=archive)
    return load(name, archive)


@cache
def program() -> Program:
    """Its kernel, translated."""
    (found,) = recording().kernel().programs.values()
    return found


def barrier_name(offset: int, barriers: Sequence[str] = BARRIERS) -> str:
    """Name of the mbarrier at a byte of shared memory, as kv.full[stage, chunk]."""
    if offset // 8 >= len(barriers):
        raise invalid("offset", offset, "an mbarrier of the kernel")
    return barriers[offset // 8]


@cache
def caller(pc: int) -> Place:
    """The kernel's own line of an instruction: of one in a wrapper of `cute/common`, the nearest
    line that calls such a wrapper, before or behind it."""
    code = program().kernel.code
    place, kind = code[pc].place, code[pc].opcode
    words = next((w for start, w in CALLS.items() if kind.startswith(start)), ())
    if is_own(place) and not words:
        return place
    earlier = [code[i].place for i in range(pc, max(0, pc - NEAR), -1) if is_own(code[i].place)]
    before = next(iter(earlier), place)
    behind = next((s.place for s in code[pc : pc + NEAR] if is_own(s.place)), place)
    found = _line_with(words, ((before, 1), (behind, -1)))
    if found is None:  # the line before may belong to a helper elsewhere: earlier ones
        found = _line_with(words, tuple((line, 1) for line in dict.fromkeys(earlier)))
    return found or before


def _line_with(words: Sequence[str], anchors: Sequence[tuple[Place, int]]) -> Place | None:
    """The nearest line with one of the words, downwards (1) or upwards (-1) from each anchor."""
    for way in range(WINDOW):
        for anchor, sign in anchors:
            line = Place(anchor.file, anchor.line + sign * way)
            if any(word in line_of(line) for word in words):
                return line
    return None


def is_own(place: Place) -> bool:
    """Whether a line is the kernel's own, and none of a wrapper."""
    return bool(place.line) and not place.file.endswith(WRAPPERS) and "/common/" not in place.file


def own_place(one: Finding) -> Place:
    """The kernel's own line of a finding, whose line may be that of a wrapper."""
    if is_own(one.place):
        return one.place
    code = program().kernel.code
    same = (pc for pc, s in enumerate(code) if (s.place, s.text) == (one.place, one.instruction))
    return next((caller(pc) for pc in same), one.place)


class Use(NamedTuple):
    """An instruction that waits at a barrier, or arrives at it."""

    what: str
    barrier: str
    warp: int


class State(NamedTuple):
    """An mbarrier at an instant: phases completed, arrivals still to come of how many, and bytes
    on their way."""

    phase: int
    pending: int
    expected: int
    bytes: int


@dataclass
class Arrivals:
    """History of one mbarrier."""

    expected: int = 0
    #: (slot, phase, arrivals pending before it) in the order of execution
    arrivals: list[tuple[int, int, int]] = field(default_factory=list)
    #: slots at which phases were complete
    phases: list[int] = field(default_factory=list)
    #: copies: (issued, landed, bytes)
    copies: list[tuple[int, int, int]] = field(default_factory=list)
    left: int = 0

    def at(self, slot: int) -> State:
        """Its state at a slot."""
        phase = bisect_right(self.phases, slot)
        mine = [k for k, (_, p, _) in enumerate(self.arrivals) if p == phase]
        came = sum(self.arrivals[k][0] <= slot for k in mine)
        last = 0 if phase < len(self.phases) else self.left
        after = [self.arrivals[k][2] for k in mine[1:]] + [last]
        pending = self.expected if not came else after[came - 1]
        flying = sum(n for begin, end, n in self.copies if begin <= slot < end)
        return State(phase, pending, self.expected, flying)


@dataclass(frozen=True)
class Film:
    """What a launch did: spans of tracks, barriers, where warps stood, findings, and the result."""

    spans: tuple[Event, ...]
    barriers: dict[str, Arrivals]
    #: by warp: slots, and the first instruction of the block begun there
    moves: tuple[tuple[list[int], list[int]], ...]
    #: (slot, warp, registers a thread)
    registers: tuple[tuple[int, int, int], ...]
    uses: dict[int, Counter[Use]]
    findings: tuple[Finding, ...]
    #: what each warp that never went on waits for
    stuck: dict[int, str]
    right: bool
    end: int

    @property
    def report(self) -> str:
        """The findings as the emulator prints them."""
        return "\n".join(dict.fromkeys(map(str, self.findings)))

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of findings, each once, in the order in which they were met."""
        return tuple(dict.fromkeys(f.kind for f in self.findings))

    def at(self, warp: int, slot: int) -> int:
        """The instruction at which a warp stands."""
        slots, blocks = self.moves[warp]
        i = bisect_right(slots, slot) - 1
        if i < 0:
            return 0
        pc, owner = blocks[i], program()
        block = bisect_right(owner.starts, pc) - 1
        return min(pc + slot - slots[i], owner.ends[block] - 1)

    def held(self, slot: int) -> list[int]:
        """Registers a thread of each warp at a slot."""
        now = [LAUNCH_REGISTERS] * WARPS
        for when, warp, count in self.registers:
            if when <= slot:
                now[warp] = count
        return now

    def groups(self, slot: int) -> list[int]:
        """wgmma-groups in flight of each warp group at a slot."""
        found = [0] * (WARPS // 4)
        for span in self.spans:
            if span.kind == "product" and span.begin <= slot < span.end:
                found[int(span.track.split()[-1])] += 1
        return found

    def stage(self, stage: int) -> list[tuple[int, int, str]]:
        """(begin, end, what) of a stage: filling, or full with what it holds."""
        full = [self.barriers[f"kv.full[{stage}, {c}]"] for c in range(CHUNKS)]
        empty, found = self.barriers[f"kv.empty[{stage}]"].phases, []
        issued = sorted(begin for bar in full for begin, _, _ in bar.copies)
        for turn in range(max(len(bar.phases) for bar in full) + 1):
            ready = [bar.phases[turn] for bar in full if turn < len(bar.phases)]
            freed = empty[turn - 1] if turn and turn <= len(empty) else 0
            begun = next((t for t in issued if t >= freed), None)
            if begun is None or (turn and turn > len(empty)):
                continue
            done = max(ready) if len(ready) == CHUNKS else self.end
            found.append((begun, done, "filling"))
            what = "Q" if not stage and not turn else f"tile {turn * STAGES + stage - 1}"
            if len(ready) == CHUNKS:
                until = empty[turn] if turn < len(empty) else self.end
                found.append((done, max(until, done), what))
        return found

    def at_stage(self, stage: int, slot: int) -> str:
        """What a stage does at a slot: filling, what it holds, or "" where it is empty."""
        return next((what for a, b, what in self.stage(stage) if a <= slot < b), "")

    def steps(self) -> list[int]:
        """Slots at which something begins, in order."""
        return sorted({s.begin for s in self.spans} | {self.end})


class _Camera(Recorder):
    """Collects what a `Film` holds while a launch runs."""

    def __init__(self) -> None:
        super().__init__()
        self.histories: dict[str, Arrivals] = defaultdict(Arrivals)
        self.moves: list[tuple[list[int], list[int]]] = [([], []) for _ in range(WARPS)]
        self.registers: list[tuple[int, int, int]] = []
        self.uses: dict[int, Counter[Use]] = defaultdict(Counter)
        self.gangs: list[Gang] = []
        self.ctas: list[CTA] = []

    def begin(self, machine: Machine) -> None:
        super().begin(machine)
        self.ctas = list(machine.ctas)
        self.gangs = [g for cta in machine.ctas for g in cta.gangs]

    def _block(self, g: Gang, block: int) -> None:
        owner, warp = g.cta.program, g.first // 32
        slots, blocks = self.moves[warp]
        if not owner.waits[block] or not blocks or blocks[-1] != owner.starts[block]:
            slots.append(self.time(g))
            blocks.append(owner.starts[block])
        for pc in range(owner.starts[block], owner.ends[block]):
            s = owner.kernel.code[pc]
            if s.parts[0] == "setmaxnreg":
                self.registers.append((self.time(g), warp, int(s.args[0])))
        super()._block(g, block)

    def _history(self, bar: Mbarrier) -> Arrivals:
        found = self.histories[barrier_name(bar.offset - RESERVED)]
        found.expected = bar.expected
        return found

    def arrival(self, g: Gang, bar: Any, pc: int) -> None:
        super().arrival(g, bar, pc)
        if isinstance(bar, Mbarrier):
            self._history(bar).arrivals.append((self.time(g), bar.phase, bar.pending))
            name = barrier_name(bar.offset - RESERVED)
            self.uses[pc][Use("arrive", name, g.first // 32)] += 1

    def phase(self, bar: Any, cta: CtaLike, name: str, number: int) -> None:
        super().phase(bar, cta, name, number)
        if isinstance(bar, Mbarrier):
            self._history(bar).phases.append(self._complete[id(bar)])

    def waited(self, g: Gang, bar: Any, name: str, pc: int) -> None:
        if isinstance(bar, Mbarrier):
            name = barrier_name(bar.offset - RESERVED)
            self.uses[pc][Use("wait", name, g.first // 32)] += 1
        super().waited(g, bar, name, pc)

    def copy(self, g: Gang, cta: CtaLike, bar: Mbarrier, nbytes: int, pc: int) -> None:
        super().copy(g, cta, bar, nbytes, pc)
        last = self.events[-1]
        self._history(bar).copies.append((last.begin, last.end, nbytes))

    def stop(self) -> dict[int, str]:
        """Close the last spans; what each warp that is left waits for."""
        stuck = {}
        for g in self.gangs:
            self._reach(g, 0, "", len(g.cta.program.kernel.code) - 1)
            for f in g.fragments:
                here = g.cta.program.kernel.code[g.cta.program.starts[f.block]]
                if here.opcode.startswith("wgmma.wait"):
                    stuck[g.first // 32] = PRODUCTS
                for bar in f.waits:
                    stuck[g.first // 32] = barrier_name(bar.offset - RESERVED)
        for cta in self.ctas:
            for bar in cta.mbarriers.values():
                self._history(bar).left = bar.pending
        return stuck


def shoot(broken: Program | None = None, schedule: str = "fair") -> Film:
    """Run the recorded call, all checks on, perhaps as a broken program; its film."""
    from ..emulate.calls import is_right

    call, camera = recording().call(), _Camera()
    kernel = recording().kernel(Options(check=True, trace=True, schedule=schedule))
    if broken is not None:
        kernel.programs = {broken.kernel.name: broken}
    fault: list[Finding] = []
    try:
        kernel.observe(camera, *call.args)
    except Fault as error:
        fault.append(error.finding)
    stuck = camera.stop()
    end = max(event.end for event in camera.events) + 1
    end += int(AFTER_A_HANG * end) if stuck else 0
    for history in camera.histories.values():
        history.phases.sort()
    return Film(
        tuple(camera.events),
        dict(camera.histories),
        tuple(camera.moves),
        tuple(camera.registers),
        dict(camera.uses),
        (*kernel.run.findings, *fault),
        stuck,
        not fault and is_right(call),
        end,
    )
