"""Markdown tables of verification records.

In a cell a plain number counts cases that our kernels passed, one in italics those that the torch
backend passed; outcomes other than a pass are written out.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import geometric_mean
from typing import Any

from ..backends import ORDER
from ..core.markdown import markdown_table
from . import cuda_archs, emulated_lse, emulator_tables, kinds, planted_tables, shipped_builds, soak
from .cases import FACTORS, FORMATS, features_of, uses, whole
from .pairwise import pairs_of
from .record import Row, cases_of, table_of

#: names of features in the order of the tables
FEATURES = tuple(uses({}))
#: reasons that differ only in a number are one row
_NUMBERS = re.compile(r"(?:(?<!\w)-)?\d[\d.e+,-]*")
MOST_REASONS = 24


def formats_table(rows: Sequence[Row]) -> str:
    """Features by formats of query, cache and out."""
    lines, found = [], cases_of(rows)
    for feature in ("any", *features_in(found)):
        having = [row for row in found if feature == "any" or feature in features_of(row["case"])]
        cells = [cell(row for row in having if row["case"]["format"] == name) for name in FORMATS]
        lines.append(("all cases" if feature == "any" else feature, *cells))
    return markdown_table(("", *(f"{name}:" for name in FORMATS)), lines)


def pairs_table(rows: Sequence[Row]) -> str:
    """Features by features."""
    features = features_in(cases_of(rows))
    lines = []
    used = [(set(features_of(row["case"])), row) for row in cases_of(rows)]
    for number, feature in enumerate(features[:-1]):
        cells = [
            cell(row for have, row in used if {feature, other} <= have) if place > number else ""
            for place, other in enumerate(features)
        ][1:]
        lines.append((feature, *cells))
    return markdown_table(("with", *(f"{name}:" for name in features[1:])), lines)


def features_in(found: Sequence[Row]) -> list[str]:
    """The features that some case uses: a record may be older than a factor."""
    used = {name for row in found for name in features_of(row["case"])}
    return [name for name in FEATURES if name in used]


def shapes_note(rows: Sequence[Row]) -> str:
    """One paragraph: how many cases, over what, and where."""
    found = cases_of(rows)
    choices = len(factors_in(found))
    levels = {name: list(FACTORS[name]) for name in ("q_len", "heads", "page_size")}
    worst = max((row["rel_error"] for row in found if row["case"]["format"] == "bf16"), default=0.0)
    return " ".join(
        (
            f"{len(found)} calls on {where(rows)}: every pair of levels of {choices} choices",
            f"in {min_occurrence(found)} or more calls, each element against the float64 oracle,",
            f"caches poisoned. Query tokens {spoken(levels['q_len'])};",
            f"heads {spoken(levels['heads'])}; pages of {spoken(levels['page_size'])};",
            f"lengths 0 to 70,001. {tally(found)}.",
            f"Largest relative error in bf16: {worst:.1e}.",
        )
    )


def published_note(rows: Sequence[Row]) -> str:
    """Of the 396 published configurations, the count of each dtype that passed, or the reasons."""
    lines = []
    for dtype in dict.fromkeys(row["case"]["dtype"] for row in cases_of(rows)):
        own = [row for row in cases_of(rows) if row["case"]["dtype"] == dtype]
        passed = [row for row in own if row["status"] == "ok"]
        line = f"{dtype}: {len(passed)} of {len(own)} passed"
        if passed:
            line += f", relative error at most {max(row['rel_error'] for row in passed):.1e}"
        for reason, count in reasons(own).items():
            line += f"; {count} {reason}"
        lines.append(line + ".")
    return f"On {where(rows)}, all by our kernels. " + " ".join(lines)


def dropin_note(rows: Sequence[Row]) -> str:
    """One paragraph: how many of FlashInfer's tests passed."""
    head = next(row for row in rows if row["kind"] == "run")
    found = cases_of(rows)
    counts = Counter(row["status"] for row in found)
    passed = [row for row in found if row["status"] == "passed"]
    by_torch = sum("torch" in row["backends"] for row in passed)
    commit = (head["mla_lab_commit"] or "unknown")[:9]
    return (
        f"{len(found)} of {sum(head['parametrisations'].values())} parametrisations, drawn with "
        f"seed {head['seed']} from FlashInfer {head['flashinfer_commit'][:9]}, on {head['card']}, "
        f"{head['date']}, commit {commit}: {counts['passed']} passed ({by_torch} of "
        f"them by the torch backend), {counts['failed']} failed, "
        f"{counts['skipped']} skipped."
    )


def dropin_tests(rows: Sequence[Row]) -> str:
    """FlashInfer's tests by name: present, passed, failed, skipped."""
    head = next(row for row in rows if row["kind"] == "run")
    found = cases_of(rows)
    there = {name.split("::")[1]: count for name, count in head["parametrisations"].items()}
    lines = []
    for test in sorted({row["test"] for row in found}):
        own = [row for row in found if row["test"] == test]
        by = Counter(row["status"] for row in own)
        torch_ones = sum(row["status"] == "passed" and "torch" in row["backends"] for row in own)
        figures = (there[test], by["passed"], torch_ones, by["failed"], by["skipped"])
        lines.append((f"`{test}`", *(figure or "" for figure in figures)))
    names = ("test", "parametrisations:", "passed:", "by torch:", "failed:", "skipped:")
    return markdown_table(names, lines)


