"""What this machine has: versions of distributions, and what its programs print."""

from __future__ import annotations

import importlib.metadata
import subprocess

#: seconds that a program may take to print
PATIENCE = 20


def version_of(distribution: str) -> str | None:
    """Version of an installed distribution, None where it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def output_of(*command: str) -> str | None:
    """What a command prints, stripped; None where it cannot be run, fails or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
