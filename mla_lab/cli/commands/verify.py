"""`mla-lab verify`: pairs of features, a published list or the costs of features, on a card."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

from ...core.errors import invalid
from ._progress import Bar, bar
from ._words import device_of, names, numbers

Row = dict[str, Any]
#: seconds of a run that ends with its last case
NO_LIMIT = 1e9


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Register the command; returns its parser."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "verify", help="proofs as records: features against the oracle, builds, the emulator"
    )
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    pairs = verbs.add_parser("pairwise", help="pairs of features, formats and shapes")
    pairs.add_argument("--first", type=int, help="run only this many cases, the first ones")
    pairs.add_argument("--only", type=numbers, default=[], help="cases of these numbers, by comma")
    pairs.add_argument(
        "--again",
        action="store_true",
        help="run only cases that are not ok in the record; other rows stay",
    )
    published = verbs.add_parser("published", help="the 396 configurations of a pull request")
    published.add_argument("--dtypes", type=names, default=["bf16", "e4m3"], help="by comma")
    published.add_argument(
        "--batch",
        type=int,
        default=1024,
        help="configurations of at most this many requests (1024)",
    )
    costs = verbs.add_parser("costs", help="time with a feature beside time without")
    costs.add_argument(
        "--features",
        type=names,
        default=[],
        help="only features whose names begin with one of these, by comma",
    )
    soak = verbs.add_parser("soak", help="requests that grow, end and begin, every result checked")
    soak.add_argument("--seconds", type=float, default=600.0, help="length of this run (600)")
    soak.add_argument(
        "--seed", type=int, help="seed of the batches; default: one more than the record has runs"
    )
    soak.add_argument("record", type=Path, help="JSON lines; the runs that it has are kept")
    soak.add_argument("--device", default="cuda", help="cuda (default) or cpu")
    _add_emulator(verbs)
    kinds = verbs.add_parser("kinds", help="which backend drawn calls would take; needs no card")
    kinds.add_argument(
        "--calls", type=int, help="number of drawn calls; default: as in data/notes/features.md"
    )
    builds = verbs.add_parser("builds", help="what all shipped builds compile to; needs no card")
    builds.add_argument(
        "--elsewhere",
        action="store_true",
        help="the CUDA C++ kernels for other architectures than Hopper; needs nvcc",
    )
    sm100 = verbs.add_parser("sm100", help="the SM100 kernel in the emulator; needs no card")
    sm100.add_argument(
        "--list",
        default="",
        choices=("", "published", "features", "builds"),
        help="only this list; builds: resources of plain builds for both architectures, none runs",
    )
    sm100.add_argument("--seconds", type=float, default=NO_LIMIT, help="begin no case after this")
    sm100.add_argument("record", type=Path, help="JSON lines; rows of the same builds are kept")
    for verb in (pairs, published, costs):
        verb.add_argument("--device", default="cuda", help="cuda (default) or cpu")
    for verb in (pairs, published, costs, kinds, builds):
        verb.add_argument("record", type=Path, help="JSON lines, written anew")
    return parser


def _add_emulator(verbs: Any) -> None:
    """What runs compiled kernels in the emulator."""
    xqa = verbs.add_parser("xqa", help="the CUDA C++ kernel in the emulator; needs nvcc, no card")
    xqa.add_argument("--arch", default="sm_120a", help="architecture of the build (sm_120a)")
    xqa.add_argument("--first", type=int, help="run only this many cases, the first ones")
    cuda = verbs.add_parser("cuda", help="planner and ladder in the emulator; needs nvcc, no card")
    lse = verbs.add_parser(
        "lse",
        help="lse of eight-bit calls in the emulator, with a card's arithmetic; needs no card",
    )
    planted = verbs.add_parser(
        "planted", help="planted bugs: our checks, and compute-sanitizer's tools; needs no card"
    )
    planted.add_argument("--pack", type=Path, help="write what a card runs into this folder")
    planted.add_argument("--rows", type=Path, help="reports of a card's tools on that folder")
    for name, what in (
        ("emulated", "shipped builds in the emulator; needs no card"),
        ("mutations", "the same with one barrier, wait, arrive or fence deleted at a time"),
    ):
        verb = verbs.add_parser(name, help=what)
        verb.add_argument("--build", default="", help="part of a name; all builds without it")
        verb.add_argument(
            "--seconds", type=float, default=NO_LIMIT, help="begin no build after this"
        )
        verb.add_argument(
            "--jobs", type=int, default=1, help="builds that run at once, in a process each (1)"
        )
        verb.add_argument("record", type=Path, help="JSON lines; rows of the same builds are kept")
    speed = verbs.add_parser("emulator-speed", help="CPU seconds of the emulator on one core")
    for verb in (xqa, cuda, lse, planted, speed):
        verb.add_argument("record", type=Path, help="JSON lines, written anew")
    bits = verbs.add_parser("card-bits", help="launches and opcodes: bits of a Hopper card")
    bits.add_argument(
        "--compare", action="store_true", help="compare the record with the emulator; needs no card"
    )
    bits.add_argument(
        "--today",
        action="store_true",
        help="compare with kernels of today's source, in the emulator",
    )
    bits.add_argument("record", type=Path, help="JSON lines, written anew unless compared")


def run(args: argparse.Namespace) -> int:
    """Runs the cases of a verb into a record; exit code 1 where one is wrong or failed."""
    from ...core.revision import check_record

    if args.verb == "card-bits":
        return _card_bits(args)
    _check_numbers(args)
    check_record(args.record)
    with bar(f"verify {args.verb}", lambda text: print(text, file=sys.stderr)) as shown:
        module, rows = _made(args, shown)
    print(module.summary(rows))
    return int(module.failed(rows))


def _check_numbers(args: argparse.Namespace) -> None:
    """Refuse a device that is not here, a count of no case, and what is no time."""
    given = vars(args)
    if "device" in given:
        device_of(args.device)
    first, seconds = given.get("first"), given.get("seconds")
    for name, least in {"first": 1, "calls": 1, "batch": 1, "jobs": 1}.items():
        number = given.get(name)
        if number is not None and number < least:
            raise invalid(f"--{name}", number, f"{least} or more")
    if given.get("dtypes") == []:
        raise invalid("--dtypes", "none", "bf16, e4m3 or both")
    if first is not None and given.get("only"):
        raise invalid("--first", first, "no --only beside it")
    if given.get("list") == "builds" and given["seconds"] < NO_LIMIT:
        raise invalid(
            "--seconds", given["seconds"], "it without --list builds, of which all are made"
        )
    for name in ("first", "only"):
        if given.get("again") and given.get(name):
            raise invalid("--again", f"it with --{name}", "it alone: the record has the cases")
    if args.record.is_dir() or not args.record.absolute().parent.is_dir():
        raise invalid("record", str(args.record), "a file in a folder that exists")
    if seconds is not None and (math.isnan(seconds) or seconds < 0):
        raise invalid("--seconds", seconds, "0 or more")


def _card_bits(args: argparse.Namespace) -> int:
    from ...core.revision import check_record
    from ...verify import card_bits, record

    if args.compare or args.today:
        given = record.read(args.record)
        if given[0].get("what") != args.verb:
            got = f"{args.record} of {given[0].get('what')!r}"
            raise invalid("record", got, f"a record of {args.verb!r}")
        archive = args.record.with_suffix(".zip")
        kept = archive if archive.is_file() else None
        found = list(card_bits.compare(given, kept, args.today))
        print(card_bits.summary(found))
        return int(any(row["same"] != row["of"] for row in found))
    check_record(args.record)
    record.check_replaced(args.record, args.verb)
    rows = list(card_bits.rows())
    record.write(args.record, rows)
    card_bits.keep_calls(args.record)
    print(f"{len(rows) - 1} launches and probes")
    return 0


def _made(args: argparse.Namespace, shown: Bar) -> tuple[ModuleType, list[Row]]:
    """The rows of a verb's record, which is written, and the module that sums them up."""
    from ...verify import record

    if args.verb != "soak":  # which reads its own runs, and refuses others
        record.check_replaced(args.record, _what(args))
    if args.verb in ("emulated", "mutations"):
        from ...verify import emulated, mutations

        module = emulated if args.verb == "emulated" else mutations
        if not module.names(args.build):
            raise invalid("--build", repr(args.build), "part of a build's name")
        when = (args.seconds, shown.say, args.jobs, shown.count)
        return module, module.run(args.record, args.build, *when)
    if args.verb == "builds":
        from ...verify import cuda_archs, shipped_builds

        module = cuda_archs if args.elsewhere else shipped_builds
        return record, module.run(args.record, shown.say)
    if args.verb == "sm100":
        from ...verify import sm100, sm100_builds

        if args.list == "builds":
            return sm100, sm100_builds.run(args.record, shown.say)
        return sm100, sm100.run(args.record, args.list, args.seconds, shown.say, shown.count)
    if args.verb == "soak":
        from ...verify import soak

        return soak, soak.added(args.record, args.device, args.seconds, shown.say, args.seed)
    module, made = _streamed(args, shown.say)
    rows = list(_counted(made, shown))
    record.write(args.record, rows)
    return module, rows


