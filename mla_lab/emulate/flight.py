"""Registers in flight: who touches accumulators of a wgmma, or what a tcgen05.ld loads, before a
wait; and who touches them before a wgmma without a fence.

A wgmma reads A and writes D at any time between its issue and the wait that covers it. Before that
no other instruction may touch D, or write A; and what other instructions did to these registers
before the issue must lie behind a wgmma.fence. A `mov` is no access: the compiler writes them to
name registers, and a register that is moved keeps what is known of its source. What a tcgen05.ld
loads may be used behind the `wait::ld` that follows; packing it is no use either.
"""

from __future__ import annotations

from typing import Any

from .gang import Gang
from .parts import CheckerLike, ProgramLike
from .ptx import NAME_IN, Instruction, Place

#: (what, instruction, registers or numbers)
Step = tuple[str, int, Any]


class _State:
    """Of one warp: registers touched since its last fence, and those in flight with their group."""

    def __init__(self) -> None:
        self.touched: set[str] = set()
        self.flying: dict[str, tuple[int, int]] = {}
        self.group = 0
        #: registers that hold what a product left, and whether a fence stands behind the last wait
        self.chained: set[str] = set()
        #: what a register was moved from: an access of the copy is one of the original
        self.origin: dict[str, str] = {}
        self.fenced = False


class Flight:
    """Checks the registers of all warps of a launch, block by block."""

    def __init__(self, checker: CheckerLike) -> None:
        self.checker = checker
        self._states: dict[int, _State] = {}
        self._steps: dict[int, list[Step]] = {}
        self._relevant: frozenset[str] | None = None
        self._loads = False

    def before_block(self, g: Gang, block: int) -> None:
        """A warp is about to run a block."""
        steps = self._steps.get(block)
        if steps is None:
            program = g.cta.program
            if self._relevant is None:
                self._relevant = _relevant(program)
                self._loads = any(s.opcode.startswith("tcgen05.ld") for s in program.kernel.code)
            steps = _steps_of(program, block, self._relevant, self._loads)
            self._steps[block] = steps
        if steps:
            state = self._states.setdefault(g.agent, _State())
            for step in steps:
                getattr(self, "_" + step[0])(g, state, step[1], step[2])

    def _touch(self, g: Gang, state: _State, pc: int, names: frozenset[str]) -> None:
        state.touched |= names
        state.touched.update(state.origin[n] for n in names if n in state.origin)
        if state.flying and not names.isdisjoint(state.flying):
            name = min(n for n in names if n in state.flying)
            issue = g.cta.program.kernel.code[state.flying[name][1]]
            other: tuple[str, Place] = ("issued", issue.place)
            what = "product" if issue.parts[0] == "wgmma" else "load"
            text = f"{name} belongs to a {what} that has not been waited for"
            self.checker.note(g, pc, "in flight", text, (other,))

    def _move(self, g: Gang, state: _State, pc: int, names: tuple[str, str]) -> None:
        target, source = names
        (state.touched.add if source in state.touched else state.touched.discard)(target)
        (state.chained.add if source in state.chained else state.chained.discard)(target)
        if source in g.cta.program.writer.rows:
            state.origin[target] = state.origin.get(source, source)
        else:
            state.origin.pop(target, None)
        if source in state.flying:
            state.flying[target] = state.flying[source]
        else:
            state.flying.pop(target, None)

    def _pack(self, g: Gang, state: _State, pc: int, names: tuple[set[str], set[str]]) -> None:
        targets, sources = names
        loads = [state.flying[source] for source in sources if source in state.flying]
        for target in targets:
            state.flying.pop(target, None)
        state.flying.update(dict.fromkeys(targets if loads else (), min(loads, default=(0, 0))))

    def _load(self, g: Gang, state: _State, pc: int, names: frozenset[str]) -> None:
        state.flying.update(dict.fromkeys(names, (0, pc)))

    def _loaded(self, g: Gang, state: _State, pc: int, _: None) -> None:
        state.flying.clear()

    def _fence(self, g: Gang, state: _State, pc: int, _: None) -> None:
        state.touched.clear()
        state.fenced = True

    def _define(self, g: Gang, state: _State, pc: int, names: frozenset[str]) -> None:
        state.chained -= names

    def _product(self, g: Gang, state: _State, pc: int, names: frozenset[str]) -> None:
        if not state.fenced and not names <= state.chained:
            text = "a product over new registers, and no wgmma.fence behind the last wait"
            self.checker.note(g, pc, "wgmma fence", text)
        state.chained |= names
        if not names.isdisjoint(state.touched):
            name = min(n for n in names if n in state.touched)
            text = f"{name} of a product was used before, and no wgmma.fence stands between"
            self.checker.note(g, pc, "wgmma fence", text)
        state.flying.update(dict.fromkeys(names, (state.group, pc)))
        state.origin = {n: o for n, o in state.origin.items() if o not in names}

    def _commit(self, g: Gang, state: _State, pc: int, _: None) -> None:
        state.group += 1

    def _wait(self, g: Gang, state: _State, pc: int, left: int) -> None:
        done, state.fenced = state.group - left, False
        state.flying = {n: at for n, at in state.flying.items() if at[0] >= done}


