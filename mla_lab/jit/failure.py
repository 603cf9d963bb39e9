"""A compiler's refusal: one sentence to show, and everything it said to keep in a log."""

from __future__ import annotations

from ..core.errors import BuildError
from ..plan.config import KernelConfig


class CompileFailure(BuildError):
    """`log` holds what the compiler printed; the message is one sentence."""

    def __init__(self, sentence: str, log: str) -> None:
        super().__init__(sentence)
        self.log = log


def refused(config: KernelConfig, arch: str, reason: str, log: str) -> CompileFailure:
    """The house's sentence for a kernel that did not compile; `reason` may have more lines."""
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    first = lines[0] if lines else "no message"
    return CompileFailure(f"{config.name()} for {arch} did not compile: {first}", log)
