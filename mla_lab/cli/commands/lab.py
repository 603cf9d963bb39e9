"""`mla-lab lab`: JupyterLab on the workbook, for this machine only."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

from ...core.errors import invalid, unsupported

#: what opens first
FIRST = "00_start_here.ipynb"
#: defaults of JupyterLab for this command alone: no news, no updates, no extensions of a package
#: index; what a user has set elsewhere still counts
SETTINGS = Path(__file__).resolve().parents[2] / "lab" / "jupyter"


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Register the command; returns its parser."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "lab", help="JupyterLab on the workbook, for this machine only"
    )
    parser.add_argument(
        "folder",
        nargs="?",
        type=Path,
        default=Path("notebooks"),
        help="folder of notebooks (notebooks)",
    )
    parser.add_argument("--port", type=int, default=8888, help="8888, or the next free one")
    parser.add_argument("--no-browser", action="store_true", help="only print the address")
    return parser


def command(folder: Path, port: int, browser: bool) -> list[str]:
    """JupyterLab's command line: it listens on this machine only and keeps its token.

    Raises InvalidInput for a folder or port that cannot be, Unsupported without JupyterLab.
    """
    if not folder.is_dir():
        raise invalid("folder", folder, "a folder of notebooks (a wheel brings none: take a clone)")
    if not 0 < port < 65536:
        raise invalid("--port", port, "1 to 65535")
    if importlib.util.find_spec("jupyterlab") is None:
        raise unsupported(
            "lab", "no JupyterLab", "an environment with it: pip install mla-lab[lab]"
        )
    line = [sys.executable, "-m", "jupyterlab", "--ip=localhost", f"--port={port}"]
    line.append(f"--ServerApp.root_dir={folder.resolve()}")
    line.append(f"--LabApp.app_settings_dir={SETTINGS}")
    if (folder / FIRST).is_file():
        line.append(f"--LabApp.default_url=/lab/tree/{FIRST}")
    if not browser:
        line.append("--no-browser")
    if getattr(os, "geteuid", lambda: -1)() == 0:
        line.append("--allow-root")  # containers run as root, and JupyterLab asks twice
    return line


def run(args: argparse.Namespace) -> None:
    """Replace this process by JupyterLab, which then handles Ctrl-C."""
    line = command(args.folder, args.port, not args.no_browser)
    print("JupyterLab, on this machine only; its address follows. Ctrl-C ends it.", flush=True)
    os.execv(line[0], line)
