"""The machine: CTAs and clusters of a launch, run in turns by a schedule until all have ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import mod
from typing import Any

import numpy as np

from ..core.errors import invalid, unsupported
from ..core.gpu import MAX_CLUSTER
from .barriers import ClusterBarrier, Mbarrier, NamedBarrier
from .findings import Fault, Finding
from .gang import Fragment, Gang
from .memory import BASE, RESERVED, GlobalMemory, SharedMemory
from .parts import Watcher
from .ptx import Place
from .repeats import Repeats
from .schedule import Schedule
from .tcgen05 import TensorQueue
from .tensor_map import TensorMap
from .tensor_memory import TensorMemory
from .translate import Program

#: fp32 sums of wgmma: rounded once an instruction, as an H200 cuts them, or once a batch
NUMBERS = ("exact", "card", "fast")
WARP_GROUP = 128
#: of a CTA: threads, and bytes of shared memory
MAX_THREADS, MAX_SHARED = 1024, 227 * 1024
#: rounds without a store, an arrival, a copy or an exit, after which threads spin in vain: of which
#: all ask for what others leave, and of which some compute
VAIN_ROUNDS, BUSY_ROUNDS = 400, 100_000
#: rounds after which a schedule draws no lots any more: equal states lead to equal ones
DRAWN_ROUNDS = 4096


@dataclass(frozen=True)
class Launch:
    """One kernel launch: dimensions, bytes of dynamic shared memory, and each parameter's bytes."""

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    cluster: tuple[int, int, int]
    shared_bytes: int
    params: tuple[bytes, ...]
    cooperative: bool = False


def _check(launch: Launch, program: Program) -> None:
    """Refuse a launch that a card refuses, and CTAs of warps that are not whole."""
    threads, cluster = int(np.prod(launch.block)), int(np.prod(launch.cluster))
    nbytes = program.kernel.static_shared + launch.shared_bytes
    if not 1 <= threads <= MAX_THREADS:
        raise invalid("block", launch.block, f"1 to {MAX_THREADS} threads")
    if threads % 32:
        raise unsupported("block", launch.block, "whole warps of 32 threads")
    if not 1 <= cluster <= MAX_CLUSTER or any(map(mod, launch.grid, launch.cluster)):
        got = f"{launch.grid} in clusters of {launch.cluster}"
        raise invalid("grid", got, f"whole clusters, of at most {MAX_CLUSTER} CTAs")
    if nbytes > MAX_SHARED:
        raise invalid("shared memory", f"{nbytes} bytes a CTA", f"at most {MAX_SHARED}")


