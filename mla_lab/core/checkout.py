"""Which commit this code is, where it lies in a checkout of its own repository."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

_HERE = Path(__file__).resolve()
#: set where the code travels without its history, as a bundle does
COMMIT = "MLA_LAB_COMMIT"


def commit() -> str | None:
    """The checkout's commit, else what MLA_LAB_COMMIT says; None where neither is there."""
    return os.environ.get(COMMIT) or (_git("rev-parse", "HEAD") if _tracked() else None)


def dirty() -> bool | None:
    """Whether tracked files differ from the commit; None where there is no checkout."""
    if not _tracked():
        return None
    status = _git("status", "--porcelain", "--untracked-files=no")
    return None if status is None else bool(status)


def state() -> str | None:
    """The checkout's own commit, with "-dirty" behind it where tracked files differ from it."""
    found = _git("rev-parse", "HEAD") if _tracked() else os.environ.get(COMMIT)
    return f"{found}-dirty" if found and dirty() else found


def _tracked() -> bool:
    """False for a copy in an environment that merely lies below some repository."""
    return _git("ls-files", "--error-unmatch", _HERE.name) is not None


def _git(*arguments: str) -> str | None:
    command = ["git", "-C", str(_HERE.parent), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
