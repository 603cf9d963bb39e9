"""Workspaces that FlashInfer's callers never zero: their counters and LL partials are, once.

An eager call tells buffers apart by the tensor object. A compiled program may see a new object for
the same memory at each run, so there the memory itself is told apart, with the offset in it.

What the capture of a CUDA graph records has not run, and another graph may be replayed first: there
each call zeroes its buffer, until one outside of captures has.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeGuard
from weakref import ref

import torch
from torch import Tensor
from torch._library.effects import EffectType
from torch.multiprocessing.reductions import StorageWeakRef

from ...call.checks.capture import is_captured
from ...call.checks.overlap import byte_range
from ...core.errors import invalid
from ...plan.workspace import LL_WORDS, MAX_GROUPS, WORD_BYTES

#: merge counters and LL partials come first in every layout
ZEROED_BYTES = (MAX_GROUPS + LL_WORDS) * WORD_BYTES

_SEEN: dict[int, ref[Tensor]] = {}
#: by address of the storage's record, which is not used again while its weak reference is held
_SEEN_MEMORY: dict[tuple[int, int], StorageWeakRef] = {}


def clear_once(
    buffer: object, check: Callable[[], None] | None = None, others: Sequence[Tensor] = ()
) -> None:
    """Zero the first words of a workspace at its first use, on the current stream.

    check: raises what the call would raise; made before a buffer is zeroed. Under torch.compile
    the traced program zeroes it, at its first run, unless it shares bytes with one of `others`.
    Anything but a 1-D buffer of bytes is left to the checks of the call.
    """
    if not _is_bytes(buffer):
        return
    if torch.compiler.is_compiling():
        torch.ops.mla_lab.clear_once(buffer, list(others))
        return
    key = id(buffer)
    known = _SEEN.get(key)
    if known is None or known() is not buffer:
        if check is not None:
            check()
        _zero(buffer)
        if not is_captured(buffer.device):
            _SEEN[key] = ref(buffer, lambda _: _SEEN.pop(key, None))


def clear(buffer: Tensor) -> None:
    """Zero the first words of a workspace that others may have written since, as `clear_once`."""
    if _is_bytes(buffer):
        _zero(buffer)


def check_apart(name: str, buffer: Tensor, others: Sequence[Tensor]) -> None:
    """Raise InvalidInput for a workspace that shares bytes with another tensor."""
    begin, end = byte_range(buffer)
    for other in others:
        if not other.is_meta and other.device == buffer.device:
            other_begin, other_end = byte_range(other)
            if max(begin, other_begin) < min(end, other_end):
                got = f"bytes of another tensor too (0x{max(begin, other_begin):x} and on)"
                raise invalid(name, got, "memory of its own")


def _zero(buffer: Tensor) -> None:
    # what inference mode made is written in it alone, and other tensors in it as well
    with torch.inference_mode():
        buffer[:ZEROED_BYTES].zero_()


def _is_bytes(buffer: object) -> TypeGuard[Tensor]:
    if not isinstance(buffer, Tensor):
        return False
    return buffer.dtype in (torch.uint8, torch.int8) and buffer.dim() == 1


# Not declared as written to: a program that copies what its operations write, as aot_eager's does,
# would hand over a copy each time. The effect keeps the operation, and before its call.
@torch.library.custom_op("mla_lab::clear_once", mutates_args=())
def _clear_memory_once(buffer: Tensor, others: list[Tensor]) -> None:
    """`clear_once` inside a compiled program: by memory."""
    memory = StorageWeakRef(buffer.untyped_storage())
    key = (int(memory.cdata), int(buffer.storage_offset()))
    if key in _SEEN_MEMORY and not _SEEN_MEMORY[key].expired():
        return
    for old in [k for k, seen in _SEEN_MEMORY.items() if seen.expired()]:
        del _SEEN_MEMORY[old]
    check_apart("workspace_buffer", buffer, others)
    _zero(buffer)
    if not is_captured(buffer.device):
        _SEEN_MEMORY[key] = memory


_clear_memory_once.register_fake(lambda buffer, others: None)
_clear_memory_once.register_effect(EffectType.ORDERED)
