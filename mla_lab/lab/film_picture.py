"""Pictures of a film: lanes over slots, mbarriers at an instant, and where a warp stands."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

from . import film
from .film import Film
from .film_breaks import NOTHING, Break
from .source_lines import context, line_of
from .style import BLUE, GREEN, GREY, INK, ORANGE, PAGE_INK, PAGE_PAPER, PAGE_TINT, RED, SKY
from .svg import Svg, document, label
from .tables import Table, table

if TYPE_CHECKING:
    from .pair_film import PairFilm

WIDTH, LEFT, TOP = 960, 158, 58
LANE, STAGE_LANE = 15, 21
WARPS_HEIGHT = film.WARPS * LANE
PLOT = WIDTH - LEFT - 12
#: lanes below the warps: label, track of the film, colour
UNITS = (
    ("TMA copies", "copies", SKY),
    ("wgmma of warps 0-3", "products of warp group 0", GREEN),
    ("wgmma of warps 4-7", "products of warp group 1", GREEN),
    ("wgmma of warps 8-11", "products of warp group 2", BLUE),
)
#: fill of a warp's lane by warp group
FILLS = (GREEN, GREEN, ORANGE)
LEGEND = (
    ("PV", GREEN, 1.0), ("softmax", ORANGE, 1.0), ("QK", BLUE, 1.0), ("copy, filling", SKY, 1.0),
    ("waits", GREY, 0.6), ("waits for ever", RED, 0.6),
)  # fmt: skip
MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, monospace"


def role(warp: int) -> str:
    """A warp's name in menus and lanes."""
    extra = ", producer" if warp == 0 else ""
    return f"{warp}: {film.ROLES[warp // 4]}{extra}"


def finding(found: Film, made: Break) -> str:
    """The film in a sentence."""
    word = "right" if found.right else "wrong, or never written"
    if not found.findings:
        what = "" if made.name == NOTHING else f"{made.name}: "
        return f"{what}nothing found in {found.end:,} slots; the result is {word}"
    return f"{made.name}: {', '.join(found.kinds)}; the result is {word}"


def path(spans: Iterable[tuple[float, float]], y: float, height: float, end: int) -> str:
    """Rectangles of a lane over the slots of a film that ends at `end`, none thinner than 0.7."""
    scale = PLOT / end
    return "".join(
        f"M{LEFT + a * scale:.1f} {y:.1f}h{max(0.7, (b - a) * scale):.1f}v{height:.1f}"
        f"h-{max(0.7, (b - a) * scale):.1f}z"
        for a, b in spans
    )


def shape(path: str, fill: str, opacity: float = 1.0, more: str = "") -> str:
    """A path with its fill; nothing for an empty one."""
    return f'<path d="{path}" fill="{fill}" fill-opacity="{opacity}" {more}/>' if path else ""


def lane(found: Film | PairFilm, y: float, height: float, name: str, track: str, color: str) -> str:
    """A lane with its name: what a track of the film does when, waits aside."""
    busy = [(s.begin, s.end) for s in found.spans if s.track == track and s.kind != "wait"]
    words = label(LEFT - 8, y + height / 2, name, size=11, anchor="end")
    return shape(path(busy, y + 2, height - 4, found.end), color) + words


def legend(entries: Iterable[tuple[str, str, float]], gap: int, more: str = "") -> str:
    """Names beside their fill and its opacity, in one line."""
    parts, x = [], float(LEFT)
    for name, color, opacity in entries:
        parts.append(
            f'<rect x="{x}" y="34" width="12" height="11" fill="{color}" '
            f'fill-opacity="{opacity}" {more}/>'
        )
        parts.append(label(x + 17, 40, name, size=11, anchor="start"))
        x += gap + 6.2 * len(name)
    return "".join(parts)


