"""The checks of a call, before a tensor is copied as FlashInfer would, or a workspace is zeroed.

An expanded query takes no memory and its copy may take gigabytes, so the call is checked with
stand-ins on the device meta, which have shapes and strides and no memory: the query's as it would
be after the copy. Before a workspace is zeroed every check of the call is made, as its bytes may be
those of another tensor.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...api import decode, gqa
from ...api.contract_gqa import XQA_NAMES
from ...call import gqa_checks
from ...call.checks import form_of
from ...call.checks.tensors import device as check_device
from ...call.checks.values import check_numbers, read_q_lens
from ...call.decode_args import DecodeArgs
from ...call.gqa_args import GqaArgs
from ...core.errors import InvalidInput, Unsupported, under_names
from .wrapper_plan import SIXTEEN_BITS

#: tensors of an MLA call that may have a row for each query token
ROWS = ("query", "block_tables", "out", "lse", "mask", "sparse_mla_top_k_lens")

Check = Callable[[Callable[..., Any], Mapping[str, Any]], None]


class Checks(NamedTuple):
    """Checks of a call, from the function and its arguments by name."""

    #: raises what the call would raise for a contiguous query; reads no value
    before_copy: Check
    #: raises what the call would raise before it runs
    before_clear: Check


def check_mla(call: Callable[..., Any], named: Mapping[str, Any]) -> None:
    """Raises what the MLA call would raise for a contiguous query."""
    form_of(DecodeArgs(**_stand_ins(call, named)))


def check_no_rows(call: Callable[..., Any], named: Mapping[str, Any]) -> None:
    """Raises what the ragged MLA call would raise, were it not for its query without tokens."""

    def one_row(name: str, value: Any) -> Any:
        if name not in ROWS or not isinstance(value, Tensor) or not value.dim() or len(value):
            return value
        return value.new_empty((1, *value.shape[1:]))

    rows = {name: one_row(name, value) for name, value in named.items()}
    args = DecodeArgs(**_stand_ins(call, rows))
    args.native = False
    form_of(args)
    check_numbers(args)
    sums = named["cum_seq_lens_q"]
    if sums.device.type == "cpu":
        read_q_lens(sums, 0)


def _check_whole_mla(call: Callable[..., Any], named: Mapping[str, Any]) -> None:
    args = DecodeArgs(**_with_backend(call, named))
    args.native = False
    checked, runner = decode.prepare(args)
    decode.allocate(checked, decode.make_plan(checked, runner))


def check_gqa(call: Callable[..., Any], named: Mapping[str, Any]) -> None:
    """Raises what the GQA call would raise for a contiguous query."""
    gqa_checks.check_form(_gqa_args(_stand_ins(call, named)))


def _check_whole_gqa(call: Callable[..., Any], named: Mapping[str, Any]) -> None:
    args = _gqa_args(_with_backend(call, named))
    gqa.choose(gqa_checks.check(args).form, args.backend)


def _gqa_args(given: dict[str, Any]) -> GqaArgs:
    cum = given.pop("q_cu_seq_lens", None)
    if cum is not None:  # XQA's list: its q_len_per_req is then a bound
        given |= {"cum_seq_lens_q": cum, "max_q_len": given.get("q_len_per_req")}
        given["q_len_per_req"] = None
    return GqaArgs(**given)


def _by_names_of_call(check: Check) -> Check:
    """`check`, whose errors name XQA's parameters where the call has its list."""

    def run(call: Callable[..., Any], named: Mapping[str, Any]) -> None:
        try:
            check(call, named)
        except (InvalidInput, Unsupported) as error:
            if "q_cu_seq_lens" not in inspect.signature(call).parameters:
                raise
            raise under_names(error, XQA_NAMES) from None

    return run


MLA = Checks(check_mla, _check_whole_mla)
GQA = Checks(_by_names_of_call(check_gqa), _by_names_of_call(_check_whole_gqa))


def _given(call: Callable[..., Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """`named`, as Python itself would take them, with the call's own defaults; its TypeError for a
    list that is wrong."""
    bound = inspect.signature(call).bind(**named)
    given = set(bound.arguments)
    bound.apply_defaults()
    return {n: value for n, value in bound.arguments.items() if n in given or value is not None}


def _with_backend(call: Callable[..., Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """The call's arguments by name, with the backend that XQA's names stand for."""
    given = _given(call, named)
    if "backend" not in inspect.signature(call).parameters:
        given["backend"] = "cuda" if getattr(given["query"], "is_cuda", False) else "torch"
    return given


def _stand_ins(call: Callable[..., Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """The call's arguments by name, each tensor replaced. All lie on the query's device."""
    given = _given(call, named)
    query: Tensor = given["query"]
    made = {name: _stand_in(name, value, query.device) for name, value in given.items()}
    made["query"] = torch.empty(query.shape, dtype=query.dtype, device="meta")
    return made


def _stand_in(name: str, value: Any, device: torch.device) -> Any:
    if isinstance(value, (list, tuple)):
        parts = [_stand_in(name, part, device) for part in value]
        return parts if isinstance(value, list) else tuple(parts)
    if not isinstance(value, Tensor) or value.layout is not torch.strided or value.is_nested:
        return value
    check_device(name, value, device)
    dtype = torch.float32 if name == "sinks" and value.dtype in SIXTEEN_BITS else value.dtype
    return torch.empty_strided(value.shape, value.stride(), dtype=dtype, device="meta")
