"""`bench run` and `bench sweep`: measure into a record."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ...core.errors import DeviceLost, invalid
from ._bench_cases import add_flags, chosen
from ._progress import bar
from ._words import check_seed, device_of, names

if TYPE_CHECKING:
    from ...bench import Bench, Method, Record

#: our calls (plain with two bounds, with a host plan), portable baselines, public Hopper kernels
DEFAULT_PEERS = (
    "mla-lab-plain,mla-lab-plain-tight,mla-lab,torch-eager,triton-split-kv,flashinfer-fa3,"
    "flashmla,fa3-qv,fa3-qv-32"
)
#: reasons of calls without a figure that a run ends with; the record has all
SHOWN_REASONS = 3


def add_run(parser: argparse.ArgumentParser) -> None:
    """Flags of `bench run`."""
    _add_common(parser, DEFAULT_PEERS, rounds=9)
    method = parser.add_argument_group("method")
    method.add_argument("--parts", type=int, default=1, help="repetitions of the whole list (1)")
    method.add_argument(
        "--kernels", action="store_true", help="also time each kernel by the profiler"
    )
    method.add_argument(
        "--power", action="store_true", help="also measure watts of compute-bound cases"
    )
    method.add_argument(
        "--quick", action="store_true", help="time no isolated calls and no planning"
    )
    method.add_argument(
        "--no-ceilings",
        action="store_true",
        help="measure no GEMM and no read of memory before and after",
    )


def add_sweep(parser: argparse.ArgumentParser) -> None:
    """Flags of `bench sweep`."""
    _add_common(parser, "", rounds=7)
    parser.add_argument("--per-tile", type=int, help="most variants of each kernel and tile")
    parser.add_argument("--backend", default="cute", help="backend that runs the variants (cute)")
    parser.add_argument(
        "--ray",
        nargs="?",
        const="local",
        metavar="ADDRESS",
        help="spread cases over a Ray cluster, one process a GPU; without an address, this host",
    )


def _add_common(parser: argparse.ArgumentParser, peers: str, rounds: int) -> None:
    parser.add_argument("record", type=Path, help="JSON lines, appended to")
    parser.add_argument(
        "--peers",
        type=names,
        default=names(peers),
        help=f"by comma; default: {peers or 'our variants alone'}",
    )
    parser.add_argument("--device", help="default: the GPU, or the CPU without one")
    parser.add_argument(
        "--keep-failed", action="store_true", help="do not try failed cases of the record again"
    )
    parser.add_argument(
        "--no-preflight", action="store_true", help="do not try peers in processes of their own"
    )
    parser.add_argument("--rounds", type=int, default=rounds, help=f"timed rounds ({rounds})")
    parser.add_argument(
        "--rotation-mb",
        type=float,
        help="MB of KV copies that launches rotate over; default: 4800 on a GPU, 240 on a CPU",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the inputs (0)")
    add_flags(parser)


def run(args: argparse.Namespace) -> None:
    """Peers against each other."""
    from ...bench import Bench, Method

    size = _checked_size(args)
    if args.parts < 1:
        raise invalid("--parts", args.parts, "1 or more")
    if not args.peers:
        raise invalid("--peers", "none", "at least one")
    method = Method(
        rounds=args.rounds,
        parts=args.parts,
        seed=args.seed,
        rotation_bytes=size,
        isolated=not args.quick,
        planned=not args.quick,
        kernels=args.kernels,
        power=args.power,
        ceilings=not args.no_ceilings,
    )
    _measure(args, Bench, method)


def sweep(args: argparse.Namespace) -> int:
    """Our own variants against each other, and whatever peers are named beside them."""
    from ... import backends
    from ...bench.tune.sweep import METHOD, PER_TILE, Sweep

    if args.per_tile is not None and args.per_tile < 1:
        raise invalid("--per-tile", args.per_tile, "1 or more")
    if args.backend not in backends.MODULES:
        raise invalid("--backend", repr(args.backend), tuple(backends.MODULES))

    class OwnSweep(Sweep):
        backend = args.backend
        per_tile = args.per_tile or PER_TILE

    size = _checked_size(args)
    method = replace(METHOD, rounds=args.rounds, seed=args.seed, rotation_bytes=size)
    if args.ray:
        return _spread(args, method, OwnSweep.per_tile)
    _measure(args, OwnSweep, method)
    return 0


def _checked_size(args: argparse.Namespace) -> int | None:
    """Bytes of the KV copies, None by default; refuses numbers that no measurement can use."""
    if args.rounds < 1:
        raise invalid("--rounds", args.rounds, "1 or more")
    check_seed(args.seed)
    if args.rotation_mb is None:
        return None
    if not 0 <= args.rotation_mb < math.inf:
        raise invalid("--rotation-mb", args.rotation_mb, "a finite number, 0 or more")
    return int(args.rotation_mb * 1e6)


def _spread(args: argparse.Namespace, method: Method, per_tile: int) -> int:
    """A sweep by a Ray cluster; exit code 1 where a case lost its workers."""
    import ray  # noqa: F401  (missing: the command says which extra installs it)

    from ...bench import Record
    from ...bench.tune.cluster import ClusterSweep, spread

    device = args.device or "cuda"
    peers, record = tuple(args.peers or ()), Record(args.record)
    settings = ClusterSweep(method, device, args.backend, per_tile, peers, args.keep_failed)
    with bar("sweep", _show) as shown:

        def progress(done: int, total: int, line: str) -> None:
            shown.count(done, total)
            shown.say(f"{done}/{total} {line}")

        lost = spread(chosen(args), record, settings, args.ray, progress)
    _print_counts(record)
    for name in lost:
        print(f"{name}: its workers died; the same command tries it again", file=sys.stderr)
    return int(bool(lost))


def _measure(args: argparse.Namespace, kind: type[Bench], method: Method) -> None:
    """Continues the record, from the start again in a new process where the device is lost."""
    from ...bench import Record
    from ...bench.peers import select
    from ...bench.preflight import preflight

    device = device_of(args.device)
    cases = chosen(args)
    peers = select(args.peers) if args.peers else []
    record = Record(args.record)
    careful = preflight if device.startswith("cuda") and not args.no_preflight else None
    try:
        with bar("bench", _show) as shown:
            bench = kind(record, peers, device, method, progress=shown.say, preflight=careful)
            bench.count = shown.count
            bench.run(cases, args.keep_failed)
    except DeviceLost as lost:
        _restart(args.argv, str(lost))
    finally:
        _print_counts(record)


def _print_counts(record: Record) -> None:
    from ...bench import results

    found = results(record.rows)
    reasons = Counter(row["reason"] for row in found if row["status"] != "ok")
    without = reasons.total()
    print(f"{record.path}: {len(found) - without} results, {without} without a figure")
    for reason, count in reasons.most_common(SHOWN_REASONS):
        print(f"  {count} times: {reason}")


def _restart(arguments: list[str], reason: str) -> None:
    """This command anew in this process's place; the failure is in the record and stays there."""
    _show(f"starting again: {reason}")
    more = [] if "--keep-failed" in arguments else ["--keep-failed"]
    os.execv(sys.executable, [sys.executable, "-m", "mla_lab", *arguments, *more])


def _show(text: str) -> None:
    """A line that replaces the last one on a terminal; lines of their own in a log."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
    else:
        print(text, file=sys.stderr, flush=True)
