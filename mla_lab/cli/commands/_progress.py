"""Progress of long work: a bar with the time left on a terminal, lines elsewhere.

The bar is on stderr, so that what a command prints stays clean. It needs `rich`, a dependency of
the package; on a host that runs a bundle without it there are lines alone.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

#: seconds over which the speed is averaged, as a step may take a minute
SPEED_OVER_S = 600.0
#: characters of a status line, beside which a terminal of 80 columns has room for the time left
TEXT_WIDTH = 32
#: characters of a bar that stays on the screen
BAR_WIDTH = 30


class Bar:
    """`count` takes (done, total) steps, `say` a status line."""

    def __init__(self, shown: Progress | None, task: TaskID | None, log: Callable[[str], Any]):
        self._shown, self._task, self._log = shown, task, log

    def count(self, done: int, total: int | None) -> None:
        """Move the bar; a total of None shows activity without an extent."""
        if self._shown is not None and self._task is not None:
            self._shown.update(self._task, completed=done, total=total)

    def say(self, text: str) -> None:
        """Show `text` beside the bar, or as a line where there is none."""
        if self._shown is not None and self._task is not None:
            self._shown.update(self._task, description=_short(text))
        else:
            self._log(text)

    def phase(self, text: str, total: int | None = None) -> None:
        """Start another phase with its own count and time; prints nothing without a bar."""
        if self._shown is not None and self._task is not None:
            self._shown.reset(self._task, description=text, total=total)


@contextlib.contextmanager
def bar(text: str, log: Callable[[str], Any], quiet: bool = False) -> Iterator[Bar]:
    """A bar on stderr while the block runs, if stderr is a terminal and nothing asks for quiet.

    log: what `say` calls where there is no bar.
    """
    shown = None if quiet or not sys.stderr.isatty() else _on_terminal()
    if shown is None:
        yield Bar(None, None, log)
        return
    with shown:
        yield Bar(shown, shown.add_task(text, total=None), log)


class Steps:
    """Progress of steps that show their own: on a terminal a bar before each, which stays there,
    with the time left of all.

    total: of the steps' weights; time is taken to be proportional to them.
    """

    def __init__(self, total: int) -> None:
        self._total, self._done, self._start = total, 0, time.monotonic()

    def begin(self, text: str) -> None:
        """Show where the steps stand, and what comes next."""
        if not sys.stderr.isatty() or find_spec("rich") is None:
            return
        from rich.console import Console
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        spent = time.monotonic() - self._start
        words = f"{text}; {_clock(spent)} so far"
        if self._done:
            words += f", {_clock(spent / self._done * (self._total - self._done))} left"
        line = Table.grid(padding=(0, 1))
        line.add_row(ProgressBar(self._total, self._done, width=BAR_WIDTH), words)
        Console(stderr=True).print(line)

    def end(self, weight: int) -> None:
        """The step is done."""
        self._done += weight


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def _short(text: str) -> str:
    return text if len(text) <= TEXT_WIDTH else text[: TEXT_WIDTH - 1] + "…"


def _on_terminal() -> Progress | None:
    """rich's progress display; None where rich is not installed."""
    try:
        from rich import progress
        from rich.console import Console
    except ImportError:
        return None
    return progress.Progress(
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
        progress.TextColumn("left"),
        progress.TimeRemainingColumn(),
        console=Console(stderr=True),
        speed_estimate_period=SPEED_OVER_S,
        transient=True,
    )
