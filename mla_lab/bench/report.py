"""Records as Markdown: tables for a README, between markers that name them.

<!-- table:anchor -->
(replaced)
<!-- /table:anchor -->
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from ..core.errors import invalid
from .gate import Verdict, geometric_mean_change, passes
from .records import Row, medians, rerun_spread, results

#: our kernels; what others are compared with
OURS = "mla-lab"
#: of peers that come in two settings the better one is shown, as each caller could choose it
PEERS = {
    OURS: (OURS,),
    "FlashMLA": ("flashmla",),
    "FlashInfer fa3": ("flashinfer-fa3",),
    "FA3 with qv": ("fa3-qv", "fa3-qv-32"),
    "Triton baseline": ("triton-split-kv",),
    "torch eager": ("torch-eager",),
}
#: the strongest public kernels, which "best public" is taken over
PUBLIC = ("FlashMLA", "FlashInfer fa3", "FA3 with qv")


def times_table(rows: Sequence[Row], family: str) -> str:
    """us of every case of a family by peer; the ratio is best public over ours."""
    lines = [
        "| case | " + " | ".join(f"{name} us" for name in PEERS) + " | best public / ours |",
        "|---|" + "---:|" * (len(PEERS) + 1),
    ]
    us = best_times(rows)
    for case in _cases(rows, family):
        times = us[case]
        cells = [_cell(times.get(name)) for name in PEERS]
        public = [times[name] for name in PUBLIC if name in times]
        ratio = f"{min(public) / times[OURS]:.2f}" if public and OURS in times else ""
        lines.append(f"| {case} | " + " | ".join(cells) + f" | {ratio} |")
    return "\n".join(lines)


def rates_table(rows: Sequence[Row], family: str) -> str:
    """What our kernels reach, beside the ceilings that the same run measured."""
    lines = ["| case | us | with plan | TFLOP/s | TB/s | rel. error |", "|---|" + "---:|" * 5]
    for row in results(rows, "ok"):
        if row["peer"] == OURS and row["family"] == family and row["part"] == 0:
            planned = _cell(row.get("us_with_plan"))
            rates = f"{row['tflops']:.0f} | {row['tbps']:.2f} | {row['rel_error']:.1e}"
            lines.append(f"| {row['case']} | {_cell(row['us'])} | {planned} | {rates} |")
    return "\n".join(lines)


def power_table(rows: Sequence[Row], family: str) -> str:
    """Compute-bound cases under load: time, clock, watts and joules of a launch, peer by peer."""
    lines = ["| case | peer | us under load | MHz | W | mJ a launch |", "|---|---|" + "---:|" * 4]
    for row in results(rows, "ok"):
        power = row.get("power")
        if power and row["family"] == family and row["part"] == 0:
            figures = f"{power['sm_mhz']:.0f} | {power['watts']:.0f} | {1e3 * power['joules']:.1f}"
            lines.append(f"| {row['case']} | {row['peer']} | {_cell(power['us'])} | {figures} |")
    return "\n".join(lines)


def method_note(rows: Sequence[Row]) -> str:
    """One paragraph: where, with what and how the figures were taken."""
    runs = [row for row in rows if row["kind"] == "run"]
    if not runs:
        raise invalid("record", "no run row", "a record that `mla-lab bench run` wrote")
    run, end = runs[-1], next((row for row in reversed(rows) if row["kind"] == "end"), None)
    env, method = run["environment"], run["method"]
    card = env["card"]["name"] if env["card"] else f"CPU ({env['host']['processor']})"
    driver = (env["smi"] or {}).get("driver_version", "none")
    text = (
        f"{card}, driver {driver}, CUDA {env['cuda']}, torch {env['libraries'].get('torch')}, "
        f"commit {(env['commit'] or 'unknown')[:9]}{' (modified)' if env['dirty'] else ''}, "
        f"{run['time'][:10]}. Whole calls, {method['timer']}, median of {method['rounds']} rounds, "
        f"KV copies of {method['rotation_bytes'] / 1e6:.0f} MB in rotation."
    )
    for word, row in (("before", run), ("after", end)):
        if row and row["ceilings"]:
            gemm, read = row["ceilings"]["gemm_tflops"], row["ceilings"]["read_tbps"]
            text += f" GEMM 8192 {word}: {gemm:.0f} TFLOP/s, read {read:.2f} TB/s."
    spread = rerun_spread(rows)
    if spread:
        text += f" Rerun spread: {spread['median']:.1%} median, {spread['p90']:.1%} at the 90th"
        text += f" percentile, {spread['worst']:.1%} worst."
    versions = [f"{p['name']} {p['version']}" for p in run["peers"] if p["version"]]
    return text + (f" Peers: {', '.join(versions)}." if versions else "")


def refusals_table(rows: Sequence[Row]) -> str:
    """Rows without a figure, and why."""
    lines = ["| case | peer | | reason |", "|---|---|---|---|"]
    for row in results(rows):
        if row["status"] != "ok":
            reason = str(row["reason"]).replace("|", "\\|").replace("\n", " ")
            lines.append(f"| {row['case']} | {row['peer']} | {row['status']} | {reason} |")
    return "\n".join(lines)


def gate_table(verdicts: Sequence[Verdict], everything: bool = False) -> str:
    """Verdicts that are not "same" (or all), and a line that sums them up."""
    lines = [
        "| case | peer | before us | after us | change | noise | |",
        "|---|---|" + "---:|" * 4 + "---|",
    ]
    for v in verdicts:
        if everything or v.verdict != "same":
            change = "" if v.change is None else f"{v.change:+.1%}"
            noise = "" if v.noise is None else f"{v.noise:.1%}"
            times = f"{_cell(v.baseline_us)} | {_cell(v.candidate_us)}"
            note = v.verdict + (f" ({v.reason})" if v.reason else "")
            lines.append(f"| {v.case} | {v.peer} | {times} | {change} | {noise} | {note} |")
    mean = geometric_mean_change(verdicts)
    total = "" if mean is None else f", mean change {mean:+.1%}"
    result = "passes" if passes(verdicts) else "FAILS"
    return "\n".join([*lines, "", f"{result}: {len(verdicts)} compared{total}"])


def best_times(rows: Iterable[Row]) -> dict[str, dict[str, float]]:
    """case -> shown name -> us, of the better setting where a peer has two."""
    us: dict[str, dict[str, float]] = {}
    shown = {peer: name for name, peers in PEERS.items() for peer in peers}
    for (case, peer), value in medians(rows).items():
        name = shown.get(peer, peer)
        times = us.setdefault(case, {})
        times[name] = min(value, times.get(name, value))
    return us


#: README tables by the name in their markers; each takes the rows of a record
TABLES: dict[str, Callable[[Sequence[Row]], str]] = {
    "anchor": lambda rows: times_table(rows, "anchor"),
    "anchor-rates": lambda rows: rates_table(rows, "anchor"),
    "anchor-power": lambda rows: power_table(rows, "anchor"),
    "twin": lambda rows: times_table(rows, "twin"),
    "feature": lambda rows: times_table(rows, "feature"),
    "trace": lambda rows: times_table(rows, "trace"),
    "method": method_note,
    "refusals": refusals_table,
}


def fill_tables(text: str, rows: Sequence[Row]) -> str:
    """`text` with everything between known markers made anew. Raises InvalidInput for others."""

    def fill(match: re.Match[str]) -> str:
        name = match["name"]
        if name not in TABLES:
            raise invalid("table", repr(name), tuple(TABLES))
        return f"<!-- table:{name} -->\n{TABLES[name](rows)}\n<!-- /table:{name} -->"

    pattern = r"<!-- table:(?P<name>[\w-]+) -->\n.*?<!-- /table:(?P=name) -->"
    return re.sub(pattern, fill, text, flags=re.DOTALL)


def _cases(rows: Sequence[Row], family: str) -> list[str]:
    """Names of a family's measured cases, in the order of the record."""
    ok = [row["case"] for row in results(rows, "ok") if row["family"] == family]
    return list(dict.fromkeys(ok))


def _cell(us: float | None) -> str:
    if us is None:
        return ""
    return f"{us:.0f}" if us >= 100 else f"{us:.1f}"
