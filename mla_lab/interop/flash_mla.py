"""FlashMLA's decode names on our calls: the import is all that a program changes.

    from mla_lab.flash_mla_names import flash_mla_with_kvcache, get_mla_metadata

Dense calls in bf16 and fp16, and sparse calls of a bf16 query over 656-byte tokens; `backend`
"auto" chooses. What differs from `api.decode`, as FlashMLA's callers expect it:

* lse is [batch, heads, q_len], and +inf for a row without keys, whose out is 0.
* A dense call that is not causal lets draft tokens see each other: a full draft mask.
* A query whose rows lie apart is copied.
* The metadata object holds the workspace, 64 MiB, made at its first use. It belongs to one stream,
  and like FlashMLA's to calls of one shape.

A second cache, tokens of other sizes, and several KV heads are refused by name. Prefill has no
counterpart here. Source: flash_mla/flash_mla_interface.py (FlashMLA 9241ae3).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..api.decode import decode
from ..call.checks import tensors as argument
from ..call.checks.capture import is_captured
from ..core import masks
from ..core.dims import FP8_656_BYTES, LATENT_DIM, ROPE_DIM
from ..core.errors import InvalidInput, Unsupported, invalid, invalid_type, under_names, unsupported
from ..core.kv_cache import BYTE_TYPES
from .flashinfer.before_copy import check_mla
from .flashinfer.first_use import clear_once

__all__ = ["FlashMLASchedMeta", "flash_mla_with_kvcache", "get_mla_metadata"]

WORKSPACE_BYTES = 64 << 20
#: of our call: what errors name them
OUR_NAMES = {
    "query": "q",
    "kv_cache": "k_cache",
    "seq_lens": "cache_seqlens",
    "kv_lora_rank": "head_dim_v",
    "bmm1_scale": "softmax_scale",
    "sinks": "attn_sink",
    "sparse_mla_top_k_lens": "topk_length",
}
#: what calls that share a metadata object have in common, in this order
SHAPE = ("batch", "q_len", "heads", "page_size", "causal", "is_fp8_kvcache", "top_k")


@dataclass
class FlashMLASchedMeta:
    """What calls of one shape share: the shape of the first that ran, the workspace, and lengths or
    a mask that are the same in all of them."""

    config: tuple[Any, ...] | None = None
    workspace: Tensor | None = field(default=None, repr=False)
    kept: dict[tuple[Any, ...], Tensor] = field(default_factory=dict, repr=False)

    def check(self, config: tuple[Any, ...], device: torch.device) -> Tensor:
        """The workspace. Raises InvalidInput for a call of another shape than the first."""
        if self.config not in (None, config):
            got, known = (_words(shape) for shape in (config, self.config))
            raise invalid("tile_scheduler_metadata", f"a call with {got}", f"calls with {known}")
        if self.workspace is None or self.workspace.device != device:
            self.workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        clear_once(self.workspace)
        return self.workspace

    def once(self, make: Callable[[int, int, torch.device], Tensor], *given: Any) -> Tensor:
        """What `make` returns for these numbers on a device, kept for later calls; made anew in the
        capture of a graph, to which its memory would belong, and under torch.compile."""
        if torch.compiler.is_compiling() or is_captured(given[-1]):
            return make(*given)
        key = (make, *given)
        if key not in self.kept:
            self.kept.clear()  # of a shape that was refused
            with torch.inference_mode(False):
                self.kept[key] = make(*given)
        return self.kept[key]


def _words(config: tuple[Any, ...] | None) -> str:
    return ", ".join(f"{name} {value}" for name, value in zip(SHAPE, config or (), strict=False))


def get_mla_metadata(*args: Any, **named: Any) -> tuple[FlashMLASchedMeta, None]:
    """A new metadata object, and None; arguments of older interfaces have no effect."""
    return FlashMLASchedMeta(), None


def flash_mla_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor | None,
    cache_seqlens: Tensor | None,
    head_dim_v: int,
    tile_scheduler_metadata: FlashMLASchedMeta,
    num_splits: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    is_fp8_kvcache: bool = False,
    indices: Tensor | None = None,
    attn_sink: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices_in_kvcache: Tensor | None = None,
    topk_length: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of new tokens over cached tokens, or over those that `indices` name.

    q: bf16 or fp16 [batch, q_len, heads, 576]. k_cache: [pages, page_size, 1, 576] in the query's
    dtype, or with is_fp8_kvcache 656 bytes a token. block_table, cache_seqlens: int32 [batch,
    max_pages] and [batch]; not read in sparse calls, as in FlashMLA. indices: int32 [batch, q_len,
    top_k] slots, -1 for none. attn_sink: fp32 [heads], in sparse calls. softmax_scale: default
    576 ** -0.5.
    Returns out [batch, q_len, heads, 512] in the query's dtype, lse fp32 [batch, heads, q_len].
    Raises InvalidInput, Unsupported.
    """
    lacking = {
        "num_splits": num_splits,
        "extra_k_cache": extra_k_cache,
        "extra_indices_in_kvcache": extra_indices_in_kvcache,
        "extra_topk_length": extra_topk_length,
    }
    for name, value in lacking.items():
        if value is not None:
            raise unsupported(name, "a value", "None")
    argument.flag("causal", causal)
    argument.flag("is_fp8_kvcache", is_fp8_kvcache)
    _check(q, k_cache, head_dim_v, tile_scheduler_metadata, is_fp8_kvcache)
    if indices is None:
        for name, value in {"attn_sink": attn_sink, "topk_length": topk_length}.items():
            if value is not None:
                raise unsupported(name, "a tensor in a dense call", "sparse calls")
        named = _dense(q, block_table, cache_seqlens, causal, tile_scheduler_metadata)
    else:
        for name, value in {"indices": indices, "topk_length": topk_length}.items():
            if value is not None:
                argument.tensor(name, value)
        named = _sparse(q, indices, topk_length, causal, is_fp8_kvcache, tile_scheduler_metadata)
        named["sinks"] = attn_sink
    top_k = None if indices is None else indices.shape[-1]
    config = (*q.shape[:3], k_cache.shape[1], causal, is_fp8_kvcache, top_k)
    named |= {
        "kv_cache": k_cache.squeeze(2),
        "kv_lora_rank": head_dim_v,
        "qk_rope_head_dim": ROPE_DIM,
        "bmm1_scale": q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale,
        "return_lse": True,
    }
    try:
        if not q.is_contiguous():
            unused = {"workspace_buffer": None, "qk_nope_head_dim": 0, "max_seq_len": None}
            check_mla(decode, {**unused, **named, "query": q})
        out, lse = decode(
            query=q.contiguous(),
            workspace_buffer=tile_scheduler_metadata.check(config, q.device),
            out=q.new_empty((*q.shape[:-1], head_dim_v)),
            **named,
        )
    except (InvalidInput, Unsupported) as error:
        tables = {"block_tables": "block_table" if indices is None else "indices"}
        raise under_names(error, OUR_NAMES | tables) from None
    tile_scheduler_metadata.config = config
    rows = lse.view(q.shape[:-1]).transpose(1, 2)
    # one kernel, where a comparison and a choice would be two
    return out, rows.nan_to_num(nan=torch.nan, posinf=torch.inf, neginf=torch.inf)


