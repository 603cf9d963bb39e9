"""Charts of the anchor record for the benchmark notebook: pure functions of its rows."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from ..bench.records import Row, results
from ..bench.report import HEADLINES, OURS, PUBLIC, best_times, headline
from ..core.gpu import H200
from .measuring import Run
from .style import BLUE, GREY, ORANGE, RED, add_bars, new_figure

#: a case needs this much room in a chart of bars
BAR_PX = 22
#: a ratio as near to 1 as this is noise (notebook 90)
NOISE = 0.03
#: the call whose rate under load is shown, and peers by the name of a reader
LOADED = "b128_q1_h128_kv8192"
LOADED_PEERS = {"mla-lab": ("ours", BLUE), "flashmla": ("FlashMLA", ORANGE)}


def speedups(rows: Sequence[Row], family: str = "anchor") -> dict[str, tuple[float, str]]:
    """Best public kernel over ours by case, and a sentence with both times."""
    found = {}
    for case, times in best_times([r for r in results(rows) if r["family"] == family]).items():
        public = {name: times[name] for name in PUBLIC if name in times}
        if public and OURS in times:
            best = min(public, key=lambda name: public[name])
            sentence = f"{best} {public[best]:.1f} us, ours {times[OURS]:.1f} us"
            found[case] = (public[best] / times[OURS], sentence)
    return found


def speedup_bars(rows: Sequence[Row], family: str = "anchor") -> go.Figure:
    """Best public kernel over ours, a bar a case; above 1 ours is faster, and within `NOISE` of it
    neither is.
    """
    found = speedups(rows, family)
    ratios = [ratio for ratio, _ in found.values()]
    faster = sum(ratio > 1 + NOISE for ratio in ratios)
    near = sum(abs(ratio - 1) <= NOISE for ratio in ratios)
    call = f" ({HEADLINES[headline(rows)]})" if found else ""
    figure = new_figure(
        f"Ours is over {NOISE:.0%} faster in {faster} of {len(ratios)} cases, "
        f"within {NOISE:.0%} in {near}",
        x=f"best public kernel / ours{call}<br>{_source(rows)}",
        height=140 + BAR_PX * len(ratios),
    )
    add_bars(
        figure,
        list(found),
        ratios,
        ".2f",
        lying=True,
        marker_color=[BLUE if ratio > 1 else RED for ratio in ratios],
        customdata=[sentence for _, sentence in found.values()],
        hovertemplate="%{y}<br>%{customdata}<extra></extra>",
    )
    figure.add_vline(x=1.0, line_color=GREY, line_dash="dot")
    figure.update_xaxes(range=[0, 1.1 * max(ratios, default=1.0)])
    figure.update_yaxes(autorange="reversed")
    return figure


def _source(rows: Sequence[Row]) -> str:
    """Card and date of the run that the rows are of; "not recorded" without one."""
    run = next((row for row in rows if row["kind"] == "run"), None)
    return Run("", (run,)).source.label if run else "not recorded"


def load_bars(rows: Sequence[Row], case: str = LOADED) -> go.Figure:
    """Matrix rates of one run: the datasheet, its best GEMM, and a compute-bound call as it was
    timed, in short bursts, and as it runs for a while under the card's power limit.
    """
    gemm = max((r["ceilings"]["gemm_tflops"] for r in rows if r.get("ceilings")), default=None)
    bars = {"datasheet": (H200.bf16_tflops, GREY)}
    if gemm:
        bars["best GEMM"] = (gemm, GREY)
    clocks = []
    for row in results(rows, "ok"):
        if row["case"] == case and row["part"] == 0 and row["peer"] in LOADED_PEERS:
            name, color = LOADED_PEERS[row["peer"]]
            bars[f"{name},<br>timed"] = (row["tflops"], color)
            if power := row.get("power"):
                bars[f"{name},<br>under load"] = (row["flop"] / power["us"] / 1e6, color)
                clocks.append(f"{name} {power['sm_mhz']:.0f} MHz at {power['watts']:.0f} W")
    figure = new_figure(
        f"Under load: {', '.join(clocks) or 'not recorded'}",
        x=f"{case}: {_source(rows)}",
        y="TFLOP/s, bf16",
        height=350,
    )
    rates = [rate for rate, _ in bars.values()]
    figure.add_bar(
        x=list(bars),
        y=rates,
        text=[f"{rate:.0f}" for rate in rates],
        marker_color=[color for _, color in bars.values()],
    )
    return figure
