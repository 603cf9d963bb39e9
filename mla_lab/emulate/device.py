"""Tensors in emulated device memory, and back."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..core.errors import invalid_type
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


def _place(tensor: Tensor) -> tuple[int, int]:
    """Addresses on the host of a tensor's first byte and behind its last one."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    extent = 1 + sum((n - 1) * s for n, s in pairs) if tensor.numel() else 0
    return tensor.data_ptr(), tensor.data_ptr() + extent * tensor.element_size()


def _tensors(args: Sequence[Any]) -> Iterator[Tensor]:
    for arg in args:
        if isinstance(arg, tuple | Addresses):
            yield from _tensors(arg if isinstance(arg, tuple) else arg.tensors)
        elif isinstance(arg, Tensor) and arg.numel():
            yield arg


class Device:
    """Copies of a call's tensors in device memory; equal calls get equal addresses."""

    def __init__(self) -> None:
        self.memory = GlobalMemory()
        #: addresses on the host, begin and end, of arguments' memory: of those that overlap, as one
        self._spans: list[tuple[int, int]] = []
        #: (bytes on the host, offset) of each span by its begin, and the tensors that hold them
        self._placed: dict[int, tuple[np.ndarray, int]] = {}
        self._held: list[Tensor] = []

    def place(self, args: Sequence[Any], names: Sequence[str] = ()) -> list[Any]:
        """`args` with a `DeviceTensor` for each tensor, those inside tuples too."""
        placed: list[Any] = []
        self._join(args)
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
        if not tensor.numel():
            return DeviceTensor(self.memory.allocate(0, name), DTYPES[tensor.dtype], shape, strides)
        begin, end = _place(tensor)
        span = next((s for s in self._spans if s[0] <= begin and end <= s[1]), (begin, end))
        if span[0] not in self._placed:
            nbytes = span[1] - span[0]
            flat = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(span[0]))
            offset = self.memory.allocate(nbytes, name)
            self.memory.bytes[offset : offset + nbytes] = flat
            self._placed[span[0]] = flat, offset
        self._held.append(tensor)
        offset = self._placed[span[0]][1] + begin - span[0]
        self._open(offset, shape, strides, size)
        return DeviceTensor(offset, DTYPES[tensor.dtype], shape, strides)

    def _join(self, args: Sequence[Any]) -> None:
        """Find the spans of these arguments, whose memory may overlap."""
        found: list[tuple[int, int]] = []
        for begin, end in sorted(map(_place, _tensors(args))):
            if found and begin < found[-1][1]:
                found[-1] = found[-1][0], max(found[-1][1], end)
            else:
                found.append((begin, end))
        known = self._spans
        self._spans += [s for s in found if not any(k[0] <= s[0] and s[1] <= k[1] for k in known)]

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
        for flat, offset in self._placed.values():
            flat[:] = self.memory.bytes[offset : offset + flat.size]
