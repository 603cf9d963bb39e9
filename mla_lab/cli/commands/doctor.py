"""`mla-lab doctor`: what this machine can do, and why not the rest."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from itertools import groupby
from typing import Any


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Register the command; returns its parser."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "doctor", help="what this machine can do, and why not the rest"
    )
    parser.add_argument("--json", action="store_true", help="findings as JSON")
    return parser


def run(args: argparse.Namespace) -> None:
    """Print the findings, grouped; a cross stands where something optional is missing."""
    from ...api.doctor import examine

    findings = examine()
    if args.json:
        print(json.dumps([asdict(f) for f in findings], indent=1))
        return
    width = max(len(f.name) for f in findings)
    for topic, group in groupby(findings, key=lambda f: f.topic):
        print(topic)
        for finding in group:
            mark = "ok" if finding.there else "--"
            print(f"  {mark}  {finding.name:<{width}}  {finding.detail}")