def flash_mla_tests(rows: Sequence[Row]) -> str:
    """FlashMLA's tests of decoding by name: present, run, and how they ended, with reasons."""
    head = next(row for row in rows if row["kind"] == "run")
    found = cases_of(rows)
    lines = []
    for test, count in head["there"].items():
        by = Counter(row["status"] for row in found if row["test"] == test)
        ended = (by[status] or "" for status in ("passed", "refused", "failed"))
        lines.append((test, count, *ended))
    tests = markdown_table(("test", "cases:", "passed:", "refused:", "failed:"), lines)
    why = reasons([row for row in found if row["status"] != "passed"])
    commit = f", commit {head['mla_lab_commit'][:9]}" if head.get("mla_lab_commit") else ""
    origin = f"{len(found)} cases of FlashMLA {head['flash_mla_commit'][:9]} on {head['card']}"
    return (
        f"{origin}, {head['date']}{commit}.\n\n{tests}\n\n"
        f"{markdown_table(('why refused or failed', ':'), why.items())}"
    )


def dropin_reasons(rows: Sequence[Row]) -> str:
    """Reasons why tests failed or were skipped, without the numbers in them."""
    lines: list[tuple[object, ...]] = []
    for status in ("failed", "skipped"):
        why = reasons([row for row in cases_of(rows) if row["status"] == status])
        lines += [(status, *line) for line in why.items()]
    return markdown_table(("", "why", ":"), lines)


def costs_table(rows: Sequence[Row]) -> str:
    """Time of calls with a feature by time without, over the shapes that were timed."""
    lines: list[list[object]] = []
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in cases_of(rows):
        groups.setdefault((row["feature"], row["inputs"]), []).append(row)
        for name, words in (
            ("control", "{beside} beside itself"),
            ("turns", "{feature}, in turns"),
        ):
            if name in row:
                again = {"low": row[f"{name}_low"], "high": row[f"{name}_high"]}
                again |= {"status": "ok", "ratio": row[name]}
                groups.setdefault((words.format(**row), row["inputs"]), []).append(again)
    for (feature, inputs), own in groups.items():
        timed = sorted((r for r in own if r["status"] == "ok"), key=lambda r: r["ratio"])
        if not timed:
            lines.append([feature, inputs, len(own), own[0]["reason"][:80], *[""] * 4])
            continue
        last = timed[-1]
        span = " to ".join(dict.fromkeys(f"{r['ratio']:.3f}" for r in (timed[0], last)))
        bounds = f"{last['low']:.3f} to {last['high']:.3f}"
        mean = geometric_mean([row["ratio"] for row in timed])
        cells: list[object] = [feature, inputs, len(timed), f"{mean:.3f}", span, bounds, "", ""]
        if "kept" in last:
            kept, lost = (max(row[name] for row in timed) for name in ("kept", "dropped"))
            cells[-2:] = [f"{kept:.0%}", f"{max(lost, 0.0):.0e}"]
        lines.append(cells)
    figures = ("shapes:", "mean:", "least to greatest:", "greatest, 95 %:", "tiles kept:", "lost:")
    return markdown_table(("with", "inputs", *figures), lines)


def sanitizer_note(rows: Sequence[Row]) -> str:
    """One paragraph: the tools, the calls and the findings."""
    found = cases_of(rows)
    head = next(row for row in rows if row["kind"] == "run")
    tools = {}
    for tool in dict.fromkeys(row["tool"] for row in found):
        own = [row for row in found if row["tool"] == tool]
        tools[tool] = (
            f"{tool} {sum(row['errors'] for row in own)} in {sum(r['calls'] for r in own)}"
        )
    wrong = sorted({row["name"] for row in found if row["errors"]})
    unseen = sorted({row["name"] for row in found if not row["calls"]})
    return (
        f"{head['tool']} on {where(rows)}. Errors in calls with each feature (racecheck: a process "
        f"for each): {', '.join(tools.values())}."
        + (f" With errors: {', '.join(wrong)}." if wrong else "")
        + (f" Ended ahead of the call, and so not seen: {', '.join(unseen)}." if unseen else "")
    )


def rounding_table(rows: Sequence[Row]) -> str:
    """Each kernel's largest errors over an fp8 cache: out relative to torch's, and lse."""
    from ..plan.promotion import PROMOTED_KEYS
    from .rounding import worst_of

    lines = []
    found = [row for row in cases_of(rows) if row["status"] != "refused"]
    lse = worst_of(found, "lse_error")
    for key, times in worst_of(found).items():
        query, cache, kernel, beyond = key
        piece = f", pieces of more than {PROMOTED_KEYS} keys" if beyond else ""
        lines.append((query, cache, f"{kernel}{piece}", f"{times:.2f}", f"{lse[key]:.1e}"))
    names = ("query", "cache", "kernel", "error of out, times torch's:", "error of lse:")
    table = markdown_table(names, lines)
    lengths = spoken([f"{n}" for n in sorted({row["kv_len"] for row in found})])
    where_to = f"Worst over {lengths} keys, whole requests, {len(found)} calls on {where(rows)}."
    return f"{table}\n\n{where_to}"


