"""Checks of one argument each: type, dtype, rank, sizes, device, layout, in that order."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real

import torch
from torch import Tensor

from ...core.errors import invalid, invalid_type

#: a size that is checked, or a name for one that may be anything
Size = int | str


def tensor(name: str, value: object) -> Tensor:
    """`value`, if it is a tensor."""
    if not isinstance(value, Tensor):
        raise invalid_type(name, type(value).__name__, "a torch.Tensor")
    return value


def dtype(name: str, value: Tensor, supported: Sequence[torch.dtype]) -> None:
    """Refuse a dtype that is not in `supported`."""
    if value.dtype not in supported:
        raise invalid_type(name, value.dtype, " or ".join(str(d) for d in supported))


def shape(name: str, value: Tensor, *supported: tuple[Size, ...]) -> None:
    """Refuse a shape that fits none of `supported`."""
    for sizes in supported:
        if len(sizes) == value.dim() and all(
            want == got for want, got in zip(sizes, value.shape, strict=True) if type(want) is int
        ):
            return
    raise invalid(
        name, f"shape {list(value.shape)}", " or ".join(_shape_text(sizes) for sizes in supported)
    )


def device(name: str, value: Tensor, expected: torch.device) -> None:
    """Refuse a tensor that is not where the query is."""
    if value.device != expected:
        raise invalid(name, f"device {value.device}", f"the query's device, {expected}")


def contiguous(name: str, value: Tensor) -> None:
    """Refuse gaps and reordered dimensions: a call never makes a copy."""
    if not value.is_contiguous():
        raise invalid(
            name, f"strides {list(value.stride())} of shape {list(value.shape)}", "contiguous"
        )


def last_dim_contiguous(name: str, value: Tensor) -> None:
    """Refuse elements that do not lie side by side."""
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


def integer(name: str, value: object, least: int) -> int:
    """An int, Python's or NumPy's (no bool), of at least `least`."""
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise invalid_type(name, type(value).__name__, "an int")
    if value < least:
        raise invalid(name, value, f"{least} or more")
    return int(value)


def flag(name: str, value: object) -> bool:
    """A bool."""
    if not isinstance(value, bool):
        raise invalid_type(name, type(value).__name__, "a bool")
    return value


def number(name: str, value: object) -> float:
    """A finite real number."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise invalid_type(name, type(value).__name__, "a number")
    if not math.isfinite(value):
        raise invalid(name, value, "a finite number")
    return float(value)


def _shape_text(sizes: tuple[Size, ...]) -> str:
    return "[" + ", ".join(str(s) for s in sizes) + "]"
