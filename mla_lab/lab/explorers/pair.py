"""The SM100 kernel stepped: roles of the leader CTA, its tensor core, and tensor memory."""

from __future__ import annotations

from html import escape
from typing import Any

from .. import explorer, pair_film
from ..film_picture import LEFT, PLOT, TOP, WIDTH, lane, legend, path, shape, waits_at
from ..pair_film import PairFilm
from ..source import Source
from ..style import BLUE, GREEN, GREY, INK, ORANGE, PAGE_INK, PAGE_PAPER, PAGE_TINT, SKY
from ..svg import Svg, document, label

LANE, REGION = 18, 26
#: lanes below the warps: label, track of the film, colour
UNITS = (("TMA copies", "copies", SKY), ("tensor core", "tensor core", GREEN))
COLORS = {"softmax": ORANGE, "MMA": BLUE, "producer": SKY}
#: state of a region -> fill
FILLS = {"written": "#F0BE9A", "unread": "#A8DCCB", "sum": "#A8DCCB", "read": PAGE_PAPER}
WORDS = {
    "written": "the tensor core is writing it",
    "unread": "written, not yet read by all four softmax warps",
    "sum": "the sum so far; the next product adds to it",
    "read": "read: free for the next product",
}
LEGEND = (
    ("softmax", ORANGE, 1.0), ("MMA warp", BLUE, 1.0), ("producer", SKY, 1.0),
    ("tensor core", GREEN, 1.0), ("waits", GREY, 1.0), ("being written", "#F0BE9A", 1.0),
    ("holds", "#A8DCCB", 1.0), ("read", PAGE_PAPER, 1.0),
)  # fmt: skip


def _warps(film: PairFilm) -> list[str]:
    parts = []
    for warp, role in enumerate(pair_film.ROLES):
        y, track = TOP + warp * LANE, f"warp {warp}"
        waits = [(s.begin, s.end) for s in film.spans if s.track == track and s.kind == "wait"]
        parts.append(shape(path(waits, y + 7, 3, film.end), GREY, 0.6))
        parts.append(lane(film, y, LANE, f"warp {warp}: {role}", track, COLORS[role]))
    for i, unit in enumerate(UNITS, len(pair_film.ROLES)):
        parts.append(lane(film, TOP + i * LANE, LANE, *unit))
    return parts


def _regions(film: PairFilm, top: float) -> list[str]:
    parts, scale = [], PLOT / film.end
    for i, (name, (first, last)) in enumerate(pair_film.REGIONS.items()):
        y = top + i * REGION
        words = f"{name}: columns {first}-{last - 1}"
        parts.append(label(LEFT - 8, y + REGION / 2, words, size=11, anchor="end"))
        whole = path([(0, film.end)], y + 2, REGION - 5, film.end)
        parts.append(shape(whole, "none", more=f'stroke="{GREY}" stroke-dasharray="3 3"'))
        for held in film.held(name):
            drawn = path([held[:2]], y + 2, REGION - 5, film.end)
            parts.append(shape(drawn, FILLS[held.state], more=f'stroke="{INK}"'))
            words = f"{held.what}, read" if held.state == "read" else held.what
            if (held.end - held.begin) * scale > 5.5 * len(words):
                ink = PAGE_INK if held.state == "read" else INK
                middle = LEFT + (held.begin + held.end) / 2 * scale
                parts.append(label(middle, y + REGION / 2, words, size=10, ink=ink))
    return parts


def _commits(film: PairFilm, top: float) -> list[str]:
    ends = [end for name in pair_film.REGIONS for _, end in film.writes(name)]
    marks = "".join(f"M{LEFT + end * PLOT / film.end:.1f} {top}l-4 8h8z" for end in ends)
    words = label(LEFT - 8, top + 4, "commit: s_full, o_full", size=11, anchor="end")
    return [words, f'<path d="{marks}" fill="{PAGE_INK}"/>']


def lanes(film: PairFilm, slot: int) -> Svg:
    """Warps, units and regions of tensor memory over slots, with a cursor."""
    regions = TOP + (len(pair_film.ROLES) + 2) * LANE + 6
    commits = regions + len(pair_film.REGIONS) * REGION + 4
    word = "right" if film.right else "wrong"
    alt = (
        f"{film.tiles} tiles in {film.end:,} slots: {len(film.findings)} findings, "
        f"the result is {word}"
    )
    body = [label(8, 14, alt, size=15, anchor="start")]
    body.append(legend(LEGEND, 34, f'stroke="{GREY}"'))
    body += [*_warps(film), *_regions(film, regions), *_commits(film, commits)]
    at = LEFT + slot * PLOT / film.end
    body.append(
        f'<path d="M{at:.1f} {TOP - 6}V{commits + 10}" stroke="{PAGE_INK}" stroke-width="1.6"/>'
    )
    words = f"slot {slot:,} of {film.end:,}: instructions, not microseconds"
    body.append(label(LEFT, commits + 22, words, size=11, anchor="start"))
    return document(WIDTH, commits + 34, "".join(body), alt)


def states(film: PairFilm, slot: int) -> str:
    """What each region holds at a slot, and what each role waits for, as HTML."""
    rows, slot = [], min(slot, film.end - 1)  # at the end: what was there last
    for name in pair_film.REGIONS:
        held = film.at(name, slot)
        words = f"<b>{held.what}</b>: {WORDS[held.state]}" if held else "not written yet"
        rows.append(f"<div><b>{name}</b> {words}</div>")
    for warp in (0, 4, 5):
        waits = waits_at(film, slot).get(warp)
        what = f"waits for {escape(pair_film.named(waits))}" if waits else "runs, or has ended"
        rows.append(f"<div>warp {warp}, {pair_film.ROLES[warp]}: {what}</div>")
    style = f"background:{PAGE_TINT};color:{PAGE_INK};padding:6px 9px;border-radius:6px"
    return f"<div style='{style};font-size:12px;max-width:940px'>{''.join(rows)}</div>"


class PairExplorer(explorer.Explorer):
    """One CTA of the SM100 kernel over emulated steps."""

    source = Source("predicted", detail="emulator")

    def controls(self) -> explorer.Knobs:
        last = len(pair_film.film_of().steps()) - 1
        step = explorer.integers("step", 0, last, last // 2, width="620px")
        return explorer.knobs(step=step)

    def figure(self, state: dict[str, Any]) -> Svg:
        film = pair_film.film_of()
        slot = film.steps()[state["step"]]
        drawn = lanes(film, slot)
        return Svg(drawn.markup + states(film, slot), drawn.alt)
