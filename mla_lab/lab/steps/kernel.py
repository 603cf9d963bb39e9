"""`kernel` and `solution`: a step with a reader's functions, or with the author's."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

from ...core.errors import invalid
from ...xray import KernelReport
from . import text as texts
from .catalogue import Step, step
from .compiled import Compiled, compile_step
from .outcome import Outcome, emulate, words_of


class StepKernel:
    """A step's module with some functions in place of the author's.

    Compiles and runs at the first use of `compiled` or `outcomes`.
    """

    def __init__(self, of: Step, functions: dict[str, Callable[..., Any]]) -> None:
        self.step, self.functions = of, functions
        self.sources = {name: texts.source_of(f) for name, f in functions.items()}

    @property
    def text(self) -> str:
        """Text of the module."""
        return texts.with_functions(texts.module_text(self.step.path), self.sources)

    @property
    def unfinished(self) -> list[str]:
        """Functions that still hold a `...`."""
        return [name for name, source in self.sources.items() if texts.is_unfinished(source)]

    @cached_property
    def compiled(self) -> Compiled:
        """Its files. Raises DoesNotCompile with the compiler's words."""
        return compile_step(self.step.number, self.text, self.step.trial().args)

    @cached_property
    def xray(self) -> KernelReport:
        """Registers, spills and instructions."""
        return self.compiled.xray

    @cached_property
    def outcomes(self) -> list[Outcome]:
        """One for each schedule of the step, until one is wrong."""
        emulated, found = self.compiled.emulated(), []
        for schedule in self.step.schedules:
            found.append(emulate(emulated, self.step.trial(), schedule))
            if not found[-1].is_right:
                break
        return found

    @property
    def outcome(self) -> Outcome:
        """The last one: the wrong one where there is one."""
        return self.outcomes[-1]

    def ptx_count(self, prefix: str) -> int:
        """PTX instructions that begin with `prefix`."""
        counts = self.xray.ptx_opcodes
        return sum(n for opcode, n in counts.items() if opcode.startswith(prefix))

    def hazards(self) -> list[str]:
        """Fault and findings, each as a sentence with its source line."""
        return [words_of(finding, self.text) for finding in self.outcome.hazards()]


def kernel(number: str, *functions: Callable[..., Any]) -> StepKernel:
    """Step `number` with these functions, told by their names, in place of the author's.

    Raises InvalidInput for a name that the step's reader does not write.
    """
    of, named = step(number), {}
    for function in functions:
        name = getattr(function, "__name__", repr(function))
        if name not in of.functions:
            raise invalid("function", repr(name), of.functions)
        named[name] = function
    return StepKernel(of, named)


def solution(number: str) -> StepKernel:
    """Step `number` as its author wrote it."""
    return StepKernel(step(number), {})
