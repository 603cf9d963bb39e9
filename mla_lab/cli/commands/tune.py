"""`mla-lab tune`: a sweep of our own variants, on one GPU or a Ray cluster, then the fit to it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from . import _bench_run, bench


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """The flags of `bench sweep`, and where the fitted costs go."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "tune", help="bench sweep, then bench fit: the costs that plans are chosen by"
    )
    _bench_run.add_sweep(parser)
    parser.add_argument("--out", type=Path, help="of the fitted costs, as in bench fit")
    parser.add_argument("--dry-run", action="store_true", help="judge the fit, and write nothing")
    return parser


def run(args: argparse.Namespace) -> int:
    """Sweep and fit; exit code 1, without a fit, where a case lost its workers."""
    code = _bench_run.sweep(args)
    if code:
        return code
    args.records, args.judge, args.parts = [args.record], None, False
    bench.fit(args)
    return 0
