"""A request on one card and on two: recorded times of a step, and how words cross between cards."""

from __future__ import annotations

from functools import cache
from typing import Any

import plotly.graph_objects as go

from .. import explorer, peer_words
from ..source import Source, formula
from ..style import GREEN, GREY, INK, ORANGE, PALETTE, PINK, new_figure
from ..svg import Cell, Svg, box, document, label, tint
from ..tables import lines

RECORD = "records/h200_ranks.jsonl"
BATCHES = (1, 2, 4, 8, 16)
#: of each way to one result: its parts as (name, field, colour), and the field of the whole step
OWN = ("own call", "own_call_us", PALETTE[0])
WAYS = {
    "by NCCL": (
        (OWN, ("gather", "gather_us", ORANGE), ("merge", "merge_us", GREEN)),
        "in_order_us",
    ),
    "by peer memory": ((OWN, ("exchange and merge", "exchange_us", PINK)), "peers_us"),
}


@cache
def steps() -> tuple[dict[str, Any], ...]:
    """Recorded steps as CUDA graphs, by length."""
    found = [row for row in lines(RECORD) if row["graph"] and "peers_us" in row]
    return tuple(sorted(found, key=lambda row: row["kv_len"]))


def steps_of(batch: int) -> list[dict[str, Any]]:
    """Those of one batch size."""
    return [row for row in steps() if row["batch"] == batch]


def source() -> Source:
    """The record's cards and date."""
    row = steps()[0]
    card = f"{row['world']} {row['environment']['card']['name']}"
    return Source("recorded", card=card, date=row["time"][:10])


class RanksExplorer(explorer.Explorer):
    """A step of two ranks as a share of one card's time, in parts, by NCCL and by peer memory."""

    frames_over = "batch"

    knobs = explorer.knobs(
        batch=explorer.steps("requests", BATCHES, 1, "250px"),
        microseconds=explorer.tick("in microseconds", False),
    )

    def figure(self, state: dict[str, Any]) -> go.Figure:
        rows = steps_of(state["batch"])
        unit = [1.0 if state["microseconds"] else row["alone_us"] for row in rows]
        shares = {
            way: [row[step] / row["alone_us"] for row in rows] for way, (_, step) in WAYS.items()
        }
        first = rows[0]
        figure = new_figure(
            f"{_requests(state['batch'])} of {first['kv_len']:,} tokens on two cards: "
            + ", ".join(f"{share[0]:.2f} {way}" for way, share in shares.items())
            + " (one card: 1)",
            x="tokens of a request",
            y="us" if state["microseconds"] else "of one card's time",
            height=400,
        )
        lengths = [f"{row['kv_len']:,}" for row in rows]
        alone = [row["alone_us"] / u for row, u in zip(rows, unit, strict=True)]
        figure.add_bar(
            x=lengths, y=alone, name="one card", marker_color=GREY, offsetgroup="one card",
            customdata=[row["alone_us"] for row in rows],
            hovertemplate="one card: %{customdata:.1f} us<extra></extra>",
        )  # fmt: skip
        # marks lie over the bars of their group, of as many groups
        figure.add_scatter(
            x=lengths, y=[None] * len(rows), offsetgroup="one card", showlegend=False
        )
        for way, (parts, step) in WAYS.items():
            _add_way(figure, way, parts, step, rows, lengths, unit)
        if not state["microseconds"]:
            figure.add_hline(y=1, line={"color": GREY, "dash": "dot", "width": 1})
        figure.update_xaxes(type="category")
        figure.update_layout(margin={"b": 100}, legend={"y": -0.28}, scattermode="group")
        return figure

    def note(self, state: dict[str, Any]) -> str:
        words = (
            "At each length, from the left: one card, by NCCL, by peer memory. A bar stacks parts "
            "that were timed alone; a mark is the whole step, timed as one."
        )
        return f"<div>{words} {source().chip()}</div>"


def _requests(batch: int) -> str:
    return f"{batch} request{'s' * (batch > 1)}"


