"""`make` on a machine that lacks something: one sentence, with the way out."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from .house import ROOT

FILES = ("Makefile", "requirements.txt", "pyproject.toml")

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make here")


@pytest.fixture
def clone(tmp_path):
    for name in FILES:
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def make(clone, *arguments, path=None):
    # this test may itself run under `make test`, whose level and flags are not a person's
    clean = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS")}
    run = subprocess.run(
        ["make", *arguments],
        cwd=clone,
        env=clean | ({"PATH": path} if path else {}),
        capture_output=True,
        text=True,
    )
    return run.returncode, run.stdout


def program(folder, name, script):
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def test_no_python(clone):
    path = ""
    for name in ("python3", "python3.11", "python3.12", "python3.13", "python3.14"):
        path = program(clone / "bin", name, "exit 1")
    code, said = make(clone, "lab", path=path)
    assert code
    assert said.startswith("mla-lab needs Python 3.11 or newer and found none: install one")
    assert "make lab PYTHON=" in said
    assert said.count("\n") == 1


def test_an_old_python(clone):
    code, said = make(clone, "setup", "PYTHON=false")
    assert code
    assert said == "PYTHON=false does not run as Python 3.11 or newer: name another one\n"


def test_no_venv(clone):
    script = f'case "$*" in *ensurepip*) exit 1;; esac; exec {sys.executable} "$@"'
    code, said = make(clone, "setup", path=program(clone / "bin", "python3", script))
    assert code
    assert "python3 has no venv module: install it" in said
    assert said.count("\n") == 1


def test_nothing_to_do_takes_no_time(clone):
    """The stamp is newer than what it depends on."""
    (clone / ".venv").mkdir()
    (clone / ".venv" / ".mla-lab-ready").touch()
    code, said = make(clone, "setup", "PYTHON=false")
    assert code == 0
    assert said == "ready: .venv\n"


def test_help_names_the_two_commands(clone):
    code, said = make(clone)
    assert code == 0
    assert "make lab " in said
    assert "make test " in said
