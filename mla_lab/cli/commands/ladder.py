"""`mla-lab ladder`: the steps from naive to fast, with predicted and measured times."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from ...core.errors import invalid, unsupported

ROUNDS = 5


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Options `--record`, `--rounds`, `--show`."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "ladder", help="the CUDA C++ kernels from naive to fast: predicted and measured gains"
    )
    parser.add_argument("--record", type=Path, help="measure on this GPU, and append to this file")
    parser.add_argument("--rounds", type=int, help="with --record (5)")
    parser.add_argument("--show", type=Path, help="a record; default: the one in data/")
    return parser


def run(args: argparse.Namespace) -> None:
    """Measure if asked to, then print a table for each case."""
    from ...bench import ladder

    rounds = ROUNDS if args.rounds is None else args.rounds
    if rounds < 1:
        raise invalid("--rounds", rounds, "1 or more")
    if args.rounds is not None and args.record is None:
        raise invalid("--rounds", rounds, "it with --record")
    if args.record is not None:
        import torch

        if not torch.cuda.is_available():
            raise unsupported("--record", "no GPU here", "a machine with one")
        ladder.measure(args.record, rounds, lambda text: print(text, file=sys.stderr, flush=True))
    print(ladder.tables(args.show or args.record))