def _add_way(
    figure: go.Figure, way: str, parts: Any, step: str, rows: list[dict[str, Any]],
    lengths: list[str], unit: list[float],
) -> None:  # fmt: skip
    """Bars of a way's parts, stacked, and marks of its steps."""
    base = [0.0] * len(rows)
    for name, part, color in parts:
        heights = [row[part] / u for row, u in zip(rows, unit, strict=True)]
        figure.add_bar(
            x=lengths, y=heights, base=base, name=name, marker_color=color, offsetgroup=way,
            legendgroup=name, showlegend=not (name == OWN[0] and way != "by NCCL"),
            customdata=[row[part] for row in rows],
            hovertemplate=f"{way}, {name}: %{{customdata:.1f}} us<extra></extra>",
        )  # fmt: skip
        base = [b + h for b, h in zip(base, heights, strict=True)]
    figure.add_scatter(
        x=lengths, y=[row[step] / u for row, u in zip(rows, unit, strict=True)], mode="markers",
        name=f"step {way}", offsetgroup=way,
        marker={"symbol": "diamond" if way == "by NCCL" else "star", "size": 11, "color": INK},
        customdata=[row[step] for row in rows],
        hovertemplate=f"step {way}: %{{customdata:.1f}} us<extra></extra>",
    )  # fmt: skip


#: pixels of a word, and of what stands left of the first one
_WORD, _LEFT = 44, 150


class WordsExplorer(explorer.Explorer):
    """The memory of two ranks, word by word, at a moment of four calls."""

    source = formula("model of the kernel")
    frames_over = "moment"

    knobs = explorer.knobs(
        moment=explorer.integers("moment", 0, peer_words.MOVES, 30, width="420px"),
        halves=explorer.steps("halves", (1, 2), 2, "200px"),
        seed=explorer.integers("seed", 0, 9, 0, width="220px"),
    )

    def at(self, state: dict[str, Any]) -> peer_words.Ranks:
        """The ranks at the moment, or at their last one."""
        found = peer_words.moments(state["halves"], state["seed"])
        return found[min(state["moment"], len(found) - 1)]

    def figure(self, state: dict[str, Any]) -> Svg:
        ranks = self.at(state)
        finding = _finding(ranks)
        parts, y = [label(0, 10, finding, size=16, anchor="start")], 34
        for owner, halves in enumerate(ranks.memory):
            parts.append(label(0, y + 8, f"memory of rank {owner}", size=14, anchor="start"))
            y += 22
            for half, buffers in enumerate(halves):
                name = f"half {half}" if len(halves) > 1 else "the only half"
                parts.append(label(8, y + 17, name, size=12, anchor="start"))
                parts += _buffers(buffers, y)
                y += 42
            y += 10
        width = _LEFT + peer_words.RANKS * (peer_words.WORDS * _WORD + 70)
        return document(width, y, "".join(parts), finding)

    def note(self, state: dict[str, Any]) -> str:
        return (
            "<div>A number is the call that a word is of; an empty square has not come, or has "
            "been taken. Rank 0 has four turns where rank 1 has one.</div>"
        )


def _finding(ranks: peer_words.Ranks) -> str:
    if ranks.done:
        return "All calls have ended, and all words are empty again"
    where = [
        f"rank {rank} " + ("has ended" if call == peer_words.CALLS else f"is in call {call}")
        for rank, call in enumerate(ranks.calls)
    ]
    if ranks.hung:
        waiting = [rank for rank, call in enumerate(ranks.calls) if call < peer_words.CALLS]
        where = [f"rank {rank} waits for ever" for rank in waiting]
    said = " and ".join(where)
    if ranks.lost:
        said += f"; overwritten: {ranks.lost}, taken of a wrong call: {ranks.wrong}"
    return f"{said[0].upper()}{said[1:]}"


def _buffers(buffers: list[list[peer_words.Word | None]], y: float) -> list[str]:
    """One half of a rank's memory: a buffer for each rank."""
    parts = []
    for rank, words in enumerate(buffers):
        x = _LEFT + rank * (len(words) * _WORD + 70)
        parts.append(label(x - 8, y + 17, f"of {rank}", size=12, anchor="end"))
        for i, word in enumerate(words):
            cell = Cell("", title=f"word {i} of rank {rank}: empty")
            if word is not None:
                title = f"word {i} of rank {rank}, of call {word.call}"
                cell = Cell(str(word.call), tint(word.call), title)
            parts.append(box(x + i * _WORD, y, _WORD - 4, 34, cell, size=14))
    return parts
