"""`mla-lab bundle OUT`: a folder that launches kernels on a host without compilers."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ._selection import add_selection


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> argparse.ArgumentParser:
    """`OUT`, `--kernel`, `--arch`, `--set`, `--python`, `--wheel`."""
    parser = subparsers.add_parser(
        "bundle", help="collect compiled kernels for a GPU host without registry or compilers"
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write")
    add_selection(parser)
    parser.add_argument("--python", default="3.12", help="the host's Python (default: 3.12)")
    parser.add_argument(
        "--wheel", action="append", default=[], help="one more wheel for the host, e.g. pytest"
    )
    return parser


def run(args: argparse.Namespace) -> int:
    """Write the bundle and say how to use it."""
    from ...jit.bundle import bundle, size_of
    from ...jit.shipped import select

    configs = select(args.kernel, args.set, args.arch)
    built = bundle(
        args.out, configs, [args.arch], python=args.python, wheels=args.wheel, progress=print
    )
    size = size_of(args.out) / 2**20
    print(f"{len(built)} kernels for {args.arch}, {size:.1f} MB in {args.out}")
    print(f"on the GPU host: source {args.out}/setup.sh")
    return 0