def _what(args: argparse.Namespace) -> str:
    """What the first row of a verb's record says that it is."""
    if args.verb == "xqa":
        return f"xqa --arch {args.arch}"
    if args.verb == "builds" and args.elsewhere:
        return "cuda builds"
    return "sm100 builds" if args.verb == "sm100" and args.list == "builds" else str(args.verb)


def _counted(rows: Iterable[Row], shown: Bar) -> Iterator[Row]:
    """`rows`, shown as they come, of as many cases as their heads say."""
    done, total = 0, 0
    for row in rows:
        if row["kind"] == "run":
            total += row.get("cases", 0)
        else:
            done += 1
        shown.count(done, total or None)
        yield row


def _streamed(
    args: argparse.Namespace, say: Callable[[str], None]
) -> tuple[ModuleType, Iterable[Row]]:
    """The record of a verb, as it is made, and the module that sums it up."""
    from ...verify import record

    if args.verb == "pairwise":
        if args.again:
            return record, record.pairwise_again(record.read(args.record), args.device, say)
        chosen = args.only or (None if args.first is None else range(args.first))
        return record, record.pairwise_run(args.device, chosen, say)
    if args.verb == "published":
        runs = (record.published_run(args.device, d, args.batch, say) for d in args.dtypes)
        return record, chain.from_iterable(runs)
    if args.verb == "costs":
        return record, record.costs_run(args.device, args.features, say)
    if args.verb == "xqa":
        from ...verify import emulated_xqa

        return record, emulated_xqa.rows(args.arch, args.first, say)
    if args.verb == "cuda":
        from ...verify import emulated_cuda

        return record, emulated_cuda.rows(say)
    if args.verb == "lse":
        from ...verify import emulated_lse

        return emulated_lse, emulated_lse.rows()
    if args.verb == "emulator-speed":
        from ...verify import emulator_speed

        return emulator_speed, emulator_speed.rows()
    if args.verb == "planted":
        from ...lab import planted
        from ...verify import planted_tables

        if args.pack:
            planted.pack(args.pack)
        return planted_tables, planted.rows(record.read(args.rows) if args.rows else [])
    from ...verify import kinds

    return kinds, kinds.rows(args.calls or kinds.CALLS)
