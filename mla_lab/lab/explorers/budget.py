"""Shared memory and register budget of a decode CTA, before it is written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from ...core.gpu import H200
from .. import explorer
from ..source import formula
from ..style import BLUE, GREEN, INK, ORANGE, PAPER, PINK, SKY, ink_on, new_figure

HEAD_DIM, LATENT = 576, 512
#: columns of Q that keep_ab has in registers: its rope and last k-step stay in shared memory
Q_COLUMNS = HEAD_DIM - 64 - 16
#: threads of a warpgroup, and the most registers that one thread can name
WARPGROUP, MOST_REGISTERS = 128, 255
#: registers of a thread for addresses, sums and the loop, as in keep_ab's PV warp groups
BESIDE = 32


@dataclass(frozen=True)
class Budget:
    """Resources of a CTA of `rows` query rows: shared memory in bytes, registers a thread."""

    rows: int
    tile_kv: int
    stages: int
    warpgroups: int
    q_in_registers: bool
    kv_bytes: int = 2

    def shared(self) -> dict[str, int]:
        """Bytes by buffer."""
        q = 0 if self.q_in_registers else self.rows * HEAD_DIM * 2
        return {
            "KV stages": self.stages * self.tile_kv * HEAD_DIM * self.kv_bytes,
            "Q": q,
            "P": self.rows * self.tile_kv * 2,
            "barriers": 1024,
        }

    @property
    def _scores(self) -> int:
        return self.rows * self.tile_kv // WARPGROUP

    def registers(self) -> dict[str, int]:
        """Registers of a thread of a PV warp group. With Q in registers another warp group has Q
        and the scores (`q_registers`).
        """
        threads = self.warpgroups * WARPGROUP
        return {
            "O": self.rows * LATENT // threads,
            "scores": 0 if self.q_in_registers else self._scores,
            "addresses, sums, loop": BESIDE,
        }

    def q_registers(self) -> int:
        """Registers of a thread of the warp group that has Q, an operand as wide as KV; or 0."""
        if not self.q_in_registers:
            return 0
        return self.rows * Q_COLUMNS * self.kv_bytes // 4 // WARPGROUP + self._scores + BESIDE

    def sm_registers(self) -> dict[str, int]:
        """Registers of the SM by warp group; a producer warp group would come on top."""
        return {
            "groups with O": self.warpgroups * WARPGROUP * self.registers_per_thread,
            "group with Q": WARPGROUP * self.q_registers(),
        }

    @property
    def shared_bytes(self) -> int:
        return sum(self.shared().values())

    @property
    def registers_per_thread(self) -> int:
        return sum(self.registers().values())

    def verdict(self) -> str:
        """ "fits", or the resources that are exceeded."""
        wrong = []
        if self.shared_bytes > H200.smem_per_block:
            over = (self.shared_bytes - H200.smem_per_block) / 1024
            wrong.append(f"{over:.0f} KB of shared memory too much")
        most = max(self.registers_per_thread, self.q_registers())
        if most > MOST_REGISTERS:
            wrong.append(f"{most} registers a thread of {MOST_REGISTERS}")
        every = sum(self.sm_registers().values())
        if every > H200.registers_per_sm:
            wrong.append(f"{every:,} registers of the SM's {H200.registers_per_sm:,}")
        return " and ".join(wrong) or "fits"


class BudgetExplorer(explorer.Explorer):
    """Stages, rows and warpgroups against 227 KB, 255 registers a thread and 65,536 of an SM."""

    source = formula("sizes")
    frames_over = "stages"

    knobs = explorer.knobs(
        rows=explorer.steps("rows", (16, 32, 64, 128), 64, "220px"),
        tile_kv=explorer.steps("tokens a tile", (32, 64, 128), 64, "250px"),
        stages=explorer.integers("stages", 1, 6, 2, width="240px"),
        warpgroups=explorer.integers("groups with O", 1, 3, 2, width="260px"),
        q_in_registers=explorer.tick("Q in registers", False),
        fp8=explorer.tick("8-bit KV", False),
    )

    def budget(self, state: dict[str, Any]) -> Budget:
        """The CTA of `state`."""
        plain = {key: state[key] for key in ("rows", "tile_kv", "stages", "warpgroups")}
        return Budget(**plain, q_in_registers=state["q_in_registers"], kv_bytes=2 - state["fp8"])

    def figure(self, state: dict[str, Any]) -> go.Figure:
        budget = self.budget(state)
        figure = new_figure(
            f"{state['stages']} stages, {state['rows']} rows: {budget.verdict()}",
            x="share of what one CTA can have",
            height=340,
        )
        colors = iter((BLUE, ORANGE, GREEN, PINK, BLUE, ORANGE, SKY, BLUE, ORANGE))
        lanes = (
            ("shared memory", budget.shared(), H200.smem_per_block, "bytes"),
            ("registers a thread", budget.registers(), MOST_REGISTERS, "registers"),
            ("registers of the SM", budget.sm_registers(), H200.registers_per_sm, "registers"),
        )
        for lane, parts, most, unit in lanes:
            for part, size in parts.items():
                color, words = next(colors), part.split(", ")
                room = 0.014 * max(map(len, words)) * most
                figure.add_bar(
                    orientation="h",
                    y=[lane],
                    x=[size / most],
                    name=part,
                    text=[",<br>".join(words) if size > room else ""],
                    textposition="inside",
                    textangle=0,
                    insidetextfont={"color": ink_on(color)},
                    insidetextanchor="middle",
                    marker={"color": color, "line": {"color": PAPER, "width": 1}},
                    hovertemplate=f"{part}: {size:,} {unit}<extra></extra>",
                    showlegend=False,
                )
        # a name that does not fit is left to the hover text
        figure.update_layout(barmode="stack", uniformtext={"minsize": 11, "mode": "hide"})
        figure.add_vline(x=1, line={"color": INK, "dash": "dash", "width": 2})
        figure.update_xaxes(tickformat=".0%", rangemode="tozero")
        return figure

    def note(self, state: dict[str, Any]) -> str:
        budget = self.budget(state)
        other = f", {budget.q_registers()} where Q is" if budget.q_in_registers else ""
        return (
            f"<div>{budget.shared_bytes:,} of {H200.smem_per_block:,} bytes; "
            f"{budget.registers_per_thread} of {MOST_REGISTERS} registers a thread of a group with "
            f"O{other}; {sum(budget.sm_registers().values()):,} of the SM's "
            f"{H200.registers_per_sm:,}. O alone is {budget.rows * LATENT:,} fp32 registers.</div>"
        )
