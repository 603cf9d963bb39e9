"""A model of `cute.rank_exchange`: ranks that write words into each other's memory, and wait for
them there without flags, fences or a common clock.

In a call a rank writes its words to its buffer in the memory of every rank, then takes the words of
every rank from its own memory, in order: it polls a word until it is there, and leaves it empty.
Ranks take turns at random, rank 0 most often.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field

#: words of a rank's result; calls that each rank makes; how often each rank has its turn
WORDS, CALLS, TURNS = 4, 4, (4, 1)
RANKS = len(TURNS)
#: turns without a move after which the ranks count as hung: all poll, or have ended
PATIENCE = 400
#: words that are written and taken in all calls
MOVES = CALLS * RANKS * 2 * RANKS * WORDS


@dataclass(frozen=True)
class Word:
    """A written word: the call and the rank that it is of."""

    call: int
    rank: int


#: [rank that owns the memory][half][rank that writes][word]: None is empty
Memory = list[list[list[list[Word | None]]]]


@dataclass
class Ranks:
    """What is so after some turns."""

    memory: Memory
    #: of each rank the call that it is in, from 0; `CALLS` behind its last one
    calls: list[int] = field(default_factory=lambda: [0] * RANKS)
    #: words that were overwritten before they were taken; words of another call that were taken
    lost: int = 0
    wrong: int = 0
    hung: bool = False

    @property
    def done(self) -> bool:
        """Whether all calls have ended."""
        return all(call == CALLS for call in self.calls)


def empty(halves: int) -> Memory:
    """Memory that no one has written to."""
    return [[[[None] * WORDS for _ in range(RANKS)] for _ in range(halves)] for _ in range(RANKS)]


def _calls(rank: int, state: Ranks) -> Iterator[bool]:
    """One rank's calls, a step at a time; a step is whether anything moved."""
    halves = len(state.memory[0])
    for call in range(CALLS):
        half, word = call % halves, Word(call, rank)
        for owner in range(RANKS):
            places = state.memory[owner][half][rank]
            for i in range(WORDS):
                state.lost += places[i] is not None
                places[i] = word
                yield True
        for source in range(RANKS):
            places = state.memory[rank][half][source]
            for i in range(WORDS):
                while places[i] is None:
                    yield False
                state.wrong += places[i] != Word(call, source)
                places[i] = None
                # the last word of the last rank ends the call
                state.calls[rank] += (source, i) == (RANKS - 1, WORDS - 1)
                yield True
    while True:
        yield False


def moments(halves: int, seed: int) -> list[Ranks]:
    """The state at the beginning and after each turn in which something moved, until all calls have
    ended or all ranks poll in vain."""
    rng, state = random.Random(seed), Ranks(empty(halves))
    ranks = [_calls(rank, state) for rank in range(RANKS)]
    found, idle = [deepcopy(state)], 0
    while not state.done and not state.hung:
        (rank,) = rng.choices(range(RANKS), TURNS)
        moved = next(ranks[rank])
        idle = 0 if moved else idle + 1
        state.hung = idle > PATIENCE
        if moved or state.hung:
            found.append(deepcopy(state))
    return found
