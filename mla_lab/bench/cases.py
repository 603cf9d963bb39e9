"""Lists of cases, each one decode call as numbers.

Lists are made by rule, so that a name is complete: `b128_q1_h128_kv4096_gauss` is 128
requests of one query token, 128 heads and KV lengths drawn around 4096.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from ..core.errors import invalid
from ..core.gpu import H200
from ..core.problem import Problem

#: values that `drawn_cases` draws from, and the longest call in seconds at the card's limits
DRAWN_BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
DRAWN_HEADS = (8, 16, 32, 64, 128)
DRAWN_SECONDS = 4e-4


@dataclass(frozen=True)
class Case:
    """One call to time. `features` and `distribution` are those of `mla_lab.reference.inputs`."""

    name: str
    family: str
    problem: Problem
    features: tuple[str, ...] = ()
    distribution: str = "gauss"
    #: how the KV lengths were drawn
    lengths: str = "uniform"
    batch_invariant: bool = False


def uniform_case(
    batch: int, q_len: int, heads: int, kv_len: int, family: str = "sweep", **fields: Any
) -> Case:
    """All requests of one length; `fields` go to `Problem`."""
    problem = Problem.uniform(batch, q_len, kv_len, heads, **fields)
    return Case(_name(batch, q_len, heads, kv_len) + _suffix(problem), family, problem)


def gauss_lengths(batch: int, mean: int, least: int) -> tuple[int, ...]:
    """Ragged lengths: normal(mean, mean / 2) by Python's `random.gauss`, floored at `least`."""
    draw = random.Random(0)
    return tuple(max(int(draw.gauss(mean, mean / 2)), least) for _ in range(batch))


def anchor_cases() -> list[Case]:
    """The 54 anchor cases: latency, middle, compute and memory regimes, bf16, page 64."""
    grids = [
        ((1,), (128,), (1, 4, 16, 64, 128), (1024, 4096, 8192)),
        ((1,), (16,), (1, 4, 16, 64, 128), (1024, 4096, 8192)),
        ((2,), (128,), (1, 16, 128), (1024, 8192)),
        ((4,), (16,), (1, 16, 128), (1024, 8192)),
        ((1,), (64,), (1, 16, 128), (1024, 8192)),
        ((1,), (128, 16), (1,), (65536,)),
    ]
    cases = [
        uniform_case(batch, q_len, heads, kv_len, "anchor")
        for grid in grids
        for q_len, heads, batch, kv_len in itertools.product(*grid)
    ]
    for batch, heads, mean in ((128, 128, 4096), (128, 16, 4096), (32, 128, 2048)):
        problem = Problem((1,) * batch, gauss_lengths(batch, mean, least=1), heads)
        name = _name(batch, 1, heads, mean) + "_gauss"
        cases.append(Case(name, "anchor", problem, lengths="gauss(mean, mean / 2), seed 0"))
    return [*cases, uniform_case(8, 1, 128, 16384, "anchor")]


def drawn_cases(seed: int, count: int, family: str) -> list[Case]:
    """Shapes drawn evenly from the range of the anchors and beyond, without the anchors: 8 to 128
    heads, 1 to 4 query tokens, batch 1 to 256, keys 512 to 32768 on a logarithmic scale, a third of
    them ragged. A draw that would take an H200 more than `DRAWN_SECONDS` is drawn again.
    """
    draw = random.Random(seed)
    cases = {case.name: case for case in anchor_cases()}
    anchors = len(cases)
    while len(cases) < anchors + count:
        batch, heads = draw.choice(DRAWN_BATCHES), draw.choice(DRAWN_HEADS)
        q_len = draw.choice((1, 1, 1, 2, 3, 4))
        kv_len = round(2 ** draw.uniform(9, 15))
        ragged = draw.random() < 1 / 3 and batch > 1
        case = uniform_case(batch, q_len, heads, kv_len, family)
        if ragged:
            lengths = gauss_lengths(batch, kv_len, least=q_len)
            problem = replace(case.problem, kv_lens=lengths)
            words = "gauss(mean, mean / 2), seed 0"
            case = Case(case.name + "_gauss", family, problem, lengths=words)
        if H200.roofline_time(case.problem) < DRAWN_SECONDS:
            cases.setdefault(case.name, case)
    return list(cases.values())[anchors:]


