"""Tensors in emulated device memory, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core.errors import invalid, invalid_type
from .host import DeviceTensor
from .memory import BASE, GlobalMemory

#: torch dtype -> (DLPack code, bits)
DTYPES = {
    torch.bfloat16: (4, 16),
    torch.float16: (2, 16),
    torch.float32: (2, 32),
    torch.float8_e4m3fn: (10, 8),
    torch.int32: (0, 32),
    torch.int64: (0, 64),
    torch.uint8: (1, 8),
    torch.uint16: (1, 16),
}


@dataclass(frozen=True)
class Addresses:
    """An argument of a call: where other tensors lie in device memory, int64 [tensors]."""

    tensors: tuple[Tensor, ...]


class Device:
    """Copies of a call's tensors in device memory; equal calls get equal addresses."""

    def __init__(self) -> None:
        self.memory = GlobalMemory()
        #: (bytes on the host, offset) of each tensor that lies in no other
        self._placed: list[tuple[np.ndarray, int]] = []

    def place(self, args: Sequence[Any], names: Sequence[str] = ()) -> list[Any]:
        """`args` with a `DeviceTensor` for each tensor, those inside tuples too."""
        placed: list[Any] = []
        for i, arg in enumerate(args):
            name = names[i] if i < len(names) else f"argument {i}"
            if isinstance(arg, tuple):
                placed.append(tuple(self.place(arg, [f"{name}[{k}]" for k in range(len(arg))])))
            else:
                given = self._addresses(arg, name) if isinstance(arg, Addresses) else arg
                placed.append(self._put(given, name) if isinstance(given, Tensor) else given)
        return placed

    def _addresses(self, given: Addresses, name: str) -> Tensor:
        placed = [self._put(tensor, f"what {name} points to") for tensor in given.tensors]
        return torch.tensor([BASE + tensor.offset for tensor in placed], dtype=torch.int64)

    def _put(self, tensor: Tensor, name: str) -> DeviceTensor:
        if tensor.dtype not in DTYPES:
            raise invalid_type(name, tensor.dtype, list(DTYPES))
        shape, strides, size = tuple(tensor.shape), tensor.stride(), tensor.element_size()
        extent = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        extent = extent if tensor.numel() else 0
        if not extent:
            return DeviceTensor(self.memory.allocate(0, name), DTYPES[tensor.dtype], shape, strides)
        flat = tensor.detach().as_strided((extent,), (1,)).view(torch.uint8).numpy()
        offset = self._shared(flat, name)
        if offset < 0:
            offset = self.memory.allocate(flat.size, name)
            self.memory.bytes[offset : offset + flat.size] = flat
            self._placed.append((flat, offset))
        self._open(offset, shape, strides, size)
        return DeviceTensor(offset, DTYPES[tensor.dtype], shape, strides)

    def _shared(self, flat: np.ndarray, name: str) -> int:
        """Where the bytes of a tensor lie in an earlier one; -1 of memory of its own."""
        for other, offset in self._placed:
            at = flat.ctypes.data - other.ctypes.data
            if at >= 0 and at + flat.size <= other.size:
                return offset + at
            if -flat.size < at < other.size:
                got = f"a view that overlaps an earlier argument from byte {at} of it"
                raise invalid(name, got, "memory of its own, or all of it in an earlier one's")
        return -1

    def _open(self, offset: int, shape: Sequence[int], strides: Sequence[int], size: int) -> None:
        """Allow what belongs to the tensor: not what lies between its rows."""
        inner, dims = 1, list(zip(shape, strides, strict=True))
        while dims and dims[-1][1] == inner:
            inner *= dims.pop()[0]
        if inner * size % 4 or any(s * size % 4 for _, s in dims):
            last = sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
            self.memory.open(offset, (last + 1) * size)
            return
        flags = np.lib.stride_tricks.as_strided(
            self.memory.valid[offset // 4 :],
            [*(n for n, _ in dims), inner * size // 4],
            [*(s * size // 4 for _, s in dims), 1],
        )
        flags[...] = True

    def fetch(self) -> None:
        """Copy what device memory holds back to the tensors."""
        for flat, offset in self._placed:
            flat[:] = self.memory.bytes[offset : offset + flat.size]
