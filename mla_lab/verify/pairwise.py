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
    missing = Counter(dict.fromkeys(allowed_pairs(factors, allowed), times))
    draw = random.Random(seed)
    cases: list[Case] = []
    known: set[Key] = set()
    given_up: set[Pair] = set()
    for pair in list(missing):
        while missing[pair] > 0 and pair not in given_up:
            case = _case_with(pair, factors, allowed, missing, draw)
            if _key(case, factors) in known:
                other = _complete(dict(pair), factors, allowed, known)
                if other is None:
                    given_up.add(pair)
                    continue
                case = other
            known.add(_key(case, factors))
            cases.append(case)
            missing.subtract(pairs_of(case, factors))
    return cases


def _key(case: Mapping[str, str], factors: Mapping[str, Sequence[str]]) -> Key:
    return tuple(case[name] for name in factors)


def _case_with(
    pair: Pair,
    factors: Mapping[str, Sequence[str]],
    allowed: Allowed,
    missing: Mapping[Pair, int],
    draw: random.Random,
) -> Case:
    """An allowed case that holds `pair` and many other missing ones."""
    case: Case = dict(pair)
    rest = [name for name in factors if name not in case]
    draw.shuffle(rest)
    for name in rest:
        levels = list(factors[name])
        draw.shuffle(levels)
        levels.sort(key=lambda level: -_gain(name, level, case, missing, factors))
        for level in levels:
            longer = {**case, name: level}
            if _complete(longer, factors, allowed) is not None:
                case = longer
                break
    return case


def _gain(
    name: str,
    level: str,
    case: Mapping[str, str],
    missing: Mapping[Pair, int],
    factors: Mapping[str, Sequence[str]],
) -> int:
    """Missing pairs that `level` forms with the levels of `case`."""
    order = {factor: place for place, factor in enumerate(factors)}
    gain = 0
    for other, chosen in case.items():
        here, there = (name, level), (other, chosen)
        pair = (here, there) if order[name] < order[other] else (there, here)
        gain += missing.get(pair, 0) > 0
    return gain


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