def _check(q: Tensor, k_cache: Tensor, head_dim_v: int, metadata: object, eight_bit: bool) -> None:
    if not isinstance(metadata, FlashMLASchedMeta):
        got = type(metadata).__name__
        raise invalid_type("tile_scheduler_metadata", got, "what get_mla_metadata returns")
    for name, tensor in {"q": q, "k_cache": k_cache}.items():
        if argument.tensor(name, tensor).dim() != 4:
            raise invalid(name, f"{tensor.dim()} dimensions", 4)
    if k_cache.shape[2] != 1:
        raise unsupported("k_cache", f"{k_cache.shape[2]} KV heads", 1)
    if argument.any_integer("head_dim_v", head_dim_v) != LATENT_DIM:
        raise unsupported("head_dim_v", head_dim_v, LATENT_DIM)
    if eight_bit and (k_cache.shape[-1] != FP8_656_BYTES or k_cache.dtype not in BYTE_TYPES):
        got = f"{k_cache.shape[-1]} x {k_cache.dtype} a token"
        raise unsupported("k_cache", got, f"{FP8_656_BYTES} bytes with is_fp8_kvcache")
    if not eight_bit and k_cache.dtype != q.dtype:
        raise unsupported("k_cache", f"{k_cache.dtype}", f"{q.dtype}, as q, without is_fp8_kvcache")
    width = FP8_656_BYTES if eight_bit else LATENT_DIM + ROPE_DIM
    if k_cache.shape[-1] != width or 0 in k_cache.shape:
        supported = f"[pages, page_size, 1, {width}], at least one page of one token"
        raise invalid("k_cache", f"shape {list(k_cache.shape)}", supported)


def _dense(
    q: Tensor,
    block_table: Tensor | None,
    cache_seqlens: Tensor | None,
    causal: bool,
    metadata: FlashMLASchedMeta,
) -> dict[str, Any]:
    for name, tensor in {"block_table": block_table, "cache_seqlens": cache_seqlens}.items():
        if tensor is None:
            raise invalid(name, "None", "a tensor in dense calls")
    batch, q_len = q.shape[:2]
    named: dict[str, Any] = {"block_tables": block_table, "seq_lens": cache_seqlens}
    if not causal and q_len > 1:
        named["mask"] = metadata.once(_whole_mask, batch, q_len, q.device)
    return named


def _sparse(
    q: Tensor,
    indices: Tensor,
    topk_length: Tensor | None,
    causal: bool,
    eight_bit: bool,
    metadata: FlashMLASchedMeta,
) -> dict[str, Any]:
    if causal:
        raise unsupported("causal", "True in a sparse call", "False: a row sees exactly its slots")
    if not eight_bit:
        raise unsupported("is_fp8_kvcache", "False in a sparse call", True)
    if indices.dim() != 3 or indices.shape[:2] != q.shape[:2]:
        got = f"shape {list(indices.shape)}"
        raise invalid("indices", got, f"[{q.shape[0]}, {q.shape[1]}, top_k]")
    top_k = indices.shape[-1]
    if not top_k:
        raise invalid("indices", f"shape {list(indices.shape)}", "at least one slot a query token")
    if topk_length is not None and topk_length.shape != q.shape[:1]:
        raise invalid("topk_length", f"shape {list(topk_length.shape)}", f"[{q.shape[0]}]")
    return {
        "block_tables": indices.contiguous(),
        "seq_lens": metadata.once(_lengths, q.shape[0], top_k, q.device),
        "sparse_mla_top_k": top_k,
        "sparse_mla_top_k_lens": topk_length,
        "max_seq_len": top_k,
    }


def _lengths(batch: int, top_k: int, device: torch.device) -> Tensor:
    """Lengths of sparse calls, which no kernel reads: int32 [batch]."""
    return torch.full((batch,), top_k, dtype=torch.int32, device=device)


def _whole_mask(batch: int, q_len: int, device: torch.device) -> Tensor:
    """By which each new token of a request sees all of them: uint16 [batch, q_len, words]."""
    return masks.pack(torch.ones(batch, q_len, q_len, dtype=torch.bool, device=device))
