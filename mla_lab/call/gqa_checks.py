"""Checks of a GQA call: types, shapes, layouts, and what excludes what; then values where they can
be read without waiting for a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from ..core import kv_cache as formats
from ..core import masks
from ..core.errors import invalid, invalid_type, unsupported
from ..reference.gqa import KV_LAYOUTS
from .checks import tensors as argument
from .gqa_args import CheckedGqaCall, GqaArguments, GqaForm

#: fp32 and fp64 are for teaching, on the torch path
QUERY_DTYPES = (
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float32,
    torch.float64,
)
OUT_DTYPES = (torch.bfloat16, torch.float16)


def check(given: GqaArguments) -> CheckedGqaCall:
    """The checked call. Raises InvalidInput, InvalidType or Unsupported, before anything runs."""
    _check_flags(given)
    query = argument.tensor("query", given.query)
    argument.dtype("query", query, QUERY_DTYPES)
    argument.shape("query", query, ("num_tokens", "heads", "head_dim"))
    argument.contiguous("query", query)
    if not query.numel():
        raise invalid("query", f"shape {list(query.shape)}", "at least one token and one head")
    keys, values = _caches(given)
    token, head = (2, 1) if given.kv_layout == "HND" else (1, 2)
    kv_heads, page_size = keys.shape[head], keys.shape[token]
    if query.shape[1] % kv_heads:
        raise invalid("query", f"{query.shape[1]} heads", f"a multiple of the cache's {kv_heads}")
    batch = _batch(given)
    max_q_len = _q_lens(given, batch)
    capacity = _tables(given, batch, page_size)
    _check_scales(given)
    _check_mask(given, batch, max_q_len)
    out_dtype = _results(given)
    features = _features(given)
    longest = min(capacity, argument.integer("max_seq_len", given.max_seq_len, 0))
    form = GqaForm(
        batch=batch,
        total_q=query.shape[0],
        heads=query.shape[1],
        kv_heads=kv_heads,
        head_dim=query.shape[2],
        page_size=page_size,
        q_dtype=formats.DTYPE_NAMES[query.dtype],
        kv_format=formats.DTYPE_NAMES[keys.dtype],
        out_dtype=formats.DTYPE_NAMES[out_dtype],
        longest=longest,
        max_q_len=max_q_len,
        device=query.device,
        ragged=given.cum_seq_lens_q is not None,
        features=features,
    )
    q_lens = _read_values(given, form, capacity, keys.shape[0])
    return _with_results(form, given, (keys, values), q_lens, out_dtype)


def _check_flags(given: GqaArguments) -> None:
    for name in ("uses_shared_paged_kv_idx", "return_lse", "batch_invariant"):
        argument.flag(name, getattr(given, name))
    if given.enable_pdl is not None:
        argument.flag("enable_pdl", given.enable_pdl)
    if given.kv_layout not in KV_LAYOUTS:
        raise invalid("kv_layout", repr(given.kv_layout), KV_LAYOUTS)
    argument.integer("window_left", given.window_left, -1)
    if given.o_scale is not None and argument.number("o_scale", given.o_scale) == 0:
        raise invalid("o_scale", 0, "a number other than 0: results are divided by it again")
    factor = given.skip_softmax_threshold_scale_factor
    if factor is not None and argument.number("skip_softmax_threshold_scale_factor", factor) < 0:
        raise invalid("skip_softmax_threshold_scale_factor", factor, "0 or more, or None")
    if given.workspace_buffer is not None:
        buffer = argument.tensor("workspace_buffer", given.workspace_buffer)
        bytes_ = [torch.uint8, torch.int8]
        device = argument.tensor("query", given.query).device
        argument.array("workspace_buffer", buffer, bytes_, [("bytes",)], device)


def _caches(given: GqaArguments) -> tuple[Tensor, Tensor]:
    """Keys and values, of one shape and dtype, where the query is."""
    if isinstance(given.kv_cache, Tensor):
        if given.kv_cache.dim() != 5 or given.kv_cache.shape[1] != 2:
            got = f"one tensor of shape {list(given.kv_cache.shape)}"
            raise invalid("kv_cache", got, "a tuple (keys, values), or one tensor [pages, 2, ...]")
        keys, values = given.kv_cache.unbind(1)
    elif isinstance(given.kv_cache, Sequence) and len(given.kv_cache) == 2:
        keys, values = (argument.tensor("kv_cache", part) for part in given.kv_cache)
    else:
        raise invalid_type("kv_cache", type(given.kv_cache).__name__, "a tuple, or one tensor")
    query = given.query
    fitting = [query.dtype]
    if query.dtype in (torch.bfloat16, torch.float16):
        fitting.append(torch.float8_e4m3fn)
    if torch.uint8 in (keys.dtype, values.dtype):
        raise unsupported("kv_cache", "uint8 (FP4 with scales)", fitting)
    for part in (keys, values):
        argument.dtype("kv_cache", part, fitting)
        sizes = (
            ("pages", "kv_heads", "page_size", query.shape[2])
            if given.kv_layout == "HND"
            else ("pages", "page_size", "kv_heads", query.shape[2])
        )
        argument.shape("kv_cache", part, sizes)
        argument.device("kv_cache", part, query.device)
        argument.last_dim_contiguous("kv_cache", part)
        if not part.numel():
            raise invalid("kv_cache", f"shape {list(part.shape)}", "at least one page of one token")
    if keys.shape[1:] != values.shape[1:] or keys.dtype != values.dtype:
        got = f"values {values.dtype} {list(values.shape)}"
        raise invalid("kv_cache", got, f"as the keys, {keys.dtype} {list(keys.shape)}")
    return keys, values


def _batch(given: GqaArguments) -> int:
    lens = argument.tensor("seq_lens", given.seq_lens)
    argument.array("seq_lens", lens, [torch.int32], [("batch",)], given.query.device)
    if not len(lens):
        raise invalid("seq_lens", "no request", "at least one")
    return len(lens)


def _q_lens(given: GqaArguments, batch: int) -> int | None:
    """The bound of query tokens a request; None where it must be read from the prefix sums."""
    sums, tokens = given.cum_seq_lens_q, given.query.shape[0]
    if sums is None:
        if given.max_q_len is not None:
            raise invalid("max_q_len", given.max_q_len, "None without cum_seq_lens_q")
        if given.q_len_per_req is None:
            raise invalid("q_len_per_req", None, "a number, or cum_seq_lens_q")
        q_len = argument.integer("q_len_per_req", given.q_len_per_req, 1)
        if tokens != batch * q_len:
            expected = f"{batch} requests x q_len_per_req {q_len}"
            raise invalid("query", f"{tokens} tokens", expected)
        return q_len
    shape = [(batch + 1,)]
    argument.array("cum_seq_lens_q", sums, [torch.int32], shape, given.query.device)
    if given.max_q_len is None:
        return None
    return min(argument.integer("max_q_len", given.max_q_len, 1), tokens)


def _tables(given: GqaArguments, batch: int, page_size: int) -> int:
    """Tokens that a row of the block table can name."""
    tables = argument.tensor("block_tables", given.block_tables)
    argument.dtype("block_tables", tables, [torch.int32])
    shared = given.uses_shared_paged_kv_idx
    shape = (batch, "max_pages") if shared else (batch, 2, "max_pages")
    argument.shape("block_tables", tables, shape)
    argument.device("block_tables", tables, given.query.device)
    argument.last_dim_contiguous("block_tables", tables)
    if not tables.shape[-1]:
        raise invalid("block_tables", f"shape {list(tables.shape)}", "at least one page a row")
    return int(tables.shape[-1]) * page_size


def _check_scales(given: GqaArguments) -> None:
    device = given.query.device
    for name in ("bmm1_scale", "bmm2_scale"):
        scale = getattr(given, name)
        if isinstance(scale, Tensor):
            argument.array(name, scale, [torch.float32], [(), (1,)], device)
        else:
            argument.number(name, scale)
    sinks = given.sinks
    if isinstance(sinks, Sequence):
        if len(sinks) != 1:
            raise invalid("sinks", f"a list of {len(sinks)}", "a tensor, or a list of one")
        sinks = sinks[0]
    if sinks is not None:
        heads = given.query.shape[1]
        argument.array("sinks", sinks, [torch.float32], [(heads,)], device)


def _check_mask(given: GqaArguments, batch: int, max_q_len: int | None) -> None:
    if given.mask is None:
        return
    words = "words" if max_q_len is None else masks.words_per_row(max_q_len)
    shapes: list[tuple[int | str, ...]] = [(given.query.shape[0], words)]
    if given.cum_seq_lens_q is None:
        shapes.append((batch, max_q_len or 1, words))
    argument.array("mask", given.mask, [torch.uint16], shapes, given.query.device)


def _results(given: GqaArguments) -> torch.dtype:
    """dtype of out: the given out's, else out_dtype, else the query's."""
    query, out, dtype = given.query, given.out, given.out_dtype
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise unsupported("out_dtype", repr(dtype), "a torch.dtype: there is no FP4 output")
    if out is not None and not isinstance(out, Tensor):
        raise unsupported("out", type(out).__name__, "a torch.Tensor: there is no FP4 output")
    chosen = dtype or (query.dtype if out is None else out.dtype)
    if chosen not in (*OUT_DTYPES, query.dtype):
        name = "out_dtype" if out is None else "out"
        raise invalid_type(name, chosen, f"{query.dtype}, torch.bfloat16 or torch.float16")
    if out is not None:
        argument.array("out", out, [chosen], [tuple(query.shape)], query.device)
    if given.lse is not None:
        shape = [(query.shape[0], query.shape[1])]
        argument.array("lse", given.lse, [torch.float32], shape, query.device)
    return chosen


def _features(given: GqaArguments) -> frozenset[str]:
    used = {
        "mask": given.mask is not None,
        "sinks": given.sinks is not None,
        "lse": given.return_lse or given.lse is not None,
        "window": given.window_left >= 0,
        "skip_softmax": given.skip_softmax_threshold_scale_factor is not None,
        "separate_tables": not given.uses_shared_paged_kv_idx,
        "pdl": given.enable_pdl is True,
        "batch_invariant": given.batch_invariant,
    }
    return frozenset(name for name, there in used.items() if there)


def _read_values(
    given: GqaArguments, form: GqaForm, capacity: int, pages: int
) -> tuple[int, ...] | None:
    """Query lengths where they are read: on a CPU always, on a GPU where no bound is given."""
    on_host = form.device.type == "cpu"
    q_lens = None
    if given.cum_seq_lens_q is not None and (on_host or form.max_q_len is None):
        q_lens = _read_q_lens(given.cum_seq_lens_q, form)
    if not on_host:
        return q_lens
    lengths = given.seq_lens.tolist()
    if min(lengths) < 0:
        raise invalid("seq_lens", min(lengths), "0 or more")
    if max(lengths) > capacity:
        supported = f"up to {capacity}, which block_tables can name"
        raise invalid("seq_lens", max(lengths), supported)
    for length, table in zip(lengths, given.block_tables, strict=True):
        used = table[..., : -(-length // form.page_size)]
        if used.numel() and (int(used.min()) < 0 or int(used.max()) >= pages):
            raise invalid("block_tables", used.flatten().tolist(), f"page ids below {pages}")
    return q_lens


def _read_q_lens(sums: Tensor, form: GqaForm) -> tuple[int, ...]:
    values = sums.tolist()
    q_lens = tuple(after - before for before, after in pairwise(values))
    if values[0] != 0 or min(q_lens) < 0 or values[-1] != form.total_q:
        expected = f"sums from 0 to {form.total_q} that never decrease"
        raise invalid("cum_seq_lens_q", values, expected)
    if form.max_q_len is not None and max(q_lens) > form.max_q_len:
        raise invalid("max_q_len", form.max_q_len, f"at least the longest, {max(q_lens)}")
    return q_lens


def _with_results(
    form: GqaForm,
    given: GqaArguments,
    caches: tuple[Tensor, Tensor],
    q_lens: tuple[int, ...] | None,
    out_dtype: torch.dtype,
) -> CheckedGqaCall:
    out, lse = given.out, given.lse
    if out is None:
        out = torch.empty_like(given.query, dtype=out_dtype)
    if lse is None and given.return_lse:
        lse = torch.empty(form.total_q, form.heads, dtype=torch.float32, device=form.device)
    return CheckedGqaCall(form, given, *caches, q_lens, out, lse)
