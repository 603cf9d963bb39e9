"""Error of lse under a bf16 query over eight bits, in the emulator with an H200's arithmetic.

The tensor core adds e4m3 products with 14 bits (`emulate.tiles.card_product`), so that large scores
are less exact than those of 16 bits. Calls are plain ones, dense and sparse, over Gaussian,
heavy-tailed and concentrated caches, with a query as drawn and up to 16 times as large. Dense calls
of so few requests run swap_ab; keep_ab's dense builds multiply as its sparse ones do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from ..api.contract import trtllm_batch_decode_with_kv_cache_mla
from ..backends.emulate.backend import running
from ..core import kv_cache as formats
from ..core.problem import Problem
from ..emulate import Options
from ..reference.inputs import DISTRIBUTIONS, make_inputs
from ..reference.mla import decode_reference
from ..reference.tolerance import lse_error, rel_error
from .record import Row, head_row, not_ok

CACHES = ("e4m3", "fp8_656")
HEADS = (16, 32, 64, 128)
#: scale factors of the query
TIMES = (1, 4, 16)
#: tokens of a sparse call's cache, and those that a query token attends to, dense or sparse
TOKENS, ATTENDED = 1024, 192
#: of lse, relative where |lse| exceeds 1: what is asked of every call
MOST = 1e-3
WORKSPACE_BYTES = 64 << 20
#: (cache, heads, sparse, inputs, times)
Case = tuple[str, int, bool, str, int]


def cases() -> list[Case]:
    """Every combination, calls of one build together."""
    return list(product(CACHES, HEADS, (False, True), DISTRIBUTIONS, TIMES))


def run_case(case: Case) -> Row:
    """Errors of one call."""
    cache, heads, sparse, distribution, times = case
    kv_len, top_k = (TOKENS, ATTENDED) if sparse else (ATTENDED, 0)
    problem = Problem((1,), (kv_len,), heads, kv_format=cache, top_k=top_k)
    inputs = make_inputs(
        problem, 1, ("lse",), distribution=distribution, workspace_bytes=WORKSPACE_BYTES
    )
    inputs = replace(inputs, query=formats.pack(inputs.query.float() * times, problem.q_dtype))
    expected = decode_reference(inputs)
    given: dict[str, Any] = inputs.contract_args() | {"backend": "emulate"}
    with running(Options(numbers="card")) as taken:
        out, lse = trtllm_batch_decode_with_kv_cache_mla(**given)
    error = lse_error(lse, expected.lse)
    return {
        "kind": "case",
        "status": "ok" if error <= MOST else "wrong",
        "cache": cache,
        "heads": heads,
        "sparse": sparse,
        "inputs": distribution,
        "query_times": times,
        "builds": [config.name() for config in taken],
        "lse_error": float(f"{error:.3e}"),
        "greatest_lse": float(f"{expected.lse.abs().max().item():.3e}"),
        "error": float(f"{rel_error(out.double(), expected.out):.3e}"),
    }


def rows() -> Iterator[Row]:
    """The record's head and a row for each case."""
    chosen = cases()
    yield head_row("lse", "cpu", len(chosen))
    yield from map(run_case, chosen)


def summary(record: Sequence[Row]) -> str:
    """The largest error, and how much ran."""
    found = record[1:]
    most = max(row["lse_error"] for row in found)
    builds = {name for row in found for name in row["builds"]}
    environment = record[0]["environment"]
    return (
        f"In the emulator, with an H200's arithmetic, the error of lse is at most {most:.1e} times "
        f"max(1, |lse|): {len(found)} calls of {len(builds)} builds, dense and sparse, "
        f"{HEADS[0]} to {HEADS[-1]} heads, Gaussian, heavy-tailed and concentrated caches, a bf16 "
        f"query as drawn, {TIMES[1]} and {TIMES[2]} times as large, |lse| up to "
        f"{max(row['greatest_lse'] for row in found):.0f} "
        f"(commit {(environment['commit'] or 'unknown')[:9]}, {environment['date']})."
    )


failed = not_ok
