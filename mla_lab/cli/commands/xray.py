"""`mla-lab xray`: registers, shared memory, spills, opcodes, PTX and SASS of compiled kernels."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from ...core.errors import invalid, unsupported
from ._progress import bar
from ._selection import add_selection

if TYPE_CHECKING:
    from ...plan.config import KernelConfig


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> argparse.ArgumentParser:
    """Options `--kernel`, `--arch`, `--set`, `--diff`, `--sass`, `--only`, `--ptx`."""
    parser = subparsers.add_parser(
        "xray", help="resources and opcodes of compiled kernels; needs no GPU"
    )
    add_selection(parser)
    parser.add_argument(
        "--diff",
        action="append",
        metavar="FIELD=VALUE",
        help="compare the build that --kernel and --set name with the one with this as well",
    )
    parser.add_argument("--sass", action="store_true", help="machine code with source lines")
    parser.add_argument("--only", action="append", help="with --sass: these classes, e.g. matrix")
    parser.add_argument("--ptx", action="store_true", help="the PTX text")
    return parser


def run(args: argparse.Namespace) -> int:
    """Print a report for each selected configuration."""
    from ... import xray
    from ...jit import compile_all

    _check_only(args)
    configs = _selected(args)
    if args.ptx and args.sass:
        raise invalid("--ptx", "it with --sass", "one of the two")
    with bar(f"compiling for {args.arch}", lambda text: print(text, file=sys.stderr)) as shown:
        made = compile_all(configs, args.arch, progress=shown.say, built=shown.count)
    reports = [xray.inspect(a) for a in (made[:1] if args.diff else made)]
    for report in reports:
        if args.ptx:
            print(report.ptx())
        elif args.sass and not report.has_sass:
            raise unsupported("--sass", "no nvdisasm", "`pip install nvidia-cuda-nvdisasm`, --ptx")
        elif args.sass:
            kinds = frozenset(args.only or ())
            print("\n\n".join(xray.render_sass(k, kinds) for k in report.kernels))
        else:
            print(xray.render(report) + "\n")
    if args.diff:
        after = xray.inspect(made[1])
        print(f"{reports[0].artifact.config.name()} -> {after.artifact.config.name()}")
        for one, other in zip(reports[0].kernels, after.kernels, strict=False):
            print(f"\n{one.name}\n{xray.render_changes(xray.compare(one, other))}")
    return 0


def _check_only(args: argparse.Namespace) -> None:
    """Refuse classes that no listing has, and those of a report, which has all."""
    from ...xray.opcodes import OTHER, SASS_CLASSES

    for name in args.only or ():
        if not args.sass:
            raise invalid("--only", name, "a class with --sass")
        if name not in (*SASS_CLASSES, OTHER):
            raise invalid("--only", name, (*SASS_CLASSES, OTHER))


def _selected(args: argparse.Namespace) -> list[KernelConfig]:
    """Builds to report on; with --diff the build of --set, and the one it is compared with."""
    from ...jit.shipped import select, with_settings

    if not args.diff:
        return select(args.kernel, args.set, args.arch)
    if not args.kernel or len(args.kernel) > 1:
        raise invalid("--kernel", args.kernel, "one kernel, with --diff")
    (kernel,) = args.kernel
    return [with_settings(kernel, args.set), with_settings(kernel, [*args.set, *args.diff])]
