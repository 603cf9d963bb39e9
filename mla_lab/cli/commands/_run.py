"""One decode call, run and judged: time, memory, error against the oracle."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...core.errors import invalid

if TYPE_CHECKING:
    from torch import Tensor

    from ...core.problem import Problem
    from ...reference.inputs import DecodeInputs
    from ...reference.tolerance import Error

#: repeat up to this many seconds or calls
BUDGET_SECONDS = 3.0
MOST_CALLS = 9
PROCESS = Path("/proc/self")
MEMORY = Path("/proc/meminfo")

#: called with (done, total) steps
Counted = Callable[[int, int], None]


@dataclass(frozen=True)
class Measured:
    """Result and times of repeated equal calls."""

    out: Tensor
    lse: Tensor
    #: seconds of each call, without the first if there are others
    seconds: tuple[float, ...]
    #: peak bytes above those before the last call; None if the system does not report them
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
        """True if out's error is at most `allowed_ratio` times SDPA's and lse within tolerance."""
        return self.out.within(self.sdpa, self.allowed_ratio) and self.lse <= self.lse_tolerance


def measure(
    call: Callable[[], Any],
    device: str,
    calls: int | None = None,
    counted: Counted = lambda done, total: None,
) -> Measured:
    """Run `call` -> (out, lse) `calls` times, or as often as the budget allows, at least once.

    counted: called after each call with (done, total).
    """
    seconds: list[float] = []
    while not seconds or _goes_on(seconds, calls):
        memory = _Memory(device)
        start = time.perf_counter()
        out, lse = call()
        memory.finish()
        seconds.append(time.perf_counter() - start)
        counted(len(seconds), calls or _expected(seconds))
    return Measured(out, lse, tuple(seconds[1:] or seconds), memory.peak_bytes())


def _goes_on(seconds: list[float], calls: int | None) -> bool:
    if calls is not None:
        return len(seconds) < calls
    return len(seconds) < MOST_CALLS and sum(seconds) + seconds[-1] < BUDGET_SECONDS


def _expected(seconds: list[float]) -> int:
    """Calls that fit into the budget at the pace so far."""
    pace = sum(seconds) / len(seconds)
    return max(len(seconds), min(MOST_CALLS, int(BUDGET_SECONDS / pace) if pace else MOST_CALLS))


class _Memory:
    """Peak memory since its creation: torch's count on a GPU, the resident set on a CPU."""

    def __init__(self, device: str) -> None:
        import torch

        self.cuda = torch.cuda if device.startswith("cuda") else None
        self.before: int | None
        if self.cuda:
            self.cuda.synchronize()
            self.cuda.reset_peak_memory_stats()
            self.before = self.cuda.memory_allocated()
        else:
            self.before = _resident("VmRSS") if _reset_high_water() else None

    def finish(self) -> None:
        """Wait until the work is done."""
        if self.cuda:
            self.cuda.synchronize()

    def peak_bytes(self) -> int | None:
        """Bytes above the start; None where the system reports none."""
        if self.before is None:
            return None
        if self.cuda:
            return self.cuda.max_memory_allocated() - self.before
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


def check_memory(problem: Problem, device: str, judged: bool, command: str = "decode") -> None:
    """InvalidInput, before anything is allocated, for a call that the memory cannot hold."""
    free = _free_bytes(device)
    rows, longest = problem.total_q * problem.heads, max(problem.kv_lens)
    pages = sum(-(-length // problem.page_size) for length in problem.kv_lens)
    cache = pages * problem.page_size * problem.kv_token_bytes
    # the query in fp32 before it is packed, the longest request's tokens likewise
    needed = cache + rows * problem.head_dim * 6 + longest * problem.head_dim * 6
    if judged:  # float64: the result of all, keys and scores of one request
        pairs = max(q * n for q, n in zip(problem.q_lens, problem.kv_lens, strict=True))
        needed += 8 * (rows * problem.latent_dim + longest * problem.head_dim)
        needed += 8 * pairs * problem.heads
    if free is not None and needed > free:
        got = f"a call of {needed / 1e9:.1f} GB, {cache / 1e9:.1f} of them the cache"
        raise invalid(command, got, f"what the {free / 1e9:.1f} GB that are free on {device} hold")


def _free_bytes(device: str) -> int | None:
    """Memory that is free on the device; None where the system does not report it."""
    if device.startswith("cuda"):
        import torch

        return torch.cuda.mem_get_info()[0]
    try:
        lines = MEMORY.read_text().splitlines()
    except OSError:
        return None
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return found[0] if found else None


def judge(
    inputs: DecodeInputs, out: Tensor, lse: Tensor, counted: Counted = lambda done, total: None
) -> Judged:
    """Compare out and lse with the float64 oracle, one request in memory at a time. The allowed
    error over a cache of eight bits is that of torch with the same rounding, as in
    `mla-lab verify`.

    counted: called after each request of the oracle.
    """
    from ...core.kv_cache import pack
    from ...reference.mla import decode_reference
    from ...reference.tolerance import ALLOWED_RATIO, LSE_TOLERANCE, error, lse_error, sdpa_error
    from ...verify.limits import TOPS, WEIGHTS, limits_of, rounded

    reference = decode_reference(inputs, counted=counted)
    problem = inputs.problem
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