def _warp_lanes(found: Film) -> list[str]:
    parts, waits = [], ""
    for warp in range(film.WARPS):
        y, track = TOP + warp * LANE, f"warp {warp}"
        mine = [s for s in found.spans if s.track == track]
        waits += path([(s.begin, s.end) for s in mine if s.kind == "wait"], y + 6, 3, found.end)
        parts.append(lane(found, y, LANE, f"warp {role(warp)}", track, FILLS[warp // 4]))
        if warp in found.stuck:
            last = max((s.end for s in mine), default=0)
            more = f'stroke="{RED}" stroke-dasharray="4 2"'
            left = path([(last, found.end)], y + 3, LANE - 6, found.end)
            parts.append(shape(left, RED, 0.25, more))
            if (found.end - last) * PLOT / found.end < 150:
                continue
            at = LEFT + last * PLOT / found.end + 6
            parts.append(label(at, y + LANE / 2, found.stuck[warp], size=10, anchor="start"))
    return [shape(waits, GREY, 0.6), *parts]


def _unit_lanes(found: Film) -> list[str]:
    top = TOP + WARPS_HEIGHT + 8
    return [lane(found, top + i * LANE, LANE, *unit) for i, unit in enumerate(UNITS)]


def _stage_lanes(found: Film) -> list[str]:
    parts, top = [], TOP + WARPS_HEIGHT + 16 + len(UNITS) * LANE
    scale = PLOT / found.end
    for stage in range(film.STAGES):
        y = top + stage * STAGE_LANE
        parts.append(label(LEFT - 8, y + 10, f"stage {stage} of the ring", size=11, anchor="end"))
        whole = path([(0, found.end)], y + 2, 17, found.end)
        parts.append(shape(whole, PAGE_PAPER, 1, f'stroke="{GREY}"'))
        for begin, end, what in found.stage(stage):
            filling = what == "filling"
            held = path([(begin, end)], y + 2, 17, found.end)
            parts.append(shape(held, SKY if filling else "#BBD7EA", 0.8, f'stroke="{INK}"'))
            if (end - begin) * scale > 42:
                middle = LEFT + (begin + end) / 2 * scale
                parts.append(label(middle, y + 11, what, size=10, ink=INK))
    return parts


def _cursor(found: Film, slot: int, warp: int) -> list[str]:
    x, height = LEFT + slot * PLOT / found.end, WARPS_HEIGHT + 16 + len(UNITS) * LANE + 66
    y = TOP + warp * LANE
    return [
        f'<path d="M{x:.1f} {TOP - 6}v{height}" stroke="{PAGE_INK}" stroke-width="1.6"/>',
        f'<path d="M{x - 5:.1f} {TOP - 9}h10l-5 7z" fill="{PAGE_INK}"/>',
        f'<circle cx="{x:.1f}" cy="{y + LANE / 2}" r="5" fill="{PAGE_PAPER}" stroke="{PAGE_INK}" '
        'stroke-width="2"/>',
    ]


def lanes(found: Film, made: Break, slot: int, warp: int) -> Svg:
    """Warps, units and stages over slots, with a cursor."""
    bottom = TOP + WARPS_HEIGHT + 16 + len(UNITS) * LANE + film.STAGES * STAGE_LANE
    alt = finding(found, made)
    body = [label(8, 14, alt, size=15, anchor="start"), legend(LEGEND, 36)]
    body += [*_warp_lanes(found), *_unit_lanes(found), *_stage_lanes(found)]
    body += _cursor(found, slot, warp)
    words = f"slot {slot:,} of {found.end:,}: instructions, not microseconds"
    body.append(label(LEFT, bottom + 14, words, size=11, anchor="start"))
    return document(WIDTH, bottom + 26, "".join(body), alt)


def _cell(found: Film, name: str, slot: int, waiting: set[str]) -> str:
    if name not in found.barriers:
        return "<td></td>"
    state = found.barriers[name].at(slot)
    came = state.expected - state.pending
    words = f"phase {state.phase}"
    if state.bytes:
        words += f", {state.bytes:,} B due"
    elif came:
        words += f", {came} of {state.expected} arrived"
    mark = f"outline:2px solid {ORANGE};outline-offset:-2px;" if name in waiting else ""
    tint = f"background:{SKY}55;" if state.bytes else (f"background:{GREEN}44;" if came else "")
    sign = " (waits)" if name in waiting else ""
    return f"<td style='padding:1px 5px;text-align:left;{mark}{tint}'>{words}{sign}</td>"


def _last(found: Film, warp: int) -> int:
    return max((s.end for s in found.spans if s.track == f"warp {warp}"), default=0)


def waits_at(found: Film | PairFilm, slot: int) -> dict[int, str]:
    """Names of the barriers at which warps wait at a slot."""
    waits = [s for s in found.spans if s.kind == "wait" and s.begin <= slot < s.end]
    return {int(s.track.split()[1]): s.name for s in waits if s.track.startswith("warp ")}


def waiting_for(found: Film, slot: int) -> dict[int, str]:
    """What each warp waits for at a slot; warps that run are not there."""
    now = waits_at(found, slot)
    for warp, name in found.stuck.items():
        if slot >= _last(found, warp):
            now[warp] = name
    return now


def barriers(found: Film, slot: int) -> str:
    """State of the mbarriers at a slot as an HTML table: a row a kind, a column a stage."""
    waiting = set(waiting_for(found, slot).values())
    kinds = [("kv.full", c) for c in range(film.CHUNKS)]
    rows = []
    for kind, chunk in [*kinds, ("kv.empty", None), ("p.full", None), ("p.empty", None)]:
        inner = "" if chunk is None else f", {chunk}"
        names = [f"{kind}[{s}{inner}]" for s in range(film.STAGES)]
        cells = "".join(_cell(found, name, slot, waiting) for name in names)
        head = kind if chunk is None else f"{kind}, part {chunk}"
        rows.append(f"<tr><td style='text-align:left;padding:1px 0'>{head}</td>{cells}</tr>")
    heads = "".join(
        f"<th style='text-align:left;padding:1px 5px;width:24%'>stage {s}</th>"
        for s in range(film.STAGES)
    )
    return (
        "<table style='font-size:11px;width:100%;table-layout:fixed;margin:0'>"
        f"<tr><th style='text-align:left'>mbarrier</th>{heads}</tr>{''.join(rows)}</table>"
    )


def _numbers(found: Film, slot: int) -> str:
    held, groups = found.held(slot), found.groups(slot)
    each = ", ".join(f"{held[4 * i]} in warps {4 * i}-{4 * i + 3}" for i in range(len(groups)))
    total = 32 * sum(held)
    flying = ", ".join(map(str, groups))
    return (
        f"<div style='font-size:12px;margin-top:3px'>registers a thread: {each}: {total:,} of "
        f"the launch's {film.CTA_REGISTERS:,} · wgmma-groups in flight by warp group: "
        f"{flying}</div>"
    )


def source_row(number: int, text: str, mine: bool) -> str:
    """A line of source with its number; one that is meant is marked."""
    style = f"background:{ORANGE}55;font-weight:700" if mine else ""
    mark = "▶" if mine else " "
    return f"<div style='white-space:pre;{style}'>{mark}{number:4d}  {escape(text)}</div>"


def stand(found: Film, slot: int, warp: int) -> str:
    """Where a warp stands at a slot: what it does, and its source line among its neighbours."""
    pc = found.at(warp, slot)
    place = film.caller(pc)
    lines = "".join(source_row(n, text, mine) for n, text, mine in context(place))
    waits = waiting_for(found, slot).get(warp)
    what = f"waits for <b>{escape(waits)}</b>" if waits else "runs"
    if warp not in found.stuck and slot >= _last(found, warp):
        what = "has exited, last seen"
    ptx = escape(film.program().kernel.code[pc].text)
    return (
        f"<div style='font-size:12px'><b>warp {role(warp)}</b> {what} at {place}</div>"
        f"<div style='font:11px {MONO};overflow-x:auto'>{lines}"
        f"<div style='opacity:0.75;white-space:pre'>PTX   {ptx}</div></div>"
    )


def panel(found: Film, slot: int, warp: int) -> str:
    """Barriers beside the source line."""
    box = f"background:{PAGE_TINT};color:{PAGE_INK};padding:6px 9px;border-radius:6px"
    return (
        "<div style='display:flex;flex-wrap:wrap;gap:8px;max-width:960px'>"
        f"<div style='{box};flex:1 1 440px'>{barriers(found, slot)}{_numbers(found, slot)}</div>"
        f"<div style='{box};flex:1 1 430px;min-width:0'>{stand(found, slot, warp)}</div></div>"
    )


def to_run(made: Break, schedule: str) -> Svg:
    """In place of a film that was not run: what will be changed, and where."""
    alt = f"Press Run: {made.name}, under the {schedule} schedule"
    lines = [f"{p}    {line_of(p).strip()[:76]}" for p in made.places[:5]]
    body = [label(12, 18, alt, size=15, anchor="start")]
    body.append(label(12, 46, made.sentence, size=13, anchor="start"))
    body += [label(12, 74 + 20 * i, text, size=12, anchor="start") for i, text in enumerate(lines)]
    return document(WIDTH, 90 + 20 * len(lines), "".join(body), alt)


def summary(films: Sequence[tuple[str, Film]]) -> Table:
    """What the emulator said of each break: findings, the first line named, and the result."""
    rows = []
    for name, found in films:
        first = str(film.own_place(found.findings[0])) if found.findings else ""
        result = "right" if found.right else "wrong"
        rows.append((name, ", ".join(found.kinds) or "nothing", first, result))
    return table(("break", "found", "first at", "result"), rows)
