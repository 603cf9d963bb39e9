"""Options that choose kernel configurations, for the commands that compile."""

from __future__ import annotations

import argparse


def add_selection(parser: argparse.ArgumentParser) -> None:
    """Add `--arch`, `--kernel` and `--set`."""
    parser.add_argument("--arch", default="sm_90a", help="architecture (default: sm_90a)")
    parser.add_argument(
        "--kernel", action="append", help="a kernel such as cuda/planner (default: all shipped)"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="a field or option of the configuration, e.g. --set mask=causal --set stages=2",
    )
