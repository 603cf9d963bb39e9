"""compute-sanitizer's tools on the calls of `sanitizer_cases`, as a record.

    python -m mla_lab.verify.sanitizer RECORD

Memcheck and synccheck see all calls in one process, racecheck a process a call (see there). Some
processes run at once.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ..core.errors import unsupported
from ..core.revision import check_record
from .record import Row, environment_today, write
from .sanitizer_cases import CASES

PROGRAM = "compute-sanitizer"
TOOLS = ("memcheck", "racecheck", "synccheck")
KERNELS = ("--kernel-name", "kernel_substring=kernel_cutlass")
#: stands for all cases in one process
ALL = "all"
#: processes at a time: most of one is Python and the float64 oracle, on one thread each. 15 of them
#: took 52 s for all tools, on 16 cores; 12 with as many threads as cores took 244 s (2026-11-29)
AT_ONCE = os.cpu_count() or 4
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)")
Run = Callable[[Sequence[str]], tuple[int, str]]


def command(tool: str, name: str) -> list[str]:
    """One process: `name` is a case, or `ALL`."""
    filters = KERNELS if tool == "racecheck" else ()
    cases = [sys.executable, "-m", "mla_lab.verify.sanitizer_cases"]
    return [PROGRAM, "--tool", tool, *filters, *cases, *([] if name == ALL else [name])]


def rows(run: Run) -> Iterator[Row]:
    """A row for each process: calls that ran, errors that the tool reported, exit code. The
    processes that see all calls take the longest and begin first.
    """
    processes = [(tool, name) for tool in TOOLS for name in names(tool)]
    first = sorted(processes, key=lambda process: process[1] != ALL)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        ended = {process: pool.submit(run, command(*process)) for process in first}
        for process in processes:
            yield _row(*process, *ended[process].result())


def names(tool: str) -> list[str]:
    """What the processes of a tool run: a case each, or all in one."""
    return list(CASES) if tool == "racecheck" else [ALL]


def _row(tool: str, name: str, code: int, text: str) -> Row:
    counts = [int(count) for count in SUMMARY.findall(text)]
    if not counts:
        raise unsupported(tool, text[-300:], "a tool that ends with its summary")
    calls = len(re.findall(r": (?:ok|wrong), error", text))
    return {
        "kind": "case",
        "tool": tool,
        "name": name,
        "calls": calls,
        "errors": sum(counts),
        "exit": code,
    }


def _run(line: Sequence[str]) -> tuple[int, str]:
    done = subprocess.run(
        line,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **ONE_THREAD},
    )
    return done.returncode, done.stdout


def _head() -> Row:
    version = re.search(r"Version (\S+)", _run([PROGRAM, "--version"])[1])
    tool = f"{PROGRAM} {version[1] if version else 'of no known version'}"
    here = environment_today("cuda")
    return {"kind": "run", "what": "sanitizer", "tool": tool, "environment": here}


def main(argv: Sequence[str] | None = None) -> int:
    """Write the record; exit code 1 if it is no proof (`failed`)."""
    parser = argparse.ArgumentParser(prog="python -m mla_lab.verify.sanitizer")
    parser.add_argument("record", type=Path, help="JSON lines, written anew")
    record = parser.parse_args(argv).record
    check_record(record)
    found = []
    for row in rows(_run):
        found.append(row)
        sys.stdout.write(f"{row['tool']}, {row['name']}: {row['errors']} errors\n")
    write(record, [_head(), *found])
    return int(failed(found))


def failed(found: Sequence[Row]) -> bool:
    """Whether a tool found an error, a result was wrong, or a process ended without a call."""
    return any(row["errors"] or row["exit"] or not row["calls"] for row in found)


if __name__ == "__main__":
    sys.exit(main())