def blackwell_twins() -> list[Case]:
    """The 40 cases of the Blackwell table in FlashInfer's pull request 2743, for this card.

    Equal lengths of 8192, or uniform in 1 to 8191 with the last one 8192, as its script draws
    them (its seed is not published; ours is 0). Page 32.
    """
    cases = []
    for dtype, variable in itertools.product(("e4m3", "bf16"), (False, True)):
        for q_len, batch in itertools.product((1, 4), (1, 32, 64, 128, 256)):
            draw = random.Random(0)
            lengths = [max(draw.randint(1, 8191), q_len) for _ in range(batch - 1)] + [8192]
            problem = Problem(
                (q_len,) * batch,
                tuple(lengths) if variable else (8192,) * batch,
                128,
                q_dtype=dtype,
                kv_format=dtype,
                page_size=32,
            )
            name = _name(batch, q_len, 128, 8192) + ("_var" if variable else "") + _suffix(problem)
            drawn = "randint(1, 8191), seed 0, last 8192" if variable else "uniform"
            cases.append(Case(name, "twin", problem, lengths=drawn))
    return cases


def trace_cases(samples: Iterable[tuple[str, Problem]]) -> list[Case]:
    """One case for each sample of a serving trace (its name and its problem)."""
    return [Case(f"trace_{name}", "trace", problem, lengths=name) for name, problem in samples]


def uniform_twin(case: Case) -> Case:
    """As many requests and tokens as `case` has, with lengths that differ by one token at most."""
    problem = case.problem
    length, longer = divmod(sum(problem.kv_lens), problem.batch)
    lengths = tuple(length + (request < longer) for request in range(problem.batch))
    return replace(
        case,
        name=f"{case.name}_uniform",
        problem=replace(problem, kv_lens=lengths),
        lengths=f"the tokens of {case.lengths}, spread evenly",
    )


def invariant_twin(case: Case) -> Case:
    """The same call, batch-invariant."""
    return replace(case, name=f"{case.name}_invariant", batch_invariant=True)


def sweep_cases(
    batches: Iterable[int],
    q_lens: Iterable[int],
    heads: Iterable[int],
    kv_lens: Iterable[int],
    **fields: Any,
) -> list[Case]:
    """Every combination of the values given; `fields` go to `Problem`."""
    grid = itertools.product(batches, q_lens, heads, kv_lens)
    return [uniform_case(*lengths, **fields) for lengths in grid]


#: lists without arguments, by their name on the command line
LISTS: dict[str, Callable[[], list[Case]]] = {
    "anchor": anchor_cases,
    "twin": blackwell_twins,
    # what the cost model may be fitted to beside the anchors, and what it is judged on; seed 2 was
    # judged on until its misses had been looked at
    "drawn": lambda: drawn_cases(1, 120, "drawn"),
    "heldout": lambda: drawn_cases(3, 60, "heldout"),
}


def get_list(name: str) -> list[Case]:
    """The list of cases called `name`."""
    if name not in LISTS:
        raise invalid("cases", repr(name), tuple(LISTS))
    return LISTS[name]()


def _name(batch: int, q_len: int, heads: int, kv_len: int) -> str:
    return f"b{batch}_q{q_len}_h{heads}_kv{kv_len}"


def _suffix(problem: Problem) -> str:
    """Name parts of the dtypes, page size and top_k that are not at their default."""
    parts = []
    if (problem.q_dtype, problem.kv_format) != ("bf16", "bf16"):
        same = problem.q_dtype == problem.kv_format
        parts.append(problem.q_dtype if same else f"{problem.q_dtype}_{problem.kv_format}")
    if problem.page_size != 64:
        parts.append(f"p{problem.page_size}")
    if problem.top_k:
        parts.append(f"topk{problem.top_k}")
    return "".join(f"_{part}" for part in parts)
