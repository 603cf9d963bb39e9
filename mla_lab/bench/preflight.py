"""Preflight of peers: each runs a small case in its own process before the measurement.

An illegal memory access destroys the CUDA context of its process, and so the measurement of all
peers in it. `python -m mla_lab.bench.preflight PEER DEVICE` is one such trial.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import torch

from ..core.errors import MlaLabError
from .cases import Case, uniform_case
from .peers import Peer, select
from .rotation import make_rotation
from .timers import timer_for

#: seconds for all peers together, which start torch and load their libraries in parallel
TIMEOUT_SECONDS = 90.0
#: two requests, one of which ends inside a page; more rows than one tile
CASES = (uniform_case(2, 1, 128, 300), uniform_case(2, 1, 16, 300))


def preflight(
    peers: Sequence[Peer],
    device: torch.device,
    timeout: float = TIMEOUT_SECONDS,
    command: Callable[[str, torch.device], list[str]] | None = None,
) -> dict[str, str]:
    """Peer name -> cause of death, for trials that died. command: the trial's, by peer name."""
    command = command or _command
    trials = {peer.name: _start(command(peer.name, device)) for peer in peers}
    until = time.monotonic() + timeout
    died = {name: _verdict(trial, until) for name, trial in trials.items()}
    return {name: reason for name, reason in died.items() if reason}


def trial(peer: Peer, device: torch.device, cases: Sequence[Case] = CASES) -> str | None:
    """Run a peer's launches as in a measurement. Returns a reason if the device is lost afterwards.

    Refusals, wrong results, and errors that leave the device usable are reported in the rows of
    the cases.
    """
    timer = timer_for(device)
    error: Exception | None = None
    for case in cases:
        if peer.refuses(case):
            continue
        try:
            rotation = make_rotation(case, device=device, rotation_bytes=1, workspace_bytes=1 << 26)
            launches = peer.prepare(rotation).launches
            launches[0]()
            timer.ready(launches)()
        except (MlaLabError, NotImplementedError):
            continue
        except Exception as failure:
            error = failure
        lost = timer.lost()
        if lost:
            return f"{type(error).__name__}: {error}" if error else lost
    return None


def main(name: str, device: str) -> str | None:
    """One trial; the reason in one line, for `sys.exit`, which prints it."""
    (peer,) = select([name])
    reason = trial(peer, torch.device(device))
    return " ".join(reason.split())[:300] if reason else None


def _command(name: str, device: torch.device) -> list[str]:
    return [sys.executable, "-m", __name__, name, str(device)]


def _start(command: list[str]) -> subprocess.Popen[str]:
    # buffered, what was printed first would come behind the reason
    unbuffered = {**os.environ, "PYTHONUNBUFFERED": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, stdout=pipe, stderr=subprocess.STDOUT, text=True, errors="replace", env=unbuffered
    )


def _verdict(trial: subprocess.Popen[str], until: float) -> str | None:
    """None for a trial that ended well; a trial over its time limit is killed."""
    try:
        output, _ = trial.communicate(timeout=max(until - time.monotonic(), 0.1))
    except subprocess.TimeoutExpired:
        trial.kill()
        trial.communicate()
        return "preflight: no end in time"
    if trial.returncode == 0:
        return None
    said = (output.strip().splitlines() or ["nothing said"])[-1]
    return f"preflight: exit code {trial.returncode}: {said[:300]}"


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
