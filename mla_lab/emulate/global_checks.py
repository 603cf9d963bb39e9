"""Races of global memory: what reads, writes, releases and acquires of warps order."""

from __future__ import annotations

import numpy as np

from .arithmetic import some
from .gang import Gang
from .memory import BASE
from .parts import CheckerLike
from .shadow import AGENTS, BEFORE_SC, SEEN, GlobalShadow, expand, least_store

Row = np.ndarray
#: orders of an access to global memory that take or give what happened before
TAKES, GIVES = ("acquire", "acq_rel"), ("release", "acq_rel")


class GlobalChecks:
    """The accesses of one launch, beside its `Checker`."""

    def __init__(self, checker: CheckerLike, nbytes: int) -> None:
        self.checker = checker
        ctas = checker.machine.ctas
        #: bytes of the words that are followed
        self.unit = least_store(ctas[0].program.kernel, shared=False) if ctas else 4
        self.shadow = GlobalShadow(nbytes // self.unit)
        #: what released words hand on
        self.published: dict[int, Row] = {}
        #: vectors at the last fence of a whole card's scope, and what relaxed loads will take at
        #: the next
        self.at_fence = np.zeros_like(checker.vectors)
        self.at_next: dict[int, Row] = {}

    def fence(self, g: Gang, sc: bool) -> None:
        """A fence that orders accesses of all CTAs."""
        mine = self.checker.vectors[g.agent]
        if g.agent in self.at_next:
            self.checker.learn(g, self.at_next.pop(g.agent))
        if sc:
            np.maximum(mine[BEFORE_SC], mine[SEEN], out=mine[BEFORE_SC])
        self.at_fence[g.agent] = mine

    def read(self, g: Gang, offsets: Row, n: int, where: tuple[int, str]) -> None:
        """Threads of a warp read `n` bytes each; `where` is the instruction and its order."""
        pc, order = where
        words = expand(offsets, n, self.unit)
        self._order(g, words, pc, order, "read")
        clock, seen = self.checker.tick(g, pc), self.checker.vectors[g.agent, SEEN]
        self.shadow.reads[order != "weak"].add(words, AGENTS * g.agent, clock, seen)
        if order in TAKES:
            self._take(g, words, now=True)
        elif order == "relaxed":
            self._take(g, words, now=False)

    def write(self, g: Gang, offsets: Row, n: int, where: tuple[int, str]) -> None:
        """Threads of a warp write `n` bytes each."""
        pc, order = where
        words = expand(offsets, n, self.unit)
        self._order(g, words, pc, order, "write")
        self.shadow.wrote(words, AGENTS * g.agent, self.checker.tick(g, pc), order != "weak")
        if order != "weak":
            self._give(g, words, order)

    def atomic(self, g: Gang, offsets: Row, n: int, where: tuple[int, str]) -> None:
        """atom and red of `n` bytes each."""
        pc, order = where
        words = expand(offsets, n, self.unit)
        self._order(g, words, pc, order, "atomic")
        self._take(g, words, now=order in TAKES)
        self.shadow.wrote(words, AGENTS * g.agent, self.checker.tick(g, pc), strong=True)
        self._give(g, words, order)

    def _order(self, g: Gang, words: Row, pc: int, order: str, what: str) -> None:
        shadow, seen = self.shadow, self.checker.vectors[g.agent, SEEN]
        writer, when = shadow.writer[words], shadow.when[words]
        late = when > seen[writer]
        if order != "weak":
            late &= ~shadow.strong[words]
        if some(late):
            i = int(late.reshape(-1).argmax())
            found = (int(x.reshape(-1)[i]) for x in (words, writer, when))
            self._race(g, pc, f"this {what}", "write", *found)
        # accesses that both have an order do not race
        for reads in shadow.reads[: 1 if order != "weak" else 2] if what != "read" else ():
            if behind := reads.behind(words, seen):
                self._race(g, pc, f"this {what}", "read", *behind)

    def _race(self, g: Gang, pc: int, this: str, other: str, *found: int) -> None:
        """A race of an access with an earlier one: (word, agent, clock)."""
        word, agent, clock = found
        name = self.checker.machine.memory.describe(BASE + self.unit * word)
        text = f"{this} of global memory at {name} and the {other} are not ordered"
        self.checker.note(g, pc, "race", text, (self.checker.where(agent, clock),))

    def _take(self, g: Gang, words: Row, now: bool) -> None:
        found = map(self.published.get, words.reshape(-1).tolist())
        for vector in {id(each): each for each in found if each is not None}.values():
            if now:
                self.checker.learn(g, vector)
            else:
                held = self.at_next.get(g.agent)
                self.at_next[g.agent] = vector if held is None else np.maximum(held, vector)

    def _give(self, g: Gang, words: Row, order: str) -> None:
        mine = self.checker.vectors[g.agent]
        if order not in GIVES:
            # a fence.sc of another thread, which a barrier has ordered before, counts as well
            mine = self.at_fence[g.agent].copy()
            np.maximum(mine[SEEN], self.checker.vectors[g.agent, BEFORE_SC], out=mine[SEEN])
        # words that had one vector have one afterwards; none is changed in place
        before = {word: self.published.get(word) for word in words.reshape(-1).tolist()}
        after: dict[int, Row] = {}
        for word, held in before.items():
            if id(held) not in after:
                after[id(held)] = mine.copy() if held is None else np.maximum(held, mine)
            self.published[word] = after[id(held)]
