"""`mla-lab verify`: pairs of features, a published list or the costs of features, on a card."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ._progress import Bar, bar


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Register the command; returns its parser."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "verify", help="every pair of features and shapes against the oracle, and a published list"
    )
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    pairs = verbs.add_parser("pairwise", help="pairs of features, formats and shapes")
    pairs.add_argument("--first", type=int, help="only the first so many cases")
    pairs.add_argument("--only", default="", help="cases of these numbers, by comma")
    pairs.add_argument(
        "--again", action="store_true", help="only cases that the record has as not ok; others stay"
    )
    published = verbs.add_parser("published", help="the 396 configurations of a pull request")
    published.add_argument("--dtypes", default="bf16,e4m3", help="by comma")
    published.add_argument("--batch", type=int, default=1024, help="up to so many requests")
    costs = verbs.add_parser("costs", help="time with a feature beside time without")
    costs.add_argument("--features", default="", help="only those that begin so, by comma")
    soak = verbs.add_parser("soak", help="requests that grow, end and begin, every result checked")
    soak.add_argument("--seconds", type=float, default=600.0, help="how long this run is")
    soak.add_argument("--seed", type=int, help="default: how many runs the record then has")
    soak.add_argument("record", type=Path, help="JSON lines; the runs that it has are kept")
    soak.add_argument("--device", default="cuda")
    _add_emulator(verbs)
    kinds = verbs.add_parser("kinds", help="which backend drawn calls would take; needs no card")
    kinds.add_argument("--calls", type=int, help="how many, instead of those of the notes")
    kinds.add_argument("record", type=Path, help="JSON lines, written anew")
    sm100 = verbs.add_parser("sm100", help="the SM100 kernel in the emulator; needs no card")
    sm100.add_argument(
        "--list",
        default="",
        choices=("", "published", "features", "builds"),
        help="one list; builds: what each is compiled to, for both architectures, and nothing runs",
    )
    sm100.add_argument("--seconds", type=float, default=1e9, help="begin no case after this")
    sm100.add_argument("record", type=Path, help="JSON lines; rows of the same builds are kept")
    for verb in (pairs, published, costs):
        verb.add_argument("record", type=Path, help="JSON lines, written anew")
        verb.add_argument("--device", default="cuda")
    return parser


def _add_emulator(verbs: Any) -> None:
    """What runs compiled kernels in the emulator."""
    xqa = verbs.add_parser("xqa", help="the CUDA C++ kernel in the emulator; needs nvcc, no card")
    xqa.add_argument("--arch", default="sm_120a", help="what it is compiled for")
    xqa.add_argument("--first", type=int, help="only the first so many cases")
    xqa.add_argument("record", type=Path, help="JSON lines, written anew")
    cuda = verbs.add_parser("cuda", help="planner and ladder in the emulator; needs nvcc, no card")
    cuda.add_argument("record", type=Path, help="JSON lines, written anew")
    planted = verbs.add_parser(
        "planted", help="planted bugs: our checks, and compute-sanitizer's tools; needs no card"
    )
    planted.add_argument("--pack", type=Path, help="leave in this folder what a card runs")
    planted.add_argument("--rows", type=Path, help="what a card's tools said of that")
    planted.add_argument("record", type=Path, help="JSON lines, written anew")
    for name, what in (
        ("emulated", "shipped builds in the emulator; needs no card"),
        ("mutations", "the same with one barrier, wait, arrive or fence deleted at a time"),
    ):
        verb = verbs.add_parser(name, help=what)
        verb.add_argument("--build", default="", help="part of a name; all builds without it")
        verb.add_argument("--seconds", type=float, default=1e9, help="begin no build after this")
        verb.add_argument("--jobs", type=int, default=1, help="processes, of builds")
        verb.add_argument("record", type=Path, help="JSON lines; rows of the same builds are kept")
    speed = verbs.add_parser("emulator-speed", help="CPU seconds of the emulator on one core")
    speed.add_argument("record", type=Path, help="JSON lines, written anew")
    bits = verbs.add_parser("card-bits", help="launches and opcodes: bits of a Hopper card")
    bits.add_argument(
        "--compare", action="store_true", help="the record with the emulator; needs no card"
    )
    bits.add_argument("--today", action="store_true", help="the same with kernels of this source")
    bits.add_argument("record", type=Path, help="JSON lines, written anew unless compared")


def run(args: argparse.Namespace) -> int:
    """Runs the cases of a verb into a record; exit code 1 where one is wrong or failed."""
    from ...core.revision import check_record
    from ...verify import record

    def say(text: str) -> None:
        print(text, file=sys.stderr)

    if args.verb == "card-bits":
        return _card_bits(args)
    check_record(args.record)
    if args.verb == "emulator-speed":
        return _speed(args)
    if args.verb in ("emulated", "mutations"):
        return _in_emulator(args, say)
    if args.verb == "sm100":
        return _sm100(args, say)
    if args.verb == "soak":
        return _soak(args, say)
    if args.verb == "planted":
        return _planted(args)
    with bar(f"verify {args.verb}", say) as shown:
        rows = list(_counted(_rows(args, shown.say), shown, _selected(args)))
    record.write(args.record, rows)
    if args.verb == "kinds":
        from ...verify.kinds import shares

        print("\n".join(map(shares, (row for row in rows if row["kind"] == "taken"))))
        return 0
    counts = Counter(row["status"] for row in rows if row["kind"] == "case")
    print(", ".join(f"{counts[status]} {status}" for status in record.STATUSES if counts[status]))
    return 1 if counts["wrong"] or counts["failed"] else 0


def _card_bits(args: argparse.Namespace) -> int:
    from ...core.revision import check_record
    from ...verify import card_bits, record

    if args.compare or args.today:
        archive = args.record.with_suffix(".zip")
        kept = archive if archive.is_file() else None
        found = list(card_bits.compare(record.read(args.record), kept, args.today))
        print(card_bits.summary(found))
        return int(any(row["same"] != row["of"] for row in found))
    check_record(args.record)
    rows = list(card_bits.rows())
    record.write(args.record, rows)
    card_bits.keep_calls(args.record)
    print(f"{len(rows) - 1} launches and probes")
    return 0


def _planted(args: argparse.Namespace) -> int:
    from ...lab import planted
    from ...verify import planted_tables, record

    if args.pack:
        planted.pack(args.pack)
    rows = planted.rows(record.read(args.rows) if args.rows else [])
    record.write(args.record, rows)
    print(planted_tables.summary(rows))
    return int(any(row["mended"]["ours"] for row in rows[1:]))


def _speed(args: argparse.Namespace) -> int:
    from ...verify import emulator_speed, record

    rows = list(emulator_speed.rows())
    record.write(args.record, rows)
    print(emulator_speed.summary(rows))
    return int(any(row["cpu_seconds"] > row["allowed"] for row in rows[1:]))


def _in_emulator(args: argparse.Namespace, say: Callable[[str], None]) -> int:
    from ...verify import emulated, mutations

    if args.verb == "emulated":
        with bar("emulator", say) as shown:
            rows = emulated.run(
                args.record, args.build, args.seconds, shown.say, args.jobs, shown.count
            )
        print(emulated.summary(rows))
        return int(any(row["status"] != "ok" for row in rows[1:]))
    with bar("mutations", say) as shown:
        rows = mutations.run(
            args.record, args.build, args.seconds, shown.say, args.jobs, shown.count
        )
    print(mutations.summary(rows))
    rest = (left["why"] for row in rows[1:] for left in row["unreported"])
    return int(mutations.UNEXPLAINED in rest)


def _soak(args: argparse.Namespace, say: Callable[[str], None]) -> int:
    from ...verify import soak

    with bar("soak", say) as shown:
        rows = soak.added(args.record, args.device, args.seconds, shown.say, args.seed)
    print(soak.note(rows))
    return int(any(row["status"] != "ok" for row in soak.cases(rows)))


def _sm100(args: argparse.Namespace, say: Callable[[str], None]) -> int:
    from ...verify import sm100, sm100_builds

    if args.list == "builds":
        rows = sm100_builds.run(args.record, say)
    else:
        with bar("sm100", say) as shown:
            rows = sm100.run(args.record, args.list, args.seconds, shown.say, shown.count)
    counts = Counter(row["status"] for row in rows[1:])
    words = ", ".join(f"{count} {status}" for status, count in counts.items())
    print(f"{len(rows) - 1} of {rows[0]['cases']}: {words}")
    return int(counts["ok"] < len(rows) - 1)


def _selected(args: argparse.Namespace) -> int | None:
    """How many cases are named or counted by options; None for all of a list."""
    if args.verb != "pairwise":
        return None
    return len([number for number in args.only.split(",") if number]) or args.first


def _counted(
    rows: Iterator[dict[str, Any]], shown: Bar, selected: int | None
) -> Iterator[dict[str, Any]]:
    """`rows`, shown as they come: of `selected` cases, or as many as their heads say."""
    done, total = 0, selected or 0
    for row in rows:
        if row["kind"] == "run":
            total += 0 if selected else row.get("cases", 0)
        else:
            done += 1
        shown.count(done, total or None)
        yield row


def _rows(args: argparse.Namespace, say: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """The record of a verb, as it is made."""
    from ...verify import kinds, record

    if args.verb == "pairwise":
        if args.again:
            yield from record.pairwise_again(record.read(args.record), args.device, say)
            return
        numbers = [int(number) for number in args.only.split(",") if number]
        chosen = numbers or (None if args.first is None else range(args.first))
        yield from record.pairwise_run(args.device, chosen, say)
    elif args.verb == "costs":
        names = [name for name in args.features.split(",") if name]
        yield from record.costs_run(args.device, names, say)
    elif args.verb == "xqa":
        from ...verify import emulated_xqa

        yield from emulated_xqa.rows(args.arch, args.first, say)
    elif args.verb == "cuda":
        from ...verify import emulated_cuda

        yield from emulated_cuda.rows(say)
    elif args.verb == "kinds":
        yield from kinds.rows(args.calls or kinds.CALLS)
    else:
        for dtype in args.dtypes.split(","):
            yield from record.published_run(args.device, dtype, args.batch, say)
