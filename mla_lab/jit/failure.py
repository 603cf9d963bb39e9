"""A failed compilation: one sentence to show, and the compiler's output for a log."""

from __future__ import annotations

from ..core.errors import BuildError, InvalidInput, Unsupported
from ..plan.config import KernelConfig

#: errors of a kernel's static checks
REFUSALS = (InvalidInput.__name__, Unsupported.__name__)


class CompileFailure(BuildError):
    """A kernel did not compile. The message is one sentence; `log` is the compiler's output."""

    def __init__(self, sentence: str, log: str) -> None:
        super().__init__(sentence)
        self.log = log

    def __reduce__(self) -> tuple[type[CompileFailure], tuple[str, str]]:
        return type(self), (str(self), self.log)


def failure(config: KernelConfig, arch: str, reason: str, log: str) -> BuildError:
    """The error that names the build and the first line of `reason`: a `CompileFailure`, or without
    a log where a static check of the configuration has refused it, ahead of the compiler.
    """
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    first = lines[0] if lines else "no message"
    kind, _, said = first.partition(": ")
    if kind in REFUSALS:
        return BuildError(f"{config.name()} for {arch} is refused before it is compiled: {said}")
    return CompileFailure(f"{config.name()} for {arch} did not compile: {first}", log)
