"""Launches without host code: PTX of one's own, with pointers and numbers as parameters."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..core.errors import invalid
from .host import DeviceTensor
from .kernel import EmulatedKernel, Options
from .machine import Launch
from .memory import BASE


@dataclass(frozen=True)
class Direct:
    """Launches the kernel that is called, in these dimensions."""

    grid: tuple[int, int, int] = (1, 1, 1)
    block: tuple[int, int, int] = (32, 1, 1)
    cluster: tuple[int, int, int] = (1, 1, 1)
    shared_bytes: int = 0

    def launches(
        self, function: str, args: Sequence[Any], sizes: dict[str, list[int]]
    ) -> list[Launch]:
        """One launch; a tensor is passed as its address. Raises InvalidInput for arguments that the
        kernel's parameters do not hold."""
        wanted = sizes.get(function)
        if wanted is None or len(wanted) != len(args):
            raise invalid("arguments", f"{len(args)} of {function!r}", sizes)
        params = [
            _packed(*both, f"argument {i}") for i, both in enumerate(zip(args, wanted, strict=True))
        ]
        shape = (self.grid, self.block, self.cluster, self.shared_bytes)
        return [Launch(function, *shape, tuple(params))]


def _packed(arg: Any, size: int, name: str) -> bytes:
    if isinstance(arg, DeviceTensor) and size == 8:
        return struct.pack("<Q", BASE + arg.offset)
    if isinstance(arg, float) and size in (4, 8):
        return struct.pack("<f" if size == 4 else "<d", arg)
    if isinstance(arg, int) and -(1 << 8 * size - 1) <= arg < 1 << 8 * size:
        return arg.to_bytes(size, "little", signed=arg < 0)
    kind = "a tensor" if isinstance(arg, DeviceTensor) else repr(arg)
    raise invalid(name, kind, f"what a parameter of {size} bytes holds")


def ptx_kernel(
    text: str, name: str, launch: Direct, options: Options | None = None
) -> EmulatedKernel:
    """A kernel of a PTX text, called with tensors and numbers in the order of its parameters."""
    return EmulatedKernel(text, name, launch, options)
