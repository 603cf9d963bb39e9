"""Notebook 53 behind its ladder: what each step changes in the code, up to Hopper's own means, and
the recorded times of the kernels to which they lead.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from functools import cache
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

from ..backends.cuda.ladder import STEPS as LADDER
from ..core.errors import invalid
from ..core.resources import kernels_dir
from . import explorer, ladder_facts
from .source import Source
from .steps import STEPS as WRITTEN
from .style import PAGE_INK
from .svg import Svg
from .tables import Table, lines, table

SWEEP = "records/h200_sweep.jsonl"
#: the case whose recorded gains are shown beside the ladder's changes
CASE = "b64_q1_h128_kv2048"
#: steps of notebooks 63 to 69, and the means that each brings
_IDEAS = {
    "63": "TMA: one thread requests a whole box, the copy engine writes it swizzled",
    "64": "an mbarrier counts the bytes of a tile that has arrived, phase by phase",
    "65": "a ring of stages: a producer warp group runs ahead of its consumers",
    "66": "wgmma: a warp group multiplies tiles that stay in shared memory",
    "67": "online softmax in the registers in which wgmma left the scores",
    "68": "P from registers times V where K lies, read transposed",
    "69": "split, workers that fetch their own pieces, and a merge by those who split",
}


@dataclass(frozen=True)
class Change:
    """One step: its name, its idea, and its file beside the file before."""

    name: str
    idea: str
    before: Path
    after: Path

    def lines(self) -> list[str]:
        """Lines of a unified diff, context included; of a file that builds on the one before by
        including it, all lines are new.
        """
        old, new = self.before.read_text().splitlines(), self.after.read_text().splitlines()
        if any(f"/{self.before.name}" in line for line in new if "#include" in line):
            old = []
        found = list(difflib.unified_diff(old, new, lineterm="", n=1))
        return [line for line in found[2:] if line.strip("+- ")]


@cache
def changes() -> tuple[Change, ...]:
    """All steps from one to the next: CUDA C++ on `mma.sync`, then CuTe DSL on Hopper's means."""
    ladder = kernels_dir() / "ladder"
    found = [
        Change(f"step {new.number}, {new.name}", new.idea, ladder / old.file, ladder / new.file)
        for old, new in pairwise(LADDER)
    ]
    for number, idea in _IDEAS.items():
        old, new = WRITTEN[WRITTEN[number].before], WRITTEN[number]
        found.append(Change(f"notebook {number}, {new.module}", idea, old.path, new.path))
    return tuple(found)


class DiffExplorer(explorer.Explorer):
    """What a step changes in the code: + is new, - is gone."""

    frames_over = "step"

    def controls(self) -> explorer.Knobs:
        return explorer.knobs(step=explorer.integers("step", 1, len(changes()), 10, width="420px"))

    def figure(self, state: dict[str, Any]) -> Svg:
        change = changes()[state["step"] - 1]
        found = change.lines()
        new, gone = (sum(line.startswith(sign) for line in found) for sign in "+-")
        title = f"{change.name}: {change.idea} ({new} lines new, {gone} gone)"
        body = "".join(map(_line, found))
        frame = "max-height:420px;overflow:auto;font:12px/1.4 Menlo,Consolas,monospace"
        return Svg(
            f"<div style='color:{PAGE_INK}'><b>{escape(title)}</b>"
            f"<pre style='{frame};margin:6px 0;padding:6px'>{body}</pre></div>",
            title,
        )

    def note(self, state: dict[str, Any]) -> str:
        if state["step"] >= len(LADDER):
            return "<div>A step of notebooks 60 to 69: emulated there, not timed.</div>"
        rung, before = (ladder_facts.rungs(CASE)[state["step"] - back] for back in (0, 1))
        source = ladder_facts.source()
        chip = source.chip() if source else ""
        return f"<div>{CASE}: {before.us:,.0f} us before, {rung.us:,.0f} us after {chip}</div>"


def _line(line: str) -> str:
    tint = {"+": "rgba(0,158,115,.18)", "-": "rgba(213,94,0,.18)"}.get(line[0], "none")
    style = f"background:{tint};white-space:pre" + (";opacity:.75" if line[0] == "@" else "")
    return f"<span style='display:block;{style}'>{escape(line)}</span>"


@cache
def shipped(case: str) -> tuple[dict[str, Any], ...]:
    """Recorded variants of the two shipped kernels on a case, the quickest first."""
    rows = [row for row in lines(SWEEP) if row["kind"] == "result" and row["case"] == case]
    mine = [row for row in rows if row["status"] == "ok" and "_ab-" in row["peer"]]
    if not mine:
        raise invalid("case", repr(case), "a case that the sweep and the ladder share")
    return tuple(sorted(mine, key=lambda row: float(row["us"])))


def shipped_table(case: str) -> Table:
    """The quickest variant of each kernel and cluster size beside the ladder's last step.

    Two records of one kind of card on different days: a few percent between them mean nothing.
    """
    last = ladder_facts.rungs(case)[-1]
    ladder = ladder_facts.source()
    best: dict[tuple[str, int, int], dict[str, Any]] = {}
    for row in shipped(case):
        config = row["notes"]["config"]
        cluster = int(config.get("cluster", 1) or 1)
        best.setdefault((row["peer"].split("-")[0], config["tile_rows"], cluster), row)
    rows: list[tuple[Any, ...]] = [
        (
            name,
            rows_,
            cluster,
            row["notes"]["policy"],
            row["us"],
            f"{(last.us or 0) / row['us']:.1f}",
        )
        for (name, rows_, cluster), row in best.items()
    ]
    rows.append((f"the ladder's step {last.step}", 64, 1, "", last.us, "1.0"))
    columns = (
        "kernel",
        "rows of a tile",
        "CTAs a cluster",
        "policy",
        "recorded us",
        "times quicker",
    )
    run = next(row for row in lines(SWEEP) if row["kind"] == "run")
    dates = f"{str(run['time'])[:10]}, step {last.step}: {ladder.date if ladder else 'unknown'}"
    card = run["environment"]["card"]["name"]
    return table(columns, rows, source=Source("recorded", card, dates))
