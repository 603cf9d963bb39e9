"""The report of a film for a reader: who waits for what, and findings with their source lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from html import escape

from ..emulate.findings import Finding
from ..emulate.ptx import Place
from . import film
from .film import Film
from .film_picture import MONO, role
from .source_lines import line_of
from .style import PAGE_INK, PAGE_TINT, RED
from .tables import Table, table

#: findings of a report that are shown
SHOWN = 5
HANGS = ("deadlock", "livelock")


def groups(findings: Sequence[Finding]) -> list[tuple[Finding, int]]:
    """Findings of one kind between the same lines, as their first one and how many they are."""
    first: dict[object, Finding] = {}
    count: Counter[object] = Counter()
    for one in findings:
        places = [one.place, *(place for _, place in one.others)]
        key = one.kind if one.kind in HANGS else (one.kind, *places)
        first.setdefault(key, one)
        count[key] += 1
    return [(first[key], n) for key, n in count.items()]


def arrivers(barrier: str) -> list[int]:
    """Warps that arrive at a barrier in the kernel as it ships."""
    from .film_breaks import whole

    uses = {use for found in whole().uses.values() for use in found}
    return sorted({use.warp for use in uses if use[:2] == ("arrive", barrier)})


def waits(found: Film) -> list[tuple[str, str, list[int], Place]]:
    """Of a hang, by barrier: how many arrivals came, who waits, and at which line."""
    rows: dict[str, list[int]] = {}
    for warp, barrier in sorted(found.stuck.items()):
        rows.setdefault(barrier, []).append(warp)
    result = []
    for barrier, warps in rows.items():
        if barrier not in found.barriers:
            came = "which a warp of the group has not issued"
        else:
            state = found.barriers[barrier].at(found.end)
            arrived = f"{state.expected - state.pending} of {state.expected} arrived"
            came = f"phase {state.phase}: {arrived}"
        result.append((barrier, came, warps, film.caller(found.at(warps[0], found.end))))
    return result


def who_waits(found: Film) -> Table:
    """Of a hang: each barrier that somebody waits for, who, where, and who should arrive."""
    rows = [
        (barrier, came, _few(warps), _few(arrivers(barrier)), str(place))
        for barrier, came, warps, place in waits(found)
    ]
    return table(("barrier", "state", "warps that wait", "warps that arrive", "wait at"), rows)


def _few(warps: Sequence[int]) -> str:
    if len(warps) > 1 and warps[-1] - warps[0] == len(warps) - 1:
        return f"{warps[0]} to {warps[-1]}"
    return ", ".join(map(str, warps))


def _source(place: Place) -> str:
    text = escape(line_of(place).strip()[:88])
    return f"<div style='font:11px {MONO}'>&nbsp;&nbsp;{place}: <b>{text}</b></div>"


def _hang(found: Film, one: Finding) -> str:
    lines = [f"<div><b style='background:{RED}33'>{one.kind}</b>: no warp can go on</div>"]
    for barrier, came, warps, place in waits(found):
        who = f"{_few(warps)} ({role(warps[0]).split(': ')[1]})"
        many = "warps" if len(warps) > 1 else "warp"
        words = f"{many} {who} for <b>{barrier}</b>, {came}"
        lines.append(f"<div>{words}{_source(place)}</div>")
    return "".join(lines)


def _finding(one: Finding, count: int) -> str:
    times = f", {count} times" if count > 1 else ""
    kind = f"<b style='background:{RED}33'>{one.kind}</b>"
    head = f"{kind}{times}: {escape(one.text)} ({escape(one.who)})"
    places = [_source(film.own_place(one))]
    places += [f"<div>{escape(who)}:{_source(place)}</div>" for who, place in one.others]
    return f"<div style='margin-top:3px'>{head}{''.join(places)}</div>"


def report(found: Film) -> str:
    """The findings as HTML: what, who, and each line of the kernel's source that took part."""
    every = groups(found.findings)
    parts = [
        _hang(found, one) if one.kind in HANGS else _finding(one, n) for one, n in every[:SHOWN]
    ]
    if len(every) > SHOWN:
        parts.append(f"<div>and {len(every) - SHOWN} pairs of lines more</div>")
    style = f"background:{PAGE_TINT};color:{PAGE_INK};border-radius:6px;padding:6px 9px"
    return f"<div style='{style};font-size:12px;max-width:942px'>{''.join(parts)}</div>"
