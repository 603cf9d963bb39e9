"""Exercises that a reader has solved, kept in a small file between sessions.

The file is $MLA_LAB_PROGRESS, else mla-lab/progress.json in $XDG_STATE_HOME or ~/.local/state:
a JSON object from the number of an exercise to the date on which it was solved first.
"""

from __future__ import annotations

import datetime
import json
import os
from pathlib import Path

from ..core.files import replacing

VARIABLE = "MLA_LAB_PROGRESS"


def path() -> Path:
    """Where progress is kept."""
    if named := os.environ.get(VARIABLE):
        return Path(named)
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "mla-lab" / "progress.json"


def solved_on() -> dict[str, str]:
    """Date by exercise; empty where the file is missing or is not of that form."""
    try:
        found = json.loads(path().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {str(number): str(date) for number, date in found.items()}


def keep(number: str) -> bool:
    """Adds a solved exercise, with today's date; False where the file cannot be written."""
    known = solved_on()
    if number in known:
        return True
    known[number] = datetime.date.today().isoformat()
    file = path()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as fresh:
            fresh.write(json.dumps(known, indent=1, sort_keys=True).encode() + b"\n")
    except OSError:
        return False
    return True
