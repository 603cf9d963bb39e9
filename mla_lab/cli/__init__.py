"""The command line: `mla-lab COMMAND`, each command a module of `mla_lab.cli.commands`.

A command's module has `add_parser(subparsers)` and `run(args) -> int | None`; it imports what it
needs inside `run`, so that `mla-lab --help` stays quick. Errors that mla_lab raises on purpose
are one line on stderr and exit code 2.
"""

from __future__ import annotations

import argparse
import os
import pkgutil
import sys
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType

from .. import __version__
from ..core.errors import MlaLabError
from . import commands

USER_ERROR = 2
INTERRUPTED = 130


def command_modules() -> list[ModuleType]:
    """Modules of `mla_lab.cli.commands` that are commands; `_names` are what those share."""
    names = [m.name for m in pkgutil.iter_modules(commands.__path__) if m.name[0] != "_"]
    return [import_module(f"{commands.__name__}.{name}") for name in names]


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line; `args.run` is the chosen command."""
    parser = argparse.ArgumentParser(
        prog="mla-lab", description="MLA decode: plan it, run it, look inside."
    )
    parser.add_argument("--version", action="version", version=f"mla-lab {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for module in command_modules():
        module.add_parser(subparsers).set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit code, 2 where mla_lab refused with a reason."""
    args = build_parser().parse_args(argv)
    #: for a command that starts itself again
    args.argv = list(sys.argv[1:] if argv is None else argv)
    try:
        return args.run(args) or 0
    except MlaLabError as error:
        print(f"mla-lab {args.command}: {error}", file=sys.stderr)
        return USER_ERROR
    except BrokenPipeError:
        # `mla-lab plan | head` has read enough; keep the interpreter's last flush quiet
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
