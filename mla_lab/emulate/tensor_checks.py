"""Checks of tensor memory and of the tensor core that works on it.

A product is an agent of the warp that issues it: it reads operands and writes accumulators at any
time until a barrier of a `commit` behind it completes. A warp's tcgen05.ld and st are agents too,
until its `wait::ld` or `wait::st`. Products of one warp come in order. All else must be ordered by
barriers and, where `strict`, by tcgen05.fence before and behind them, as the ISA has it; NVIDIA's
own kernels leave these fences out.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from .barriers import Mbarrier
from .gang import Gang
from .machine import Machine
from .parts import CheckerLike, CtaLike
from .shadow import AGENTS, LET_GO, LOADS, PRODUCTS, SEEN, STORES, TAKEN, Shadow
from .tcgen05 import Issued
from .tensor_memory import COLUMNS, LANES
from .tiles import operand_words

Row = np.ndarray
WAITS = {LOADS: "tcgen05.wait::ld", STORES: "tcgen05.wait::st"}


class TensorChecks:
    """Watches the tensor memory of all CTAs of a launch."""

    def __init__(self, checker: CheckerLike) -> None:
        self.checker = checker
        self._shadows: dict[int, Shadow] = {}
        #: allocating instruction by (CTA, first column)
        self._open: dict[tuple[int, int], tuple[Gang, int]] = {}
        #: of each warp, its last fence::after_thread_sync, if that took something new
        self._taken: dict[int, int | None] = {}

    def _shadow(self, cta: CtaLike) -> Shadow:
        found = self._shadows.get(id(cta))
        if found is None:
            found = self._shadows[id(cta)] = Shadow(4 * LANES * COLUMNS)
        return found

    # life of an allocation

    def allocated(self, g: Gang, first: int, count: int, pc: int) -> None:
        """tcgen05.alloc"""
        words = _words(np.arange(LANES), np.arange(first, first + count))
        self._shadow(g.cta).writer[words] = -1
        self._open[id(g.cta), first] = (g, pc)

    def freed(self, g: Gang, first: int, count: int, pc: int) -> None:
        """tcgen05.dealloc: everybody must be done with the columns."""
        words = _words(np.arange(LANES), np.arange(first, first + count))
        self._write(g, g.cta, words, pc, "deallocation", -1)
        del self._open[id(g.cta), first]

    def at_exit(self, g: Gang) -> None:
        """All threads of a warp have exited."""
        for warp, queue in g.cta.tensor_queues.items():
            if queue.issued and warp * 32 == g.first:
                pc = queue.issued[0].multiply.pc
                self.checker.note(g, pc, "open at exit", "a product that nobody committed")

    def finish(self, machine: Machine) -> None:
        """The launch is over."""
        for (_, first), (g, pc) in self._open.items():
            text = f"columns of tensor memory from {first} on were never deallocated"
            self.checker.note(g, pc, "open at exit", text)

    # accesses of warps

    def load(self, g: Gang, lanes: Row, columns: Row, pc: int) -> None:
        """tcgen05.ld"""
        words = lanes * COLUMNS + columns
        clock = self.checker.tick(g, pc, LOADS)
        self._read(g, g.cta, words, pc, "load", LOADS, clock)

    def store(self, g: Gang, lanes: Row, columns: Row, pc: int) -> None:
        """tcgen05.st"""
        words, shadow = lanes * COLUMNS + columns, self._shadow(g.cta)
        clock, agent = self.checker.tick(g, pc, STORES), AGENTS * g.agent + STORES
        self._write(g, g.cta, words, pc, "store", -1)
        shadow.writer[words], shadow.when[words] = agent, clock

    def wait(self, g: Gang, loads: bool) -> None:
        """tcgen05.wait::ld and wait::st"""
        agent = AGENTS * g.agent + (LOADS if loads else STORES)
        mine = self.checker.vectors[g.agent]
        mine[SEEN, agent] = len(self.checker.places[agent])
        if self.checker.strict:
            mine[TAKEN, agent] = mine[SEEN, agent]

    def fence(self, g: Gang, before: bool, pc: int) -> None:
        """tcgen05.fence"""
        if self.checker.strict:
            mine = self.checker.vectors[g.agent]
            source, target = (SEEN, LET_GO) if before else (LET_GO, TAKEN)
            new = (mine[source] > mine[target]) & self._uses_tensor
            new[AGENTS * g.agent + PRODUCTS] &= before  # a warp's own products are in order
            self.checker.machine.recorder.tensor_fence(pc, before and bool(new.any()))
            if not before:
                self._taken[g.agent] = pc if new.any() else None
            np.maximum(mine[target], mine[source], out=mine[target])

    def _used(self, g: Gang) -> None:
        """An access of tensor memory leans on the fence before it, if that took something new."""
        pc = self._taken.pop(g.agent, None)
        if pc is not None:
            self.checker.machine.recorder.tensor_fence(pc, True)

    @cached_property
    def _uses_tensor(self) -> Row:
        """Of each agent, whether it uses tensor memory."""
        agents = np.arange(self.checker.size)
        used = np.isin(agents % AGENTS, (PRODUCTS, LOADS, STORES))
        found: Row = used & (agents < self.checker.barriers)
        return found

    # the tensor core

    def product(self, g: Gang, issued: Issued) -> None:
        """tcgen05.mma"""
        checker, pc = self.checker, issued.multiply.pc
        agent, clock = AGENTS * g.agent + PRODUCTS, checker.tick(g, pc, PRODUCTS)
        for cta in issued.ctas:
            if not any(other.fragments for other in cta.gangs):
                checker.note(
                    g, pc, "tensor memory", f"CTA {cta.name} has exited; a product uses it"
                )
            operands = [operand_words(*operand) for operand in issued.operands()]
            checker.product_reads(g, cta, operands, pc, clock)
            shadow = self._shadow(cta)
            for part in issued.parts():
                lanes = np.arange(LANES)[part.lanes]
                words = _words(lanes, issued.column + np.arange(issued.columns))
                if issued.multiply.a_in_tensor:
                    a = _words(lanes, (issued.a & 0xFFFF) + np.arange(issued.a_columns))
                    self._read(g, cta, a, pc, "product", PRODUCTS, clock)
                if issued.keep:
                    self._unwritten(g, shadow, words, pc, "added to")
                self._write(g, cta, words, pc, "product", agent)
                shadow.writer[words], shadow.when[words] = agent, clock

    def committed(self, g: Gang) -> Row:
        """tcgen05.commit: what its barriers' waiters will have seen."""
        agent = AGENTS * g.agent + PRODUCTS
        vector: Row = self.checker.vectors[g.agent].copy()
        vector[:, agent] = len(self.checker.places[agent])
        if self.checker.strict:  # a commit lets go by itself
            np.maximum(vector[LET_GO], vector[SEEN], out=vector[LET_GO])
        return vector

    def arrives(self, bar: Mbarrier, seen: Row) -> None:
        """A commit's products are done."""
        np.maximum(bar.released, seen, out=bar.released)

    # order

    def _read(
        self, g: Gang, cta: CtaLike, words: Row, pc: int, what: str, part: int, clock: int
    ) -> None:
        self._used(g)
        shadow, agent = self._shadow(cta), AGENTS * g.agent + part
        self._unwritten(g, shadow, words, pc, "read")
        writer, when = shadow.writer[words], shadow.when[words]
        # products of one warp are in order
        self._late(g, words, (writer, when), pc, what, agent if part == PRODUCTS else -1)
        shadow.reads_of(agent)[words] = clock

    def _write(self, g: Gang, cta: CtaLike, words: Row, pc: int, what: str, own: int) -> None:
        self._used(g)
        shadow = self._shadow(cta)
        self._late(g, words, (shadow.writer[words], shadow.when[words]), pc, what, own)
        readers, reads = shadow.readers()
        vector = self._vector(g)
        for reader, times in zip(readers.tolist(), reads, strict=True):
            found = times[words]
            if (found > vector[reader]).any():
                self._late(g, words, (np.full(words.shape, reader), found), pc, what, own)

    def _vector(self, g: Gang) -> Row:
        """What lies before an access of tensor memory."""
        vector: Row = self.checker.vectors[g.agent, TAKEN if self.checker.strict else SEEN]
        return vector

    def _late(
        self, g: Gang, words: Row, found: tuple[Row, Row], pc: int, what: str, own: int
    ) -> None:
        """Earlier accesses `found` = (agents, clocks) must be ordered before this one."""
        checker, (agents, when) = self.checker, found
        vectors = checker.vectors[g.agent]
        late = (when > self._vector(g)[agents]) & (agents != own)
        if not late.any():
            return
        racing = late & (when > vectors[SEEN][agents])
        i = int((racing if racing.any() else late).reshape(-1).argmax())
        agent, clock = int(agents.reshape(-1)[i]), int(when.reshape(-1)[i])
        word, other = int(words.reshape(-1)[i]), checker.where(agent, clock)
        where = f"lane {word // COLUMNS}, column {word % COLUMNS} of tensor memory"
        warp, part = divmod(agent, AGENTS)
        waited = warp >= len(checker.vectors) or checker.vectors[warp, SEEN, agent] >= clock
        if not racing.any():
            text = f"no tcgen05.fence between {checker.names[agent]} and this {what}, {where}"
            checker.note(g, pc, "tcgen05 fence", text, (other,))
        elif part in WAITS and not waited:
            text = f"no {WAITS[part]} between {checker.names[agent]} and this {what}, {where}"
            checker.note(g, pc, "tcgen05 wait", text, (other,))
        else:
            text = f"{where}: this {what} and {checker.names[agent]} are not ordered"
            checker.note(g, pc, "race", text, (other,))

    def _unwritten(self, g: Gang, shadow: Shadow, words: Row, pc: int, how: str) -> None:
        missing = shadow.writer[words] < 0
        if missing.any():
            word = int(words.reshape(-1)[int(missing.reshape(-1).argmax())])
            text = f"lane {word // COLUMNS}, column {word % COLUMNS} of tensor memory, which "
            text += f"nobody has written, is {how}"
            self.checker.note(g, pc, "unwritten", text)


def _words(lanes: Any, columns: Row) -> Row:
    found: Row = np.asarray(lanes)[:, None] * COLUMNS + columns[None]
    return found
