"""Who last wrote and read each word of memory, and when."""

from __future__ import annotations

import numpy as np

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


def expand(offsets: Row, nbytes: int) -> Row:
    """4-byte words [n, words each] of accesses of `nbytes` at byte offsets [n]."""
    if nbytes <= 4:
        return (offsets >> 2)[:, None]
    return (offsets >> 2)[:, None] + np.arange(nbytes >> 2)


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
    """Of one CTA's shared memory. An agent of -1 and a time of 0 are nobody's."""

    def __init__(self, nbytes: int) -> None:
        self.words = -(-nbytes // 16) * 4
        self.writer = np.full(self.words, -1, np.int32)
        self.when = np.zeros(self.words, np.int32)
        #: thread of the warp, -1 where the writer is no thread
        self.lane = np.full(self.words, -1, np.int8)
        #: whether an mbarrier lies there
        self.barrier = np.zeros(self.words, bool)
        self._agents: dict[int, int] = {}
        self._reads = np.zeros((4, self.words), np.int32)
        self._readers = np.zeros(0, np.int64)

    def reads_of(self, agent: int) -> Row:
        """Times at which an agent last read each word."""
        row = self._agents.get(agent)
        if row is None:
            row = self._agents[agent] = len(self._agents)
            if row == len(self._reads):
                more = np.zeros((row, self.words), np.int32)
                self._reads = np.concatenate([self._reads, more])
            self._readers = np.array(list(self._agents))
        return self._reads[row]

    def readers(self) -> tuple[Row, Row]:
        """Agents that have read anything, and their times [agents, words]."""
        return self._readers, self._reads[: len(self._readers)]


class GlobalShadow:
    """Of device memory: writers alone, and whether they wrote with an order."""

    def __init__(self, nbytes: int) -> None:
        self.writer = np.full(nbytes // 4, -1, np.int32)
        self.when = np.zeros(nbytes // 4, np.int32)
        self.strong = np.zeros(nbytes // 4, bool)

    def wrote(self, words: Row, agent: int, when: int, strong: bool) -> None:
        """An agent wrote words."""
        self.writer[words], self.when[words], self.strong[words] = agent, when, strong
