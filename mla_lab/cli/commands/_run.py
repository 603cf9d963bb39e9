"""One decode call, run and judged: time, memory, error against the oracle."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from ...reference.inputs import DecodeInputs
    from ...reference.tolerance import Error

#: repeat until this many seconds are spent or this many calls are made
BUDGET_SECONDS = 3.0
MOST_CALLS = 9
PROCESS = Path("/proc/self")


@dataclass(frozen=True)
class Measured:
    """Repeated equal calls: the last result, and what each took."""

    out: Tensor
    lse: Tensor
    #: seconds of each call, the first one left out where there are others
    seconds: tuple[float, ...]
    #: bytes beyond what was there before the last call; None where the system does not tell
    peak_bytes: int | None

    @property
    def median_seconds(self) -> float:
        return statistics.median(self.seconds)


@dataclass(frozen=True)
class Judged:
    """A result against the float64 oracle, and torch SDPA in the same precision against it."""

    out: Error
    sdpa: Error
    lse: float
    allowed_ratio: float
    lse_tolerance: float

    @property
    def good(self) -> bool:
        """Out at most `allowed_ratio` times as wrong as SDPA, lse within its tolerance."""
        return self.out.within(self.sdpa, self.allowed_ratio) and self.lse <= self.lse_tolerance


def measure(call: Callable[[], Any], device: str, calls: int | None = None) -> Measured:
    """Run `call` -> (out, lse) `calls` times, or as often as the budget allows, at least once."""
    seconds: list[float] = []
    while not seconds or _goes_on(seconds, calls):
        memory = _Memory(device)
        start = time.perf_counter()
        out, lse = call()
        memory.finish()
        seconds.append(time.perf_counter() - start)
    return Measured(out, lse, tuple(seconds[1:] or seconds), memory.peak_bytes())


def _goes_on(seconds: list[float], calls: int | None) -> bool:
    if calls is not None:
        return len(seconds) < calls
    return len(seconds) < MOST_CALLS and sum(seconds) + seconds[-1] < BUDGET_SECONDS


class _Memory:
    """Peak memory from here on: torch's own count on a GPU, the resident set on a CPU."""

    def __init__(self, device: str) -> None:
        self.cuda = device.startswith("cuda")
        self.before: int | None
        if self.cuda:
            import torch

            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()
        else:
            self.before = _resident("VmRSS") if _reset_high_water() else None

    def finish(self) -> None:
        """Wait until the work is done."""
        if self.cuda:
            import torch

            torch.cuda.synchronize()

    def peak_bytes(self) -> int | None:
        """Bytes above the start, or None where nothing tells."""
        if self.before is None:
            return None
        if self.cuda:
            import torch

            return torch.cuda.max_memory_allocated() - self.before
        return _resident("VmHWM") - self.before


def _reset_high_water() -> bool:
    """Linux: "5" sets VmHWM back to the present (proc_pid_clear_refs(5))."""
    try:
        (PROCESS / "clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _resident(field: str) -> int:
    lines = (PROCESS / "status").read_text().splitlines()
    (kilobytes,) = (line.split()[1] for line in lines if line.startswith(f"{field}:"))
    return int(kilobytes) * 1024


def judge(inputs: DecodeInputs, out: Tensor, lse: Tensor) -> Judged:
    """Against the oracle in float64, one request in memory at a time; over a cache of eight bits
    beside torch with the same rounding, as `mla-lab verify` does.
    """
    from ...core.kv_cache import pack
    from ...reference.mla import decode_reference
    from ...reference.tolerance import ALLOWED_RATIO, LSE_TOLERANCE, error, lse_error, sdpa_error
    from ...verify.limits import TOPS, WEIGHTS, limits_of, rounded

    reference, problem = decode_reference(inputs), inputs.problem
    baseline, lse_tolerance = sdpa_error(inputs, reference), LSE_TOLERANCE
    weights = WEIGHTS.get((problem.q_dtype, problem.kv_format))
    if weights is not None:
        tops = (pack(rounded(inputs, weights, top).out, problem.out_dtype) for top in TOPS)
        errors = [error(each.float(), reference.out) for each in tops]
        baseline = type(baseline)(*map(max, zip(*errors, strict=True)))
        lse_tolerance = limits_of(inputs, reference).lse_error
    return Judged(
        out=error(out, reference.out),
        sdpa=baseline,
        lse=lse_error(lse, reference.lse),
        allowed_ratio=ALLOWED_RATIO,
        lse_tolerance=lse_tolerance,
    )
