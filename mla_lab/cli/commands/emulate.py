"""`mla-lab emulate`: run compiled kernels on the CPU, check them, draw what happened."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ...core.errors import invalid
from ._problem import _lengths
from ._selection import add_selection
from ._words import check_seed

#: lengths that cross a tile and end inside one
KV_LENS = (300, 77)
#: of requests, query tokens, heads and pieces
MOST = 65536
#: options of a call that is compiled and made here, which a recorded one has in it
OF_A_NEW_CALL = ("arch", "kernel", "set", "batch", "kv_len", "q_len", "heads", "splits")


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> argparse.ArgumentParser:
    """`BUILD`, the problem, `--check`, `--schedule`, `--numbers`, `--trace`."""
    parser = subparsers.add_parser("emulate", help="run compiled kernels on the CPU; needs no GPU")
    parser.add_argument(
        "build", nargs="?", help="part of a shipped build's name; all that contain it are run"
    )
    add_selection(parser)
    parser.add_argument("--batch", type=int, help="requests, with the lengths of --kv-len in turn")
    parser.add_argument(
        "--kv-len",
        type=_lengths,
        default=KV_LENS,
        metavar="N[,N...]",
        help="cached tokens of each request (300,77)",
    )
    parser.add_argument("--q-len", type=int, default=1, help="query tokens a request (1)")
    parser.add_argument(
        "--heads", type=int, default=0, help="query heads (as many as a tile has rows)"
    )
    parser.add_argument(
        "--splits",
        type=int,
        help="splits of a request (1); 0: the kernel finds its work tiles from the lengths, as "
        "builds with the option pieces always do",
    )
    parser.add_argument(
        "--check", action="store_true", help="report races, missing fences, deadlocks, ..."
    )
    parser.add_argument(
        "--strict",
        action="store_true",
        help="with --check: report also accesses that are in order only because a wgmma group "
        "is committed by all four warps of a warp group",
    )
    parser.add_argument(
        "--schedule",
        default="fair",
        help="order of warps: fair (default), greedy, random, late or adverse",
    )
    parser.add_argument("--seed", type=int, default=0, help="of inputs and of the schedule (0)")
    parser.add_argument(
        "--numbers", default="fast", help="arithmetic: fast (default), exact, or card: an H200's"
    )
    parser.add_argument(
        "--recorded", action="store_true", help="run recorded calls; needs no compiler"
    )
    parser.add_argument(
        "--record",
        metavar="FILE",
        help="keep each call in this archive; with --recorded, record the same calls anew",
    )
    parser.add_argument("--trace", metavar="FILE", help="write a timeline that Perfetto reads")
    parser.set_defaults(untouched={name: parser.get_default(name) for name in OF_A_NEW_CALL})
    return parser


def run(args: argparse.Namespace) -> int:
    """Print errors against the oracle, counts and findings; 1 where something is wrong."""
    from ...emulate import recorded
    from ...emulate.schedule import DRAWN

    _check(args)
    if args.recorded:
        changed = [n for n in OF_A_NEW_CALL if getattr(args, n) != args.untouched[n]]
        if changed:
            got = "--recorded with " + ", ".join(f"--{name.replace('_', '-')}" for name in changed)
            raise invalid("options", got, "BUILD chooses among recorded calls, each as it is")
        if args.seed and args.schedule not in DRAWN:
            got = f"--recorded with --seed {args.seed} and --schedule {args.schedule}"
            raise invalid("options", got, f"a seed of a schedule that is drawn: {', '.join(DRAWN)}")
        found = [recorded.load(name) for name in recorded.recordings(args.build or "")]
        if not found:
            raise invalid("BUILD", repr(args.build), recorded.recordings())
        _one_trace(args, len(found))
        if args.record:
            found = [_again(r, Path(args.record)) for r in found]
        return int(sum(_show(args, r.call(), r.kernel(_options(args))) for r in found) > 0)
    return int(sum(_emulate(args, artifact) for artifact in _compiled(args)) > 0)


def _again(recording: Any, archive: Path) -> Any:
    """The recorded call of the build as this source compiles it, kept in `archive`."""
    from ...emulate.recorded import record
    from ...jit import compile as compiled

    made = record(compiled(recording.config), recording.problem, recording.splits, recording.seed)
    made.save(archive)
    return made


def _compiled(args: argparse.Namespace) -> list[Any]:
    from ...emulate.calls import KERNELS
    from ...jit import compile_all
    from ...jit.shipped import select
    from ._run import check_memory

    others = [name for name in args.kernel or () if name not in KERNELS]
    if others:
        raise invalid("--kernel", ", ".join(others), KERNELS)
    found = [c for c in select(args.kernel, args.set, args.arch) if c.kernel in KERNELS]
    if args.build is not None:
        exact = [c for c in found if c.name() == args.build]
        found = exact or [c for c in found if args.build in c.name()]
    if not found:
        supported = "part of the name of a decode kernel's build (`mla-lab compile --list`)"
        raise invalid("BUILD", repr(args.build), f"{supported} for {args.arch}")
    _one_trace(args, len(found))
    for config in found:
        check_memory(_problem(args, config), "cpu", True, "emulate")
    return compile_all(found, args.arch)


def _problem(args: argparse.Namespace, config: Any) -> Any:
    """The problem of the options, in the formats of a build."""
    from ...emulate.calls import problem_for

    lengths = tuple(args.kv_len)
    if args.batch is not None and len(lengths) != args.batch:
        lengths = (lengths * args.batch)[: args.batch]
    return problem_for(config, lengths, args.heads, args.q_len)


def _check(args: argparse.Namespace) -> None:
    """Refuse numbers that no call has, and options without effect, before anything is compiled."""
    from ...emulate.machine import NUMBERS
    from ...emulate.schedule import SCHEDULES

    for name, least in {"batch": 1, "q_len": 1, "heads": 0, "splits": 0}.items():
        number = getattr(args, name)
        if number is not None and not least <= number <= MOST:
            raise invalid(f"--{name.replace('_', '-')}", number, f"{least} to {MOST}")
    for name, known in {"schedule": SCHEDULES, "numbers": NUMBERS}.items():
        if getattr(args, name) not in known:
            raise invalid(f"--{name}", repr(getattr(args, name)), known)
    check_seed(args.seed)
    for name in ("trace", "record"):
        path = getattr(args, name)
        if path is not None and (Path(path).is_dir() or not Path(path).absolute().parent.is_dir()):
            raise invalid(f"--{name}", repr(path), "a file in a folder that is there")
    if args.strict and not args.check:
        raise invalid("--strict", "no --check", "both")
    lengths = len(args.kv_len)
    if args.batch is not None and args.kv_len != KV_LENS and lengths not in (1, args.batch):
        raise invalid("--kv-len", f"{lengths} lengths", f"one, or --batch {args.batch} of them")


def _one_trace(args: argparse.Namespace, calls: int) -> None:
    if args.trace and calls > 1:
        raise invalid("--trace", f"{calls} calls", "one: a timeline is of one call, name its BUILD")


def _options(args: argparse.Namespace) -> Any:
    from ...emulate import Options

    words = (args.numbers, args.schedule, args.seed)
    return Options(*words, args.check, bool(args.trace), args.strict)


def _emulate(args: argparse.Namespace, artifact: Any) -> bool:
    from ...emulate import EmulatedKernel, recorded
    from ...emulate.calls import make_call

    problem, splits = _problem(args, artifact.config), args.splits
    if splits is None:
        splits = 0 if artifact.config.option("pieces") else 1
    if args.record:
        recorded.record(artifact, problem, splits, args.seed).save(Path(args.record))
    call = make_call(artifact.config, problem, splits, args.seed)
    return _show(args, call, EmulatedKernel.of(artifact, _options(args)))


def _show(args: argparse.Namespace, call: Any, kernel: Any) -> bool:
    """Run a call and print what came of it; whether something is wrong."""
    from time import perf_counter

    from ...emulate import Fault
    from ...emulate.calls import is_right

    began = perf_counter()
    print(call.config.name())
    try:
        kernel(*call.args)
    except Fault as fault:
        print(f"  {fault}")
        return True
    seconds, done = perf_counter() - began, kernel.run
    out, lse = call.errors()
    words = "right" if is_right(call) else "WRONG"
    print(f"  {words}: out differs by {out:.1e}, lse by {lse:.1e} from the float64 oracle")
    counted = f"{done.instructions / 1e6:.1f} M thread instructions, {done.flops / 1e6:.0f} MFLOP"
    print(f"  {counted}, {done.copied_bytes} bytes copied to shared memory, {seconds:.2f} s")
    for finding in done.findings:
        print(f"  {finding}")
    if args.check and not done.findings:
        print("  checks: nothing found")
    if args.trace and done.recorder is not None:
        done.recorder.write(Path(args.trace))
        print(f"  {len(done.recorder.events)} events in {args.trace}")
    return bool(done.findings) or not is_right(call)
