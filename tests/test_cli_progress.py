"""The bar of long commands: on a terminal with the time left, and nowhere else."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mla_lab import cli
from mla_lab.cli.commands import _progress, doctor
from mla_lab.cli.commands._progress import bar
from mla_lab.core.gpu import Gpu
from mla_lab.verify import prove
from mla_lab.verify.check import Outcome
from mla_lab.verify.proof_cases import Check

from .house import ROOT

SMALL = ["decode", "--heads", "4", "--kv-len", "70", "--batch", "2", "--device", "cpu"]


class Terminal(io.StringIO):
    """A stderr that is a terminal."""

    def isatty(self) -> bool:
        return True


def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """In place of stderr from here on; a fixture would come before pytest's own stderr."""
    made = Terminal()
    monkeypatch.setattr(sys, "stderr", made)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    return made


def test_a_terminal_sees_steps_and_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = terminal(monkeypatch)
    lines: list[str] = []
    with bar("compiling", lines.append) as shown:
        shown.count(0, 3)
        shown.say("compiling keep_ab")
        shown.count(1, 3)
        shown.phase("oracle", 8)
        shown.count(8, 8)
    seen = stderr.getvalue()
    assert "oracle" in seen
    assert "8/8" in seen
    assert "left" in seen
    assert lines == []


def test_no_terminal_gets_lines_alone(capsys: pytest.CaptureFixture[str]) -> None:
    lines: list[str] = []
    with bar("compiling", lines.append) as shown:
        shown.count(1, 3)
        shown.phase("oracle", 8)
        shown.say("compiling keep_ab")
    assert lines == ["compiling keep_ab"]
    assert capsys.readouterr() == ("", "")


def test_quiet_is_quiet_on_a_terminal_too(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = terminal(monkeypatch)
    with bar("calls", print, quiet=True) as shown:
        shown.count(1, 3)
    assert stderr.getvalue() == ""


def test_without_rich_there_are_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = terminal(monkeypatch)
    monkeypatch.setitem(sys.modules, "rich", None)
    assert _progress._on_terminal() is None
    lines: list[str] = []
    with bar("compiling", lines.append) as shown:
        shown.say("compiling keep_ab")
    assert (lines, stderr.getvalue()) == (["compiling keep_ab"], "")


def test_steps_that_show_their_own_have_a_bar_between_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stderr = terminal(monkeypatch)
    now = iter([0.0, 0.0, 90.0])
    monkeypatch.setattr(_progress, "time", SimpleNamespace(monotonic=lambda: next(now)))
    steps = _progress.Steps(8)
    steps.begin("sweep")
    steps.end(3)
    steps.begin("costs")
    first, second = stderr.getvalue().splitlines()
    assert "sweep; 0:00:00 so far" in first and "left" not in first
    assert "costs; 0:01:30 so far, 0:02:30 left" in second
    assert second.count("━") > first.count("╸")


def test_steps_say_nothing_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    steps = _progress.Steps(2)
    steps.begin("sweep")
    steps.end(1)
    steps.begin("costs")
    assert capsys.readouterr() == ("", "")


def test_a_proof_shows_its_builds_and_cases(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a CPU, with builds and cases of its own in place of a card's."""
    gpu = Gpu.preset("H200")
    checks = [
        Check("contract", f"case {n}", "torch", lambda: Outcome("ok", "torch")) for n in (1, 2)
    ]

    def compiled(wanted: Any, arch: str, *, workers: int, built: Any) -> None:
        built(1, 2)

    monkeypatch.setattr(prove, "here", lambda: gpu)
    monkeypatch.setattr(prove, "compile_all", compiled)
    lists = SimpleNamespace(checks=lambda: checks)
    monkeypatch.setattr(prove, "Lists", lambda card, device: lists)
    seen: list[Any] = []
    rows = prove.prove(
        tmp_path / "first.jsonl",
        seen.append,
        lambda *count: seen.append(count),
        lambda *phase: seen.append(phase),
    )
    assert rows[-1]["passed"] and seen[0].startswith("compiling what is missing of ")
    of_cases = [(1, 2), "1/2 ok case 1", (2, 2), "2/2 ok case 2"]
    assert seen[1:] == [(1, 2), ("cases", 2), *of_cases]
    stderr = terminal(monkeypatch)
    assert doctor._prove(tmp_path / "second.jsonl") == 0
    assert "2/2" in stderr.getvalue() and "left" in stderr.getvalue()
    assert capsys.readouterr().out.startswith("passed: 2 ok; ")


def run_on_terminal(*options: str) -> tuple[str, str]:
    """stdout, and what a terminal on stderr shows, of the program."""
    ours, theirs = pty.openpty()
    seen: list[bytes] = []

    def read() -> None:
        with contextlib.suppress(OSError):  # Linux: the other side is closed
            while part := os.read(ours, 65536):
                seen.append(part)

    # while the program runs: a terminal's buffer is small
    reader = threading.Thread(target=read)
    reader.start()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "100"}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "mla_lab", *options],
            stdout=subprocess.PIPE, stderr=theirs, env=environment, text=True, check=True,
        )  # fmt: skip
    finally:
        os.close(theirs)
        reader.join()
        os.close(ours)
    return done.stdout, b"".join(seen).decode()