#: tables by name, and the record that each is made from
TABLES: dict[str, tuple[str, Callable[[Sequence[Row]], str]]] = {
    "shapes": ("records/pairwise.jsonl", shapes_note),
    "formats": ("records/pairwise.jsonl", formats_table),
    "pairs": ("records/pairwise.jsonl", pairs_table),
    "published": ("records/h200_published.jsonl", published_note),
    "costs": (
        "records/h200_features.jsonl",
        lambda rows: f"{where(rows)}.\n\n{costs_table(rows)}",
    ),
    "sanitizer": ("records/sanitizer.jsonl", sanitizer_note),
    "rounding": ("records/h200_eight_bit_errors.jsonl", rounding_table),
    "lse": ("records/emulated_lse.jsonl", emulated_lse.summary),
    "kinds": ("records/kinds.jsonl", kinds.table),
    "soak": ("records/soak.jsonl", soak.summary),
    "dropin": ("records/dropin.jsonl", dropin_note),
    "dropin-tests": ("records/dropin.jsonl", dropin_tests),
    "dropin-reasons": ("records/dropin.jsonl", dropin_reasons),
    "emulated": ("records/emulated.jsonl", emulator_tables.emulated_note),
    "mutations": ("records/mutations.jsonl", emulator_tables.mutations_table),
    "mutations-exceptions": ("records/mutations.jsonl", emulator_tables.exceptions_table),
    "planted": ("records/planted.jsonl", planted_tables.planted_table),
    "planted-note": ("records/planted.jsonl", planted_tables.planted_note),
    "builds": (shipped_builds.RECORD, shipped_builds.table),
    "builds-elsewhere": (cuda_archs.RECORD, cuda_archs.table),
    "dropin-flash-mla": ("records/dropin_flash_mla.jsonl", flash_mla_tests),
}


def made(name: str) -> str:
    """The table `name` of `TABLES`, from its record in `data/`."""
    return table_of(*TABLES[name])


def cell(rows: Iterable[Row]) -> str:
    """Counts of a table's cell."""
    kinds = Counter(row["backend"] if row["status"] == "ok" else row["status"] for row in rows)
    torch_ones = kinds.pop("torch", 0)
    wrong = {name: kinds.pop(name, 0) for name in ("wrong", "refused", "failed")}
    kernels = sum(kinds.values())
    parts = [str(kernels)] if kernels else []
    parts += [f"*{torch_ones}*"] if torch_ones else []
    parts += [f"**{count} {name}**" for name, count in wrong.items() if count]
    return " + ".join(parts) or "–"


def reasons(rows: Iterable[Row]) -> dict[str, int]:
    """Why rows did not pass, most frequent first, numbers left out."""
    texts = [
        _NUMBERS.sub("#", str(row["reason"])).replace("|", "\\|").replace("\n", " ")[:160]
        for row in rows
        if row["status"] not in ("ok", "passed")
    ]
    return dict(Counter(texts).most_common(MOST_REASONS))


def tally(rows: Sequence[Row]) -> str:
    """Counts of passes by backend, and of other outcomes, in words."""
    kinds: Counter[Any] = Counter(
        row["backend"] if row["status"] == "ok" else row["status"] for row in rows
    )
    words = [f"{count} passed by {name}" for name, count in kinds.items() if name in ORDER]
    words += [f"{count} {name}" for name, count in kinds.items() if name not in ORDER]
    return ", ".join(words)


def where(rows: Sequence[Row]) -> str:
    """Card, commit and date of a record."""
    environment = next(row for row in rows if row["kind"] == "run")["environment"]
    card = environment["card"]["name"] if environment["card"] else "a CPU"
    commit = (environment["commit"] or "unknown")[:9]
    return f"{card}, commit {commit}, {environment.get('date', 'date unknown')}"


def factors_in(found: Sequence[Row]) -> dict[str, tuple[str, ...]]:
    """The factors that the cases were made of: a record may be older than a factor."""
    known = {name for row in found for name in row["case"]}
    return {name: levels for name, levels in FACTORS.items() if name in known}


def min_occurrence(found: Sequence[Row]) -> int:
    """Count of the rarest pair of levels among those that occur."""
    factors = factors_in(found)
    counts = Counter(pair for row in found for pair in pairs_of(whole(row["case"]), factors))
    return min(counts.values(), default=0)


def spoken(levels: Sequence[str] | Mapping[str, Any]) -> str:
    """1, 2 and 3."""
    *most, last = levels
    return f"{', '.join(most)} and {last}" if most else last
