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
        """One launch; a tensor is passed as its address."""
        wanted = sizes.get(function)
        if wanted is None or len(wanted) != len(args):
            raise invalid("arguments", f"{len(args)} of {function!r}", sizes)
        params = [_packed(arg, size) for arg, size in zip(args, wanted, strict=True)]
        shape = (self.grid, self.block, self.cluster, self.shared_bytes)
        return [Launch(function, *shape, tuple(params))]


def _packed(arg: Any, size: int) -> bytes:
    if isinstance(arg, DeviceTensor):
        return struct.pack("<Q", BASE + arg.offset)
    if isinstance(arg, float):
        return struct.pack("<f" if size == 4 else "<d", arg)
    return int(arg).to_bytes(size, "little", signed=int(arg) < 0)


def ptx_kernel(
    text: str, name: str, launch: Direct, options: Options | None = None
) -> EmulatedKernel:
    """A kernel of a PTX text, called with tensors and numbers in the order of its parameters."""
    return EmulatedKernel(text, name, launch, options)
