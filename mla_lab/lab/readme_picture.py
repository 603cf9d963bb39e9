"""The picture of the README: one batch, planned twice, on the 132 SMs of an H200."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..core.problem import Problem
from ..plan import make_plan
from ..simulate import H200, Timeline, simulate
from .style import BLUE, GREY, ORANGE, RED
from .svg import Svg, document, label

#: log-normal context lengths, as chat traffic has them: a few long ones among many short
BATCH, MEDIAN, SIGMA, SEED = 24, 2000, 1.1, 7
HEADS = 128
#: few busy SMs keep the clock that many lose to the power cap
CARD = replace(H200, burst_ghz=1.98)

WIDTH, LEFT, RIGHT = 860, 92, 16
LANE = 1.15
PANEL_TOPS = (84, 292)
#: what is drawn: the simulator's roles, under a reader's word and colour
DRAWN = (
    ("read keys, multiply", ("attend",), BLUE),
    ("write", ("write",), ORANGE),
    ("merge partials", ("merge",), RED),
)


def batch() -> Problem:
    """The batch of the picture: DeepSeek-V3's 128 heads, drawn lengths, longest first."""
    drawn = np.random.default_rng(SEED).normal(np.log(MEDIAN), SIGMA, BATCH)
    lengths = sorted(np.exp(drawn).astype(int).tolist(), reverse=True)
    return Problem((1,) * BATCH, tuple(lengths), HEADS)


def _spans(timeline: Timeline, roles: tuple[str, ...], scale: float) -> str:
    """One path of rectangles for all spans of `roles`."""
    parts = []
    for event in timeline:
        if event.role in roles:
            x, width = event.start * scale, (event.end - event.start) * scale
            y = event.sm * LANE
            parts.append(f"M{x:.1f} {y:.1f}h{width:.1f}v{LANE:.2f}h-{width:.1f}z")
    return "".join(parts)


def _panel(timeline: Timeline, top: int, heading: str, scale: float) -> str:
    height = timeline.lanes * LANE
    width = WIDTH - LEFT - RIGHT
    parts = [
        label(LEFT, top - 14, heading, size=15, anchor="start"),
        f'<rect x="{LEFT}" y="{top}" width="{width}" height="{height:.1f}" fill="#F4F5F8"/>',
        label(LEFT - 8, top + 8, "SM 0", size=12, anchor="end"),
        label(LEFT - 8, top + height - 8, f"SM {timeline.lanes - 1}", size=12, anchor="end"),
    ]
    for _, roles, colour in DRAWN:
        path = _spans(timeline, roles, scale)
        if path:
            parts.append(f'<path transform="translate({LEFT} {top})" fill="{colour}" d="{path}"/>')
    end = LEFT + timeline.makespan * scale
    parts.append(
        f'<path d="M{end:.1f} {top - 4}v{height + 8:.1f}" stroke="{GREY}" stroke-dasharray="4 3"/>'
    )
    return "".join(parts)


def _legend(y: float) -> str:
    parts, x = [], float(LEFT)
    for name, _, colour in DRAWN:
        parts.append(f'<rect x="{x}" y="{y - 6}" width="12" height="12" fill="{colour}"/>')
        parts.append(label(x + 18, y, name, size=13, anchor="start"))
        x += 48 + 7.2 * len(name)
    return "".join(parts)


def _axis(y: float, longest: float, scale: float) -> str:
    parts = []
    for tick in range(0, int(longest) + 1, 50):
        x = LEFT + tick * scale
        parts.append(f'<path d="M{x:.1f} {y}v5" stroke="{GREY}"/>')
        parts.append(label(x, y + 15, str(tick), size=12))
    parts.append(label(WIDTH - RIGHT, y + 34, "microseconds from the launch", anchor="end"))
    return "".join(parts)


def cover() -> Svg:
    """Both plans of the batch on one axis of predicted time."""
    problem = batch()
    whole, split = (simulate(make_plan(problem, policy=name), CARD) for name in ("none", "cost"))
    scale = (WIDTH - LEFT - RIGHT) / (whole.makespan * 1.02)
    gain = whole.makespan / split.makespan
    title = f"The same decode step, {gain:.1f} times sooner: a plan decides who reads which keys"
    bottom = PANEL_TOPS[1] + whole.lanes * LANE
    body = [
        '<rect width="100%" height="100%" fill="#FFFFFF"/>',
        label(LEFT, 24, title, size=18, anchor="start"),
        _legend(48),
        _panel(
            whole,
            PANEL_TOPS[0],
            f"each request whole: {whole.makespan:.0f} us, the longest one decides",
            scale,
        ),
        _panel(
            split,
            PANEL_TOPS[1],
            f"cut by the cost model: {split.makespan:.0f} us on all {split.lanes} SMs",
            scale,
        ),
        _axis(bottom, whole.makespan, scale),
        label(LEFT, bottom + 34, "simulated for an H200, not measured", size=12, anchor="start"),
    ]
    lengths = problem.kv_lens
    alt = (
        f"Two charts of {whole.lanes} SMs over time for one decode step of {problem.batch} "
        f"requests with {lengths[-1]} to {lengths[0]} cached tokens and {HEADS} heads, simulated "
        f"for an H200. Without splitting, a few SMs work for {whole.makespan:.0f} microseconds "
        f"and most stand idle; cut by the cost model, all of them finish by "
        f"{split.makespan:.0f} microseconds."
    )
    return document(WIDTH, bottom + 50, "".join(body), alt)
