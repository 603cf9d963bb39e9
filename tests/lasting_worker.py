"""Compiling processes that outlast a build: a test that compiles takes one that others started."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

from mla_lab.jit.cute_build import CuteWorker
from mla_lab.plan.config import KernelConfig

#: builds of one process; each leaves some 20 MB behind
MOST_BUILDS = 16


class LastingWorker:
    """Stands in for `CuteWorker`: `close` hands the process on to the next build of its
    architecture.

    To start one takes two seconds, a fifth of a build. Its kernels are those of this checkout,
    which no test changes in place; a compiler that a test hides is missed before a process is
    asked.
    """

    #: architecture -> processes that nobody uses, with the number of their builds
    idle: ClassVar[dict[str, list[tuple[CuteWorker, int]]]] = {}

    def __init__(self, arch: str) -> None:
        self.arch = arch
        self._taken: tuple[CuteWorker, int] | None = None

    def build(self, config: KernelConfig, folder: Path) -> dict[str, Any]:
        """As `CuteWorker.build`."""
        waiting = self.idle.setdefault(self.arch, [])
        if self._taken is None:
            self._taken = waiting.pop() if waiting else (CuteWorker(self.arch), 0)
        worker, builds = self._taken
        self._taken = worker, builds + 1
        return worker.build(config, folder)

    def close(self) -> None:
        """Keep the process, unless it has had its builds."""
        if self._taken is None:
            return
        worker, builds = self._taken
        self._taken = None
        if builds < MOST_BUILDS:
            self.idle.setdefault(self.arch, []).append((worker, builds))
        else:
            worker.close()

    @classmethod
    def end(cls) -> None:
        """End all processes that nobody uses."""
        for waiting in cls.idle.values():
            while waiting:
                waiting.pop()[0].close()
