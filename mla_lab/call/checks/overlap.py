"""Results and workspace share no byte with another tensor of the call.

A kernel reads its inputs while it writes, so that a shared byte gives wrong numbers and no error.
Addresses are compared, with strides; no value is read.
"""

from __future__ import annotations

from torch import Tensor

from ...core.errors import invalid, unsupported
from ..decode_args import Declared


def byte_range(tensor: Tensor) -> tuple[int, int]:
    """Addresses [begin, end) from a tensor's first byte to behind its last."""
    begin = tensor.data_ptr()
    if not tensor.numel():
        return begin, begin
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((size - 1) * stride for size, stride in steps)
    return begin, begin + (last + 1) * tensor.element_size()


def _memory(name: str, tensor: Tensor) -> tuple[int, int]:
    try:
        begin, end = byte_range(tensor)
    except RuntimeError:  # torch has no address for it
        got = "a tensor without memory of its own, as in torch.vmap and torch.func.grad"
        raise unsupported(name, got, "a tensor with memory") from None
    if not begin and end:
        got = "address 0: its memory was freed, or torch.func.functionalize holds it"
        raise invalid(name, got, "a tensor with memory")
    return begin, end


def check_overlap(args: object, parameters: tuple[Declared, ...]) -> None:
    """Raise InvalidInput for a tensor that the call writes and that overlaps another one, and for
    one whose memory was freed.

    Each tensor of a list has a range of its own: what lies between two of them is free.
    """
    found: list[tuple[str, int, int]] = []
    for p in parameters:
        value = getattr(args, p.name)
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(tensor, Tensor) and not tensor.is_meta:
                found.append((p.name, *_memory(p.name, tensor)))
    names = {p.name for p in parameters if p.arg.written}
    for name, begin, end in [entry for entry in found if entry[0] in names]:
        for other, other_begin, other_end in found:
            if other != name and max(begin, other_begin) < min(end, other_end):
                got = f"bytes that are {other}'s too (0x{max(begin, other_begin):x} and on)"
                raise invalid(name, got, "memory of its own")
