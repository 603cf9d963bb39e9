"""The proof of the checks: delete one synchronising instruction at a time, and see it reported."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from .barriers import Mbarrier
from .findings import Fault
from .gang import Gang
from .kernel import EmulatedKernel, Options
from .machine import Machine
from .observe import Recorder
from .ptx import Instruction, Place
from .translate import Program

#: what is deleted -> opcodes
KINDS: dict[str, tuple[str, ...]] = {
    "mbarrier wait": ("mbarrier.try_wait", "mbarrier.test_wait"),
    "mbarrier arrive": ("mbarrier.arrive", "cp.async.mbarrier"),
    "mbarrier expect_tx": ("mbarrier.expect_tx",),
    "mbarrier init": ("mbarrier.init",),
    "named barrier": ("bar.sync", "bar.red", "bar.arrive", "barrier.sync"),
    "warp barrier": ("bar.warp",),
    "cluster barrier": ("barrier.cluster",),
    "wgmma wait": ("wgmma.wait_group",),
    "wgmma commit": ("wgmma.commit_group",),
    "wgmma fence": ("wgmma.fence",),
    "tcgen05 wait": ("tcgen05.wait",),
    "tcgen05 commit": ("tcgen05.commit",),
    "tcgen05 fence": ("tcgen05.fence",),
    "proxy fence": ("fence.proxy",),
    "fence": ("fence.", "membar"),
    "cp.async commit, wait": ("cp.async.commit", "cp.async.wait"),
}
#: a kernel with checks, then schedules that move results
TRIES = (
    Options("exact", check=True, stop=True),
    Options("exact", "adverse", 1, check=True, stop=True),
    Options("exact", "adverse", 2),
    Options("exact", "random", 3),
)


#: files whose lines say little about where an instruction belongs
PACED = ("wgmma commit", "wgmma wait")
NOWHERE = Place("?", 0)
WRAPPERS = ("/kernel.py", "/kernel_bf16.py", "/kernel_fp8.py")
#: an arrival in phases that nobody waits for, an mbarrier that nobody uses, a wait where no phase
#: has ended yet (the call fills each stage once), a tcgen05.fence that orders nothing new for the
#: accesses behind it, or a barrier behind which threads exit
IDLE = "idle"
#: a commit or wait that says when some of the products are done (for a barrier's sake, or so that
#: ptxas may use their registers again), where what reads results stands behind a wait for all
PACING = "pacing"


class Subject(Protocol):
    """A call in which instructions are deleted."""

    @property
    def args(self) -> tuple[Any, ...]:
        """Of the kernel, in order."""
        ...

    @property
    def written(self) -> Sequence[Tensor]:
        """Those of them that the kernel writes; they begin as zeros."""
        ...

    @property
    def results(self) -> Sequence[Tensor]:
        """What a deletion may not change unnoticed."""
        ...


class _Uses(Recorder):
    """Which phases of which barriers an instruction arrives in, and which are waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.arrivals: dict[int, set[tuple[int, int]]] = {}
        self.awaited: dict[int, int] = {}
        #: of each wait, whether a phase had ended when it passed
        self.waits: dict[int, bool] = {}
        #: of each tcgen05.fence, whether it ordered anything
        self.fences: dict[int, bool] = {}
        self._bars: list[Mbarrier] = []

    def arrival(self, g: Gang, bar: Any, pc: int) -> None:
        super().arrival(g, bar, pc)
        if isinstance(bar, Mbarrier):
            self._bars.append(bar)  # kept, so that no other gets its id
            self.arrivals.setdefault(pc, set()).add((id(bar), bar.phase))

    def waited(self, g: Gang, bar: Any, name: str, pc: int) -> None:
        super().waited(g, bar, name, pc)
        if isinstance(bar, Mbarrier):
            self.awaited[id(bar)] = max(self.awaited.get(id(bar), 0), bar.phase)
            self.waits[pc] = self.waits.get(pc, False) or bar.phase > 0

    def tensor_fence(self, pc: int, orders: bool) -> None:
        self.fences[pc] = self.fences.get(pc, False) or orders

    def finish(self, machine: Machine) -> None:
        super().finish(machine)
        used = {id(bar) for bar in self._bars} | set(self.awaited)
        for cta in machine.ctas:
            for bar in cta.mbarriers.values():
                here = self.arrivals.setdefault(bar.init_pc, set())
                if id(bar) in used:
                    here.add((id(bar), -1))

    def idle(self, pc: int) -> bool:
        """Whether an instruction arrived only in phases that nobody waited for, initialised an
        mbarrier that nobody used, waited only where no phase had ended, or was a tcgen05.fence
        that orders nothing new.
        """
        for had_effect in (self.waits, self.fences):
            if pc in had_effect:
                return not had_effect[pc]
        found = self.arrivals.get(pc, {(0, -1)})
        return all(phase >= self.awaited.get(bar, 0) for bar, phase in found)


@dataclass(frozen=True)
class Mutant:
    """One deletion: what, where, how it was noticed ("" where it was not), and the kernel's own
    line before it, where its line is that of a wrapper.
    """

    kind: str
    pc: int
    place: Place
    text: str
    noticed: str = ""
    near: Place = NOWHERE


