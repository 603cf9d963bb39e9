"""The film's CTA beside the same roles of a CTA on an H200, from clocks read inside the kernel."""

from __future__ import annotations

from collections.abc import Iterable

import plotly.graph_objects as go

from ..simulate import Timeline
from ..simulate.timeline import Event
from .explorers import anatomy
from .film import Film
from .film_breaks import whole
from .gantt import ROLE_LANES, role_lanes
from .source import Source

#: KV tiles of the recorded CTA that are drawn, and slots that a softmax of a tile takes at least
SHOWN, SOFTMAX_SLOTS = 8, 150


def joined(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Spans in order, those that touch made one."""
    found: list[tuple[int, int]] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found


def timeline(found: Film) -> Timeline:
    """Loads, QK, softmax and PV of the film's KV tiles, in slots."""

    def of(track: str, kind: str) -> list[tuple[int, int]]:
        return [(s.begin, s.end) for s in found.spans if s.track == track and s.kind == kind]

    issued = sorted({begin for begin, _ in of("copies", "copy")})
    tiles = [(begin, begin + 40) for begin in issued[::3][1:]]  # three copies a tile, Q first
    softmax = [span for span in of("warp 8", "run") if span[1] - span[0] > SOFTMAX_SLOTS]
    lanes = {
        "load": tiles,
        "qk": joined(of("products of warp group 2", "product")),
        "softmax": softmax,
        "pv": of("products of warp group 0", "product"),
    }
    events = [
        Event(ROLE_LANES.index(role), 0, role, float(begin), float(end), tile)
        for role, spans in lanes.items()
        for tile, (begin, end) in enumerate(spans)
    ]
    return Timeline.from_events(events, len(ROLE_LANES))


def recorded() -> tuple[Timeline, Source]:
    """The first tiles of a CTA of keep_ab on an H200, and the record's source."""
    spans = next(s for s in anatomy.recorded_rows()[1] if s.lanes == "role")
    every = anatomy.from_zero(spans.timeline)
    first = [event for event in every if event.tile < SHOWN]
    source = Source("recorded", card=spans.card, date=spans.date, detail=spans.case)
    return Timeline.from_events(first, every.lanes), source


def ahead(shown: Timeline) -> tuple[int, int]:
    """(how often QK of the next tile began before PV of a tile, of how many)."""
    begins = {(e.role, e.tile): e.start for e in shown}
    tiles = [t for t in range(SHOWN - 1) if ("qk", t + 1) in begins and ("pv", t) in begins]
    return sum(begins["qk", t + 1] < begins["pv", t] for t in tiles), len(tiles)


def beside_card() -> go.Figure:
    """Emulated above, in slots; recorded below, in microseconds."""
    card, source = recorded()
    mine = timeline(whole())
    words = " and ".join(
        f"{count} of {total} {kind}"
        for (count, total), kind in ((ahead(mine), "emulated"), (ahead(card), "recorded"))
    )
    shown = (
        ("emulated, slots of instructions", "predicted", mine),
        (f"{source.label}, us", "recorded", card),
    )
    title = f"QK of the next tile begins before PV of a tile: {words}"
    figure = role_lanes(shown, title, 470, numbered=True, vertical_spacing=0.19)
    figure.update_layout(margin_b=50)
    return figure
