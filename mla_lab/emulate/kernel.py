"""An emulated kernel: called with the arguments of the compiled one, tensors on the CPU."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ..core.errors import invalid
from ..jit import Artifact
from .contraction import contracted
from .debugger import Debugger
from .device import Device
from .findings import Finding
from .host import HostCode
from .machine import Launch, Machine
from .observe import Recorder
from .ptx import parse
from .races import Checker
from .schedule import Schedule
from .translate import Program

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .gang import Gang

#: PTX texts whose translations stay: one takes up to half a second, and up to 60 MB
MOST_PROGRAMS = 8


@lru_cache(maxsize=MOST_PROGRAMS)
def programs(text: str) -> dict[str, Program]:
    """The translated kernels of a PTX text; the last few texts are remembered."""
    return {k.name: Program(k) for k in parse(text).values()}


@dataclass(frozen=True)
class Options:
    """How to run.

    numbers: "fast" (fp32 sums in any order), "exact" (one rounding an instruction) or "card" (as an
    H200 rounds). check: report races and the like, a warp at a time; otherwise a warp group runs in
    step. trace: keep events. schedule and seed: see `schedule.SCHEDULES`.
    """

    numbers: str = "fast"
    schedule: str = "fair"
    seed: int = 0
    check: bool = False
    trace: bool = False
    #: report also what is in order only because a wgmma-group is one of all four warps
    strict: bool = False
    #: end a run with checks at its first finding, which is a Fault then
    stop: bool = False
    #: called with (gang, block) before each block; threads then run a warp at a time
    watch: Callable[[Gang, int], None] | None = None

    @property
    def width(self) -> int:
        """Threads that run in step."""
        return 32 if self.check or self.watch or self.trace else 128


class Host(Protocol):
    """Where launches come from: host code, or a recording."""

    def launches(
        self, function: str, args: Sequence[Any], sizes: dict[str, list[int]]
    ) -> list[Launch]:
        """Launches of one call."""
        ...


@dataclass
class Run:
    """What one call did."""

    launches: list[Launch]
    findings: list[Finding] = field(default_factory=list)
    recorder: Recorder | None = None
    instructions: int = 0
    flops: int = 0
    copied_bytes: int = 0
    rounds: int = 0


class EmulatedKernel:
    """Runs a kernel's PTX for each launch that its host code makes."""

    #: of the arguments, for messages
    names: Sequence[str] = ()

    def __init__(
        self, text: str, function: str, host: Host, options: Options | None = None
    ) -> None:
        self.text, self.function, self.host = text, function, host
        self.options = options or Options()
        self.programs = programs(text)
        #: of the last call
        self.run = Run([])

    @classmethod
    def of(cls, artifact: Artifact, options: Options | None = None) -> EmulatedKernel:
        """The kernel of a compiled build."""
        if not artifact.ptx.is_file():
            raise invalid("build", f"{artifact.folder} without kernel.ptx", "a build with its PTX")
        return cls(
            artifact.ptx.read_text(), artifact.functions[0], _host(artifact.library), options
        )

    def __call__(self, *args: Any) -> None:
        """One call; tensors are read, and written where the kernel writes.

        Raises Fault where the kernel cannot go on. `run` holds what was found and counted.
        """
        self.observe(Recorder() if self.options.trace else None, *args)

    def observe(self, recorder: Recorder | None, *args: Any) -> None:
        """The same with a recorder of one's own."""
        device = Device()
        self.run = Run(
            self.host.launches(self.function, device.place(args, self.names), self.sizes)
        )
        for launch in self.run.launches:
            self._emulate(device, launch, recorder)
        device.fetch()

    @property
    def sizes(self) -> dict[str, list[int]]:
        """Bytes of the parameters of each kernel."""
        return {n: [p.nbytes for p in q.kernel.params] for n, q in self.programs.items()}

    def debug(self, *args: Any) -> Debugger:
        """A debugger at the beginning of a call's first launch; tensors are not written."""
        device = Device()
        launch = self.host.launches(self.function, device.place(args), self.sizes)[0]
        machine = self._machine(device, None, None)
        machine.begin(launch, Program(self._program(launch).kernel, by_line=True))
        return Debugger(machine)

    def _program(self, launch: Launch) -> Program:
        """What a launch runs, joined as ptxas does where numbers are a card's."""
        program = self.programs[launch.kernel]
        return contracted(program) if self.options.numbers == "card" else program

    def _machine(
        self, device: Device, checker: Checker | None, recorder: Recorder | None
    ) -> Machine:
        options = self.options
        machine = Machine(
            device.memory,
            numbers=options.numbers,
            width=options.width,
            schedule=Schedule(options.schedule, options.seed),
            checker=checker,
            recorder=recorder,
        )
        machine.before_block = options.watch
        return machine

    def _emulate(self, device: Device, launch: Launch, recorder: Recorder | None) -> None:
        options, run = self.options, self.run
        checker = Checker(options.strict, options.stop) if options.check else None
        machine = self._machine(device, checker, recorder)
        try:
            machine.run(launch, self._program(launch))
        finally:
            if checker:
                run.findings += checker.findings
                checker.close()
            run.recorder = recorder or run.recorder
            gangs = [g for cta in machine.ctas for g in cta.gangs]
            run.instructions += sum(g.instructions * g.n for g in gangs)
            run.flops += machine.flops
            run.copied_bytes += machine.copied_bytes
            run.rounds += machine.clock
            machine.close()


@lru_cache(maxsize=64)
def _host(library: Path) -> HostCode:
    return HostCode(library)
