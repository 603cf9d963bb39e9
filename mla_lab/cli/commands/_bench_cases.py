"""Flags that say which cases to measure, shared by `bench run` and `bench sweep`."""

from __future__ import annotations

import argparse
import itertools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.errors import invalid
from ._words import names, numbers

if TYPE_CHECKING:
    from ...bench.cases import Case


#: defaults of flags that say more of a grid, and of samples of a trace
GRID: dict[str, Any] = {
    "q_dtype": ["bf16"],
    "kv_format": None,
    "formats": [],
    "out_dtype": None,
    "page_size": [64],
    "top_k": 0,
}
OF_TRACES: dict[str, Any] = {
    "trace": None,
    "model": ["deepseek-v3"],
    "requests": [128],
    "seeds": [0, 1, 2, 3, 4],
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Lists, a grid, or samples of a trace; and a filter over them."""
    parser.add_argument(
        "--cases",
        type=names,
        default=[],
        help="lists by comma: anchor, twin, drawn, heldout, trace",
    )
    parser.add_argument("--only", default="", help="regular expression that a case's name matches")
    grid = parser.add_argument_group("grid, in place of --cases: every combination")
    for name in ("batch", "q-len", "heads", "kv-len"):
        grid.add_argument(f"--{name}", type=numbers, help="by comma")
    grid.add_argument(
        "--q-dtype", type=names, default=GRID["q_dtype"], help="by comma; default: bf16"
    )
    grid.add_argument("--kv-format", help="default: as the query")
    grid.add_argument(
        "--formats",
        type=names,
        default=[],
        help="query:cache by comma, as bf16:e4m3, in place of those two; e4m3 alone is e4m3:e4m3",
    )
    grid.add_argument("--out-dtype", help="default: bf16, or fp16 where the query is")
    grid.add_argument(
        "--page-size", type=numbers, default=GRID["page_size"], help="tokens, by comma; default: 64"
    )
    grid.add_argument("--top-k", type=int, default=0, help="sparse: slots of each query token")
    parser.add_argument(
        "--batch-invariant", action="store_true", help="each case also batch-invariant, beside it"
    )
    parser.add_argument(
        "--uniform",
        action="store_true",
        help="each case also with its tokens spread evenly over its requests",
    )
    trace = parser.add_argument_group("trace samples, for --cases trace: every combination")
    trace.add_argument(
        "--trace",
        type=names,
        help="Azure CSV or Mooncake JSON lines, by comma; default: the synthetic trace",
    )
    for name, kind in (("model", names), ("requests", numbers), ("seeds", numbers)):
        shown = ",".join(map(str, OF_TRACES[name]))
        trace.add_argument(
            f"--{name}", type=kind, default=OF_TRACES[name], help=f"by comma; default: {shown}"
        )


def chosen(args: argparse.Namespace) -> list[Case]:
    """The cases that the flags name, at least one, each followed by its twins."""
    from ...bench.cases import invariant_twin, uniform_twin

    try:
        wanted = re.compile(args.only)
    except re.error as error:
        raise invalid("--only", repr(args.only), f"a regular expression: {error}") from error
    if args.top_k < 0:
        raise invalid("--top-k", args.top_k, "0 or more")
    cases = [case for case in _listed(args) if wanted.search(case.name)]
    if not cases:
        raise invalid("--only", repr(args.only), "a pattern that some case's name matches")
    if args.uniform:
        cases = _beside(cases, uniform_twin)
    if args.batch_invariant:
        cases = _beside(cases, invariant_twin)
    return cases


def _beside(cases: list[Case], twin: Callable[[Case], Case]) -> list[Case]:
    """Each case and its twin behind it, so that the card is in the same state for both."""
    return [each for case in cases for each in (case, twin(case))]


def _refuse_unused(args: argparse.Namespace, flags: Mapping[str, object], wanted: str) -> None:
    """Flags that would have no effect, where they are not at their defaults."""
    for name, default in flags.items():
        if getattr(args, name) != default:
            raise invalid(f"--{name.replace('_', '-')}", getattr(args, name), f"it with {wanted}")


def _listed(args: argparse.Namespace) -> list[Case]:
    from ...bench.cases import LISTS, get_list, sweep_cases

    if "trace" not in args.cases:
        _refuse_unused(args, OF_TRACES, "--cases trace")
    if args.formats:
        _refuse_unused(args, {"q_dtype": GRID["q_dtype"], "kv_format": None}, "no --formats")
    if any((args.batch, args.q_len, args.heads, args.kv_len)):
        if args.cases:
            raise invalid("--cases", ",".join(args.cases), "no list beside a grid's flags")
        shapes = (args.batch or [1], args.q_len or [1], args.heads or [128], args.kv_len or [4096])
        formats = [
            sweep_cases(
                *shapes,
                q_dtype=q_dtype,
                kv_format=kv_format,
                out_dtype=args.out_dtype or ("fp16" if q_dtype == "fp16" else "bf16"),
                page_size=page_size,
                top_k=args.top_k,
            )
            for q_dtype, kv_format in _formats(args)
            for page_size in args.page_size
        ]
        # formats of one shape follow each other, so that the card is in the same state for all
        return [case for shape in zip(*formats, strict=True) for case in shape]
    _refuse_unused(args, GRID, "a grid: --batch, --q-len, --heads or --kv-len")
    cases = []
    for name in args.cases or ():
        if name not in (*LISTS, "trace"):
            raise invalid("--cases", repr(name), (*LISTS, "trace"))
    for name in args.cases or ["anchor"]:
        cases += _trace_cases(args) if name == "trace" else get_list(name)
    return cases


def _formats(args: argparse.Namespace) -> list[tuple[str, str]]:
    """(query, cache) of the grid."""
    pairs = [pair.partition(":") for pair in args.formats]
    given = [(query, cache or query) for query, _, cache in pairs]
    return given or [(query, args.kv_format or query) for query in args.q_dtype]


def _trace_cases(args: argparse.Namespace) -> list[Case]:
    from ...bench.cases import trace_cases
    from ...core.models import get_model
    from ...workload import load_trace, sample, shipped_trace

    traces = [load_trace(path) for path in args.trace] if args.trace else [shipped_trace()]
    stems = [Path(trace.name).stem for trace in traces]
    if len(set(stems)) < len(stems):
        raise invalid("--trace", ",".join(args.trace), "files of different names, which cases have")
    drawn = itertools.product(traces, args.model, args.requests, args.seeds)
    return trace_cases(
        (
            f"{Path(trace.name).stem}_{model}_n{requests}_s{seed}",
            sample(trace, requests, seed).problem(get_model(model)),
        )
        for trace, model, requests, seed in drawn
    )
