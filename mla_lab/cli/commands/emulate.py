"""`mla-lab emulate`: run compiled kernels on the CPU, check them, draw what happened."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ._problem import _lengths
from ._selection import add_selection

#: lengths that cross a tile and end inside one
KV_LENS = (300, 77)


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> argparse.ArgumentParser:
    """`BUILD`, the problem, `--check`, `--schedule`, `--numbers`, `--trace`."""
    parser = subparsers.add_parser("emulate", help="run compiled kernels on the CPU; needs no GPU")
    parser.add_argument(
        "build", nargs="?", help="part of a shipped build's name; all that contain it are run"
    )
    add_selection(parser)
    parser.add_argument("--batch", type=int, help="requests, all of one length")
    parser.add_argument("--kv-len", type=_lengths, default=KV_LENS, metavar="N[,N...]")
    parser.add_argument("--q-len", type=int, default=1, help="query tokens a request (1)")
    parser.add_argument("--heads", type=int, default=0, help="query heads (a tile's rows)")
    parser.add_argument("--splits", type=int, default=1, help="pieces a request (1)")
    parser.add_argument("--check", action="store_true", help="report races, missing fences, ...")
    parser.add_argument("--schedule", default="fair", help="fair, greedy, random, late, adverse")
    parser.add_argument("--seed", type=int, default=0, help="of inputs and of the schedule (0)")
    parser.add_argument("--numbers", default="fast", help="fast, exact, card (as an H200 rounds)")
    parser.add_argument("--trace", metavar="FILE", help="write a timeline that Perfetto reads")
    return parser


def run(args: argparse.Namespace) -> int:
    """Print errors against the oracle, counts and findings; 1 where something is wrong."""
    from ...core.errors import invalid
    from ...jit import compile_all

    configs = _selected(args)
    if not configs:
        raise invalid("BUILD", repr(args.build), "part of a name that `mla-lab compile` prints")
    wrong = 0
    for artifact in compile_all(configs, args.arch):
        wrong += _emulate(args, artifact)
    return 1 if wrong else 0


def _selected(args: argparse.Namespace) -> list[Any]:
    from ...jit.shipped import select

    found = [c for c in select(args.kernel, args.set, args.arch) if c.kernel.startswith("cute/")]
    found = [c for c in found if c.kernel != "cute/empty"]
    if args.build is None:
        return found
    return [c for c in found if c.name() == args.build] or [
        c for c in found if args.build in c.name()
    ]


def _emulate(args: argparse.Namespace, artifact: Any) -> bool:
    from time import perf_counter

    from ...emulate import EmulatedKernel, Fault, Options
    from ...emulate.calls import is_right, make_call, problem_for

    config = artifact.config
    lengths = tuple(args.kv_len)
    if args.batch is not None and len(lengths) != args.batch:
        lengths = (lengths * args.batch)[: args.batch]
    options = Options(args.numbers, args.schedule, args.seed, args.check, bool(args.trace))
    call = make_call(
        config, problem_for(config, lengths, args.heads, args.q_len), args.splits, args.seed
    )
    kernel = EmulatedKernel.of(artifact, options)
    began = perf_counter()
    print(config.name())
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
