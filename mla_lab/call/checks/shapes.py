"""Checks of the tensors that every call has: query, cache, tables, lengths, results, workspace."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...core import kv_cache as formats
from ...core.dims import FP8_656_BYTES, LATENT_DIM
from ...core.errors import invalid, unsupported
from ..decode_args import DecodeArgs
from . import tensors as argument

QUERY_DTYPES = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float32, torch.float64)
#: (latent, rope): DeepSeek's, and a small pair for teaching
DIMS = ((512, 64), (256, 64))
#: queries wider than 16 bits are for teaching; their results have the same dtype
WIDE = (torch.float32, torch.float64)


class QueryShape(NamedTuple):
    """Sizes of a query; q_len is 0 where it is ragged."""

    batch: int
    q_len: int
    total_q: int
    heads: int


class CacheShape(NamedTuple):
    """Page size in tokens, and the token format."""

    page_size: int
    kv_format: str


def check_dims(args: DecodeArgs) -> tuple[int, int]:
    """(latent, rope) of the call."""
    latent = argument.integer("kv_lora_rank", args.kv_lora_rank, 1)
    rope = argument.integer("qk_rope_head_dim", args.qk_rope_head_dim, 0)
    if (latent, rope) not in DIMS:
        supported = " or ".join(map(str, DIMS))
        got = f"({argument.short(latent)}, {argument.short(rope)})"
        raise unsupported("kv_lora_rank, qk_rope_head_dim", got, supported)
    return latent, rope


def check_query(args: DecodeArgs, head_dim: int) -> QueryShape:
    """Dense [batch, q_len, heads, head_dim], or ragged [total_q, heads, head_dim]."""
    query = argument.tensor("query", args.query)
    argument.dtype("query", query, QUERY_DTYPES)
    ragged = args.cum_seq_lens_q is not None
    if ragged:
        argument.tensor("cum_seq_lens_q", args.cum_seq_lens_q)
        argument.shape("query", query, ("total_q", "heads", head_dim))
    else:
        argument.shape("query", query, ("batch", "q_len", "heads", head_dim))
    if not query.numel():
        raise invalid("query", f"shape {list(query.shape)}", "at least one token and one head")
    _check_rows_apart(query)
    if ragged:
        return QueryShape(_check_cum(args), 0, query.shape[0], query.shape[1])
    batch, q_len, heads = query.shape[:3]
    return QueryShape(batch, q_len, batch * q_len, heads)


def _check_rows_apart(query: torch.Tensor) -> None:
    """Heads lie at one distance and tokens at one, a row's elements side by side."""
    if query.is_contiguous():
        return
    argument.last_dim_contiguous("query", query)
    whole = query.dim() == 3 or 1 in query.shape[:2]
    if not whole and query.stride(0) != query.shape[1] * query.stride(1):
        got = f"strides {list(query.stride())} of shape {list(query.shape)}"
        raise invalid("query", got, "tokens at equal distances")
    step, unit = query.element_size(), 16
    if any(stride * step % unit for stride in query.stride()[:-1]):
        got = f"strides {list(query.stride())}"
        raise invalid("query", got, f"rows at multiples of {unit} bytes")


def _check_cum(args: DecodeArgs) -> int:
    """The batch size, from the number of prefix sums."""
    name = "cum_seq_lens_q"
    cum = argument.array(name, args.cum_seq_lens_q, [torch.int32], [("n",)], args.query.device)
    if len(cum) < 2:
        raise invalid(name, f"{len(cum)} entries", "batch + 1, at least two")
    return len(cum) - 1


def check_q_lens(args: DecodeArgs, query: QueryShape) -> int | None:
    """The bound of query tokens a request; None where it must be read from the prefix sums."""
    if args.max_q_len is None:
        return query.q_len or None
    bound = argument.integer("max_q_len", args.max_q_len, 1)
    if args.cum_seq_lens_q is None:
        raise invalid("max_q_len", argument.short(bound), "None without cum_seq_lens_q")
    return bound


