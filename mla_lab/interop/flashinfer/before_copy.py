"""The checks of a call, before a tensor that FlashInfer would copy is copied.

An expanded query takes no memory and its copy may take gigabytes, so the call is checked with
stand-ins on the device meta, which have shapes and strides and no memory: the query's as it would
be after the copy.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ...call.checks import form_of
from ...call.checks.tensors import device as check_device
from ...call.decode_args import DecodeArgs
from ...call.gqa_args import GqaArgs
from ...call.gqa_checks import check_form

SIXTEEN_BITS = (torch.bfloat16, torch.float16)


def check_mla(call: Callable[..., Any], args: tuple[Any, ...], named: Mapping[str, Any]) -> None:
    """Raises what the MLA call would raise for a contiguous query."""
    form_of(DecodeArgs(**_stand_ins(call, args, named)))


def check_gqa(call: Callable[..., Any], args: tuple[Any, ...], named: Mapping[str, Any]) -> None:
    """Raises what the GQA call would raise for a contiguous query."""
    given = _stand_ins(call, args, named)
    cum = given.pop("q_cu_seq_lens", None)
    if cum is not None:  # XQA's list: its q_len_per_req is then a bound
        given |= {"cum_seq_lens_q": cum, "max_q_len": given.get("q_len_per_req")}
        given["q_len_per_req"] = None
    check_form(GqaArgs(**given))


def _stand_ins(
    call: Callable[..., Any], args: tuple[Any, ...], named: Mapping[str, Any]
) -> dict[str, Any]:
    """The call's arguments by name, each tensor replaced. All lie on the query's device."""
    given = dict(inspect.signature(call).bind(*args, **named).arguments)
    query: Tensor = given["query"]
    made = {name: _stand_in(name, value, query.device) for name, value in given.items()}
    made["query"] = torch.empty(query.shape, dtype=query.dtype, device="meta")
    return made


def _stand_in(name: str, value: Any, device: torch.device) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_stand_in(name, part, device) for part in value)
    if not isinstance(value, Tensor) or value.layout is not torch.strided or value.is_nested:
        return value
    check_device(name, value, device)
    dtype = torch.float32 if name == "sinks" and value.dtype in SIXTEEN_BITS else value.dtype
    return torch.empty_strided(value.shape, value.stride(), dtype=dtype, device="meta")
