"""Executes the workbook as a reader would, top to bottom, in a fresh kernel for each notebook.

    python -m mla_lab.lab.run_all [--only 00 31] [--keep FOLDER] [--jobs 4]

Where a GPU is, its cells measure. One line a notebook; exit code 1 if one fails.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .session import notebook_path
from .workbook_map import NOTEBOOKS

#: seconds that one cell may take
CELL_TIMEOUT = 120


def execute(path: Path, keep: Path | None) -> str:
    """Run a notebook; returns "" or the error that ended it. `keep`: path of the executed copy."""
    import nbformat
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(notebook, timeout=CELL_TIMEOUT, kernel_name="python3")
    error = ""
    try:
        client.execute(cwd=str(path.parent))
    except (CellExecutionError, CellTimeoutError, DeadKernelError) as failure:
        error = str(failure).strip().splitlines()[-1]
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        nbformat.write(notebook, keep / path.name)
    return error


def main(arguments: Sequence[str]) -> int:
    """The command; see the module."""
    parser = argparse.ArgumentParser(prog="python -m mla_lab.lab.run_all")
    parser.add_argument("--only", nargs="*", default=(), help="notebook numbers")
    parser.add_argument("--keep", type=Path, help="folder for the executed copies")
    parser.add_argument("--jobs", type=int, default=1, help="kernels at once; 1 disturbs no timing")
    args = parser.parse_args(arguments)
    numbers = [e.number for e in NOTEBOOKS if not args.only or e.number in args.only]

    begin = time.perf_counter()
    ended: list[str] = []

    def passed(number: str) -> bool:
        path, start = notebook_path(number), time.perf_counter()
        error = execute(path, args.keep)
        took = time.perf_counter() - start
        ended.append(number)
        left = (time.perf_counter() - begin) / len(ended) * (len(numbers) - len(ended))
        sys.stdout.write(
            f"{path.name:32} {took:5.1f} s  {error or 'passed'}  "
            f"({len(ended)} of {len(numbers)}, about {left:.0f} s left)\n"
        )
        sys.stdout.flush()
        return not error

    with ThreadPoolExecutor(args.jobs) as pool:
        return 0 if all([*pool.map(passed, numbers)]) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
