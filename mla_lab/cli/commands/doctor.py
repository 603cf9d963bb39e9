"""`mla-lab doctor`: what this machine can do, why not the rest, and a proof on its card."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from ...core.errors import invalid
from ._progress import bar

#: where `--prove` without a name leaves its record
RECORD = "mla-lab-proof.jsonl"


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Register the command; returns its parser."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "doctor", help="what this machine can do, and why not the rest"
    )
    parser.add_argument("--json", action="store_true", help="findings as JSON")
    parser.add_argument(
        "--prove",
        nargs="?",
        type=Path,
        const=Path(RECORD),
        metavar="FILE",
        help=f"run the proof on this machine's card, minutes; its record ({RECORD}) to send back",
    )
    return parser


def run(args: argparse.Namespace) -> int:
    """Print the findings, grouped; a cross stands where something optional is missing. Of a proof
    how it ended, with exit code 1 where it did not pass.
    """
    if args.prove is not None:
        if args.json:
            raise invalid("--json", "it with --prove", "one of the two: FILE is JSON lines")
        return _prove(args.prove)
    from ...api.doctor import examine

    findings = examine()
    if args.json:
        print(json.dumps([asdict(f) for f in findings], indent=1))
        return 0
    width = max(len(f.name) for f in findings)
    for topic, group in groupby(findings, key=lambda f: f.topic):
        print(topic)
        for finding in group:
            mark = "ok" if finding.there else "--"
            print(f"  {mark}  {finding.name:<{width}}  {finding.detail}")
    return 0


def _prove(path: Path) -> int:
    from ...core.revision import check_record
    from ...verify import prove

    check_record(path)
    with bar("compiling", lambda text: print(text, file=sys.stderr)) as shown:
        rows = prove.prove(path, shown.say, shown.count, shown.phase)
    print(prove.summary(rows, path))
    return int(not rows[-1]["passed"])
