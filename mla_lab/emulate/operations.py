"""The names that generated code calls: NumPy's, and the operations of this package."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import access, arithmetic, barriers, copies, lanes, tcgen05, tensor_memory, wgmma
from .gang import Mask

#: importing them registers the handlers of all instructions
from . import emit_arithmetic, emit_control, emit_memory, emit_tcgen05  # noqa: F401  isort: skip

_NUMPY = (
    "copyto add subtract multiply divide maximum minimum fmax fmin bitwise_and bitwise_or "
    "bitwise_xor bitwise_count logical_and logical_or logical_xor logical_not equal not_equal less "
    "less_equal greater greater_equal left_shift right_shift invert negative absolute rint floor "
    "ceil trunc fmod sqrt bool uint8 int8 uint16 int16 float16 uint32 int32 float32 uint64 int64"
)
_MODULES = (access, arithmetic, barriers, copies, lanes, tcgen05, tensor_memory, wgmma)


def guard(flags: np.ndarray, m: Mask, negated: bool) -> Mask:
    """Threads of a mask whose predicate holds; None where there are none, True for all."""
    if m is True:
        raw = flags.tobytes()
        if 0 not in raw:
            return None if negated else True
        if 1 not in raw:
            return True if negated else None
        return ~flags if negated else flags.copy()
    found = (~flags if negated else flags) & m
    return found if 1 in found.tobytes() else None


def names() -> dict[str, Any]:
    """What generated code sees."""
    found = {name: getattr(np, name) for name in _NUMPY.split()}
    for module in _MODULES:
        functions = vars(module).items()
        found |= {k: v for k, v in functions if callable(v) and not k.startswith("_")}
    found |= {"guard": guard, "pick": np.where}
    return {**found, "YES": np.ones(1, bool), "NO": np.zeros(1, bool)}