def check_cache(args: DecodeArgs, head_dim: int) -> CacheShape:
    """[pages, page_size, width], or with a dimension of 1 after pages; gaps between pages only."""
    cache = argument.tensor("kv_cache", args.kv_cache)
    packed = formats.is_656(cache) and args.query.dtype is not torch.float8_e4m3fn
    fitting = [args.query.dtype, torch.uint8, torch.int8]
    if packed or args.query.dtype is torch.bfloat16:
        fitting.append(torch.float8_e4m3fn)
    if args.query.dtype is torch.float8_e4m3fn:
        fitting = [torch.float8_e4m3fn]
    argument.dtype("kv_cache", cache, fitting)
    width = FP8_656_BYTES if packed else head_dim
    if packed and args.kv_lora_rank != LATENT_DIM:
        raise unsupported("kv_cache", f"656-byte tokens of latent {args.kv_lora_rank}", LATENT_DIM)
    argument.shape(
        "kv_cache", cache, ("pages", "page_size", width), ("pages", 1, "page_size", width)
    )
    argument.device("kv_cache", cache, args.query.device)
    if not cache.numel():
        raise invalid("kv_cache", f"shape {list(cache.shape)}", "at least one page of one token")
    argument.last_dim_contiguous("kv_cache", cache)
    page_size = cache.shape[-2]
    if page_size > 1 and cache.stride(-2) != width:
        got = f"token stride {cache.stride(-2)}"
        raise invalid("kv_cache", got, f"{width}: gaps between pages only")
    if packed and cache.shape[0] > 1 and cache.stride(0) % 4:
        got = f"page stride {cache.stride(0)} bytes"
        raise invalid("kv_cache", got, "a multiple of 4, the size of a scale")
    return CacheShape(page_size, formats.format_of(cache))


def check_tables(args: DecodeArgs, query: QueryShape, page_size: int) -> int:
    """The block tables and lengths; returns the tokens that a table row can name."""
    device = args.query.device
    tables = argument.tensor("block_tables", args.block_tables)
    argument.dtype("block_tables", tables, [torch.int32])
    if args.sparse_mla_top_k:
        top_k = args.sparse_mla_top_k
        dense = (query.batch, query.q_len, top_k)
        argument.shape("block_tables", tables, dense if query.q_len else (query.total_q, top_k))
        argument.contiguous("block_tables", tables)
        capacity = top_k
        argument.device("block_tables", tables, device)
    else:
        capacity = check_page_table(args, query.batch) * page_size
    argument.array("seq_lens", args.seq_lens, [torch.int32], [(query.batch,)], device)
    return capacity


def check_page_table(args: argument.PagedArgs, batch: int) -> int:
    """int32 [batch, max_pages] or [batch, 2, max_pages]; returns max_pages."""
    tables = argument.tensor("block_tables", args.block_tables)
    argument.dtype("block_tables", tables, [torch.int32])
    rows = (batch,) if args.uses_shared_paged_kv_idx else (batch, 2)
    argument.shape("block_tables", tables, (*rows, "max_pages"))
    argument.last_dim_contiguous("block_tables", tables)
    argument.device("block_tables", tables, args.query.device)
    if not tables.shape[-1]:
        raise invalid("block_tables", f"shape {list(tables.shape)}", "at least one page a row")
    return int(tables.shape[-1])


def check_results(
    args: DecodeArgs, query: QueryShape, latent_dim: int
) -> tuple[torch.dtype, tuple[int, ...]]:
    """dtype of out and shape of lse, given or to be allocated."""
    q_dtype = args.query.dtype
    out_dtype = q_dtype if q_dtype in WIDE else torch.bfloat16
    if args.out is not None:
        dtypes = [torch.bfloat16, torch.float16]
        dtypes += [q_dtype] if q_dtype in (*WIDE, torch.float8_e4m3fn) else []
        shape = (*args.query.shape[:-1], latent_dim)
        out_dtype = argument.array("out", args.out, dtypes, [shape], args.query.device).dtype
    lse_shape = (query.total_q, query.heads)
    if args.lse is None:
        return out_dtype, lse_shape
    accepted: list[tuple[argument.Size, ...]] = [lse_shape]
    accepted += [(query.batch, query.q_len, query.heads)] if query.q_len else []
    lse = argument.array("lse", args.lse, [torch.float32], accepted, args.query.device)
    return out_dtype, tuple(lse.shape)


def check_workspace(args: argument.PagedArgs) -> None:
    """1-D bytes, or None. Its size is checked against the plan."""
    if args.workspace_buffer is not None:
        bytes_ = [torch.uint8, torch.int8]
        device = args.query.device
        argument.array("workspace_buffer", args.workspace_buffer, bytes_, [("bytes",)], device)