def _words(args: tuple[str, ...]) -> set[str]:
    return {word for arg in args for word in NAME_IN.findall(arg)}


def _operands(instruction: Instruction) -> frozenset[str]:
    """Registers of D, and of A where it is in registers."""
    args = instruction.args[:2] if instruction.args[1].startswith("{") else instruction.args[:1]
    return frozenset(_words(args))


def _plain_move(instruction: Instruction) -> bool:
    return instruction.parts[0] == "mov" and "{" not in "".join(instruction.args)


def _pairs(instruction: Instruction) -> list[tuple[str, str]]:
    """Targets and sources of a mov that packs or unpacks."""
    targets, sources = _words(instruction.args[:1]), _words(instruction.args[1:])
    return [(t, s) for t in targets for s in sources]


def _relevant(program: ProgramLike) -> frozenset[str]:
    """Registers of products, and those that are moved to or from them."""
    code = program.kernel.code
    products = [s for s in code if s.opcode.startswith("wgmma.mma_async")]
    found = set().union(*map(_operands, products)) if products else set()
    moves = [s.args for s in code if _plain_move(s)]
    loads = [s for s in code if s.opcode.startswith("tcgen05.ld")]
    if loads:
        found = found.union(*(_words(s.args[:1]) for s in loads))
        moves += [pair for s in code if s.parts[0] == "mov" for pair in _pairs(s)]
    size = -1
    while size != len(found):
        size = len(found)
        for target, source in moves:
            if (target in found or source in found) and source in program.writer.rows:
                found |= {target, source}
    return frozenset(found)


def _steps_of(
    program: ProgramLike, block: int, relevant: frozenset[str], loads: bool
) -> list[Step]:
    """What a block does to relevant registers; loads: some of them come from tensor memory."""
    steps: list[Step] = []
    for pc in range(program.starts[block], program.ends[block]):
        s = program.kernel.code[pc]
        if s.parts[0] == "wgmma":
            step: Step = {
                "fence": ("fence", pc, None),
                "commit_group": ("commit", pc, None),
                "wait_group": ("wait", pc, int(s.args[0]) if len(s.args) == 1 else 0),
            }.get(s.parts[1]) or ("product", pc, _operands(s))
            steps.append(step)
        elif s.opcode.startswith("tcgen05.ld"):
            steps.append(("load", pc, frozenset(_words(s.args[:1]))))
        elif s.opcode.startswith("tcgen05.wait::ld"):
            steps.append(("loaded", pc, None))
        elif loads and s.parts[0] == "mov" and "{" in "".join(s.args):
            if not relevant.isdisjoint(program.named[pc]):
                steps.append(("pack", pc, (_words(s.args[:1]), _words(s.args[1:]))))
        elif _plain_move(s):
            if s.args[0] in relevant:
                steps.append(("move", pc, s.args))
        else:
            names = relevant.intersection(program.named[pc])
            if names:
                steps.append(("touch", pc, names))
                defined = names.intersection(_words(s.args[:1]))
                if defined and s.parts[0] not in ("st", "red"):
                    steps.append(("define", pc, defined))
    return steps
