"""`mla-lab compile`: build kernels for an architecture, without a GPU."""

from __future__ import annotations

import argparse
import time
from typing import Any

from ...core.errors import invalid
from ._progress import bar
from ._selection import add_selection


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> argparse.ArgumentParser:
    """Options `--arch`, `--kernel`, `--set`, `--workers`, `--list`."""
    parser = subparsers.add_parser("compile", help="compile kernels into the cache; needs no GPU")
    add_selection(parser)
    parser.add_argument("--workers", type=int, help="compiling processes (default: two at most)")
    parser.add_argument("--list", action="store_true", help="name the selected builds, then stop")
    return parser


def run(args: argparse.Namespace) -> int:
    """Compile and print one line per artifact."""
    from ...jit import compile_all
    from ...jit.arch import label
    from ...jit.shipped import select

    if args.workers is not None and args.workers < 1:
        raise invalid("--workers", args.workers, "1 or more")
    configs = select(args.kernel, args.set, args.arch)
    if args.list:
        print("\n".join(c.name() for c in configs))
        return 0
    start = time.monotonic()
    with bar(f"compiling for {args.arch}", print) as shown:
        built = compile_all(
            configs, args.arch, workers=args.workers, progress=shown.say, built=shown.count
        )
    for artifact in built:
        size = artifact.library.stat().st_size / 1024
        print(f"{artifact.config.name():50s} {size:7.0f} KB  {artifact.folder}")
    print(f"{len(built)} kernels for {label(args.arch)}, {time.monotonic() - start:.1f} s")
    return 0
