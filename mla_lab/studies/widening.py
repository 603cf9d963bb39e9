"""What the parts of the widening kernel take alone: `python -m mla_lab.studies.widening RECORD`.

A build of `cute.keep_ab_sm90.widened` can leave parts out by its option `parts`; such a build gives
no result. Barriers, records, queries and epilogues stay, so that the rows tell what each part adds.
Every row is a launch over the same sparse inputs, all of them interleaved round by round in one
process, beside the kernel that "cute" takes. One JSON line a case, in microseconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..api import decode
from ..bench.environment import environment
from ..bench.peers.ours import native_arguments
from ..bench.timers import Launch, Timer, timer_for
from ..call.decode_args import native_args
from ..core.problem import Problem
from ..core.revision import check_record
from ..reference.inputs import DecodeInputs, make_inputs

FORM = "widening 1"
#: bits of the option `parts`
WIDEN, PUSH, PRODUCTS = 1, 2, 4
PARTS = {
    "barriers": 0,
    "widening": WIDEN,
    "exchange": PUSH,
    "widening and exchange": WIDEN | PUSH,
    "products": PRODUCTS,
    "whole": WIDEN | PUSH | PRODUCTS,
}
#: (batch, query heads), 2,048 slots of a context of 32,768 tokens
CASES = ((1, 128), (16, 64), (64, 64), (16, 128), (64, 128), (128, 128))
TOP_K, CONTEXT = 2048, 32768
ROUNDS, REPEATS = 20, 10


def launch_of(inputs: DecodeInputs, backend: str, parts: int | None = None) -> Launch:
    """A launch by `backend`, of some of the kernel's parts where `parts` says which."""
    arguments = {**native_arguments(inputs, False), "workspace_buffer": None}
    call, runner = decode.prepare(native_args(**arguments, backend=backend))
    plan: Any = decode.make_plan(call, runner)
    if parts is not None:
        config = plan.config
        plan = replace(plan, config=replace(config, options=(*config.options, ("parts", parts))))
    workspace = decode.allocate(call, plan)

    def launch() -> Tensor:
        runner.run(call, plan, workspace)
        return call.out

    return launch


def measure(inputs: DecodeInputs, timer: Timer) -> dict[str, float]:
    """Median microseconds of each part, and of the kernel that "cute" takes."""
    launches = {name: launch_of(inputs, "cute-widened", parts) for name, parts in PARTS.items()}
    launches["cute"] = launch_of(inputs, "cute")
    for launch in launches.values():
        launch()
    replays = {name: timer.ready([launch] * REPEATS) for name, launch in launches.items()}
    times: dict[str, list[float]] = {name: [] for name in replays}
    for _ in range(ROUNDS):
        for name, replay in replays.items():
            times[name].append(replay() / REPEATS)
    return {name: round(statistics.median(found), 3) for name, found in times.items()}


def record(path: Path, device: str, progress: Callable[[str], object]) -> None:
    """Appends a line for each case to `path`."""
    check_record(path)
    here = {"form": FORM, "environment": environment(torch.device(device))}
    timer = timer_for(device)
    with path.open("a", encoding="utf-8") as file:
        for batch, heads in CASES:
            problem = Problem(
                (1,) * batch, (CONTEXT,) * batch, heads, kv_format="fp8_656", top_k=TOP_K
            )
            inputs = make_inputs(problem, 0, device=device)
            row = {"batch": batch, "heads": heads, "top_k": TOP_K, "us": measure(inputs, timer)}
            file.write(json.dumps({**here, **row}) + "\n")
            progress(f"{batch} x {heads} heads: {row['us']}")


def main() -> None:
    """Measure every case into the record that is named."""
    parser = argparse.ArgumentParser(prog="python -m mla_lab.studies.widening")
    parser.add_argument("record", type=Path, help="JSON lines, appended to")
    chosen = parser.parse_args().record
    record(chosen, "cuda", lambda text: sys.stderr.write(f"{text}\n"))


if __name__ == "__main__":
    main()
