"""Grading: every exercise that students handed in, judged by the workbook's hidden checks.

Each notebook runs in a process of its own with a time limit; a progress file is what a student
says, and is shown as such. A verdict is a sentence about the answer and never a solution.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...core.errors import invalid
from ..checks import CHECKS
from ..checks.hints import NOTHING_YET
from .submission import Unreadable, Work, claims, plain, works

PASSED, REFUSED, UNTOUCHED, SAID = "passed", "refused", "untouched", "said"
#: one character a state in the table
SIGNS = {PASSED: "+", REFUSED: "x", UNTOUCHED: "-", SAID: "?", "": "."}
#: what a better mark replaces
_ORDER = (PASSED, REFUSED, SAID, UNTOUCHED)
#: bytes of a worker's report that are read
REPORT_BYTES = 1_000_000
#: variables that a student's code sees
KEPT = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "TMPDIR", "OMP_NUM_THREADS")


@dataclass(frozen=True)
class Mark:
    """State of one exercise of one student, the reason where it was refused, and the file."""

    state: str
    sentence: str
    file: str


@dataclass
class Graded:
    """A student's marks by exercise, and sentences about files that could not be graded."""

    student: str
    marks: dict[str, Mark] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def add(self, number: str, mark: Mark) -> None:
        """Keeps the better one of two marks of an exercise."""
        known = self.marks.get(number)
        if known is None or _ORDER.index(mark.state) < _ORDER.index(known.state):
            self.marks[number] = mark

    def count(self, state: str) -> int:
        """How many exercises are in `state`."""
        return sum(mark.state == state for mark in self.marks.values())

    @property
    def is_good(self) -> bool:
        """Whether everything that was handed in could be graded and nothing was refused."""
        return not self.problems and not self.count(REFUSED) and not self.count(UNTOUCHED)


def grade(
    folder: Path, *, seconds: int = 60, jobs: int = 1, watch: Callable[[str], None] | None = None
) -> list[Graded]:
    """Marks of each student of `folder`, in order of their names.

    seconds: for one notebook. jobs: notebooks at once. watch: takes a line a student.
    Raises InvalidInput for a folder without students, or numbers below 1.
    """
    for name, number in (("seconds", seconds), ("jobs", jobs)):
        if number < 1:
            raise invalid(name, number, "1 or more")
    handed_in = works(folder)
    found = []
    with ThreadPoolExecutor(jobs) as pool, tempfile.TemporaryDirectory() as scratch:
        for work in handed_in:
            if watch:
                watch(f"{work.student}: {len(work.notebooks)} notebooks")
            found.append(_graded(work, Path(scratch), seconds, pool))
    return found


def _graded(work: Work, scratch: Path, seconds: int, pool: ThreadPoolExecutor) -> Graded:
    graded = Graded(work.student, problems=list(work.problems))
    runs = pool.map(lambda path: judged(path, scratch, seconds), work.notebooks)
    for path, (marks, problems) in zip(work.notebooks, runs, strict=True):
        graded.problems += [plain(p) for p in problems]
        if not marks and not problems:
            graded.problems.append(f"{plain(path.name, 80)} has no exercise that is checked.")
        for number, mark in marks.items():
            graded.add(number, mark)
    for path in work.progress:
        try:
            said = claims(path)
        except Unreadable as error:
            graded.problems.append(plain(error))
            continue
        for number, date in said.items():
            graded.add(number, Mark(SAID, f"said to be solved on {date}", plain(path.name, 80)))
    return graded


def judged(path: Path, scratch: Path, seconds: int) -> tuple[dict[str, Mark], list[str]]:
    """Marks of one notebook, and problems with it. Never raises for what the notebook does."""
    marks: dict[str, Mark] = {}
    name = plain(path.name, 80)
    while True:
        lines, ended = _run(path, scratch, seconds, tuple(marks))
        problems = [str(line["problem"]) for line in lines if "problem" in line]
        begun = ""
        for line in lines:
            if line.get("begun") in CHECKS:
                begun = line["begun"]
            elif line.get("number") == begun:
                marks[begun] = _mark(bool(line.get("passed")), plain(line.get("sentence")), name)
                begun = ""
        if begun and begun not in marks:
            # the answer ended its process; the others get a new one
            marks[begun] = Mark(REFUSED, ended, name)
            continue
        if not problems and not any(line.get("done") for line in lines):
            problems.append(f"{name}: {ended}")
        return marks, problems


