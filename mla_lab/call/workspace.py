"""Named slices of the caller's buffer, as a plan's layout says."""

from __future__ import annotations

import torch
from torch import Tensor

from ..plan import WorkspaceLayout


class Workspace:
    """One buffer seen through a layout; `workspace["partial_out"]` is a typed view of it."""

    def __init__(self, layout: WorkspaceLayout, buffer: Tensor) -> None:
        self.layout = layout
        self.buffer = buffer

    @classmethod
    def of(cls, layout: WorkspaceLayout, buffer: Tensor | None, device: torch.device) -> Workspace:
        """`buffer` if it is large enough and aligned; without one, zeroed bytes of our own.

        Raises InvalidInput naming both sizes, or the address.
        """
        if buffer is None:
            return cls(layout, torch.zeros(layout.nbytes, dtype=torch.uint8, device=device))
        layout.check(buffer.numel(), buffer.data_ptr())
        return cls(layout, buffer)

    def __getitem__(self, name: str) -> Tensor:
        part = self.layout[name]
        raw = self.buffer[part.offset : part.offset + part.nbytes]
        return raw.view(getattr(torch, part.dtype)).view(part.shape)
