"""Who runs next, for how long, and when copies land."""

from __future__ import annotations

import random

from ..core.errors import invalid
from .gang import Gang

#: fair: turns of equal length. greedy: each as far as it can. random: order and lengths by a seed.
#: late: as fair, but copies and products end when no warp can go on without them. adverse: random
#: and late.
SCHEDULES = ("fair", "greedy", "random", "late", "adverse")
#: that a seed changes
DRAWN = ("random", "adverse")
FAIR_BLOCKS, GREEDY_BLOCKS = 100, 20_000
RANDOM_BLOCKS = (1, 3, 30, 1000)
#: chance that one late copy lands in a round of an adverse schedule
LANDING = 0.3


class Schedule:
    """One of `SCHEDULES`; equal seeds give equal runs."""

    def __init__(self, name: str = "fair", seed: int = 0) -> None:
        if name not in SCHEDULES:
            raise invalid("schedule", repr(name), SCHEDULES)
        self.name, self.seed = name, seed
        self.late = name in ("late", "adverse")
        self._random = random.Random(seed) if name in DRAWN else None

    @property
    def draws(self) -> bool:
        """Whether a round depends on lots."""
        return self._random is not None

    def settle(self) -> None:
        """Draw no lots from here on."""
        self._random = None

    def order(self, gangs: list[Gang]) -> list[Gang]:
        """Gangs in the order of this round."""
        if self._random is not None:
            self._random.shuffle(gangs)
        return gangs

    def budget(self) -> int:
        """Blocks that the next gang may run."""
        if self._random is not None:
            return self._random.choice(RANDOM_BLOCKS)
        return GREEDY_BLOCKS if self.name == "greedy" else FAIR_BLOCKS

    def lands(self) -> bool:
        """Whether a late copy lands in this round, though somebody can go on."""
        return self._random is not None and self._random.random() < LANDING

    def pick(self, count: int) -> int:
        """Which of so many late copies lands."""
        return self._random.randrange(count) if self._random is not None else 0
