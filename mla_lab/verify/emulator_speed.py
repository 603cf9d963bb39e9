"""CPU seconds of the emulator on one core: whole kernels without and with checks; translation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from time import process_time
from typing import Any

from ..emulate import EmulatedKernel, Options
from ..emulate.calls import Call, is_right, make_call, problem_for
from ..emulate.ptx import parse
from ..emulate.translate import Program
from ..jit import compile as compiled
from ..plan.config import KernelConfig
from .record import Row, head_row

GRID = (("shaped", 1), ("fused_merge", 3), ("grid", 1))
FEW = KernelConfig("cute/swap_ab_sm90", tile_rows=16, mask="causal", options=GRID)
MANY = KernelConfig("cute/keep_ab_sm90", tile_rows=128, cluster=2, options=(("shaped", 1),))
#: build, heads, tokens, and the seconds allowed: fast, with all checks
CASES = ((FEW, 16, 1024, 0.1, 1.0), (MANY, 128, 2048, 0.5, 5.0))
TRANSLATION = 0.5
ROUNDS = 3


def rows() -> Iterator[Row]:
    """The least of ROUNDS runs of each case, beside what is allowed. Translation is what a first
    call takes beside a later one: parsing, and Python of the blocks that it reaches.
    """
    yield head_row("emulator-speed", "cpu", 3 * len(CASES))
    for config, heads, tokens, fast, checked in CASES:
        artifact = compiled(config, "sm_90a")
        call = make_call(config, problem_for(config, (tokens,), heads))
        shape = {"name": config.name(), "heads": heads, "tokens": tokens}
        kernel = EmulatedKernel.of(artifact)
        times = {}
        for what, allowed, check in (("fast", fast, False), ("checked", checked, True)):
            kernel.options = Options(check=check)
            times[what] = _seconds(partial(kernel, *call.args))
            if not is_right(call):
                raise ArithmeticError(f"{config.name()}: errors {call.errors()}")
            yield _row({**shape, "what": what}, times[what], allowed)
        kernel.options = Options()
        cold = _seconds(partial(_first_call, kernel, call))
        yield _row({**shape, "what": "translation"}, cold - times["fast"], TRANSLATION)


def _first_call(kernel: EmulatedKernel, call: Call) -> None:
    kernel.programs = {k.name: Program(k) for k in parse(kernel.text).values()}
    kernel(*call.args)


def _seconds(run: Callable[[], object]) -> float:
    found = []
    for _ in range(ROUNDS):
        began = process_time()
        run()
        found.append(process_time() - began)
    return min(found)


def _row(facts: Row, seconds: float, allowed: float) -> Row:
    return {"kind": "case", **facts, "cpu_seconds": round(seconds, 3), "allowed": allowed}


def summary(found: Sequence[dict[str, Any]]) -> str:
    """A line a case."""
    return "\n".join(
        f"{row['cpu_seconds']:.3f} of {row['allowed']} s: {row['what']} of {row['name']}"
        for row in found[1:]
    )


def failed(found: Sequence[Row]) -> bool:
    """Whether a case took longer than is allowed."""
    return any(row["cpu_seconds"] > row["allowed"] for row in found[1:])
