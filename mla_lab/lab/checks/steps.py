"""Exercises of notebooks 60 to 69: the reader's functions, compiled into a kernel and emulated.

A check refuses, in this order: functions that are missing or unfinished, numbers that can be
judged without a compiler, what the compiler refuses, what the emulator finds, wrong outputs, and
facts of the code that is right and not yet good.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from ..layout import IntTuple, Layout, compact
from ..steps.catalogue import TABLE
from ..steps.compiled import DoesNotCompile
from ..steps.kernel import StepKernel
from ..steps.plain import constants_of, in_module
from .hints import NOTHING_YET, Attempt, Check, Hint, need, short
from .step_hints import HINTS, PRAISE
from .step_numbers import NUMBERS

#: for which stages and parities of a ring are judged
TILES = 96


def _check(number: str, attempt: Attempt) -> str:
    kernel = _handed_over(number, attempt)
    if judge := NUMBERS.get(number):
        judge(_Functions(kernel))
    try:
        outcome = kernel.outcome
    except DoesNotCompile as error:
        hint = HINTS[number].get("compiler", "")
        raise Hint(f"The compiler refuses it. {error}. {hint}".strip(" .")) from error
    hazards = kernel.hazards()
    if outcome.fault or outcome.wrong or hazards:
        raise Hint(_sentence(number, kernel, hazards))
    _facts(kernel)
    facts = kernel.xray.resources
    spills = kernel.xray.spills
    return f"{PRAISE[number]} {facts.registers} registers a thread at launch, {spills} spills."


def _handed_over(number: str, attempt: Attempt) -> StepKernel:
    kernel = attempt.plain()
    need(
        isinstance(kernel, StepKernel),
        f"The check takes what lab.kernel({number!r}, ...) made, not {short(kernel)}",
    )
    need(kernel.step.number == number, f"This is a kernel of step {kernel.step.number}")
    if kernel.unfinished:
        raise Hint(f"{NOTHING_YET}. Still to write: {', '.join(kernel.unfinished)}")
    missing = [name for name in kernel.step.functions if name not in kernel.functions]
    need(
        not (kernel.functions and missing),
        f"lab.kernel takes all functions of the exercise; not handed over: {', '.join(missing)}",
    )
    return kernel


class _Functions:
    """Functions of a reader that are plain arithmetic, called as Python; None of the author's."""

    def __init__(self, kernel: StepKernel) -> None:
        self._functions = {
            name: in_module(function, kernel.step.path)
            for name, function in kernel.functions.items()
        }

    def __bool__(self) -> bool:
        return bool(self._functions)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return Attempt(self._functions[name])


def _sentence(number: str, kernel: StepKernel, hazards: list[str]) -> str:
    """The step's hint for what was found, and the emulator's own words."""
    outcome, hints = kernel.outcome, HINTS[number]
    found = outcome.hazards()
    kinds = [f.kind for f in found] + [m.name for m in outcome.wrong] + ["wrong"]
    hint = next((hints[kind] for kind in kinds if kind in hints), "")
    words = hazards[0] if hazards else str(outcome.wrong[0])
    wrong = f" And {outcome.wrong[0]}" if hazards and outcome.wrong else ""
    return f"{hint} The emulator ({outcome.schedule}): {words}{wrong}".strip()


def _facts(kernel: StepKernel) -> None:
    need(
        kernel.xray.spills == 0,
        f"It is right, and {kernel.xray.spills} registers spill to local memory",
    )
    if kernel.step.number == "61":
        need(
            kernel.ptx_count("ld.global.v4"),
            "It is right, but no load is of 16 bytes: what should a thread copy at once, so that "
            "its numbers are neighbours in a row?",
        )
        rows, least = rows_of_a_warp(kernel)
        need(
            rows == least,
            f"It is right, but a load of a warp goes to {rows} rows of the box, and {least} would "
            "do: threads 0, 1, 2 and so on are to be neighbours along a row. Which mode of your "
            "thread layout has stride 1?",
        )
    if kernel.step.number in ("64", "65"):
        _any_number_of_tiles(kernel)
    if kernel.step.number == "67":
        _row_max(kernel)


