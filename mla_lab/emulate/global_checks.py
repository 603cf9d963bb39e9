"""Races of global memory: what writes, releases and acquires of warps order.

Of each word the last writer is kept; a read that another warp overwrites later is not.
"""

from __future__ import annotations

import numpy as np

from .arithmetic import some
from .gang import Gang
from .parts import CheckerLike
from .shadow import AGENTS, BEFORE_SC, SEEN, GlobalShadow, expand

Row = np.ndarray
#: orders of an access to global memory that take or give what happened before
TAKES, GIVES = ("acquire", "acq_rel"), ("release", "acq_rel")


class GlobalChecks:
    """The accesses of one launch, beside its `Checker`."""

    def __init__(self, checker: CheckerLike, nbytes: int) -> None:
        self.checker = checker
        self.shadow = GlobalShadow(nbytes)
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
        """Threads of a warp read `n` bytes each."""
        pc, order = where
        words = expand(offsets, n)
        self._order(g, words, pc, order, "read")
        if order in TAKES:
            self._take(g, words, now=True)
        elif order == "relaxed":
            self._take(g, words, now=False)

    def write(self, g: Gang, offsets: Row, n: int, where: tuple[int, str]) -> None:
        """Threads of a warp write `n` bytes each."""
        pc, order = where
        words = expand(offsets, n)
        self._order(g, words, pc, order, "write")
        self.shadow.wrote(words, AGENTS * g.agent, self.checker.tick(g, pc), order != "weak")
        if order != "weak":
            self._give(g, words, order)

    def atomic(self, g: Gang, offsets: Row, n: int, where: tuple[int, str]) -> None:
        """atom and red of `n` bytes each."""
        pc, order = where
        words = expand(offsets, n)
        self._order(g, words, pc, order, "atomic")
        self._take(g, words, now=order in TAKES)
        self.shadow.wrote(words, AGENTS * g.agent, self.checker.tick(g, pc), strong=True)
        self._give(g, words, order)

    def _order(self, g: Gang, words: Row, pc: int, order: str, what: str) -> None:
        shadow = self.shadow
        writer, when = shadow.writer[words], shadow.when[words]
        late = when > self.checker.vectors[g.agent, SEEN][writer]
        if order != "weak":
            late &= ~shadow.strong[words]
        if some(late):
            i = int(late.reshape(-1).argmax())
            address = (1 << 40) + 4 * int(words.reshape(-1)[i])
            name = self.checker.machine.memory.describe(address)
            other = self.checker.where(int(writer.reshape(-1)[i]), int(when.reshape(-1)[i]))
            text = f"this {what} of global memory at {name} and the write are not ordered"
            self.checker.note(g, pc, "race", text, (other,))

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
