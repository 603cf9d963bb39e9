"""A failed compilation: one sentence to show, and the compiler's output for a log."""

from __future__ import annotations

from ..core.errors import BuildError
from ..plan.config import KernelConfig


class CompileFailure(BuildError):
    """A kernel did not compile. The message is one sentence; `log` is the compiler's output."""

    def __init__(self, sentence: str, log: str) -> None:
        super().__init__(sentence)
        self.log = log

    def __reduce__(self) -> tuple[type[CompileFailure], tuple[str, str]]:
        return type(self), (str(self), self.log)


def refused(config: KernelConfig, arch: str, reason: str, log: str) -> CompileFailure:
    """A `CompileFailure` that names the build and the first line of `reason`."""
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    first = lines[0] if lines else "no message"
    return CompileFailure(f"{config.name()} for {arch} did not compile: {first}", log)