def test_decode_shows_a_bar() -> None:
    out, seen = run_on_terminal(*SMALL, "--calls", "2")
    assert "error " in out and "\x1b" not in out
    assert "left" in seen


@pytest.mark.slow
def test_ranks_show_a_bar(tmp_path: Path) -> None:
    """Their processes start from the program's own main module."""
    record = tmp_path / "record.jsonl"
    sizes = ("--batch", "1", "--kv-len", "64", "--heads", "2", "--rounds", "1")
    out, seen = run_on_terminal("ranks", str(record), "--device", "cpu", *sizes)
    assert "left" in seen and "1/1" in seen
    assert "\x1b" not in out
    assert all(json.loads(line) for line in record.read_text().splitlines())


def test_a_measurement_ends_with_the_reasons_of_calls_without_a_figure(
    run_here: Callable[..., tuple[str, str]], tmp_path: Path
) -> None:
    out, _ = run_here(
        "bench", "run", str(tmp_path / "record.jsonl"), "--device", "cpu", "--peers",
        "mla-lab-cuda", "--batch", "1", "--heads", "2,4", "--kv-len", "64", "--quick",
    )  # fmt: skip
    assert "0 results, 2 without a figure\n  2 times: backend: got 'cuda'" in out


@pytest.fixture
def run_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[str, str]]:
    """stdout, and what a terminal on stderr would show, of a command in this process."""

    def run(*options: str) -> tuple[str, str]:
        stderr = terminal(monkeypatch)
        assert cli.main(options) == 0
        return capsys.readouterr().out, stderr.getvalue()

    return run


def test_json_stays_clean(run_here: Callable[..., tuple[str, str]]) -> None:
    out, seen = run_here(*SMALL, "--calls", "2", "--json")
    assert json.loads(out)["error"]["good"]
    assert seen == ""


@pytest.mark.parametrize(
    "command",
    [
        ["bench", "run", "RECORD", "--device", "cpu", "--peers", "torch-eager", "--batch", "1",
         "--heads", "2", "--kv-len", "64", "--rounds", "1", "--quick", "--rotation-mb", "0.1"],
        ["verify", "pairwise", "RECORD", "--device", "cpu", "--only", "0"],
    ],
    ids=lambda command: command[0],
)  # fmt: skip
def test_measuring_shows_a_bar(
    run_here: Callable[..., tuple[str, str]], command: list[str], tmp_path: Path
) -> None:
    record = tmp_path / "record.jsonl"
    out, seen = run_here(*(str(record) if word == "RECORD" else word for word in command))
    assert "left" in seen and "1/1" in seen
    assert "\x1b" not in out
    assert all(json.loads(line) for line in record.read_text().splitlines())


@pytest.mark.compiler
def test_compiling_shows_a_bar(
    run_here: Callable[..., tuple[str, str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MLA_LAB_CACHE_DIR", str(tmp_path))
    out, seen = run_here("compile", "--kernel", "cute/empty")
    assert "left" in seen and "1/1" in seen
    assert "\x1b" not in out
