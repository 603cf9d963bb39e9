"""Who last wrote and read each word of memory, and when."""

from __future__ import annotations

from typing import Any

import numpy as np

from .memory import RESERVED
from .ptx import SIZES, Kernel

Row = np.ndarray
WARP, ALL_LANES = 32, 0xFFFFFFFF
#: agents of a warp: its own accesses, its products, its cp.async copies, its loads from tensor
#: memory and its stores to it
PRODUCTS, COPIES, LOADS, STORES, AGENTS = 1, 2, 3, 4, 5
UNITS = {PRODUCTS: "product", COPIES: "cp.async", LOADS: "tcgen05.ld", STORES: "tcgen05.st"}
#: what a warp has seen, what of it lies before a fence.proxy.async, and what before a fence.sc of
#: anybody; where `strict`, also what of it tcgen05.fence::before_thread_sync has let go, and
#: ::after_thread_sync has taken
SEEN, FENCED, BEFORE_SC, LET_GO, TAKEN = 0, 1, 2, 3, 4


def expand(offsets: Row, nbytes: int, unit: int = 4) -> Row:
    """Words of `unit` bytes, [n, words each], of accesses of `nbytes` at byte offsets [n]."""
    if nbytes <= unit:
        return (offsets // unit)[:, None]
    return (offsets // unit)[:, None] + np.arange(nbytes // unit)


def least_store(kernel: Kernel, shared: bool) -> int:
    """Bytes of the smallest store to shared memory, or to memory that is not, 4 at most: neighbours
    that are smaller than a word may be different threads'."""
    least = 4
    for s in kernel.code:
        to_shared = any(p.startswith("shared") for p in s.parts)
        if s.parts[0] in ("st", "atom", "red") and to_shared is shared:
            count = s.args[0 if s.parts[0] == "atom" else -1].count(",") + 1
            least = min(least, count * SIZES.get(s.parts[-1], 4))
    return least


def lane_bits(lanes: Row) -> int:
    """Lanes of a warp, a bit each."""
    return ALL_LANES if len(lanes) == WARP else int((1 << lanes.astype(np.int64)).sum())


def since(arrivals: list[tuple[int, int]], clock: int) -> int:
    """Lanes of the arrivals (clock, lanes) at `clock` or later, a bit each."""
    lanes = 0
    for at, some in arrivals:
        if at >= clock:
            lanes |= some
    return lanes


class Shadow:
    """Of one CTA's shared memory: a cell of each 4-byte word, and, of words that somebody has used
    a part of, cells of `unit` bytes, the smallest that a kernel stores. An agent of -1 and a time
    of 0 are nobody's."""

    def __init__(self, nbytes: int, unit: int = 4) -> None:
        self.words = self._size = -(-nbytes // 16) * 4
        self.unit, self._each = unit, 4 // unit
        self.writer = np.full(self.words, -1, np.int32)
        self.when = np.zeros(self.words, np.int32)
        #: thread of the warp, -1 where the writer is no thread
        self.lane = np.full(self.words, -1, np.int8)
        #: whether an mbarrier lies there
        self.barrier = np.zeros(self.words, bool)
        #: the first cell of each word's parts, 0 of one that is whole
        self._parts = np.zeros(self.words, np.int32)
        self._agents: dict[int, int] = {}
        self._reads = np.zeros((4, self.words), np.int32)
        self._readers = np.zeros(0, np.int64)

    def cells(self, offsets: Row, nbytes: int) -> Row:
        """Cells, [n, cells each], of accesses of `nbytes` at byte offsets [n]. Words of which they
        use a part are followed in parts from here on, where a kernel stores any."""
        if nbytes < 4 and self.unit < 4:
            self._part(offsets)
        words = expand(offsets, nbytes)
        if self._size == self.words:
            return words
        first = self._parts[words]
        if not first.any():
            return words
        parts = np.arange(max(1, min(nbytes, 4) // self.unit))
        if nbytes < 4:
            parts = parts + (offsets % 4 // self.unit)[:, None, None]
        apart = (first > 0)[..., None]
        found = np.where(apart, first[..., None] + parts, words[..., None])
        return found.reshape(len(offsets), -1)

    def cells_of(self, words: Any) -> Any:
        """Cells of whole words, which are a slice or numbers, in any order."""
        apart = self._parts[words] > 0
        if self._size == self.words or not apart.any():
            return words
        numbers = np.arange(words.start, words.stop) if isinstance(words, slice) else words
        parts = self._parts[numbers[apart]][:, None] + np.arange(self._each)
        return np.concatenate([numbers[~apart], parts.reshape(-1)])

    def _part(self, offsets: Row) -> None:
        """Make cells of the parts of the words at these byte offsets."""
        words = offsets >> 2
        words = np.unique(words[self._parts[words] == 0])
        if not len(words):
            return
        first, self._size = self._size, self._size + self._each * len(words)
        if self._size > len(self.writer):
            self._grow(self._size)
        cells, whole = slice(first, self._size), np.repeat(words, self._each)
        for row in (self.writer, self.when, self.lane, self.barrier):
            row[cells] = row[whole]
        self._reads[:, cells] = self._reads[:, whole]
        self._parts[words] = np.arange(first, self._size, self._each)

    def _grow(self, more: int) -> None:
        """Make room for so many more cells."""
        for name in ("writer", "when", "lane", "barrier"):
            setattr(self, name, np.pad(getattr(self, name), (0, more)))
        self._reads = np.pad(self._reads, ((0, 0), (0, more)))

    def byte(self, cells: Any, i: int) -> int:
        """Byte of shared memory of the i-th of cells, which are a slice or numbers."""
        cell = cells.start + i if isinstance(cells, slice) else int(cells.reshape(-1)[i])
        if cell < self.words:
            return 4 * cell - RESERVED
        part = (cell - self.words) % self._each
        word = int((self._parts == cell - part).argmax())
        return 4 * word + self.unit * part - RESERVED

    def reads_of(self, agent: int) -> Row:
        """Times at which an agent last read each word."""
        row = self._agents.get(agent)
        if row is None:
            row = self._agents[agent] = len(self._agents)
            if row == len(self._reads):
                more = np.zeros_like(self._reads)
                self._reads = np.concatenate([self._reads, more])
            self._readers = np.array(list(self._agents))
        return self._reads[row]

    def readers(self) -> tuple[Row, Row]:
        """Agents that have read anything, and their times [agents, words]."""
        return self._readers, self._reads[: len(self._readers)]


class Reads:
    """Who read each word of device memory last, and when; of reads that no order joins, each."""

    def __init__(self, words: int) -> None:
        # of words that nobody has read `when` is 0, and `reader` says nothing
        self.reader = np.zeros(words, np.int32)
        self.when = np.zeros(words, np.int32)
        #: whether reads of several agents count, and when agents other than the last read each word
        self.several = np.zeros(words, bool)
        self._others: dict[int, Row] = {}

    def add(self, words: Row, agent: int, when: int, seen: Row) -> None:
        """An agent, which has `seen` others up to these clocks, reads words."""
        before, then = self.reader[words], self.when[words]
        apart = then > seen[before]
        if apart.any():
            self.several[words[apart]] = True
            for other in np.unique(before[apart]).tolist():
                mine = apart & (before == other)
                if other not in self._others:
                    self._others[other] = np.zeros(self.when.size, np.int32)
                self._others[other][words[mine]] = then[mine]
        self.reader[words], self.when[words] = agent, when

    def behind(self, words: Row, seen: Row) -> tuple[int, int, int] | None:
        """(word, agent, clock) of a read of these words that is not in `seen`."""
        found = [(self.reader[words], self.when[words])]
        if self.several[words].any():
            found += [(np.full_like(words, a), times[words]) for a, times in self._others.items()]
        for agent, when in found:
            late = when > seen[agent]
            if late.any():
                i = int(late.argmax())
                return int(words.flat[i]), int(agent.flat[i]), int(when.flat[i])
        return None


class GlobalShadow:
    """Of so many words of device memory: the last writers, whether they wrote with an order, and
    reads without an order and with one."""

    def __init__(self, words: int) -> None:
        # of words that nobody has written `when` is 0, and `writer` says nothing
        self.writer = np.zeros(words, np.int32)
        self.when = np.zeros(words, np.int32)
        self.strong = np.zeros(words, bool)
        self.reads = Reads(words), Reads(words)

    def wrote(self, words: Row, agent: int, when: int, strong: bool) -> None:
        """An agent wrote words."""
        self.writer[words], self.when[words], self.strong[words] = agent, when, strong
