"""Records as Markdown tables, and the choice of the headline among our calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median

from ..core.errors import invalid
from ..core.markdown import markdown_table
from .gate import Verdict, geometric_mean_change, passes
from .records import Row, grouped, medians, rerun_spread, results
from .rotation import rotation_words

#: column of our kernels, with which peers are compared
OURS = "mla-lab"
#: column of the headline's call as a step's first layer
FIRST = f"{OURS}, first layer"
#: columns of what a call adds to a step, ours and the least of the public kernels
IN_STEP, PUBLIC_IN_STEP = f"{OURS}, in a step", "best public, in a step"
#: our calls that may be in that column, with their description: the first one that a record has. A
#: call with a plan comes later: public peers plan outside the timing too, but our callers pass none
HEADLINES = {
    "mla-lab-plain": "plain call, bound of 131072 tokens",
    "mla-lab": "call with a host plan",
}
#: our other calls, each in its own column if the record has it
BESIDE = {"tight bound": "mla-lab-plain-tight", "host plan": "mla-lab"}
#: whether a record has times of a step's first layer -> how a sentence on its layers ends
FIRST_LAYER = {
    True: "the first layer of a step, whose launch finds the work tiles anew, is timed apart, with "
    "lengths that differ from those of the launch before.",
    False: "the first layer of a step, whose launch finds the work tiles anew, is not timed apart.",
}
#: what a sentence on the call says of times in a step
IN_A_STEP = (
    " Times in a step are measured over 16 layers. Each layer runs {} and the call, so that the "
    "call's {} are fetched anew. The figure is the difference from the same layers without the "
    "call, divided by 16."
)
#: the kernels there in records that name none: behind a GEMM alone most of the code is still in the
#: instruction caches
REST = "a GEMM over 132 MB of weights"
#: peers with two settings: the faster one is shown, as a caller could choose it
PEERS = {
    "FlashMLA": ("flashmla",),
    "FlashInfer fa3": ("flashinfer-fa3",),
    "FA3 with qv": ("fa3-qv", "fa3-qv-32"),
    "Triton baseline": ("triton-split-kv",),
    "torch eager": ("torch-eager",),
}
#: the fastest public kernels, among which "best public" is chosen
PUBLIC = ("FlashMLA", "FlashInfer fa3", "FA3 with qv")


#: the cases of README's table: few and many requests, 128 and 16 heads, short and long, ragged
SHORT = (
    "b1_q1_h128_kv8192",
    "b16_q1_h128_kv8192",
    "b128_q1_h128_kv1024",
    "b128_q1_h128_kv8192",
    "b128_q1_h128_kv4096_gauss",
    "b1_q1_h16_kv8192",
    "b16_q1_h16_kv8192",
    "b128_q1_h16_kv8192",
)


def find_headline(rows: Iterable[Row]) -> str | None:
    """Name of our call whose times are the record's headline; None without such a row."""
    have = {row["peer"] for row in results(rows, "ok")}
    return next((peer for peer in HEADLINES if peer in have), None)


def headline(rows: Sequence[Row]) -> str:
    """As `find_headline`. Raises InvalidInput without any."""
    found = find_headline(rows)
    if found is None:
        raise invalid("record", "none of our calls", f"a result of {' or '.join(HEADLINES)}")
    return found


def call_note(rows: Sequence[Row]) -> str:
    """A sentence on the headline's call, and on what its timing excludes."""
    words = {
        "mla-lab-plain": "Our times are of the plain call, as a serving engine captures it: no "
        "plan, `max_seq_len` = 131072, the graph captured at other lengths than those of its "
        "replays. Replays repeat one set of lengths, as the layers of a step do; "
        + FIRST_LAYER[any("us_first_layer" in row for row in rows)],
        "mla-lab": "**Our times are of a call with a host plan** that was made outside of the "
        "timing; the plain call, which makes its plan itself, is not in this record.",
    }
    step = ""
    if any("us_in_step" in row for row in rows):
        methods = [row["method"] for row in rows if row["kind"] == "run"]
        rest = next((method["rest"] for method in methods if "rest" in method), REST)
        whose = "data and part of its code" if rest == REST else "code and data"
        step = IN_A_STEP.format(rest, whose)
    return (
        "Times are of whole calls in a CUDA graph, with KV read from memory; each peer makes its "
        f"own plan outside of the timing.\n{words[headline(rows)]}{step}"
    )


def columns(rows: Sequence[Row]) -> dict[str, tuple[str, ...]]:
    """Column name -> peers of a record: ours first, then our other calls, then public kernels."""
    have, own = {row["peer"] for row in results(rows, "ok")}, find_headline(rows)
    beside = {f"{OURS}, {words}": (peer,) for words, peer in BESIDE.items() if peer in have - {own}}
    return {OURS: (own,) if own else (), **beside, **PEERS}


