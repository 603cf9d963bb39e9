"""`mla-lab course`: the syllabus, and grading of what students hand in."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Register the command; returns its parser."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "course", help="eight sessions on the workbook; grade what students hand in"
    )
    which = parser.add_subparsers(dest="part", metavar="PART", required=True)
    which.add_parser("syllabus", help="the sessions, as Markdown")
    grade = which.add_parser(
        "grade",
        help="judge notebooks and progress files of several students",
        description="Judges every exercise in FOLDER by the workbook's checks; one folder in it is "
        "one student. Notebooks run in processes of their own, with limits, which is no sandbox: "
        "use a container for people whom you do not trust.",
        epilog="Exit code 0 where all that was handed in passes, 1 where something does not.",
    )
    grade.add_argument(
        "folder", type=Path, metavar="FOLDER", help="a folder with one folder a student"
    )
    grade.add_argument("--json", action="store_true", help="marks and sentences as JSON")
    grade.add_argument(
        "--seconds", type=int, default=60, help="time limit of a notebook, in seconds (60)"
    )
    grade.add_argument("--jobs", type=int, default=1, help="notebooks that run at once (1)")
    return parser


def run(args: argparse.Namespace) -> int:
    """Print the syllabus, or the marks; 1 where something that was handed in does not pass."""
    if args.part == "syllabus":
        from ...lab.course.syllabus import syllabus

        print(syllabus("notebooks/"))
        return 0
    from ...lab.course.grade import document, grade, report

    def watch(line: str) -> None:
        if sys.stderr.isatty():
            print(line, file=sys.stderr)

    found = grade(args.folder, seconds=args.seconds, jobs=args.jobs, watch=watch)
    print(json.dumps(document(found), indent=1) if args.json else report(found))
    return 0 if all(graded.is_good for graded in found) else 1
