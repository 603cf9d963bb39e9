"""Checks of what a call may use beyond the plain one: scales, sinks, masks, ranks, flags."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...core.errors import invalid, invalid_type, unsupported
from ...core.masks import words_per_row
from ..decode_args import PARAMETERS, Declared, DecodeArgs
from . import tensors as argument
from .shapes import QueryShape

LSE_BASES = (None, "basee", "base2")
#: integers and their least and greatest value: positions of keys on all ranks are int32
RANGES = {
    "sparse_mla_top_k": (0, None),
    "cp_world": (1, 2**31 - 1),
    "cp_rank": (0, 2**31 - 1),
}
#: parameters that other kernels than ours follow: the one value beside None, and what is supported
ONLY = {
    "kv_scale_format": ("auto", "'auto': scales are read as any fp32"),
    "multi_ctas_kv_counter_buffer": (None, "None: counters lie in workspace_buffer"),
}


def check_flags(args: DecodeArgs) -> None:
    """Types and ranges of what is neither a tensor nor a size."""
    argument.tensor("query", args.query)
    check_bools(args, PARAMETERS)
    argument.any_integer("qk_nope_head_dim", args.qk_nope_head_dim)
    _check_implementation(args)
    for name, (only, supported) in ONLY.items():
        value = getattr(args, name)
        if value is not None and not (isinstance(value, str) and value == only):
            got = repr(value) if isinstance(value, str) else "a value"
            raise unsupported(name, got, supported)
    if args.use_fp16_softmax:
        raise unsupported("use_fp16_softmax", True, "None or False: the softmax is fp32")
    base = args.return_lse_base
    if not isinstance(base, str | None):
        raise invalid_type("return_lse_base", argument.word(base), LSE_BASES)
    if base not in LSE_BASES:
        raise invalid("return_lse_base", repr(base), LSE_BASES)
    for name, (least, most) in RANGES.items():
        argument.integer(name, getattr(args, name), least, most)


def check_bools(args: object, parameters: Sequence[Declared]) -> None:
    """Parameters of type bool, or bool and None."""
    for p in parameters:
        value = getattr(args, p.name)
        if p.type is bool or (p.type == bool | None and value is not None):
            argument.flag(p.name, value)


def _check_implementation(args: DecodeArgs) -> None:
    """FlashInfer's two CuTe implementations differ for several query tokens; we have one."""
    query, name = args.query, args.cute_dsl_impl
    one_token = query.dim() == 4 and query.shape[1] == 1
    names = ("auto", "monolithic", *(("modular",) if one_token else ()))
    if not isinstance(name, str) or name not in names:
        supported = "'auto', 'monolithic'; 'modular' for one query token: its rows are not causal"
        raise unsupported("cute_dsl_impl", argument.word(name), supported)


def check(args: DecodeArgs, query: QueryShape, max_q_len: int | None) -> None:
    """Scales, sinks, skip-softmax, mask, context parallelism, and what excludes what."""
    check_scales(args)
    check_sinks(args, query.heads)
    factor = args.skip_softmax_threshold_scale_factor
    if factor is not None:
        argument.skip_factor(factor)
    if args.mask is not None:
        _check_mask(args, query, max_q_len)
    _check_context_parallel(args, query.batch)
    if args.sparse_mla_top_k:
        _check_sparse(args)
    if args.sparse_mla_top_k_lens is not None:
        _check_top_k_lens(args, query)


def check_scales(args: argument.PagedArgs) -> None:
    """Types of both scales, and shapes of those that are tensors."""
    for name in ("bmm1_scale", "bmm2_scale"):
        scale = getattr(args, name)
        if isinstance(scale, Tensor):
            argument.array(name, scale, [torch.float32], [(), (1,)], args.query.device)
        else:
            argument.scale(name, scale)


def check_sinks(args: argument.PagedArgs, heads: int) -> None:
    """fp32 [heads], or a list of one."""
    sinks = args.sinks
    if isinstance(sinks, (list, tuple)):
        if len(sinks) != 1:
            raise invalid("sinks", f"a list of {len(sinks)}", "a tensor, or a list of one")
        sinks = sinks[0]
        if sinks is None:
            raise invalid_type("sinks", "a list of None", "a torch.Tensor, or a list of one")
    if sinks is not None:
        if not isinstance(sinks, Tensor):
            raise invalid_type("sinks", type(sinks).__name__, "a torch.Tensor, or a list of one")
        argument.array("sinks", sinks, [torch.float32], [(heads,)], args.query.device)


def _check_mask(args: DecodeArgs, query: QueryShape, max_q_len: int | None) -> None:
    """Its width follows from max_q_len; where that is read later, so is the width's check."""
    words = "words" if max_q_len is None else words_per_row(max_q_len)
    dense = (query.batch, query.q_len, words)
    shape = dense if query.q_len else (query.total_q, words)
    argument.array("mask", args.mask, [torch.uint16], [shape], args.query.device)


def _check_context_parallel(args: DecodeArgs, batch: int) -> None:
    if not args.enable_dcp:
        for name, default in (("cp_world", 1), ("cp_rank", 0)):
            if getattr(args, name) != default:
                raise invalid(name, getattr(args, name), f"{default} without enable_dcp")
        lengths = args.causal_seqlens_kv_global
        if lengths is not None:
            got = "a tensor" if isinstance(lengths, Tensor) else type(lengths).__name__
            raise invalid("causal_seqlens_kv_global", got, "None without enable_dcp")
        return
    if args.cp_rank >= args.cp_world:
        raise invalid("cp_rank", args.cp_rank, f"0 to {args.cp_world - 1} (cp_world - 1)")
    if not args.return_lse:
        raise invalid("return_lse", False, "True with enable_dcp: ranks are merged by their lse")
    if args.causal_seqlens_kv_global is None:
        raise invalid("causal_seqlens_kv_global", None, "int32 [batch] with enable_dcp")
    name, device = "causal_seqlens_kv_global", args.query.device
    argument.array(name, args.causal_seqlens_kv_global, [torch.int32], [(batch,)], device)
    if args.sinks is not None:
        supported = "None with enable_dcp: a sink enters once, in context_parallel.merge"
        raise unsupported("sinks", "a tensor", supported)


def _check_top_k_lens(args: DecodeArgs, query: QueryShape) -> None:
    name = "sparse_mla_top_k_lens"
    lens, device = args.sparse_mla_top_k_lens, args.query.device
    if not args.sparse_mla_top_k:
        raise invalid(name, "a value with sparse_mla_top_k 0", "None in dense calls")
    argument.array(name, lens, [torch.int32], [(query.batch,), (query.total_q,)], device)


def _check_sparse(args: DecodeArgs) -> None:
    """Sparse rows see exactly their slots: what else hides keys has no meaning there."""
    refused = {
        "mask": args.mask is not None,
        "enable_dcp": args.enable_dcp,
        "uses_shared_paged_kv_idx": not args.uses_shared_paged_kv_idx,
        "skip_softmax_threshold_scale_factor": bool(args.skip_softmax_threshold_scale_factor),
    }
    for name, used in refused.items():
        if used:
            value = "a tensor" if name == "mask" else getattr(args, name)
            raise unsupported(name, f"{value} in a sparse call", "dense calls")
