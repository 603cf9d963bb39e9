"""Threads that one array row covers: a warp, or a whole warp group.

A gang of 128 threads is two to four times quicker and orders its four warps as no card does; one of
32 is what checks want. Threads of a gang that go different ways are fragments, each a block number
and a mask; the fragment at the lowest block runs first, and two at one block become one.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from . import arithmetic, card_arithmetic
from .findings import fault
from .parts import CtaLike
from .writer import ALL_LANES, BLOCKED, EXIT, constant_row

#: a mask of threads; True is all of them, which NumPy treats as no mask
Mask = Any


class Fragment:
    """Threads of a gang that stand at one block."""

    __slots__ = ("block", "mask", "ticket", "waits")

    def __init__(self, block: int, mask: Mask) -> None:
        self.block, self.mask = block, mask
        #: what they have arrived at and now wait for
        self.ticket: Any = None
        #: mbarrier -> the phase that they wait for
        self.waits: dict[Any, int] = {}


class Gang:
    """Threads [first, first + n) of a CTA."""

    def __init__(self, cta: CtaLike, first: int, n: int) -> None:
        self.cta, self.first, self.n = cta, first, n
        self.machine = cta.machine
        self.name = f"{_warps(first, n)} of CTA {cta.name}"
        self._make_registers()
        self.lane = np.arange(n) % 32
        self.warp_begin = np.arange(n) - self.lane
        self.threads = np.arange(n)
        self.all_set, self.none_set = b"\1" * n, bytes(n)
        self.fragments = [Fragment(0, True)]
        self.current = self.fragments[0]
        self.live: Mask = True
        #: number of the last cluster barrier phase that it arrived in
        self.cluster_phase = -1
        self.team: list[Gang] = [self]
        #: `wgmma.Issued` that are not committed; committed groups, and how many of them are done
        self.issued: list[Any] = []
        self.groups: list[list[Any]] = []
        self.done = 0
        #: cp.async writes that have not landed: open ones, and committed groups
        self.copies: list[Any] = []
        self.copy_groups: list[list[Any]] = []
        #: index among those that race checks tell apart
        self.agent = -1
        self.instructions = 0
        #: whether its last turn asked for what others leave
        self.asked = False
        numbers = cta.machine.numbers
        card = numbers == "card"
        self.ex2 = card_arithmetic.card_ex2 if card else arithmetic.ex2
        self.lg2 = card_arithmetic.card_lg2 if card else arithmetic.lg2
        self.rcp = card_arithmetic.card_rcp if card else arithmetic.rcp

    def _make_registers(self) -> None:
        counts, n = self.cta.program.writer.counts, self.n
        self.file32 = np.zeros((counts[4], n), np.uint32)
        file64 = np.zeros((counts[8], n), np.uint64)
        file16 = np.zeros((counts[2], n), np.uint16)
        self.U, self.S = list(self.file32), list(self.file32.view(np.int32))
        self.F = list(self.file32.view(np.float32))
        self.D, self.Q = list(file64), list(file64.view(np.int64))
        self.H, self.I = list(file16), list(file16.view(np.int16))
        self.G = list(file16.view(np.float16))
        predicates = np.zeros((counts[1], n), bool)
        self.P = list(predicates)
        #: all registers
        self.files = (predicates, file16, self.file32, file64)
        writer = self.cta.program.writer
        self.K = [
            self._own_constant(kind, value) if row is None else row
            for row, (kind, value) in zip(writer.literals(n), writer.constants, strict=True)
        ]

    def _own_constant(self, kind: str, value: Any) -> np.ndarray:
        value = self.cta.constant(value) if isinstance(value, tuple) else self._special(value)
        return constant_row(kind, value, self.n)

    def _special(self, name: str) -> Any:
        thread = np.arange(self.first, self.first + self.n)
        x, y, _ = self.cta.launch.block
        own = {"%laneid": thread % 32, "%warpid": thread // 32}
        own |= {"%tid.x": thread % x, "%tid.y": thread // x % y, "%tid.z": thread // (x * y)}
        return own[name] if name in own else self.cta.special(name)

    def branch(self, flags: np.ndarray, m: Mask, negated: bool, target: int, after: int) -> int:
        """Where the threads go on; those that do not branch become a fragment of their own."""
        raw = flags.tobytes()
        if m is True:
            if raw == self.all_set:
                return after if negated else target
            if raw == self.none_set:
                return target if negated else after
            taken = ~flags if negated else flags.copy()
            rest = ~taken
        else:
            taken = (~flags if negated else flags) & m
            rest = m & ~taken
            if 1 not in taken.tobytes():
                return after
            if 1 not in rest.tobytes():
                return target
        self.split(after, rest)
        self.current.mask = taken
        return target

    def split(self, block: int, mask: Mask) -> Fragment:
        """A new fragment of threads that go on elsewhere."""
        self.fragments.append(Fragment(block, mask))
        return self.fragments[-1]

    def clock(self) -> int:
        """%globaltimer and %clock64: rounds of the scheduler."""
        self.machine.timed = self.machine.clock
        return self.machine.timed

    def trap(self, pc: int, m: Mask) -> None:
        """The kernel ended itself."""
        raise fault(self, pc, "trap", "the kernel executed a trap")

    def _together(self, block: int, mask: np.ndarray) -> bool:
        """Whether all live threads that an .aligned instruction needs have come."""
        program = self.cta.program
        if program.by_group[block]:
            need = np.ones(self.n, bool)
        elif program.members[block]:
            need = np.repeat(mask.reshape(-1, 32).any(1), 32)
            if program.members[block] != ALL_LANES:
                need &= member_lanes(program.members[block])[self.lane]
        else:
            return True
        if self.live is not True:
            need = need & self.live
        return not arithmetic.some(need & ~mask)

    def _merge(self, f: Fragment) -> None:
        for other in self.fragments:
            if other is not f and other.block == f.block and other.ticket is None:
                mask = f.mask | other.mask
                f.mask = True if 0 not in mask.tobytes() else mask
                f.waits |= other.waits
                self.fragments.remove(other)
                return

    def run(self, budget: int) -> bool:
        """Run until every fragment waits, a poll repeats, or `budget` blocks are spent; whether
        anything moved."""
        program, machine, moved = self.cta.program, self.machine, False
        blocks, fragments = program.blocks, self.fragments
        starts, ends = program.starts, program.ends
        self.asked = False
        stuck: list[Fragment] = []
        while budget > 0:
            waiting = [f for f in fragments if f not in stuck] if stuck else fragments
            if not waiting:
                break
            f = waiting[0] if len(waiting) == 1 else min(waiting, key=lambda w: w.block)
            if len(fragments) > 1 and f.ticket is None:
                self._merge(f)
            block = f.block
            if f.mask is not True and not self._together(block, f.mask):
                stuck.append(f)
                continue
            self.current = f
            if machine.before_block is not None:
                machine.before_block(self, block)
            try:
                following = blocks[block](self, f.mask)
            except IndexError as error:
                raise fault(
                    self, starts[block], "out of bounds", f"shared memory, near here: {error}"
                ) from error
            if following == BLOCKED:
                stuck.append(f)
                continue
            moved = True
            budget -= 1
            self.asked |= program.asks[block]
            self.instructions += ends[block] - starts[block]
            if following == block and program.polls[block]:
                stuck.append(f)  # until another fragment of the gang has moved
                continue
            if stuck:
                stuck.clear()
            if following == EXIT:
                self._leave(f)
            else:
                f.block = following
        return moved

    def _leave(self, f: Fragment) -> None:
        """Threads exit; barriers of the cluster do not count them any more."""
        self.fragments.remove(f)
        count = self.n if f.mask is True else int(f.mask.sum())
        self.cta.cluster.leave(self, count)
        self.machine.progress += 1
        if f.mask is True:
            self.live = np.zeros(self.n, bool)
        else:
            self.live = ~f.mask if self.live is True else self.live & ~f.mask
        if not self.fragments:
            self.machine.checker.at_exit(self)


def _warps(first: int, n: int) -> str:
    if n <= 32:
        return f"warp {first // 32}"
    return f"warps {first // 32} to {(first + n - 1) // 32}"


@lru_cache(maxsize=64)
def member_lanes(members: int) -> np.ndarray:
    """Whether each of 32 lanes is in a member mask."""
    return (members >> np.arange(32) & 1).astype(bool)


def lanes_of(g: Gang, m: Mask) -> np.ndarray:
    """Threads of a mask, as numbers inside the gang."""
    return g.threads if m is True else m.nonzero()[0]
