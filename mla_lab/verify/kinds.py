"""Backends of randomly drawn calls on a Hopper card; needs no GPU.

A call has a random level of each factor of `cases.FACTORS` but `NOT_DRAWN`. Half of the calls have
a feature's first level, the plain one; formats, shapes and pages are drawn evenly. Calls outside
the contract are drawn again. The backend follows from `supports`, with every build available, or
with the shipped builds alone and no compiler.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

from .. import backends, jit
from ..backends.cute import backend as cute
from ..backends.cute import catalogue
from ..call.form import Features
from ..core.errors import BuildError
from ..core.gpu import H200
from ..core.markdown import markdown_table
from ..core.problem import Problem
from ..jit import toolchain
from ..jit.build import canonical
from ..jit.cache import Cache
from ..jit.shipped import shipped
from ..plan.config import KernelConfig
from .cases import FACTORS, allowed, form_features, problem_of, whole
from .pairwise import Case
from .record import Row, head_row

SEED, CALLS = 22, 4448
#: factors that stay at their first level
NOT_DRAWN = ("slots", "query", "bytes", "bound", "sign")
#: factors whose levels are drawn evenly
EVEN = ("format", "layout", "q_len", "heads", "lengths", "page_size", "inputs")
#: sets of available builds
BUILDS = ("any", "shipped")
#: those that no name has
_NUMBERS = re.compile(r"(?<![\w.])\d[\d,]*\b")
_NAMES = re.compile(r"(cute|cuda)_\S+ is not compiled here.*")


class Kind(NamedTuple):
    """Problem and features of a drawn call, as a backend's `supports` takes them."""

    problem: Problem
    features: Features


def drawn(count: int = CALLS, seed: int = SEED) -> Iterator[Kind]:
    """The first `count` calls of a seed."""
    draw, found = random.Random(seed), 0
    factors = {name: levels for name, levels in FACTORS.items() if name not in NOT_DRAWN}
    while found < count:
        case = whole({name: _level(draw, name, levels) for name, levels in factors.items()})
        if allowed(case):
            found += 1
            yield kind_of(case)


def _level(draw: random.Random, name: str, levels: Sequence[str]) -> str:
    even = name in EVEN or draw.random() < 0.5
    return draw.choice(levels if name in EVEN else levels[1:] if even else levels[:1])


def kind_of(case: Case) -> Kind:
    """Problem of a case with lengths at their bounds, and its features."""
    made = problem_of(case)
    q_len, kv_len = max(1, *made.q_lens), max(1, *made.kv_lens)
    bounds = replace(made, q_lens=(q_len,) * made.batch, kv_lens=(kv_len,) * made.batch)
    return Kind(bounds, form_features(case))


def verdict(kind: Kind) -> tuple[str, str]:
    """(backend that "auto" selects, reasons of the earlier ones that refuse)."""
    why: list[str] = []
    for name in backends.ORDER:
        reason = backends.load(name).supports(kind.features, kind.problem, H200)
        if reason is None:
            return name, "; ".join(why)
        why.append(f"{name}: {short(reason)}")
    return "none", "; ".join(why)


def short(reason: str) -> str:
    """A reason without numbers, names of builds and lists of supported values."""
    text = _NAMES.sub("not compiled", reason).split("; its kernel")[0]
    return _NUMBERS.sub("#", text)


@contextmanager
def only(builds: str) -> Iterator[None]:
    """Context in which only these builds are available, independent of this host."""
    available = {canonical(config) for config in shipped()} if builds == "shipped" else None

    def find(config: KernelConfig, arch: str, cache: Cache | None = None) -> Any:
        return available is None or canonical(config) in available or None

    def absent(kernel: str) -> dict[str, str]:
        raise BuildError("no compiler")

    _forget()
    try:
        with patch.object(jit, "find", find), patch.object(toolchain, "versions", absent):
            yield
    finally:
        _forget()


def _forget() -> None:
    for cached in (cute._chosen, cute._by_token, cute._plan, catalogue.without_rule):
        cached.cache_clear()


def rows(count: int = CALLS, seed: int = SEED) -> Iterator[Row]:
    """A record: for each set of builds the number of calls by backend, and the reasons for calls on
    torch, with the first such call.
    """
    yield head_row("kinds", "cpu", count) | {"seed": seed}
    kinds = list(drawn(count, seed))
    for builds in BUILDS:
        with only(builds):
            found = [verdict(kind) for kind in kinds]
        yield {"kind": "taken", "builds": builds, **Counter(name for name, _ in found)}
        why = Counter(reason for name, reason in found if name == "torch")
        for reason, times in why.most_common():
            first = found.index(("torch", reason))
            yield {"kind": "case", "builds": builds, "why": reason, "count": times, "first": first}


def table(found: Sequence[Row]) -> str:
    """Calls on the torch backend by reason, with their share of all calls."""
    head = next(row for row in found if row["kind"] == "run")
    taken = {row["builds"]: row for row in found if row["kind"] == "taken"}
    share = partial(_share, calls=head["cases"])
    about = (
        f"Of {head['cases']} drawn calls (seed {head['seed']}) the torch backend runs "
        f"{share(taken['any'])} where kernels can be compiled, and {share(taken['shipped'])} where "
        "only shipped builds are available. The reasons, where kernels can be compiled:"
    )
    lines = []
    for row in found:
        if row["kind"] == "case" and row["builds"] == "any":
            by = dict(part.split(": ", 1) for part in row["why"].split("; "))
            lines.append((by["cute"], by["cuda"], row["count"]))
    names = ("why the CuTe kernels do not", "why the CUDA kernel does not", "calls:")
    return f"{about}\n\n{markdown_table(names, lines)}"


def summary(rows: Sequence[Row]) -> str:
    """A line for each set of builds: how many calls each backend takes."""
    lines = []
    for row in (row for row in rows if row["kind"] == "taken"):
        counts = ", ".join(f"{row[name]} by {name}" for name in backends.ORDER if name in row)
        lines.append(f"{row['builds']} builds: {counts}")
    return "\n".join(lines)


def failed(rows: Sequence[Row]) -> bool:
    """No call fails: each is only judged."""
    return False


def _share(row: Row, calls: int) -> str:
    return f"{row.get('torch', 0)} ({row.get('torch', 0) / calls:.0%})"
