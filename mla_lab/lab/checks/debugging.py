"""Exercises of notebooks 54 and 55: hangs, parities, and what a report says."""

from __future__ import annotations

from .hints import Attempt, Check, need, parts, short, truth

#: (warp -> barrier that it waits for, barrier -> warps that arrive at it, the circle)
HANGS: tuple[tuple[dict[int, str], dict[str, list[int]], set[str]], ...] = (
    ({0: "full", 1: "empty"}, {"full": [1], "empty": [0]}, {"full", "empty"}),
    (
        {0: "empty", 4: "p", 5: "p", 8: "full"},
        {"empty": [1, 4], "p": [8], "full": [0]},
        {"empty", "p", "full"},
    ),
    (  # two steps lead to the circle
        {1: "x", 2: "y", 3: "a", 4: "b"},
        {"x": [2], "y": [3], "a": [4], "b": [3]},
        {"a", "b"},
    ),
    (
        {2: "out", 3: "a", 4: "b"},
        {"out": [3], "a": [4], "b": [3]},
        {"a", "b"},
    ),
)


def _circle(attempt: Attempt) -> str:
    for waits, arrivers, right in HANGS:
        case = f"waits {waits} and arrivers {arrivers}"
        mine = attempt(dict(waits), {k: list(v) for k, v in arrivers.items()})
        need(isinstance(mine, set | frozenset | list | tuple), f"Return a set, not {short(mine)}")
        found = set(mine)
        need(found, f"With {case} nothing is returned: start at any warp that waits")
        need(found <= set(arrivers), f"With {case} you return {short(mine)}: barriers are wanted")
        need(
            not found > right,
            f"With {case} a barrier too many is there: keep what is met again, not the way to it",
        )
        need(found == right, f"With {case} the circle is longer or another: follow each arriver")
    return "So a deadlock is read: one barrier of the circle lacks an arrive, or counts it wrong."


def _parities(attempt: Attempt) -> str:
    for stages in (3, 2, 4):
        for tile in range(3 * stages):
            turn = tile // stages
            case = f"Tile {tile} of a ring of {stages}: "
            producer, consumer = parts(attempt(tile, stages), "producer's", "consumer's")
            need(
                producer in (0, 1) and consumer in (0, 1),
                case + f"a parity is 0 or 1, and you return {short((producer, consumer))}",
            )
            need(
                consumer == turn & 1,
                case + "the consumer waits for the phase of the stage's own turn; turns count "
                "how often the ring went round",
            )
            need(
                producer != consumer,
                case + "at the first turn the producer must pass a fresh barrier, and the "
                "consumer must not",
            )
    return "Both sides flip at each turn of the ring, and the producer is a phase ahead."


def _invisible(attempt: Attempt) -> str:
    from ..museum import BUGS

    seen = {bug.name: bool(bug.seen) for bug in BUGS}
    mine = attempt.plain()
    need(isinstance(mine, list | set | tuple), f"A list of names is wanted, not {short(mine)}")
    for name in mine:
        known = isinstance(name, str) and name in seen
        need(known, f"{short(name)} is no name of the table: copy the first column")
        need(not seen[name], f"'{name}' was found: its row says what the emulator reported")
    left = sum(not found for found in seen.values()) - len(set(mine))
    more = "1 more bug has" if left == 1 else f"{left} more bugs have"
    need(not left, f"{more} no finding: look for rows without one")
    return "For these a test of results, a bound on errors or a budget is the judge."


def _enough(attempt: Attempt) -> str:
    for stages in (1, 2, 3, 5):
        for slots in range(1, 8):
            mine = attempt(stages, slots)
            case = f"{stages} stages and {slots} slots: "
            mine = truth(mine, case + f"return True or False, not {short(mine)}")
            if slots < stages:
                need(not mine, case + f"tile {slots} uses the slot of tile 0, and nobody waited")
            need(mine or slots < stages, case + "the ring itself keeps the producer from lapping")
    return "As many slots as stages: what belongs to a stage is released with it."


CHECKS: dict[str, Check] = {
    "54.1": _circle,
    "54.2": _parities,
    "55.1": _invisible,
    "55.2": _enough,
}
