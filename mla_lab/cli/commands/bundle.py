"""`mla-lab bundle OUT`: compiled kernels for a host without compilers, as a folder or a wheel."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.errors import invalid
from ._progress import Bar, bar
from ._selection import add_selection

if TYPE_CHECKING:
    from ...plan.config import KernelConfig

#: the host's Python, unless it is named
PYTHON = "3.12"


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> argparse.ArgumentParser:
    """Options `OUT`, `--kernel`, `--arch`, `--set`, `--python`, `--wheel`, `--as-wheel`."""
    parser = subparsers.add_parser(
        "bundle", help="collect compiled kernels for a GPU host without registry or compilers"
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to write")
    add_selection(parser)
    parser.add_argument("--python", help=f"the host's Python (default: {PYTHON})")
    parser.add_argument(
        "--wheel", action="append", default=[], help="one more wheel for the host, e.g. pytest"
    )
    parser.add_argument(
        "--as-wheel",
        action="store_true",
        help="write the kernels alone, as OUT/mla_lab_kernels_sm90-VERSION.whl for pip",
    )
    return parser


def run(args: argparse.Namespace) -> int:
    """Write the bundle or the wheel, and say how to use it."""
    if args.as_wheel and args.wheel:
        raise invalid("--wheel", "one beside --as-wheel", "one of them")
    if args.as_wheel and args.python:
        raise invalid("--python", "it beside --as-wheel", "one of them: a wheel is for any Python")
    args.python = args.python or PYTHON
    if not re.fullmatch(r"3\.[1-9]\d", args.python):
        raise invalid("--python", repr(args.python), "a version such as 3.12")
    from ...jit.shipped import select

    with bar(f"compiling for {args.arch}", print) as shown:
        configs = select(args.kernel, args.set, args.arch)
        lines = (_wheel if args.as_wheel else _bundle)(args, configs, shown)
    print("\n".join(lines))
    return 0


def _bundle(args: argparse.Namespace, configs: list[KernelConfig], shown: Bar) -> list[str]:
    from ...jit.bundle import bundle, size_of

    built = bundle(
        args.out,
        configs,
        args.arch,
        python=args.python,
        wheels=args.wheel,
        progress=shown.say,
        built=shown.count,
    )
    size = size_of(args.out) / 2**20
    return [
        f"{len(built)} kernels for {args.arch}, {size:.1f} MB in {args.out}",
        f"on the GPU host: source {args.out}/setup.sh",
    ]


def _wheel(args: argparse.Namespace, configs: list[KernelConfig], shown: Bar) -> list[str]:
    from ...jit.wheel import kernels_wheel

    path = kernels_wheel(args.out, configs, args.arch, progress=shown.say, built=shown.count)
    size = path.stat().st_size / 2**20
    return [
        f"{len(configs)} kernels for {args.arch}, {size:.1f} MB in {path}",
        f"on the GPU host, beside mla-lab: pip install {path}",
    ]