class CTA:
    """A thread block."""

    def __init__(
        self, machine: Machine, program: Program, launch: Launch, index: tuple[int, int, int]
    ) -> None:
        self.machine, self.program, self.launch, self.index = machine, program, launch, index
        x, y, _ = launch.cluster
        place = [i % c for i, c in zip(index, launch.cluster, strict=True)]
        self.rank = place[0] + x * (place[1] + y * place[2])
        self.name = ",".join(map(str, index))
        self.num_threads = int(np.prod(launch.block))
        static = -(-program.kernel.static_shared // 16) * 16
        self.dynamic_begin = static
        self.shared = SharedMemory(static + launch.shared_bytes)
        self.mbarriers: dict[int, Mbarrier] = {}
        self.named: dict[int, NamedBarrier] = {}
        self.cluster = ClusterBarrier(self.num_threads)
        self.peers: list[CTA] = [self]
        self.gangs: list[Gang] = []
        #: tensor memory, where it is used, and the products of each warp
        self.tensor: TensorMemory | None = None
        self.tensor_queues: dict[int, TensorQueue] = {}

    def start(self, width: int) -> None:
        """Make the threads, `width` of them to a gang."""
        n = self.num_threads
        self.gangs = [Gang(self, first, min(width, n - first)) for first in range(0, n, width)]
        for g in self.gangs:
            mine = g.first // WARP_GROUP
            g.team = [other for other in self.gangs if other.first // WARP_GROUP == mine]

    def constant(self, value: tuple[Any, ...]) -> Any:
        """A value that is the same for all threads of the CTA."""
        if value[0] == "shared":
            begin, _ = self.program.kernel.shared[value[1]]
            begin = self.dynamic_begin if begin < 0 else begin
            return (self.rank << 24) + RESERVED + begin + value[2]
        if value[0] == "param":
            return BASE + self.machine.param_offset + value[1]
        kind, offset = value[1], value[2]
        dtype = np.dtype(f"{'i' if kind[0] == 's' else 'u'}{int(kind[1:]) // 8}")
        return int(np.frombuffer(self.machine.param_block, dtype, 1, offset)[0])

    def special(self, name: str) -> int:
        """A special register that all threads of the CTA share."""
        register, _, axis = name[1:].partition(".")
        i = "xyz".find(axis) if axis else 0
        launch = self.launch
        shape = [n // c for n, c in zip(launch.grid, launch.cluster, strict=True)]
        values: dict[str, Any] = {"ctaid": self.index, "nctaid": launch.grid, "ntid": launch.block}
        values["cluster_ctaid"] = [n % c for n, c in zip(self.index, launch.cluster, strict=True)]
        values |= {"cluster_nctaid": launch.cluster, "nclusterid": shape}
        values["clusterid"] = [n // c for n, c in zip(self.index, launch.cluster, strict=True)]
        values["cluster_ctarank"] = [self.rank]
        values["cluster_nctarank"] = [int(np.prod(launch.cluster))]
        values["dynamic_smem_size"] = [launch.shared_bytes]
        values["is_explicit_cluster"] = [int(np.prod(launch.cluster) > 1)]
        values |= dict.fromkeys(("globaltimer", "clock64", "clock", "smid"), (0,))
        if register not in values:
            raise invalid("special register", name, sorted(values))
        return int(values[register][i])


class Silent:
    """In place of a checker or a recorder that is not there: false, and its methods do nothing."""

    def __bool__(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Silent:
        setattr(self, name, self)  # the next time Python finds it without this method
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        return None


class Machine:
    """Runs launches on one device memory.

    numbers: see `NUMBERS`. width: threads of a gang, 32 or 128; checks want 32. late: copies land
    and products run only when somebody cannot go on without them.
    """

    def __init__(
        self,
        memory: GlobalMemory,
        *,
        numbers: str = "fast",
        width: int = WARP_GROUP,
        schedule: Schedule | None = None,
        checker: Watcher | None = None,
        recorder: Watcher | None = None,
    ) -> None:
        if numbers not in NUMBERS:
            raise invalid("numbers", repr(numbers), NUMBERS)
        if width not in (32, WARP_GROUP):
            raise invalid("width", width, (32, WARP_GROUP))
        self.memory, self.numbers, self.width = memory, numbers, width
        self.schedule = schedule or Schedule()
        self.late = self.schedule.late
        self.checker: Any = checker or Silent()
        self.recorder: Any = recorder or Silent()
        #: called with (gang, block) before each block
        self.before_block: Callable[[Gang, int], None] | None = None
        self.maps: dict[int, TensorMap] = {}
        self.jobs: list[Callable[[], None]] = []
        self.clock = self.progress = 0
        #: round in which a thread last asked for the time
        self.timed = 0
        self.flops = self.copied_bytes = 0
        self.param_offset, self.param_block = 0, b""
        self.ctas: list[CTA] = []
        self._gangs: list[Gang] = []
        #: progress after the last round, and rounds without any
        self._last, self._vain = 0, 0.0
        self._repeats = Repeats()

    def later(self, land: Callable[[], None]) -> None:
        """Finish a copy now, or under a late schedule when the schedule says."""
        if self.late:
            self.jobs.append(land)
        else:
            land()

    def run(self, launch: Launch, program: Program) -> None:
        """Run one launch to its end. Raises Fault where the kernel cannot go on."""
        self.begin(launch, program)
        while self.round():
            pass
        self.finish()

    def begin(self, launch: Launch, program: Program) -> None:
        """Make the CTAs of a launch; nobody has run. Raises InvalidInput for a launch that no card
        takes, Unsupported for one of warps that are not whole."""
        _check(launch, program)
        self._load_params(launch, program)
        self.maps.clear()
        self.ctas = self._make_ctas(launch, program)
        self._gangs = [g for cta in self.ctas for g in cta.gangs]
        self._last, self._vain, self._repeats = 0, 0.0, Repeats()
        self.checker.begin(self)
        self.recorder.begin(self)

    def round(self) -> bool:
        """A turn for everybody; whether anybody is left. Raises Fault where no warp can go on."""
        moved = busy = False
        with np.errstate(all="ignore"):
            for g in self.schedule.order(self._gangs):
                if g.fragments and g.run(self.schedule.budget()):
                    moved, busy = True, busy or not g.asked
            self.clock += 1
            if self.clock == DRAWN_ROUNDS:
                self.schedule.settle()
            moved |= self._land(moved and self.progress != self._last)
        left = any(g.fragments for g in self._gangs)
        step = VAIN_ROUNDS / BUSY_ROUNDS if busy else 1
        self._vain = self._vain + step if self.progress == self._last else 0
        self._last = self.progress
        if left and (not moved or self._vain > VAIN_ROUNDS):
            raise self._stuck(spinning=moved)
        steady = left and not self.schedule.draws
        if steady and (period := self._repeats.found(self, self.ctas)):
            if not self.jobs:
                raise self._stuck(spinning=True, period=period)
            self._land(moved=False)
            self._repeats.forget()
        return left

    def finish(self) -> None:
        """Land what is still on its way, and let checks look at the end."""
        while self.jobs:
            self.jobs.pop(0)()
        self.checker.finish(self)
        self.recorder.finish(self)

    def close(self) -> None:
        """Let go of CTAs and threads, which hold each other, and of what barriers collected."""
        for cta in self.ctas:
            for bar in cta.mbarriers.values():
                bar.released = bar.completed = None
            for g in cta.gangs:
                g.team = []
            cta.gangs, cta.peers = [], []
        self.ctas, self._gangs, self.checker, self.before_block = [], [], Silent(), None

    def _land(self, moved: bool) -> bool:
        """Finish a late copy, where the schedule wants it or no warp can go on."""
        if self.jobs and (not moved or self.schedule.lands()):
            for _ in range(1 if moved else 1 + len(self.jobs) // 8):
                self.jobs.pop(self.schedule.pick(len(self.jobs)))()
            self.progress += 1
            return True
        return False

    def _load_params(self, launch: Launch, program: Program) -> None:
        block = bytearray(max(1, program.kernel.param_bytes))
        for param, value in zip(program.kernel.params, launch.params, strict=True):
            block[param.offset : param.offset + param.nbytes] = value
        self.param_block = bytes(block)
        self.param_offset = self.memory.allocate(len(block), "the parameter block")
        self.memory.bytes[self.param_offset : self.param_offset + len(block)] = list(block)
        self.memory.open(self.param_offset, len(block))

    def _make_ctas(self, launch: Launch, program: Program) -> list[CTA]:
        x, y, z = launch.grid
        grid = [(i, j, k) for k in range(z) for j in range(y) for i in range(x)]
        ctas = [CTA(self, program, launch, index) for index in grid]
        clusters: dict[tuple[int, ...], list[CTA]] = {}
        for cta in ctas:
            of = tuple(i // c for i, c in zip(cta.index, launch.cluster, strict=True))
            clusters.setdefault(of, []).append(cta)
        for peers in clusters.values():
            peers.sort(key=lambda cta: cta.rank)
            barrier = ClusterBarrier(sum(cta.num_threads for cta in peers))
            for cta in peers:
                cta.peers, cta.cluster = peers, barrier
        for cta in ctas:
            cta.start(self.width)
        return ctas

    def _stuck(self, spinning: bool, period: int = 0) -> Fault:
        lines, place, who = [], Place("?", 0), ""
        for g in self._gangs:
            for f in g.fragments:
                pc = g.cta.program.starts[f.block]
                instruction = g.cta.program.kernel.code[pc]
                count = g.n if f.mask is True else int(f.mask.sum())
                state = _waits_for(f)
                words = f"{g.name}, {count} threads: {instruction.text[:70]}{state}"
                lines.append((words, instruction.place))
                if state or not who:
                    place, who = instruction.place, g.name
        kind = "livelock" if spinning else "deadlock"
        text = "threads spin on what nobody will write" if spinning else "no warp can go on"
        if period:
            text = f"threads spin: all is as it was {period} rounds before, and comes again"
        if self.jobs:
            text += f"; {len(self.jobs)} copies are on their way"
        return Fault(Finding(kind, place, who, text, tuple(lines)))


def _waits_for(f: Fragment) -> str:
    """What a fragment waits for, with the barrier's state."""
    if isinstance(f.ticket, tuple):
        bar = f.ticket[0]
        return f" [named barrier {bar.number}: {bar.arrived} threads have arrived]"
    for bar, phase in f.waits.items():
        return (
            f" [{bar.name}, phase {phase}: {bar.pending} of {bar.expected}"
            f" arrivals and {bar.bytes} bytes pending]"
        )
    return ""
