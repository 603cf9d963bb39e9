"""Checks of what a call may use beyond the plain one: scales, sinks, masks, ranks, flags."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...core.errors import invalid, invalid_type, unsupported
from ...core.masks import words_per_row
from ..decode_args import Arguments
from . import tensors as argument
from .shapes import QueryShape

LSE_BASES = (None, "basee", "base2")


def check_flags(given: Arguments) -> None:
    """Types and ranges of what is neither a tensor nor a size."""
    for name in (
        "is_var_seq",
        "uses_shared_paged_kv_idx",
        "return_lse",
        "enable_dcp",
        "batch_invariant",
    ):
        argument.flag(name, getattr(given, name))
    if given.enable_pdl is not None:
        argument.flag("enable_pdl", given.enable_pdl)
    if given.return_lse_base not in LSE_BASES:
        raise invalid("return_lse_base", repr(given.return_lse_base), LSE_BASES)
    argument.integer("sparse_mla_top_k", given.sparse_mla_top_k, 0)
    argument.integer("cp_world", given.cp_world, 1)
    argument.integer("cp_rank", given.cp_rank, 0)


def check(given: Arguments, query: QueryShape, max_q_len: int | None) -> None:
    """Scales, sinks, skip-softmax, mask, context parallelism, and what excludes what."""
    _check_scale("bmm1_scale", given)
    _check_scale("bmm2_scale", given)
    _check_sinks(given, query.heads)
    factor = given.skip_softmax_threshold_scale_factor
    if factor is not None and argument.number("skip_softmax_threshold_scale_factor", factor) < 0:
        raise invalid("skip_softmax_threshold_scale_factor", factor, "0 or more, or None")
    if given.mask is not None:
        _check_mask(given, query, max_q_len)
    _check_context_parallel(given, query.batch)
    if given.sparse_mla_top_k:
        _check_sparse(given)


def _check_scale(name: str, given: Arguments) -> None:
    scale = getattr(given, name)
    if isinstance(scale, Tensor):
        argument.array(name, scale, [torch.float32], [(), (1,)], given.query.device)
    else:
        argument.number(name, scale)


def _check_sinks(given: Arguments, heads: int) -> None:
    sinks = given.sinks
    if isinstance(sinks, Sequence):
        if len(sinks) != 1:
            raise invalid("sinks", f"a list of {len(sinks)}", "a tensor, or a list of one")
        sinks = sinks[0]
        if sinks is None:
            raise invalid_type("sinks", "a list of None", "a torch.Tensor, or a list of one")
    if sinks is not None:
        argument.array("sinks", sinks, [torch.float32], [(heads,)], given.query.device)


def _check_mask(given: Arguments, query: QueryShape, max_q_len: int | None) -> None:
    """Its width follows from max_q_len; where that is read later, so is the width's check."""
    words = "words" if max_q_len is None else words_per_row(max_q_len)
    dense = (query.batch, query.q_len, words)
    shape = dense if query.q_len else (query.total_q, words)
    argument.array("mask", given.mask, [torch.uint16], [shape], given.query.device)


def _check_context_parallel(given: Arguments, batch: int) -> None:
    if not given.enable_dcp:
        for name, default in (("cp_world", 1), ("cp_rank", 0), ("causal_seqlens_kv_global", None)):
            value = getattr(given, name)
            if value is not default and (isinstance(value, Tensor) or value != default):
                got = "a tensor" if isinstance(value, Tensor) else value
                raise invalid(name, got, f"{default} without enable_dcp")
        return
    if given.cp_rank >= given.cp_world:
        raise invalid("cp_rank", given.cp_rank, f"0 to {given.cp_world - 1} (cp_world - 1)")
    if not given.return_lse:
        raise invalid("return_lse", False, "True with enable_dcp: ranks are merged by their lse")
    if given.causal_seqlens_kv_global is None:
        raise invalid("causal_seqlens_kv_global", None, "int32 [batch] with enable_dcp")
    name, device = "causal_seqlens_kv_global", given.query.device
    argument.array(name, given.causal_seqlens_kv_global, [torch.int32], [(batch,)], device)
    if given.sinks is not None:
        supported = "None with enable_dcp: a sink enters once, in context_parallel.merge"
        raise unsupported("sinks", "a tensor", supported)


def _check_sparse(given: Arguments) -> None:
    """Sparse rows see exactly their slots: what reshapes visibility has no meaning there."""
    refused = {
        "mask": given.mask is not None,
        "enable_dcp": given.enable_dcp,
        "uses_shared_paged_kv_idx": not given.uses_shared_paged_kv_idx,
        "skip_softmax_threshold_scale_factor": given.skip_softmax_threshold_scale_factor
        is not None,
    }
    for name, used in refused.items():
        if used:
            value = "a tensor" if name == "mask" else getattr(given, name)
            raise unsupported(name, f"{value} in a sparse call", "dense calls")
