"""MLA decode: exact semantics on a CPU, plans as values, kernels to read, a workbook to run.

    from mla_lab import trtllm_batch_decode_with_kv_cache_mla

Importing the package loads NumPy alone; torch comes with the first call. With MLA_LAB_TRACE=FOLDER
in the environment each distinct call is written there (`mla_lab.interop.capture`).
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING

from .core.errors import BuildError, InvalidInput, MlaLabError, Unsupported
from .core.problem import Problem
from .core.version import __version__ as __version__

if TYPE_CHECKING:
    from .api.contract import (
        trtllm_batch_decode_with_kv_cache_mla,
        xqa_batch_decode_with_kv_cache_mla,
    )
    from .api.contract_gqa import trtllm_batch_decode_with_kv_cache, xqa_batch_decode_with_kv_cache

__all__ = [
    "BuildError",
    "InvalidInput",
    "MlaLabError",
    "Problem",
    "Unsupported",
    "trtllm_batch_decode_with_kv_cache",
    "trtllm_batch_decode_with_kv_cache_mla",
    "xqa_batch_decode_with_kv_cache",
    "xqa_batch_decode_with_kv_cache_mla",
]

#: names that need torch, and the module that holds them
_LAZY = {
    "trtllm_batch_decode_with_kv_cache": "api.contract_gqa",
    "trtllm_batch_decode_with_kv_cache_mla": "api.contract",
    "xqa_batch_decode_with_kv_cache": "api.contract_gqa",
    "xqa_batch_decode_with_kv_cache_mla": "api.contract",
}


def __getattr__(name: str) -> object:
    if name in _LAZY:
        return getattr(import_module(f".{_LAZY[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, "__version__"})


if os.environ.get("MLA_LAB_TRACE"):  # a folder: every call shape of this process goes there
    import_module(".interop.capture", __name__).start_from_environment()
