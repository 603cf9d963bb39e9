"""Covering arrays: few cases in which every allowed pair of levels occurs.

Greedy, after AETG (Cohen, Dalal, Fredman, Patton, "The AETG system", IEEE TSE 23(7), 1997): a
case starts from a pair that is still missing and takes, factor by factor, the level that adds
most missing pairs. Equal arguments give equal cases.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import combinations, product

from ..core.errors import invalid

Case = dict[str, str]
#: one level of one factor
Level = tuple[str, str]
Pair = tuple[Level, Level]
#: how many cases a pair must still have, by its two levels
Missing = Counter[frozenset[Level]]
#: levels of a whole case in the order of the factors
Key = tuple[str, ...]
#: whether a case with these levels, among others, may exist; more levels never make it allowed
Allowed = Callable[[Mapping[str, str]], bool]


def pairs_of(case: Mapping[str, str], factors: Mapping[str, Sequence[str]]) -> list[Pair]:
    """The pairs of levels in a case, factors in their given order."""
    levels = [(name, case[name]) for name in factors]
    return list(combinations(levels, 2))


def allowed_pairs(factors: Mapping[str, Sequence[str]], allowed: Allowed) -> list[Pair]:
    """Every pair of levels of two factors that some allowed case has."""
    found = []
    for (a, levels_a), (b, levels_b) in combinations(factors.items(), 2):
        for left, right in product(levels_a, levels_b):
            if _complete({a: left, b: right}, factors, allowed) is not None:
                found.append(((a, left), (b, right)))
    return found


def cover(
    factors: Mapping[str, Sequence[str]], allowed: Allowed, *, times: int = 1, seed: int = 0
) -> list[Case]:
    """Different cases in which every allowed pair occurs at least `times` times.

    A pair of which fewer cases exist occurs as often as they do.
    """
    if times < 1:
        raise invalid("times", times, "1 or more")
    pairs = allowed_pairs(factors, allowed)
    missing: Missing = Counter(dict.fromkeys(map(frozenset, pairs), times))
    draw = random.Random(seed)
    cases: dict[Key, Case] = {}
    for pair in pairs:
        while missing[frozenset(pair)] > 0:
            case = _case_with(pair, factors, allowed, missing, draw)
            if _key(case, factors) in cases:
                other = _complete(dict(pair), factors, allowed, cases)
                if other is None:
                    break
                case = other
            cases[_key(case, factors)] = case
            missing.subtract(map(frozenset, pairs_of(case, factors)))
    return list(cases.values())


def _key(case: Mapping[str, str], factors: Mapping[str, Sequence[str]]) -> Key:
    return tuple(case[name] for name in factors)


def _case_with(
    pair: Pair,
    factors: Mapping[str, Sequence[str]],
    allowed: Allowed,
    missing: Missing,
    draw: random.Random,
) -> Case:
    """An allowed case that holds `pair` and many other missing ones."""
    case: Case = dict(pair)
    rest = [name for name in factors if name not in case]
    draw.shuffle(rest)
    for name in rest:
        levels = list(factors[name])
        draw.shuffle(levels)
        levels.sort(key=lambda level: -_gain((name, level), case, missing))
        for level in levels:
            longer = {**case, name: level}
            if _complete(longer, factors, allowed) is not None:
                case = longer
                break
    return case


def _gain(here: Level, case: Mapping[str, str], missing: Missing) -> int:
    """Missing pairs that a level forms with the levels of `case`."""
    return sum(missing[frozenset((here, there))] > 0 for there in case.items())


def _complete(
    case: Mapping[str, str],
    factors: Mapping[str, Sequence[str]],
    allowed: Allowed,
    known: Collection[Key] = (),
) -> Case | None:
    """The first allowed case with these levels that is not known, None where there is none."""
    # first levels throughout come before all other completions, and mostly they are allowed
    first = {**case, **{name: levels[0] for name, levels in factors.items() if name not in case}}
    if allowed(first) and _key(first, factors) not in known:
        return first
    if not allowed(case):
        return None
    for name, levels in factors.items():
        if name not in case:
            for level in levels:
                found = _complete({**case, name: level}, factors, allowed, known)
                if found is not None:
                    return found
            return None
    return None if _key(case, factors) in known else dict(case)
