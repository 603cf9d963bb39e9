"""Timers of a list of launches, behind a protocol that tests implement with a fake clock.

`CudaGraphTimer` captures the launches into one CUDA graph and times its replay with events, so
host overhead is excluded and the gaps between launches are those of a serving engine's graph.
`HostTimer` runs launches on the CPU and reads a clock.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

#: one launch of a peer; returns its output, so that the timed result can be checked
Launch = Callable[[], Tensor]
#: bytes written between isolated launches, to evict the L2
FLUSH_BYTES = 256_000_000


class Replay(Protocol):
    """A prepared list of launches. A call runs all of them."""

    def __call__(self) -> float:
        """Run all launches; returns microseconds."""

    def repeat(self, times: int, leads: int = 0) -> float:
        """Microseconds of `times` runs without a pause, with `leads` untimed ones before them."""

    @property
    def last_output(self) -> Tensor:
        """Output of the last launch; another replay may overwrite it."""


class Timer(Protocol):
    """Prepares launches for timing."""

    name: str

    def ready(self, launches: Sequence[Launch], *, cold: bool = False) -> Replay:
        """`launches` as one replay. cold: each call first evicts the L2, untimed."""

    def host_us(self, call: Callable[[], Any]) -> float:
        """Wall-clock microseconds of `call` until the device is done."""

    def lost(self) -> str | None:
        """Reason why the device is unusable in this process, or None."""


class HostTimer:
    """Runs launches on the host and reads a monotonic clock."""

    name = "host clock"

    def ready(self, launches: Sequence[Launch], *, cold: bool = False) -> Replay:
        """As `Timer.ready`; `cold` has no effect on a CPU."""
        return _HostReplay(launches)

    def host_us(self, call: Callable[[], Any]) -> float:
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e6

    def lost(self) -> str | None:
        """As `Timer.lost`: a CPU never is."""
        return None


class _HostReplay:
    def __init__(self, launches: Sequence[Launch]) -> None:
        self._launches = launches
        self.last_output = launches[-1]()

    def __call__(self) -> float:
        start = time.perf_counter()
        for launch in self._launches:
            self.last_output = launch()
        return (time.perf_counter() - start) * 1e6

    def repeat(self, times: int, leads: int = 0) -> float:
        return sum([self() for _ in range(leads + times)][leads:])


class CudaGraphTimer:
    """One CUDA graph a replay, timed with events on the current stream."""

    name = "CUDA graph, events"

    def __init__(self) -> None:
        self._scratch: Tensor | None = None

    def ready(self, launches: Sequence[Launch], *, cold: bool = False) -> Replay:
        """As `Timer.ready`. Launches have run before, so that nothing is compiled in a capture."""
        if cold and self._scratch is None:
            self._scratch = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
        return _GraphReplay(launches, self._scratch if cold else None)

    def host_us(self, call: Callable[[], Any]) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) * 1e6

    def lost(self) -> str | None:
        """As `Timer.lost`: an error inside a kernel makes the context unusable until the process
        ends.
        """
        try:
            torch.cuda.synchronize()
            torch.zeros(1, device="cuda").add_(1).item()
        except RuntimeError as error:
            return str(error).splitlines()[0]
        return None


class _GraphReplay:
    def __init__(self, launches: Sequence[Launch], scratch: Tensor | None) -> None:
        self._scratch = scratch
        self._graph = torch.cuda.CUDAGraph()
        self._begin = torch.cuda.Event(enable_timing=True)
        self._end = torch.cuda.Event(enable_timing=True)
        self.last_output = self._capture(launches)

    def _capture(self, launches: Sequence[Launch]) -> Tensor:
        """As `torch.cuda.graph`, without its release of the allocator's cached memory."""
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            self._graph.capture_begin()
            try:
                for launch in launches[:-1]:
                    launch()
                last = launches[-1]()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # report the first error
                    self._graph.capture_end()
                raise
            self._graph.capture_end()
        return last

    def __call__(self) -> float:
        if self._scratch is not None:
            # also gives the host time to enqueue the graph before the first event is reached
            self._scratch.fill_(1)
        return self.repeat(1)

    def repeat(self, times: int, leads: int = 0) -> float:
        for _ in range(leads):
            self._graph.replay()
        self._begin.record()
        for _ in range(times):
            self._graph.replay()
        self._end.record()
        self._end.synchronize()
        return self._begin.elapsed_time(self._end) * 1e3


def timer_for(device: torch.device | str) -> Timer:
    """The timer for a device."""
    return CudaGraphTimer() if torch.device(device).type == "cuda" else HostTimer()