def short_table(rows: Sequence[Row]) -> str:
    """us of the cases of `SHORT`: ours and the public kernels, alone and in a step. Raises
    InvalidInput for a record without any of them.
    """
    us = all_times(rows)
    cases = [case for case in SHORT if case in us]
    if not cases:
        raise invalid("record", "none of the cases of the short table", SHORT)
    have = {name for times in us.values() for name in times}
    beside = (IN_STEP, PUBLIC_IN_STEP) if have & {IN_STEP, PUBLIC_IN_STEP} else ()
    names = (OURS, *([FIRST] if FIRST in have else []), *PUBLIC, *beside)
    return markdown_table(
        ("case", *(f"{name} us:" for name in names)),
        ((case, *(_cell(us[case].get(name)) for name in names)) for case in cases),
    )


def times_table(rows: Sequence[Row], family: str) -> str:
    """us of every case of a family by peer, and of our call as a step's first layer and between
    other kernels of a step where these were timed; the ratios are best public over ours.
    """
    us = all_times(rows)
    have = {name for times in us.values() for name in times}
    in_step = have & {IN_STEP, PUBLIC_IN_STEP}
    shown = [name for name in columns(rows) if name in have]
    shown += sorted(have - {*shown, FIRST, *in_step})  # by their own names
    if FIRST in have:
        shown.insert(1, FIRST)
    lines = []
    for case in _cases(rows, family):
        times = us[case]
        cells = [*(_cell(times.get(name)) for name in shown)]
        ratio = public_over_ours(times)
        cells.append("" if ratio is None else f"{ratio:.2f}")
        if in_step:
            ours, best = times.get(IN_STEP), times.get(PUBLIC_IN_STEP)
            cells += [_cell(ours), f"{best / ours:.2f}" if best and ours else ""]
        lines.append((case, *cells))
    names = ["case", *(f"{name} us:" for name in shown), "best public / ours:"]
    names += [f"{IN_STEP} us:", "the same ratio, in a step:"] if in_step else []
    return markdown_table(names, lines)


def public_over_ours(times: Mapping[str, float]) -> float | None:
    """The best public peer's time over ours, of a case's times by peer; None without either."""
    public = [times[name] for name in PUBLIC if name in times]
    return min(public) / times[OURS] if public and OURS in times else None


