"""Debug mode inside the capture of a CUDA graph: no value can be read there, but a workspace that
two streams of one capture share is seen.

Calls of two streams may run at the same time when the graph is replayed, and would overwrite each
other's partials and counters.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...core.errors import invalid
from .overlap import byte_range


class Use(NamedTuple):
    """Bytes of a workspace that a captured call uses, and its stream."""

    begin: int
    end: int
    stream: torch.cuda.Stream


#: those of captures that had not ended at the last call
_USES: list[Use] = []


def is_captured(device: torch.device) -> bool:
    """Whether calls on `device` are recorded into a graph now."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def check_streams(workspace: Tensor | None) -> None:
    """Of a call that is captured: InvalidInput where another stream of a capture that goes on uses
    the same bytes.
    """
    if workspace is None or not workspace.numel():
        return
    own = Use(*byte_range(workspace), torch.cuda.current_stream(workspace.device))
    _USES[:] = [use for use in _USES if _captures(use.stream)]
    for use in _USES:
        shared = max(use.begin, own.begin) < min(use.end, own.end)
        if shared and use.stream != own.stream:
            got = "bytes that another stream of this capture uses"
            raise invalid("workspace_buffer", got, "a buffer for each stream")
    _USES.append(own)


def _captures(stream: torch.cuda.Stream) -> bool:
    """Whether work on `stream` is recorded into a graph now."""
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()
