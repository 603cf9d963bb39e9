"""The museum: one bug at a time, with its story, its code and the emulator's report."""

from __future__ import annotations

from typing import Any

from .. import explorer, museum, museum_picture
from ..source import Source
from ..svg import Svg


class MuseumExplorer(explorer.Explorer):
    """Twelve bugs, each run when the museum opens."""

    source = Source("predicted", detail="emulator")
    frames_over = "bug"
    knobs = explorer.knobs(bug=explorer.choice("bug", museum.NAMES, museum.NAMES[0], "340px"))

    def __init__(self, **state: Any) -> None:
        for bug in museum.BUGS:
            bug.broken()
        super().__init__(**state)

    def figure(self, state: dict[str, Any]) -> Svg:
        return museum_picture.exhibit(museum.BUGS[museum.NAMES.index(state["bug"])])
