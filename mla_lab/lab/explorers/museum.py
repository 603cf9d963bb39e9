"""The museum: one bug at a time, with its story, its code and what the emulator said, as HTML."""

from __future__ import annotations

from html import escape
from typing import Any

from ...emulate import Finding
from ...emulate.ptx import Place
from .. import explorer
from ..film import own_place
from ..film_picture import MONO, source_row
from ..film_report import groups
from ..museum import BUGS, NAMES, Bug, Outcome, changed_places
from ..source import Source
from ..source_lines import context, line_of, written
from ..style import GREEN, GREY, PAGE_INK, PAGE_TINT, RED
from ..svg import Svg

BOX = f"background:{PAGE_TINT};color:{PAGE_INK};padding:7px 10px;border-radius:6px;font-size:13px"
#: findings that are shown, and places whose source is shown
SHOWN = 3


def finding(bug: Bug, made: Outcome) -> str:
    """The exhibit in a sentence."""
    if made.kind:
        return f"{bug.name}: found, {made.kind}"
    return f"{bug.name}: no check sees it"


def places(made: Outcome) -> list[Place]:
    """Lines that the first findings name, each once."""
    found = []
    for one, _ in groups(made.findings)[:SHOWN]:
        found += [own_place(one), *(place for _, place in one.others)]
    return list(dict.fromkeys(map(written, found)))


def code(bug: Bug, made: Outcome) -> str:
    """The model's listing, or the kernel's lines that the findings name, those marked."""
    named = places(made)
    if bug.lines():
        marked = {place.line for place in named}
        rows = [source_row(n, text, n in marked) for n, text in enumerate(bug.lines(), 1)]
        rows = rows if len(rows) < 34 else _near(rows, marked)
        return f"<div style='font:11px {MONO};overflow-x:auto'>{''.join(rows)}</div>"
    parts = []
    for place in (named or changed_places(bug.name))[:2]:
        rows = [source_row(n, text, mine) for n, text, mine in context(place, 3)]
        parts.append(f"<div style='font-size:12px'>{place}</div>{''.join(rows)}")
    return f"<div style='font:11px {MONO};overflow-x:auto'>{''.join(parts)}</div>" if parts else ""


def _near(rows: list[str], marked: set[int]) -> list[str]:
    """Rows within eight lines of a marked one."""
    keep = {n for m in marked for n in range(m - 8, m + 9)}
    return [row for n, row in enumerate(rows, 1) if n in keep]


def _said(bug: Bug, one: Finding, count: int) -> str:
    times = f", {count} times" if count > 1 else ""
    lines = [("at", own_place(one)), *one.others]
    where = "".join(
        f"<div style='font:11px {MONO}'>  {escape(who)} {written(place)}"
        f"{'' if bug.lines() else ': ' + escape(line_of(place).strip()[:70])}</div>"
        for who, place in lines
    )
    words = f"{escape(one.text)} ({escape(one.who)})"
    return f"<div><b style='background:{RED}33'>{one.kind}</b>{times}: {words}{where}</div>"


def report(bug: Bug, made: Outcome) -> str:
    """What the emulator said, and what came out."""
    every = groups(made.findings)
    said = "".join(_said(bug, one, n) for one, n in every[:SHOWN])
    if not every:
        said = "<div>All checks are silent.</div>"
    color = GREEN if made.right else RED
    result = "right" if made.right else "wrong"
    after = f"; {escape(made.detail)}" if made.detail else ""
    if not bug.lines():
        said += f"<div>The result is <b style='background:{color}33'>{result}</b>{after}.</div>"
    return said


def exhibit(bug: Bug) -> Svg:
    """Story on the left, code on the right, the report below."""
    made, (origin, symptom, mend) = bug.broken(), bug.text
    alt = finding(bug, made)
    mark = RED if made.kind else GREY
    head = f"<div style='font-size:16px;border-left:6px solid {mark};padding-left:8px'>"
    parts = (("From", origin), ("Symptom", symptom), ("Mend", mend))
    story = "".join(f"<p style='margin:0 0 6px'><b>{k}.</b> {escape(v)}</p>" for k, v in parts)
    shown = code(bug, made)
    beside = f"<div style='{BOX};flex:1 1 480px;min-width:0'>{shown}</div>" if shown else ""
    markup = (
        f"<div class='exhibit' style='max-width:960px'>{head}{escape(alt)}</div>"
        "<div style='display:flex;flex-wrap:wrap;gap:8px;margin:8px 0'>"
        f"<div style='{BOX};flex:1 1 380px;min-width:0'>{story}</div>{beside}</div>"
        f"<div style='{BOX}'>{report(bug, made)}</div></div>"
    )
    return Svg(markup, alt)


class MuseumExplorer(explorer.Explorer):
    """Twelve bugs, each run when the museum opens."""

    source = Source("predicted", detail="emulator")
    frames_over = "bug"
    knobs = explorer.knobs(bug=explorer.choice("bug", NAMES, NAMES[0], "340px"))

    def __init__(self, **state: Any) -> None:
        for bug in BUGS:
            bug.broken()
        super().__init__(**state)

    def figure(self, state: dict[str, Any]) -> Svg:
        return exhibit(BUGS[NAMES.index(state["bug"])])
