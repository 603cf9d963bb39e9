"""What `flashinfer_tests` and `flash_mla_tests` share: a command line, and a run in parts.

A run of N jobs is N processes on one device, each of which runs every N-th of the same drawn cases.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch

from ..core.errors import MlaLabError, invalid
from ..core.installed import output_of
from ..core.revision import Revision, check_record
from .record import Row, read, write

#: of the draw
SEED = 7
#: checkout, commit of it, part, how many parts, and what is told of each case -> rows of a record
Tests = Callable[[Path, str, int, int, Callable[[str], None]], list[Row]]


class PartFailed(MlaLabError, RuntimeError):
    """A process of a run ended without its rows."""


def commit_of(checkout: Path) -> str:
    """The commit of a checkout. Raises InvalidInput where git has none."""
    commit = output_of("git", "-C", str(checkout), "rev-parse", "HEAD")
    if commit is None:
        raise invalid("checkout", f"{checkout}, of which git has no commit", "a git repository")
    return commit


def file_of(checkout: Path, name: Path, whose: str) -> Path:
    """A file of a checkout. Raises InvalidInput where it has none."""
    path = checkout / name
    if not path.is_file():
        raise invalid("checkout", f"{checkout} without {name}", f"a checkout of {whose}")
    return path


def of_this_run() -> Row:
    """Device, versions, day and seed, for the first row of a record."""
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return {
        "kind": "run", "card": card, "torch": torch.__version__,
        "mla_lab_commit": Revision.here().commit, "date": datetime.now(UTC).date().isoformat(),
        "seed": SEED,
    }  # fmt: skip


def in_parts(module: str, checkout: Path, commit: str, jobs: int) -> list[Row]:
    """Rows of a run in as many processes; of the first row, that of part 0.

    Raises PartFailed where a process ends without its record.
    """
    with tempfile.TemporaryDirectory() as folder:
        parts = [Path(folder, f"{part}.jsonl") for part in range(jobs)]
        running = [
            subprocess.Popen([
                sys.executable, "-m", module, str(checkout), str(part), "--commit", commit,
                "--part", str(number), "--jobs", str(jobs),
            ], stdout=subprocess.DEVNULL)
            for number, part in enumerate(parts)
        ]  # fmt: skip
        codes = [process.wait() for process in running]
        if any(codes):
            raise PartFailed(f"{module}: parts ended with codes {codes}; their errors stand above")
        rows = [read(part) for part in parts]
    return [rows[0][0], *(row for part in rows for row in part[1:])]


def command(module: str, description: str, tests: Tests, arguments: Sequence[str]) -> str:
    """Run a module's command line into its record; returns how the cases ended, as JSON."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    parser.add_argument("checkout", type=Path, help="a checkout, which is not changed")
    parser.add_argument("record", type=Path, help="JSON lines, written anew")
    parser.add_argument("--commit", help="of the checkout, where it is no git repository")
    parser.add_argument("--jobs", type=int, default=1, help="processes, on one device")
    parser.add_argument("--part", type=int, help="run this part of as many as there are jobs")
    given = parser.parse_args(arguments)
    if given.jobs < 1:
        raise invalid("jobs", given.jobs, "1 or more")
    if given.part is not None and not 0 <= given.part < given.jobs:
        raise invalid("part", given.part, f"0 to {given.jobs - 1}")
    check_record(given.record)
    commit = given.commit or commit_of(given.checkout)
    if given.part is None and given.jobs > 1:
        rows = in_parts(module, given.checkout, commit, given.jobs)
    else:
        rows = tests(given.checkout, commit, given.part or 0, given.jobs, _tell)
    write(given.record, rows)
    return json.dumps(Counter(row["status"] for row in rows[1:]))


def _tell(line: str) -> None:
    sys.stderr.write(f"{line}\n")


def main(module: str, description: str, tests: Tests) -> None:
    """`command` by the process's arguments; ends it with a message for bad ones."""
    try:
        sys.stdout.write(command(module, description, tests, sys.argv[1:]) + "\n")
    except MlaLabError as error:
        sys.exit(str(error))