def all_times(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """`best_times`, with our call as a step's first layer and what calls add to a step, where these
    were timed.
    """
    us = best_times(rows)
    for case, value in first_layer_times(rows).items():
        us[case][FIRST] = value
    for case, times in step_times(rows).items():
        us[case].update(times)
    return us


def step_times(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """case -> `IN_STEP` and `PUBLIC_IN_STEP` -> us that the call adds to a step, where timed."""
    shown = {peer: name for name, peers in columns(rows).items() for peer in peers}
    found: dict[str, dict[str, float]] = {}
    for row in results(rows, "ok"):
        name = shown.get(row["peer"])
        if "us_in_step" in row and name in (OURS, *PUBLIC):
            times = found.setdefault(row["case"], {})
            key = IN_STEP if name == OURS else PUBLIC_IN_STEP
            times[key] = min(row["us_in_step"], times.get(key, row["us_in_step"]))
    return found


def first_layer_times(rows: Sequence[Row]) -> dict[str, float]:
    """case -> us of our headline's call where its lengths are not those of the launch before."""
    own = find_headline(rows)
    timed = (r for r in results(rows, "ok") if r["peer"] == own and "us_first_layer" in r)
    by_case = grouped(timed, _case).items()
    return {case: median(row["us_first_layer"] for row in parts) for case, parts in by_case}


def own_table(rows: Sequence[Row]) -> str:
    """us of every case by each of our calls that the record has."""
    names = {"": headline(rows), **BESIDE}
    have = {row["peer"] for row in results(rows, "ok")}
    shown = {label: peer for label, peer in names.items() if peer in have}
    us: dict[str, dict[str, float]] = {}
    for (case, peer), value in medians(rows).items():
        us.setdefault(case, {})[peer] = value
    return markdown_table(
        ("case", *(f"{OURS}{label and ', '}{label} us:" for label in shown)),
        ((case, *(_cell(times.get(p)) for p in shown.values())) for case, times in us.items()),
    )


def rates_table(rows: Sequence[Row], family: str) -> str:
    """us, TFLOP/s, TB/s and relative error of our headline call, case by case: of several parts
    those of the median time."""
    own = find_headline(rows)
    ours = (r for r in results(rows, "ok") if r["peer"] == own and r["family"] == family)
    lines = []
    for case, measured in grouped(ours, _case).items():
        row = sorted(measured, key=lambda row: row["us"])[len(measured) // 2]
        planned = _cell(row.get("us_with_plan"))
        rates = (f"{row['tflops']:.0f}", f"{row['tbps']:.2f}", f"{row['rel_error']:.1e}")
        lines.append((case, _cell(row["us"]), planned, *rates))
    names = ("case", "us:", "with plan:", "TFLOP/s:", "TB/s:", "rel. error:")
    return markdown_table(names, lines)


def power_table(rows: Sequence[Row], family: str) -> str:
    """Compute-bound cases under load: time, clock, watts and joules of a launch, peer by peer."""
    lines = []
    for row in results(rows, "ok"):
        power = row.get("power")
        if power and row["family"] == family and row["part"] == 0:
            clock, watts = f"{power['sm_mhz']:.0f}", f"{power['watts']:.0f}"
            figures = (_cell(power["us"]), clock, watts, f"{1e3 * power['joules']:.1f}")
            lines.append((row["case"], row["peer"], *figures))
    names = ("case", "peer", "us under load:", "MHz:", "W:", "mJ a launch:")
    return markdown_table(names, lines)


def last_run(rows: Iterable[Row]) -> Row:
    """The last run row of a record. Raises InvalidInput where it has none."""
    runs = [row for row in rows if row["kind"] == "run"]
    if not runs:
        raise invalid("record", "no run row", "a record that `mla-lab bench run` wrote")
    return runs[-1]


def origin(rows: Iterable[Row]) -> str:
    """Card, date and commit of a record's last run."""
    run = last_run(rows)
    env = run["environment"]
    card = env["card"]["name"] if env["card"] else f"CPU ({env['host']['processor']})"
    commit = f"{(env['commit'] or 'unknown')[:9]}{' (modified)' if env['dirty'] else ''}"
    return f"{card}, {run['time'][:10]}, commit {commit}"


def method_note(rows: Sequence[Row]) -> str:
    """One paragraph: card, software and method of the figures."""
    run, end = last_run(rows), next((row for row in reversed(rows) if row["kind"] == "end"), None)
    env, method = run["environment"], run["method"]
    driver = (env["smi"] or {}).get("driver_version", "none")
    own = find_headline(rows)
    ours = f"{OURS}: {HEADLINES[own]}. " if own else ""
    text = (
        f"{origin(rows)}, driver {driver}, CUDA {env['cuda']}, torch "
        f"{env['libraries'].get('torch')}. {ours}Peers are planned outside of the timing. "
        f"Whole calls, {method['timer']}, median of {method['rounds']} rounds, "
        f"{rotation_words(method['rotation_bytes'])}."
    )
    if "rest" in method and any("us_in_step" in row for row in rows):
        text += f" Between two calls of a step: {method['rest']}."
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
    """Rows without a figure, with the reason."""
    lines = []
    for row in results(rows):
        if row["status"] != "ok":
            reason = str(row["reason"]).replace("|", "\\|").replace("\n", " ")
            lines.append((row["case"], row["peer"], row["status"], reason))
    return markdown_table(("case", "peer", "", "reason"), lines)


def gate_table(verdicts: Sequence[Verdict], everything: bool = False) -> str:
    """Verdicts that are not "same" (or all), and a line that sums them up."""
    lines = []
    for v in verdicts:
        if everything or v.verdict != "same":
            change = "" if v.change is None else f"{v.change:+.1%}"
            noise = "" if v.noise is None else f"{v.noise:.1%}"
            times = (_cell(v.baseline_us), _cell(v.candidate_us))
            note = v.verdict + (f" ({v.reason})" if v.reason else "")
            lines.append((v.case, v.peer, *times, change, noise, note))
    names = ("case", "peer", "before us:", "after us:", "change:", "noise:", "")
    mean = geometric_mean_change(verdicts)
    total = "" if mean is None else f", mean change {mean:+.1%}"
    result = "passes" if passes(verdicts) else "FAILS"
    return f"{markdown_table(names, lines)}\n\n{result}: {len(verdicts)} compared{total}"


def best_times(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """case -> shown name -> us, of the quicker setting where a peer has two."""
    us: dict[str, dict[str, float]] = {}
    shown = {peer: name for name, peers in columns(rows).items() for peer in peers}
    for (case, peer), value in medians(rows).items():
        name = shown.get(peer, peer)
        times = us.setdefault(case, {})
        times[name] = min(value, times.get(name, value))
    return us


#: families of cases that have tables, whose names begin so; sweep: a grid of `mla-lab bench run`
FAMILIES = ("anchor", "twin", "trace", "sweep")
#: tables by name; each takes the rows of a record
TABLES: dict[str, Callable[[Sequence[Row]], str]] = {
    "short": short_table,
    "anchor": lambda rows: times_table(rows, "anchor"),
    "anchor-rates": lambda rows: rates_table(rows, "anchor"),
    "anchor-power": lambda rows: power_table(rows, "anchor"),
    "twin": lambda rows: times_table(rows, "twin"),
    "trace": lambda rows: times_table(rows, "trace"),
    "sweep": lambda rows: times_table(rows, "sweep"),
    "method": method_note,
    "refusals": refusals_table,
}


def _case(row: Row) -> str:
    return str(row["case"])


def _cases(rows: Sequence[Row], family: str) -> list[str]:
    """Names of a family's measured cases, in the order of the record."""
    ok = [row["case"] for row in results(rows, "ok") if row["family"] == family]
    return list(dict.fromkeys(ok))


def _cell(us: float | None) -> str:
    if us is None:
        return ""
    return f"{us:.0f}" if us >= 100 else f"{us:.1f}"
