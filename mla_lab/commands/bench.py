"""`mla-lab bench`: time cases against peers, compare two records, write tables."""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import DeviceLost, invalid

if TYPE_CHECKING:
    from ..bench.cases import Case

#: our kernels, the portable baselines and the public Hopper kernels
DEFAULT_PEERS = "mla-lab,torch-eager,triton-split-kv,flashinfer-fa3,flashmla,fa3-qv,fa3-qv-32"


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Register the command; returns its parser."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "bench", help="time cases against peers, compare records, write tables"
    )
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    _add_run(verbs.add_parser("run", help="measure; an existing record is continued"))
    compare = verbs.add_parser(
        "compare", help="two records: a verdict a case; exit code 1 if slower"
    )
    compare.add_argument("baseline", type=Path)
    compare.add_argument("candidate", type=Path)
    compare.add_argument("--threshold", type=float, help="relative change that counts")
    compare.add_argument("--peers", type=_names, default=[], help="only these, by comma")
    compare.add_argument("--all", action="store_true", help="show cases without change too")
    report = verbs.add_parser("report", help="a record as Markdown")
    report.add_argument("record", type=Path)
    report.add_argument("--table", default="anchor", help="which one; see --readme for all")
    report.add_argument("--readme", type=Path, help="fill every marked table of this file instead")
    return parser


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("record", type=Path, help="JSON lines, appended to")
    parser.add_argument(
        "--cases", type=_names, default=[], help="lists by comma: anchor, twin, feature, trace"
    )
    parser.add_argument("--only", default="", help="regular expression that a case's name matches")
    parser.add_argument("--peers", type=_names, default=_names(DEFAULT_PEERS), help="by comma")
    parser.add_argument("--device", help="default: the GPU, or the CPU without one")
    parser.add_argument(
        "--keep-failed", action="store_true", help="continuing a record, do not try those again"
    )
    parser.add_argument(
        "--no-preflight", action="store_true", help="do not try peers in processes of their own"
    )
    method = parser.add_argument_group("method")
    method.add_argument("--rounds", type=int, default=9)
    method.add_argument("--parts", type=int, default=1, help="repetitions of the whole list")
    method.add_argument("--rotation-mb", type=float, default=240.0, help="KV copies in all")
    method.add_argument("--seed", type=int, default=0)
    method.add_argument("--kernels", action="store_true", help="times of each kernel, profiled")
    method.add_argument("--power", action="store_true", help="watts of compute-bound cases")
    method.add_argument("--quick", action="store_true", help="no isolated and no planned times")
    method.add_argument("--no-ceilings", action="store_true", help="no GEMM and read beside")
    sweep = parser.add_argument_group("sweep, in place of --cases: every combination")
    for name in ("batch", "q-len", "heads", "kv-len"):
        sweep.add_argument(f"--{name}", type=_numbers, help="by comma")
    sweep.add_argument("--q-dtype", default="bf16")
    sweep.add_argument("--kv-format", default="bf16")
    sweep.add_argument("--page-size", type=int, default=64)
    trace = parser.add_argument_group("trace samples, for --cases trace")
    trace.add_argument("--trace", type=Path, help="Azure CSV or Mooncake JSON lines; else ours")
    trace.add_argument("--model", default="deepseek-v3")
    trace.add_argument("--requests", type=int, default=128)
    trace.add_argument("--seeds", type=_numbers, default=[0, 1, 2, 3, 4], help="by comma")


def run(args: argparse.Namespace) -> int | None:
    """Dispatch; exit code 1 where a comparison fails its gate."""
    return {"run": _run, "compare": _compare, "report": _report}[args.verb](args)


def _run(args: argparse.Namespace) -> None:
    import torch

    from ..bench.harness import Bench
    from ..bench.measure import Method
    from ..bench.peers import select
    from ..bench.preflight import preflight
    from ..bench.records import Record, results

    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    method = Method(
        rounds=args.rounds,
        parts=args.parts,
        seed=args.seed,
        rotation_bytes=int(args.rotation_mb * 1e6),
        isolated=not args.quick,
        planned=not args.quick,
        kernels=args.kernels,
        power=args.power,
        ceilings=not args.no_ceilings,
    )
    cases = [case for case in _cases(args) if re.search(args.only, case.name)]
    if not cases:
        raise invalid("--only", repr(args.only), "a pattern that some case's name matches")
    record = Record(args.record)
    careful = device.startswith("cuda") and not args.no_preflight
    bench = Bench(
        record,
        select(args.peers),
        device,
        method,
        progress=_show,
        preflight=preflight if careful else None,
    )
    try:
        bench.run(cases, args.keep_failed)
    except DeviceLost as lost:
        _restart(args.argv, str(lost))
    finally:
        ok = len(results(record.rows, "ok"))
        print(f"{args.record}: {ok} results, {len(results(record.rows)) - ok} without a figure")


def _restart(arguments: list[str], reason: str) -> None:
    """This command anew in this process's place; the failure is in the record and stays there."""
    _show(f"starting again: {reason}")
    more = [] if "--keep-failed" in arguments else ["--keep-failed"]
    os.execv(sys.executable, [sys.executable, "-m", "mla_lab", *arguments, *more])


def _cases(args: argparse.Namespace) -> list[Case]:
    from ..bench.cases import get_list, sweep_cases

    swept = (args.batch, args.q_len, args.heads, args.kv_len)
    if any(swept):
        if args.cases:
            raise invalid("--cases", ",".join(args.cases), "no list beside a sweep's flags")
        return sweep_cases(
            args.batch or [1],
            args.q_len or [1],
            args.heads or [128],
            args.kv_len or [4096],
            q_dtype=args.q_dtype,
            kv_format=args.kv_format,
            page_size=args.page_size,
        )
    cases = []
    for name in args.cases or ["anchor"]:
        cases += _trace_cases(args) if name == "trace" else get_list(name)
    return cases


def _trace_cases(args: argparse.Namespace) -> list[Case]:
    from ..bench.cases import trace_cases
    from ..models import get_model
    from ..workload import load_trace, sample, shipped_trace

    trace = load_trace(args.trace) if args.trace else shipped_trace()
    model = get_model(args.model)
    return trace_cases(
        (
            f"{Path(trace.name).stem}_{args.model}_n{args.requests}_s{seed}",
            sample(trace, args.requests, seed).problem(model),
        )
        for seed in args.seeds
    )


def _compare(args: argparse.Namespace) -> int:
    from ..bench.gate import THRESHOLD, compare, passes
    from ..bench.records import read
    from ..bench.report import gate_table

    threshold = THRESHOLD if args.threshold is None else args.threshold
    rows = (list(read(args.baseline)), list(read(args.candidate)))
    verdicts = compare(*rows, threshold=threshold, peers=args.peers)
    print(gate_table(verdicts, everything=args.all))
    return 0 if passes(verdicts) else 1


def _report(args: argparse.Namespace) -> None:
    from ..bench.records import read
    from ..bench.report import TABLES, fill_tables

    rows = list(read(args.record))
    if args.readme:
        text = args.readme.read_text(encoding="utf-8")
        args.readme.write_text(fill_tables(text, rows), encoding="utf-8")
        return
    if args.table not in TABLES:
        raise invalid("--table", repr(args.table), tuple(TABLES))
    print(TABLES[args.table](rows))


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _show(text: str) -> None:
    """A line that replaces the last one on a terminal; lines of their own in a log."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
    else:
        print(text, file=sys.stderr, flush=True)
