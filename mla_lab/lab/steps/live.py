"""A step on a card: the same files as in the emulator, launched, compared and timed."""

from __future__ import annotations

from html import escape
from statistics import median
from typing import Any

import torch
from IPython.display import HTML
from torch import Tensor

from ...jit import load
from ..session import gpu_name
from .kernel import StepKernel, solution
from .outcome import compare

#: launches that are timed, each by events of its own
LAUNCHES = 50


def live(kernel: StepKernel) -> HTML:
    """Launch a step on the Hopper card of this machine; without one a sentence says so. Until the
    reader's functions are written, the author's kernel is launched.
    """
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        return HTML(
            "<div>No Hopper card here: what ran is the emulator. On one, this cell launches the "
            "same machine code, compares and times it.</div>"
        )
    shown, whose = kernel, ""
    if kernel.unfinished:
        shown, whose = solution(kernel.step.number), "The author's kernel, until yours is written. "
    wrong, microseconds = launch(shown)
    verdict = "; ".join(map(str, wrong)) or "the same numbers as expected"
    return HTML(
        f"<div>{whose}<b>{escape(gpu_name())}</b>: {escape(verdict)}; median of {LAUNCHES} "
        f"launches, each alone: {microseconds:.1f} us.</div>"
    )


def launch(kernel: StepKernel) -> tuple[list[Any], float]:
    """(wrong outputs, microseconds of a launch by events around each) on the current device."""
    tested = kernel.step.trial()
    args = [a.cuda() if isinstance(a, Tensor) else a for a in tested.fresh()]
    run = load(kernel.compiled.artifact).launch
    run(*args)
    torch.cuda.synchronize()
    wrong = compare(tested, [a.cpu() if isinstance(a, Tensor) else a for a in args])
    times = []
    for _ in range(LAUNCHES):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run(*args)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return wrong, median(times)