def rows_of_a_warp(kernel: StepKernel) -> tuple[int, int]:
    """(rows of a tile in which threads 0 to 31 begin, the least that they could), by the reader's
    thread layout; (0, 0) where it is not a plain `cute.make_layout`.
    """

    def make_layout(shape: IntTuple, stride: IntTuple | None = None) -> Layout:
        return Layout(shape, compact(shape) if stride is None else stride)

    function = kernel.functions.get("threads_over_tile")
    if function is None:
        return 0, 0
    cute = SimpleNamespace(make_layout=make_layout)
    try:
        threads = in_module(function, kernel.step.path, cute=cute)()
        rows, columns = (mode.size for mode in threads.modes)
    except (AttributeError, NameError, TypeError, ValueError):
        return 0, 0
    touched = {i for i in range(rows) for j in range(columns) if threads(i, j) < 32}
    return len(touched), -(-32 // columns)


def _any_number_of_tiles(kernel: StepKernel) -> None:
    """Stages and parities of more tiles than the trial has, where they are plain arithmetic: a wait
    takes the lowest bit of what the emulator is given, and a card wants 0 or 1. Step 64 has one
    stage.
    """
    stages = constants_of(kernel.step.path).get("STAGES", 1)
    found: dict[str, list[int]] = {}
    for name, function in kernel.functions.items():
        try:
            plain = in_module(function, kernel.step.path)
            found[name] = [int(plain(t)) for t in range(TILES)]
        except Exception:  # it needs the compiler
            continue
    full = [t // stages % 2 for t in range(TILES)]
    right = {"full_parity": full, "empty_parity": [1 - parity for parity in full]}
    if places := found.get("stage_of"):
        right["stage_of"] = places[:stages] * (TILES // stages)
        need(
            sorted(places[:stages]) == list(range(stages)),
            f"It is right here, but tiles 0 to {stages - 1} go through stages {places[:stages]}",
        )
    for name, wanted in right.items():
        values = found.get(name, wanted)
        t = next((t for t in range(TILES) if values[t] != wanted[t]), None)
        need(
            t is None,
            f"It is right for the {len(TABLE)} tiles of the trial, but {name}({t}) is "
            f"{values[t or 0]}: a stage and a parity have to be right for any number of tiles, and "
            "a parity is 0 or 1",
        )


def _row_max(kernel: StepKernel) -> None:
    """`new_max` on the lanes of a warp, where it is plain arithmetic: the lse of the trial is the
    same whatever it is relative to, while that is near enough.
    """
    drawn = np.random.default_rng(67).normal(0, 100, (2, 8, 4)).astype(np.float32)
    old, greatest = drawn[0].max(1).repeat(4), drawn[1].ravel()
    lanes = np.arange(32)
    arch = SimpleNamespace(
        fmax=np.maximum, shuffle_sync_bfly=lambda x, offset, **_: x[lanes ^ offset]
    )
    cute = SimpleNamespace(arch=arch)
    try:
        plain = in_module(kernel.functions["new_max"], kernel.step.path, cute=cute)
        made = np.broadcast_to(np.float32(plain(old, greatest)), 32)
    except Exception:  # it needs the compiler
        return
    right = np.maximum(old, drawn[1].max(1).repeat(4))
    lane = int((made != right).argmax())
    need(
        made[lane] == right[lane],
        f"It is right here, but new_max gives {made[lane]:g} to lane {lane}, whose quad has "
        f"{right[lane]:g}, the old row max included: a reference that rises with each tile leaves "
        "weights of 0 in the end",
    )


CHECKS: dict[str, Check] = {f"{n}.1": partial(_check, n) for n in HINTS}
