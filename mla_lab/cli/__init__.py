"""The command line: `mla-lab COMMAND`, each command a module of `mla_lab.cli.commands`.

A command's module has `add_parser(subparsers)` and `run(args) -> int | None`; it imports what it
needs inside `run`, so that `mla-lab --help` stays quick. Errors that mla_lab raises on purpose,
files that the system refuses, missing packages and too little memory are one line on stderr and
exit code 2.
"""

from __future__ import annotations

import argparse
import errno
import os
import pkgutil
import sys
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType

from ..core.errors import MlaLabError
from ..core.version import __version__
from . import commands

USER_ERROR = 2
INTERRUPTED = 130
#: packages that a command may need, and the extra that installs them
OPTIONAL = {
    "torch": "pip install torch",
    **dict.fromkeys(
        ("IPython", "ipywidgets", "jupyterlab", "nbclient", "nbformat", "plotly"),
        "pip install 'mla-lab[lab]'",
    ),
    "networkx": "pip install 'mla-lab[compile]'",
    "ray": "pip install 'mla-lab[ray]'",
    "tvm_ffi": "pip install apache-tvm-ffi",
}


def command_modules() -> list[ModuleType]:
    """Command modules of `mla_lab.cli.commands`; a leading underscore marks shared code."""
    names = [m.name for m in pkgutil.iter_modules(commands.__path__) if m.name[0] != "_"]
    return [import_module(f"{commands.__name__}.{name}") for name in names]


def build_parser() -> argparse.ArgumentParser:
    """Parser of the whole command line; `args.run` holds the chosen command's function."""
    parser = argparse.ArgumentParser(
        prog="mla-lab", description="MLA decode: plan it, run it, look inside."
    )
    parser.add_argument("--version", action="version", version=f"mla-lab {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for module in command_modules():
        module.add_parser(subparsers).set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 2 where it was refused with a reason."""
    args = build_parser().parse_args(argv)
    #: for a command that starts itself again
    args.argv = list(sys.argv[1:] if argv is None else argv)
    try:
        return args.run(args) or 0
    except MlaLabError as error:
        reason = str(error)
    except BrokenPipeError:
        # the reader of a pipe (`mla-lab plan | head`) has closed it; suppress the error of the last
        # flush
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as error:
        if error.filename is None and error.errno != errno.ENOSPC:
            raise
        reason = f"{error.filename or 'output'}: {error.strerror}"
    except ModuleNotFoundError as error:
        if error.name not in OPTIONAL:
            raise
        reason = f"{error.name}: not installed; {OPTIONAL[error.name]}"
    except MemoryError:
        reason = "not enough memory for this; ask for less"
    print(f"mla-lab {args.command}: {reason}", file=sys.stderr)
    return USER_ERROR


if __name__ == "__main__":
    sys.exit(main())
