"""`mla-lab bench`: time cases against peers, compare records, write tables, fit the cost model."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.errors import invalid, unsupported
from . import _bench_run
from ._words import names, numbers

if TYPE_CHECKING:
    from ...bench.tune.fitting import Launch


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Register the command; returns its parser."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "bench", help="time cases against peers, compare records, write tables"
    )
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    _bench_run.add_run(verbs.add_parser("run", help="measure; an existing record is continued"))
    _bench_run.add_sweep(verbs.add_parser("sweep", help="measure our own variants of each case"))
    _add_fit(verbs.add_parser("fit", help="fit the cost model to a sweep's record"))
    compare = verbs.add_parser(
        "compare", help="two records: a verdict a case; exit code 1 if slower"
    )
    compare.add_argument("baseline", type=Path, help="a record of `bench run`")
    compare.add_argument("candidate", type=Path, help="the record that is judged")
    compare.add_argument("--threshold", type=float, help="relative change that counts")
    compare.add_argument("--peers", type=names, default=[], help="only these, by comma")
    compare.add_argument("--all", action="store_true", help="show cases without change too")
    report = verbs.add_parser("report", help="a record as Markdown")
    report.add_argument("record", type=Path, help="of `bench run` or `bench sweep`")
    report.add_argument(
        "--table", default="anchor", help="table to print (anchor); sweep: of a grid"
    )
    ranks = verbs.add_parser(
        "rank-kernels", help="a rank's mask and the merge of ranks, beside PyTorch's"
    )
    ranks.add_argument("record", type=Path, help="JSON lines, appended to")
    ranks.add_argument("--ranks", type=numbers, default=(2, 4, 8), help="of a merge, by comma")
    ranks.add_argument("--batch", type=numbers, default=(1, 4, 16, 64, 128), help="by comma")
    ranks.add_argument("--heads", type=int, default=128, help="of a merge")
    ranks.add_argument("--rounds", type=int, default=21, help="timed rounds (21)")
    verbs.add_parser("targets", help="bounds beside the figures that data/records gives")
    return parser


def _add_fit(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("records", type=Path, nargs="+", help="of `bench sweep`")
    parser.add_argument("--judge", type=Path, help="a record whose cases the fit does not see")
    parser.add_argument(
        "--out",
        type=Path,
        help="default: data/runtime/kernel_costs.json of this checkout, or for a sweep over "
        "caches of eight bits kernel_costs_eight_bits.json",
    )
    parser.add_argument(
        "--parts", action="store_true", help="judge each part of the cases by a fit to the others"
    )
    parser.add_argument("--dry-run", action="store_true", help="judge, and write nothing")


def run(args: argparse.Namespace) -> int | None:
    """Dispatch; exit code 1 where a comparison fails its gate."""
    verbs = {
        "run": _bench_run.run,
        "sweep": _bench_run.sweep,
        "fit": fit,
        "compare": _compare,
        "report": _report,
        "rank-kernels": _rank_kernels,
        "targets": _targets,
    }
    code: int | None = verbs[args.verb](args)
    return code


def fit(args: argparse.Namespace) -> None:
    """Fit the cost model to `args.records`, judge it, and write it unless `args.dry_run`."""
    from ...bench import read
    from ...bench.tune import fitting
    from ...bench.tune.format_costs import by_formats
    from ...core.resources import data_dir
    from ...plan.kernel_costs import RECORD, SIXTEEN, recorded_costs

    if not (args.dry_run or args.out) and data_dir().name == "_data":
        raise invalid("--out", None, "a file: an installed package keeps its constants")
    rows = [row for path in args.records for row in read(path)]
    found = fitting.launches(rows)
    if SIXTEEN not in by_formats(found):
        _fit_formats(args, found, fitting.source_of(rows, found))
        return
    judges = {"on them": found}
    if args.judge:
        judges["on others"] = fitting.launches(list(read(args.judge)))
    start = recorded_costs()
    fitted = fitting.fit_all(found, start)
    source = fitting.source_of(rows, found)
    print(source)
    steps = {"before": start, "fitted": fitted}
    for name, costs in steps.items():
        for where, launches in judges.items():
            print(f"{name:8} {where:9} {fitting.quality(costs, launches)}")
    if args.parts:
        print(f"held out in parts  {fitting.held_out(found, start)}")
    if not args.dry_run:
        path = args.out or data_dir() / RECORD
        fitting.write(path, fitted, source, {launch.key for launch in found})
        print(f"wrote {path}")


def _fit_formats(args: argparse.Namespace, found: list[Launch], source: str) -> None:
    """Of a sweep over caches of eight bits."""
    for name, given in (("--judge", args.judge), ("--parts", args.parts)):
        if given:
            raise unsupported(name, "a sweep over caches of eight bits", "a sweep of 16 bits")
    from ...bench.tune import format_costs
    from ...core.resources import data_dir
    from ...plan.kernel_costs import FORMATS_RECORD

    made, said = format_costs.fit_formats(format_costs.by_formats(found))
    print("\n".join([source, *said]))
    if not args.dry_run:
        path = args.out or data_dir() / FORMATS_RECORD
        format_costs.write(path, made, source)
        print(f"wrote {path}")


def _rank_kernels(args: argparse.Namespace) -> int:
    """A line a case; exit code 1 where a result is wrong."""
    from ...bench.rank_kernels import measure

    right, head = True, f"{'':17s} batch     us  PyTorch, us"
    sizes = tuple(args.ranks), tuple(args.batch), args.heads, args.rounds
    for row in measure(args.record, *sizes):
        right = right and row["ok"]
        what = f"merge of {row['ranks']} ranks" if "ranks" in row else "mask of a rank"
        said = "" if row["kernel"] else "  PyTorch in both"
        said += "" if row["ok"] else "  wrong"
        line = f"{what:17s} {row['batch']:5d} {row['us']:6.1f} {row['torch_us']:12.1f}{said}"
        print("\n".join(filter(None, (head, line))))
        head = ""
    return int(not right)


def _compare(args: argparse.Namespace) -> int:
    from ...bench.gate import THRESHOLD, compare, passes
    from ...bench.records import read
    from ...bench.report import gate_table

    threshold = THRESHOLD if args.threshold is None else args.threshold
    if not 0 <= threshold < math.inf:
        raise invalid("--threshold", threshold, "a finite number, 0 or more")
    rows = (list(read(args.baseline)), list(read(args.candidate)))
    verdicts = compare(*rows, threshold=threshold, peers=args.peers)
    if all(verdict.verdict == "new" for verdict in verdicts):
        of = f" of peers {','.join(args.peers)}" if args.peers else ""
        raise invalid("baseline", f"no figure{of}", "a record with figures to compare")
    there = {row["peer"] for row in rows[0] if row["kind"] == "result"}
    if missing := [peer for peer in args.peers or () if peer not in there]:
        raise invalid("--peers", ",".join(missing), tuple(sorted(there)))
    print(gate_table(verdicts, everything=args.all))
    return 0 if passes(verdicts) else 1


def _report(args: argparse.Namespace) -> None:
    from ...bench.records import read, results
    from ...bench.report import FAMILIES, TABLES

    rows = list(read(args.record))
    if not rows:
        raise invalid("record", f"{args.record} without rows", "a record of `bench run`")
    if args.table not in TABLES:
        raise invalid("--table", repr(args.table), tuple(TABLES))
    lacking = {*FAMILIES} - {row.get("family") for row in results(rows, "ok")}
    if args.table.partition("-")[0] in lacking:
        got = f"{args.table!r}, of which {args.record} has no figure"
        kept = tuple(name for name in TABLES if name.partition("-")[0] not in lacking)
        raise invalid("--table", got, kept)
    print(TABLES[args.table](rows))


def _targets(_: argparse.Namespace) -> None:
    from ...core.resources import data_dir
    from ...verify.targets import FILE, made

    if not (data_dir() / FILE).is_file():
        raise unsupported("bench targets", "an installed wheel, without its records", "a checkout")
    print(made())
