"""What tests of randomly changed calls have in common: their seeds, and what a call may do."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from mla_lab.core.errors import MlaLabError

#: a test goes on for so long after its calls
SECONDS = float(os.environ.get("MLA_LAB_FUZZ_SECONDS", "0"))

#: other shapes and strides of a tensor
ODD_SHAPES: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda t: t[:0],
    lambda t: t[:1],
    lambda t: t[..., :-1],
    lambda t: t[None],
    lambda t: t.flatten(),
    lambda t: t.transpose(0, -1),
    lambda t: t.clone(),
    lambda t: torch.stack([t, t], -1)[..., 0],
)


def seeds(calls: int) -> Iterator[int]:
    """0, 1, ... up to `calls`, and on until the time is up."""
    end, seed = time.monotonic() + SECONDS, 0
    while seed < calls or time.monotonic() < end:
        yield seed
        seed += 1


def result_of(call: Callable[..., Any], named: dict[str, Any], told: str) -> Any:
    """What a call gives, None where it is refused with a reason; any other error is a failure."""
    try:
        return call(**named)
    except MlaLabError as error:
        if "got" not in str(error) or "supported" not in str(error):
            pytest.fail(f"{told}: {error}")
        return None
    except Exception as error:
        pytest.fail(f"{told}: {type(error).__name__} {error}")