def _mark(passed: bool, sentence: str, name: str) -> Mark:
    if passed:
        # praise tells the answer
        return Mark(PASSED, "", name)
    if sentence.startswith(NOTHING_YET):
        return Mark(UNTOUCHED, "", name)
    return Mark(REFUSED, sentence, name)


def _run(
    path: Path, scratch: Path, seconds: int, skip: Iterable[str]
) -> tuple[list[dict[str, Any]], str]:
    """A worker's lines, and how it ended in words."""
    request = {"notebook": str(path.resolve()), "skip": list(skip), "seconds": seconds}
    with tempfile.TemporaryDirectory(dir=scratch) as home, tempfile.TemporaryFile() as report:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "mla_lab.lab.course.worker"],
            stdin=subprocess.PIPE, stdout=report, stderr=subprocess.DEVNULL,
            cwd=home, env=_environment(scratch, home), start_new_session=True,
        )  # fmt: skip
        try:
            process.communicate(json.dumps(request).encode() + b"\n", timeout=seconds)
            ended = f"The answer ended its process (exit code {process.returncode})."
        except subprocess.TimeoutExpired:
            ended = f"The answer did not end within {seconds} s."
        finally:
            _end(process)
        report.seek(0)
        return _lines(report.read(REPORT_BYTES)), ended


def _environment(scratch: Path, home: str) -> dict[str, str]:
    package = str(Path(__file__).resolve().parents[3])
    kept = {name: os.environ[name] for name in KEPT if name in os.environ}
    own = {"HOME": home, "MLA_LAB_PROGRESS": f"{home}/progress.json", "PYTHONPATH": package}
    return {"OMP_NUM_THREADS": "1", **kept, **own, "MLA_LAB_CACHE_DIR": str(scratch / "cache")}


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the worker and what it has started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        process.kill()
    process.wait()


def _lines(report: bytes) -> list[dict[str, Any]]:
    found = []
    for line in report.decode("utf-8", "replace").splitlines():
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            found.append(value)
    return found


def document(graded: list[Graded]) -> dict[str, Any]:
    """The marks as plain values, for JSON."""
    students = [
        {
            "student": g.student,
            **{state: g.count(state) for state in (PASSED, REFUSED, UNTOUCHED, SAID)},
            "marks": {n: vars(mark) for n, mark in sorted(g.marks.items())},
            "problems": g.problems,
        }
        for g in graded
    ]
    return {"exercises": list(CHECKS), "students": students}


def report(graded: list[Graded]) -> str:
    """A row a student, a column an exercise that anybody handed in, then each refusal's reason."""
    tried = sorted({number for g in graded for number in g.marks})
    width = max(len("student"), *(len(g.student) for g in graded))
    heads = [f"{'':{width}}  {' '.join(f'{n:>4}' for n in tried)}  passed"] if tried else []
    rows = [
        f"{g.student:{width}}  "
        + " ".join(f"{SIGNS[g.marks[n].state if n in g.marks else '']:>4}" for n in tried)
        + f"  {g.count(PASSED):>3} of {len(tried)}"
        for g in graded
    ]
    lines = [*heads, *rows, "", "+ passed   x refused   - not begun   ? said in a progress file"]
    for g in graded:
        reasons = [
            f"  {n}  {mark.sentence}"
            for n, mark in sorted(g.marks.items())
            if mark.state == REFUSED
        ]
        reasons += [f"  {problem}" for problem in g.problems]
        if reasons:
            lines += ["", g.student, *reasons]
    return "\n".join(lines)
