"""The native call under torch.compile: a custom operation that the compiler does not look into.

The operation writes to out and lse, which the traced program allocates, so that it owns no memory
and returns nothing. Eager calls never come through here: an operation of torch.library costs
more host time than a kernel's launch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..call.decode_args import Arguments
from ..core.errors import unsupported

NAME = "mla_lab::decode"
WRITTEN = ("workspace_buffer", "out", "lse")
#: `decode`'s parameters, in the order of `Arguments`; a scale is a number or, at the end, a tensor
SCHEMA = """(
    Tensor query, Tensor kv_cache, Tensor block_tables, Tensor seq_lens, int? max_seq_len,
    Tensor(a!)? workspace_buffer, int kv_lora_rank, int qk_rope_head_dim, int sparse_mla_top_k,
    Tensor(b!) out, float bmm1_scale, float bmm2_scale, Tensor? sinks,
    float? skip_softmax_threshold_scale_factor, bool? enable_pdl, bool is_var_seq,
    bool uses_shared_paged_kv_idx, Tensor(c!)? lse, bool return_lse, str? return_lse_base,
    Tensor? cum_seq_lens_q, int? max_q_len, bool enable_dcp, int cp_world, int cp_rank,
    Tensor? causal_seqlens_kv_global, Tensor? mask, bool batch_invariant,
    Tensor? bmm1_tensor, Tensor? bmm2_tensor, str backend
) -> ()"""
#: of an out that nobody gave: a query wider than 16 bits keeps its dtype
_WIDE = (torch.float32, torch.float64)


def define(eager: Callable[..., Any]) -> None:
    """Make the operation; `eager` is the native call that runs it."""

    def run(*values: Any) -> None:
        *listed, bmm1_tensor, bmm2_tensor, backend = values
        named = dict(zip(Arguments._fields, listed, strict=False))
        if bmm1_tensor is not None:
            named["bmm1_scale"] = bmm1_tensor
        if bmm2_tensor is not None:
            named["bmm2_scale"] = bmm2_tensor
        eager(**named, backend=backend)

    operation = torch.library.custom_op(NAME, run, mutates_args=WRITTEN, schema=SCHEMA)
    operation.register_fake(lambda *values: None)


def call(given: Arguments, backend: str) -> Tensor | tuple[Tensor, Tensor]:
    """`decode` inside a program that torch.compile traces.

    Raises Unsupported for a `plan`, which is a value of one batch and no part of a program.
    """
    if given.plan is not None:
        raise unsupported("plan", "a Plan under torch.compile", "None: the backend plans itself")
    out, lse = _results(given)
    bmm1, bmm2, sinks = given.bmm1_scale, given.bmm2_scale, given.sinks
    listed = given._replace(
        out=out,
        lse=lse,
        bmm1_scale=1.0 if isinstance(bmm1, Tensor) else float(bmm1),
        bmm2_scale=1.0 if isinstance(bmm2, Tensor) else float(bmm2),
        sinks=sinks if sinks is None or isinstance(sinks, Tensor) else sinks[0],
    )
    torch.ops.mla_lab.decode(
        *listed[:-1],  # all but the plan
        bmm1 if isinstance(bmm1, Tensor) else None,
        bmm2 if isinstance(bmm2, Tensor) else None,
        backend,
    )
    return (out, lse) if given.return_lse and lse is not None else out


def _results(given: Arguments) -> tuple[Tensor, Tensor | None]:
    """out, and lse where it is wanted: the caller's, or new ones."""
    query, out, lse = given.query, given.out, given.lse
    if out is None:
        dtype = query.dtype if query.dtype in _WIDE else torch.bfloat16
        out = query.new_empty((*query.shape[:-1], given.kv_lora_rank), dtype=dtype)
    if lse is None and given.return_lse:
        tokens = query.shape[0] if query.dim() == 3 else query.shape[0] * query.shape[1]
        lse = query.new_empty((tokens, query.shape[-2]), dtype=torch.float32)
    return out, lse