def kind_of(s: Instruction) -> str:
    """The name in `KINDS` of a synchronising instruction, or ""."""
    return next((kind for kind, opcodes in KINDS.items() if s.opcode.startswith(opcodes)), "")


def mutants(kernel: EmulatedKernel, call: Subject) -> list[Mutant]:
    """The synchronising instructions that a call executes."""
    reached: dict[str, set[int]] = {}

    def watch(g: Gang, block: int) -> None:
        reached.setdefault(g.cta.program.kernel.name, set()).add(block)

    seen = EmulatedKernel(kernel.text, kernel.function, kernel.host, Options(watch=watch))
    seen(*call.args)
    found = []
    for name, blocks in reached.items():
        program = kernel.programs[name]
        for block in sorted(blocks):
            for pc in range(program.starts[block], program.ends[block]):
                s = program.kernel.code[pc]
                if kind_of(s):
                    near = _near(program.kernel.code, pc)
                    found.append(Mutant(kind_of(s), pc, s.place, s.text, near=near))
    return found


def _near(code: list[Instruction], pc: int) -> Place:
    """The nearest line at or before an instruction that is none of a wrapper."""
    own = (s.place for s in reversed(code[: pc + 1]) if not s.place.file.endswith(WRAPPERS))
    return next((place for place in own if "/common/" not in place.file), code[pc].place)


def prove(
    kernel: EmulatedKernel,
    calls: Sequence[Subject],
    chosen: Sequence[Mutant] | None = None,
    strict: bool = False,
) -> Iterator[Mutant]:
    """Each deletion with what noticed it in some call: a finding's kind, a fault's, or other
    results. `chosen` is all that the calls execute by default; all calls launch one kernel.
    `strict`: checks are (see `Options`).
    """
    tries = [replace(options, strict=strict and options.check) for options in TRIES]
    expected = [_results(kernel, call, tries[0]) for call in calls]
    program = kernel.programs[kernel.run.launches[0].kernel]
    uses = [_uses(kernel, call, strict) for call in calls]
    if chosen is None:
        every = {m.pc: m for call in calls for m in mutants(kernel, call)}
        chosen = [every[pc] for pc in sorted(every)]
    for mutant in chosen:
        broken = EmulatedKernel(kernel.text, kernel.function, kernel.host)
        edits = {mutant.pc: gone(program.kernel.code[mutant.pc])}
        broken.programs = {**kernel.programs, program.kernel.name: program.edited(edits)}
        noticed = ""
        for options in tries:
            for call, right in zip(calls, expected, strict=True):
                noticed = noticed or _notice(broken, call, options, right)
        seen = [u for u in uses if mutant.pc in {*u.arrivals, *u.waits, *u.fences}]
        if not noticed and (_is_last(program, mutant.pc) or seen):
            idle = all(u.idle(mutant.pc) for u in seen) or _is_last(program, mutant.pc)
            noticed = IDLE if idle else ""
        if not noticed and mutant.kind in PACED and _paces(program.kernel.code, mutant.pc):
            noticed = PACING
        yield replace(mutant, noticed=noticed)


def _paces(code: list[Instruction], pc: int) -> bool:
    """Whether all products are waited for behind an instruction that is no wait for all."""
    waits = [s.args[0] for s in code[pc:] if s.opcode.startswith("wgmma.wait_group")]
    own = code[pc].opcode.startswith("wgmma.wait_group")
    return "0" in waits[own:] and not (own and waits[0] == "0")


def _is_last(program: Program, pc: int) -> bool:
    """Whether a CTA's barrier is the last instruction before threads exit."""
    code = program.kernel.code
    named = kind_of(code[pc]) == "named barrier"
    return named and code[pc + 1].opcode in ("ret", "exit") and code[pc + 1].guard is None


def _uses(kernel: EmulatedKernel, call: Subject, strict: bool) -> _Uses:
    uses = _Uses()
    kernel.options = Options("exact", trace=True, check=strict, strict=strict)
    kernel.observe(uses, *call.args)
    return uses


def gone(s: Instruction) -> Instruction:
    """In the place of an instruction: nothing, or of a wait the answer that it has ended; of a
    reduction the thread's own flag.
    """
    text = f"// no {s.text}"
    if s.opcode.startswith(("mbarrier.try_wait", "mbarrier.test_wait")):
        return replace(s, opcode="setp.eq.s32", args=(s.args[0], "0", "0"), text=text)
    if s.opcode.startswith("bar.red"):
        return replace(s, opcode="mov.pred", args=(s.args[0], s.args[-1]), text=text)
    return replace(s, opcode="nanosleep.u32", args=("0",), text=text)


def _results(kernel: EmulatedKernel, call: Subject, options: Options) -> list[Tensor]:
    for tensor in call.written:
        tensor.zero_()
    kernel.options = options
    kernel(*call.args)
    return [tensor.clone() for tensor in call.results]


def _notice(kernel: EmulatedKernel, call: Subject, options: Options, expected: list[Tensor]) -> str:
    try:
        found = _results(kernel, call, options)
    except Fault as fault:
        kinds = [f.kind for f in kernel.run.findings]
        return kinds[0] if kinds else fault.finding.kind
    if kernel.run.findings:
        return kernel.run.findings[0].kind
    same = all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    return "" if same else "other results"
