"""Workspaces that FlashInfer's callers never zero: their counters and LL partials are, once.

An eager call tells buffers apart by the tensor object. A compiled program may see a new object for
the same memory at each run, so there the memory itself is told apart, with the offset in it.

What the capture of a CUDA graph records has not run, and another graph may be replayed first: there
each call zeroes its buffer, until one outside of captures has.
"""

from __future__ import annotations

from typing import TypeGuard
from weakref import ref

import torch
from torch import Tensor
from torch._library.effects import EffectType
from torch.multiprocessing.reductions import StorageWeakRef

from ...call.checks.capture import is_captured
from ...plan.workspace import LL_WORDS, MAX_GROUPS, WORD_BYTES

#: merge counters and LL partials come first in every layout
ZEROED_BYTES = (MAX_GROUPS + LL_WORDS) * WORD_BYTES

_SEEN: dict[int, ref[Tensor]] = {}
#: by address of the storage's record, which is not used again while its weak reference is held
_SEEN_MEMORY: dict[tuple[int, int], StorageWeakRef] = {}


def clear_once(buffer: object) -> None:
    """Zero the first words of a workspace at its first use, on the current stream.

    Under torch.compile the traced program does it, at its first run. Anything but a 1-D buffer of
    bytes is left to the checks of the call.
    """
    if not _is_bytes(buffer):
        return
    if torch.compiler.is_compiling():
        torch.ops.mla_lab.clear_once(buffer)
        return
    key = id(buffer)
    known = _SEEN.get(key)
    if known is None or known() is not buffer:
        buffer[:ZEROED_BYTES].zero_()
        if not is_captured(buffer.device):
            _SEEN[key] = ref(buffer, lambda _: _SEEN.pop(key, None))


def clear(buffer: Tensor) -> None:
    """Zero the first words of a workspace that others may have written since, as `clear_once`."""
    if _is_bytes(buffer):
        buffer[:ZEROED_BYTES].zero_()


def _is_bytes(buffer: object) -> TypeGuard[Tensor]:
    if not isinstance(buffer, Tensor):
        return False
    return buffer.dtype in (torch.uint8, torch.int8) and buffer.dim() == 1


# Not declared as written to: a program that copies what its operations write, as aot_eager's does,
# would hand over a copy each time. The effect keeps the operation, and before its call.
@torch.library.custom_op("mla_lab::clear_once", mutates_args=())
def _clear_memory_once(buffer: Tensor) -> None:
    """`clear_once` inside a compiled program: by memory."""
    memory = StorageWeakRef(buffer.untyped_storage())
    key = (int(memory.cdata), int(buffer.storage_offset()))
    if key in _SEEN_MEMORY and not _SEEN_MEMORY[key].expired():
        return
    for old in [k for k, seen in _SEEN_MEMORY.items() if seen.expired()]:
        del _SEEN_MEMORY[old]
    buffer[:ZEROED_BYTES].zero_()
    if not is_captured(buffer.device):
        _SEEN_MEMORY[key] = memory


_clear_memory_once.register_fake(lambda buffer: None)
_clear_memory_once.register_effect(EffectType.ORDERED)
