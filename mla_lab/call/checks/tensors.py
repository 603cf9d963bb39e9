"""Checks of one argument each: type, dtype, rank, sizes, device, layout, in that order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Protocol

import torch
from torch import Tensor

from ...core.errors import invalid, invalid_type, unsupported
from ..decode_args import MAX_SCALE

#: a size that is checked, or the name of one that may be any
Size = int | str


class PagedArgs(Protocol):
    """Arguments that MLA and GQA calls have in common."""

    query: Tensor
    workspace_buffer: Tensor | None
    block_tables: Tensor
    uses_shared_paged_kv_idx: bool
    bmm1_scale: float | Tensor
    bmm2_scale: float | Tensor
    sinks: Tensor | list[Tensor] | tuple[Tensor, ...] | None


def tensor(name: str, value: object) -> Tensor:
    """`value`, if it is a tensor with memory and strides."""
    if not isinstance(value, Tensor):
        raise invalid_type(name, type(value).__name__, "a torch.Tensor")
    if value.layout is not torch.strided or value.is_nested:
        kind = "nested" if value.is_nested else str(value.layout)
        raise unsupported(name, f"a tensor whose layout is {kind}", "a dense tensor with strides")
    if hasattr(value, "__tensor_flatten__"):  # such as a DTensor; its address is 0
        supported = "one with memory of its own: a DTensor's is that of to_local()"
        raise unsupported(name, f"a {type(value).__name__}, which holds other tensors", supported)
    if type(value).__name__ == "FakeTensor":
        raise unsupported(name, "a FakeTensor, which has no values", "a tensor with values")
    # torch.compile cannot trace it; the compiled call's own checks do
    if not torch.compiler.is_compiling() and value.is_neg():
        got = "a view that is negated when it is read (is_neg)"
        raise unsupported(name, got, "numbers as they lie in memory: resolve_neg() copies them")
    return value


def dtype(name: str, value: Tensor, supported: Sequence[torch.dtype]) -> None:
    """Refuse a dtype that is not in `supported`."""
    if value.dtype not in supported:
        raise invalid_type(name, value.dtype, " or ".join(str(d) for d in supported))


def shape(name: str, value: Tensor, *supported: tuple[Size, ...]) -> None:
    """Refuse a shape that is none of `supported`."""
    for sizes in supported:
        if len(sizes) == value.dim() and all(
            want == got
            for want, got in zip(sizes, value.shape, strict=True)
            if not isinstance(want, str)
        ):
            return
    raise invalid(
        name, f"shape {list(value.shape)}", " or ".join(_shape_text(sizes) for sizes in supported)
    )


def device(name: str, value: Tensor, expected: torch.device) -> None:
    """Refuse a tensor on another device than the query."""
    if value.device != expected:
        raise invalid(name, f"device {value.device}", f"the query's device, {expected}")


def contiguous(name: str, value: Tensor) -> None:
    """Refuse gaps and reordered dimensions: a call never makes a copy."""
    if not value.is_contiguous():
        raise invalid(
            name, f"strides {list(value.stride())} of shape {list(value.shape)}", "contiguous"
        )


def last_dim_contiguous(name: str, value: Tensor) -> None:
    """Refuse gaps between the elements of the last dimension."""
    if value.shape[-1] > 1 and value.stride(-1) != 1:
        raise invalid(name, f"stride {value.stride(-1)} in the last dimension", 1)


def array(
    name: str,
    value: object,
    dtypes: Sequence[torch.dtype],
    shapes: Sequence[tuple[Size, ...]],
    expected_device: torch.device,
) -> Tensor:
    """A contiguous tensor of one of the dtypes and shapes."""
    checked = tensor(name, value)
    dtype(name, checked, dtypes)
    shape(name, checked, *shapes)
    device(name, checked, expected_device)
    contiguous(name, checked)
    return checked


def any_integer(name: str, value: object) -> int:
    """An int, Python's or NumPy's (no bool)."""
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise invalid_type(name, type(value).__name__, "an int")
    return int(value)


def integer(name: str, value: object, least: int, most: int | None = None) -> int:
    """An int, Python's or NumPy's (no bool), of at least `least`, and at most `most`."""
    found = any_integer(name, value)
    if found < least or (most is not None and found > most):
        supported = f"{least} or more" if most is None else f"{least} to {most}"
        raise invalid(name, short(value), supported)
    return found


def flag(name: str, value: object) -> bool:
    """A bool."""
    if not isinstance(value, bool):
        kind = type(value)
        got = (
            kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
        )
        raise invalid_type(name, got, "a bool")
    return value


def number(name: str, value: object) -> float:
    """A finite real number that a float holds."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise invalid_type(name, type(value).__name__, "a number")
    try:
        converted = float(value)
    except OverflowError:
        converted = math.inf
    if not math.isfinite(converted):
        raise invalid(name, short(value), "a finite number")
    return converted


def scale(name: str, value: object) -> float:
    """A number that fp32 holds, and its product with log2(e)."""
    if type(value) is float and -MAX_SCALE < value < MAX_SCALE:
        return value
    converted = number(name, value)
    if abs(converted) >= MAX_SCALE:
        raise invalid(name, converted, f"a magnitude below {MAX_SCALE}, which fp32 holds")
    return converted


def skip_factor(value: object) -> float:
    """0 or more."""
    name = "skip_softmax_threshold_scale_factor"
    factor = number(name, value)
    if factor < 0:
        raise invalid(name, value, "0 or more, or None")
    return factor


def word(value: object) -> str:
    """A name as it was written, of anything else its type."""
    return repr(value) if isinstance(value, str) else type(value).__name__


def short(value: object) -> str:
    """Its text, cut to what a message has room for."""
    try:
        text = str(value)
    except ValueError:  # an int of more digits than Python prints
        return "an int of more than 4,000 digits"
    return text if len(text) <= 40 else f"{text[:40]}... ({len(text)} digits)"


def _shape_text(sizes: tuple[Size, ...]) -> str:
    return "[" + ", ".join(map(short, sizes)) + "]"
