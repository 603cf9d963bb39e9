"""What the notebooks import: `from mla_lab import lab`.

`lab.start("NN")` opens a notebook, `lab.finish()` closes it; between them explorers to play
with, checks, exercises, and numbers that say where they come from. Every name is imported when
it is first asked for.
"""

from __future__ import annotations

import importlib
from typing import Any

#: public names by module
_NAMES = {
    "answer": "exercise",
    "exercise": "exercise",
    "reveal": "exercise",
    "solved": "exercise",
    "Explorer": "explorer",
    "PlanExplorer": "plan_explorer",
    "finish": "session",
    "start": "session",
    "Source": "source",
    "formula": "source",
    "new_figure": "style",
    "Svg": "svg",
}


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        return getattr(importlib.import_module(f".{_NAMES[name]}", __name__), name)
    raise AttributeError(f"mla_lab.lab has no {name!r}")


def __dir__() -> list[str]:
    return sorted(_NAMES)
