"""The chart of speed in README: public kernels beside ours, from the record of the plain call."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import geometric_mean as mean

from ..bench.records import Row, problem_of, results
from ..bench.report import HEADLINES, OURS, PUBLIC, best_times, headline, origin
from ..verify.target_figures import PLAIN, rows_of
from .style import BLUE, GREY, ORANGE, PINK
from .svg import Svg, document, label

WIDTH, LEFT, RIGHT, TOP, STEP = 860, 190, 30, 92, 27
#: a colour and a shape a peer, so that colour never stands alone
MARKS = dict(zip(PUBLIC, ((BLUE, "circle"), (ORANGE, "square"), (PINK, "diamond")), strict=True))


def groups(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Label -> peer -> its time over ours, geometric mean over the cases of that many heads and
    requests (one query token, equal lengths).
    """
    us, found = best_times(rows), {}
    shapes = {row["case"]: problem_of(row) for row in results(rows, "ok")}
    ratios: dict[tuple[int, int], dict[str, list[float]]] = {}
    for case, times in us.items():
        p = shapes[case]
        if OURS in times and max(p.q_lens) == 1 and len(set(p.kv_lens)) == 1 and p.heads != 64:
            own = ratios.setdefault((p.heads, p.batch), {})
            for peer in PUBLIC:
                if peer in times:
                    own.setdefault(peer, []).append(times[peer] / times[OURS])
    for (heads, batch), peers in sorted(ratios.items(), key=lambda pair: (-pair[0][0], pair[0][1])):
        name = f"{heads} heads, batch {batch}"
        found[name] = {peer: mean(values) for peer, values in peers.items()}
    return found


def overall(rows: Sequence[Row]) -> tuple[int, float, float]:
    """Cases, and the best public kernel's time over ours: geometric mean and least."""
    found = [
        min(times[peer] for peer in PUBLIC if peer in times) / times[OURS]
        for times in best_times(rows).values()
        if OURS in times and any(peer in times for peer in PUBLIC)
    ]
    return len(found), mean(found), min(found)


def _mark(x: float, y: float, peer: str) -> str:
    colour, shape = MARKS[peer]
    if shape == "circle":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="6" fill="{colour}"/>'
    turn = f' transform="rotate(45 {x:.1f} {y:.1f})"' if shape == "diamond" else ""
    return f'<rect x="{x - 5:.1f}" y="{y - 5:.1f}" width="10" height="10" fill="{colour}"{turn}/>'


def _axis(bottom: float, most: float, scale: float) -> str:
    parts = []
    for tenth in range(10, int(10 * most) + 1, 5):
        x = LEFT + (tenth / 10 - 0.9) * scale
        dash = "" if tenth == 10 else ' stroke-dasharray="2 4"'
        parts.append(f'<path d="M{x:.1f} {TOP - 14}V{bottom:.1f}" stroke="{GREY}"{dash}/>')
        parts.append(label(x, bottom + 14, f"{tenth / 10:.1f}"))
    words = f"time of a public kernel / time of {OURS}; right of 1.0 {OURS} is quicker"
    return "".join(parts) + label(LEFT, bottom + 36, words, size=13, anchor="start")


def _legend(y: float) -> str:
    parts, x = [], float(LEFT)
    for peer in PUBLIC:
        parts += [_mark(x + 6, y, peer), label(x + 20, y, peer, size=13, anchor="start")]
        x += 60 + 7.2 * len(peer)
    return "".join(parts)


def chart() -> Svg:
    """One row for each number of heads and requests."""
    rows = rows_of(PLAIN)
    shown = groups(rows)
    most = max(value for peers in shown.values() for value in peers.values()) + 0.1
    scale = (WIDTH - LEFT - RIGHT) / (most - 0.9)
    bottom = TOP + STEP * len(shown)
    count, average, least = overall(rows)
    call = HEADLINES[headline(rows)]
    title = (
        f"The best public kernel takes {average:.2f} times as long as {OURS} ({count} cases, "
        f"geometric mean; least {least:.2f})"
    )
    where = f"{OURS}: {call}. {origin(rows)}. data/{PLAIN}"
    body = [
        '<rect width="100%" height="100%" fill="#FFFFFF"/>',
        label(16, 24, title, size=16, anchor="start"),
        _legend(54),
        _axis(bottom, most, scale),
    ]
    for number, (name, peers) in enumerate(shown.items()):
        y = TOP + number * STEP
        body.append(label(LEFT - 14, y, name, size=13, anchor="end"))
        body += [_mark(LEFT + (value - 0.9) * scale, y, peer) for peer, value in peers.items()]
    body.append(label(16, bottom + 60, where, size=12, anchor="start"))
    alt = f"{title}. Time of {', '.join(PUBLIC)} over ours by heads and batch. {where}"
    return document(WIDTH, bottom + 76, "".join(body), alt)
