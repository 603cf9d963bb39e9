"""Checks of a GQA call: types, shapes, layouts, and what excludes what; then values where they can
be read without waiting for a device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..core import kv_cache as formats
from ..core import masks
from ..core.errors import invalid, invalid_type, unsupported
from .checks import tensors as argument
from .checks.features import check_bools, check_scales, check_sinks
from .checks.overlap import check_overlap
from .checks.shapes import QUERY_DTYPES, check_page_table, check_workspace
from .checks.values import read_q_lens
from .decode_args import made_plain
from .gqa_args import GQA_INTEGERS, GQA_PARAMETERS, KV_LAYOUTS, CheckedGqaCall, GqaArgs, GqaForm

OUT_DTYPES = (torch.bfloat16, torch.float16)
#: kernels take the window as int32
MAX_INT = 2**31 - 1
#: bytes of a kernel's vector loads and stores
UNIT = 16
#: what is supported of parameters that our kernels do not have
ONLY = {
    "o_sf_scale": "None: there is no FP4",
    "o_sf_vec_size": "None: there is no FP4",
    "kv_cache_sf": "None: there is no FP4",
    "bmm1_scale_log2": "None: bmm1_scale may be a tensor itself",
    "multi_ctas_kv_counter_buffer": "None: counters lie in workspace_buffer",
    "enable_block_sparse_attention": "False",
    "causal_seqlens_kv_global": "None: decode context parallel is MLA's",
    "bf16q_fp8kv_transform_mode": "None",
    "request_order": "None",
    "request_order_plan": "None",
    "length_aware_schedule": "False",
}
#: numbers that MLA's call alone takes others of
ONLY_NUMBERS = {"cp_world": 1, "cp_rank": 0, "sparse_top_k": 0}


def check(args: GqaArgs) -> CheckedGqaCall:
    """The checked call. Raises InvalidInput, InvalidType or Unsupported, before anything runs."""
    form, capacity, keys, values = check_form(args)
    check_overlap(args, GQA_PARAMETERS)
    if form.device.type == "meta":
        raise unsupported("query", "tensors on meta, which have no values", "a CPU or a GPU")
    q_lens = _read_values(args, form, capacity, (keys.shape[0], values.shape[0]))
    out, lse = args.out, args.lse
    if out is None:
        out = torch.empty_like(args.query, dtype=formats.DTYPES[form.out_dtype])
    if lse is None and args.return_lse:
        lse = torch.empty(form.total_q, form.heads, dtype=torch.float32, device=form.device)
    return CheckedGqaCall(form, args, keys, values, q_lens, out, lse)


def check_form(args: GqaArgs) -> tuple[GqaForm, int, Tensor, Tensor]:
    """Every check that reads no tensor's values: the form, tokens that a row of the block table can
    name, keys and values.
    """
    made_plain(args, GQA_INTEGERS)
    _check_flags(args)
    query = argument.tensor("query", args.query)
    argument.dtype("query", query, QUERY_DTYPES)
    argument.shape("query", query, ("num_tokens", "heads", "head_dim"))
    argument.contiguous("query", query)
    if not query.numel():
        raise invalid("query", f"shape {list(query.shape)}", "at least one token and one head")
    keys, values = _caches(args)
    token, head = (2, 1) if args.kv_layout == "HND" else (1, 2)
    kv_heads, page_size = keys.shape[head], keys.shape[token]
    if query.shape[1] % kv_heads:
        raise invalid("query", f"{query.shape[1]} heads", f"a multiple of the cache's {kv_heads}")
    lens = argument.tensor("seq_lens", args.seq_lens)
    argument.array("seq_lens", lens, [torch.int32], [("batch",)], query.device)
    batch = len(lens)
    if not batch:
        raise invalid("seq_lens", "no request", "at least one")
    max_q_len = _q_lens(args, batch)
    capacity = check_page_table(args, batch) * page_size
    check_scales(args)
    check_sinks(args, query.shape[1])
    _check_mask(args, batch, max_q_len)
    out_dtype = _results(args)
    features = _features(args)
    longest = min(capacity, argument.integer("max_seq_len", args.max_seq_len, 0))
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
        ragged=args.cum_seq_lens_q is not None,
        aligned=all(map(_aligned, (query, keys, values, args.out))),
        features=features,
    )
    return form, capacity, keys, values


def _check_flags(args: GqaArgs) -> None:
    argument.tensor("query", args.query)
    check_bools(args, GQA_PARAMETERS)
    if not isinstance(args.kv_layout, str):
        raise invalid_type("kv_layout", argument.word(args.kv_layout), KV_LAYOUTS)
    if args.kv_layout not in KV_LAYOUTS:
        raise invalid("kv_layout", repr(args.kv_layout), KV_LAYOUTS)
    argument.integer("window_left", args.window_left, -1, MAX_INT)
    if args.o_scale is not None and argument.number("o_scale", args.o_scale) == 0:
        raise invalid("o_scale", 0, "a number other than 0: results are divided by it again")
    if args.skip_softmax_threshold_scale_factor is not None:
        argument.skip_factor(args.skip_softmax_threshold_scale_factor)
    for name, supported in ONLY.items():
        value = getattr(args, name)
        if value is not None and value is not False:
            raise unsupported(name, repr(value) if isinstance(value, str) else "a value", supported)
    for name, number in ONLY_NUMBERS.items():
        got = argument.integer(name, getattr(args, name), 0)
        if got != number:
            raise unsupported(name, argument.short(got), f"{number}; MLA's call takes others")
    check_workspace(args)


def _caches(args: GqaArgs) -> tuple[Tensor, Tensor]:
    """Keys and values, of one shape and dtype, on the query's device."""
    if isinstance(args.kv_cache, Tensor):
        argument.tensor("kv_cache", args.kv_cache)
        if args.kv_cache.dim() != 5 or args.kv_cache.shape[1] != 2:
            got = f"one tensor of shape {list(args.kv_cache.shape)}"
            raise invalid("kv_cache", got, "a tuple (keys, values), or one tensor [pages, 2, ...]")
        keys, values = args.kv_cache.unbind(1)
    elif isinstance(args.kv_cache, (list, tuple)) and len(args.kv_cache) == 2:
        keys, values = (argument.tensor("kv_cache", part) for part in args.kv_cache)
    else:
        raise invalid_type("kv_cache", type(args.kv_cache).__name__, "a tuple, or one tensor")
    query = args.query
    fitting = [query.dtype]
    if query.dtype in (torch.bfloat16, torch.float16):
        fitting.append(torch.float8_e4m3fn)
    if torch.uint8 in (keys.dtype, values.dtype):
        raise unsupported("kv_cache", "uint8 (FP4 with scales)", fitting)
    for part in (keys, values):
        argument.dtype("kv_cache", part, fitting)
        sizes = (
            ("pages", "kv_heads", "page_size", query.shape[2])
            if args.kv_layout == "HND"
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


def _q_lens(args: GqaArgs, batch: int) -> int | None:
    """The bound of a request's query tokens; None where it must be read from the prefix sums."""
    sums, tokens = args.cum_seq_lens_q, args.query.shape[0]
    if sums is None:
        if args.max_q_len is not None:
            bound = argument.integer("max_q_len", args.max_q_len, 1)
            raise invalid("max_q_len", argument.short(bound), "None without cum_seq_lens_q")
        if args.q_len_per_req is None:
            raise invalid("q_len_per_req", None, "a number, or cum_seq_lens_q")
        q_len = argument.integer("q_len_per_req", args.q_len_per_req, 1)
        if tokens != batch * q_len:
            expected = f"{batch} requests x q_len_per_req {argument.short(q_len)}"
            raise invalid("query", f"{tokens} tokens", expected)
        return q_len
    shape = [(batch + 1,)]
    argument.array("cum_seq_lens_q", sums, [torch.int32], shape, args.query.device)
    if args.q_len_per_req is not None:
        argument.integer("q_len_per_req", args.q_len_per_req, 1)
    if args.max_q_len is None:
        return None
    return argument.integer("max_q_len", args.max_q_len, 1)


def _check_mask(args: GqaArgs, batch: int, max_q_len: int | None) -> None:
    if args.mask is None:
        return
    words = "words" if max_q_len is None else masks.words_per_row(max_q_len)
    shapes: list[tuple[int | str, ...]] = [(args.query.shape[0], words)]
    if args.cum_seq_lens_q is None:
        shapes.append((batch, max_q_len or 1, words))
    argument.array("mask", args.mask, [torch.uint16], shapes, args.query.device)


def _results(args: GqaArgs) -> torch.dtype:
    """dtype of out: the given out's, else out_dtype, else the query's."""
    query, out, dtype = args.query, args.out, args.out_dtype
    if dtype is not None and not isinstance(dtype, torch.dtype):
        supported = "a torch.dtype: there is no FP4 output"
        raise unsupported("out_dtype", argument.word(dtype), supported)
    if out is not None and not isinstance(out, Tensor):
        raise unsupported("out", type(out).__name__, "a torch.Tensor: there is no FP4 output")
    chosen = dtype or (query.dtype if out is None else out.dtype)
    if chosen not in (*OUT_DTYPES, query.dtype):
        name = "out_dtype" if out is None else "out"
        raise invalid_type(name, chosen, f"{query.dtype}, torch.bfloat16 or torch.float16")
    if out is not None:
        argument.array("out", out, [chosen], [tuple(query.shape)], query.device)
    if args.lse is not None:
        shape = [(query.shape[0], query.shape[1])]
        argument.array("lse", args.lse, [torch.float32], shape, query.device)
    return chosen


def _features(args: GqaArgs) -> frozenset[str]:
    used = {
        "mask": args.mask is not None,
        "sinks": args.sinks is not None,
        "lse": args.return_lse or args.lse is not None,
        "window": args.window_left >= 0,
        "skip_softmax": bool(args.skip_softmax_threshold_scale_factor),
        "separate_tables": not args.uses_shared_paged_kv_idx,
        "pdl": args.enable_pdl is True,
        "batch_invariant": args.batch_invariant,
    }
    return frozenset(name for name, there in used.items() if there)


def _aligned(tensor: Tensor | None) -> bool:
    if tensor is None:
        return True
    sizes, strides = tensor.shape[:-1], tensor.stride()
    apart = [step for size, step in zip(sizes, strides, strict=False) if size > 1]
    places = (tensor.data_ptr(), *(step * tensor.element_size() for step in apart))
    return not any(place % UNIT for place in places)


def _read_values(
    args: GqaArgs, form: GqaForm, capacity: int, pages: tuple[int, int]
) -> tuple[int, ...] | None:
    """Query lengths where they are read: on a CPU always, on a GPU without a bound. `pages` of keys
    and of values."""
    on_host = form.device.type == "cpu"
    q_lens = None
    if args.cum_seq_lens_q is not None and (on_host or form.max_q_len is None):
        q_lens = read_q_lens(args.cum_seq_lens_q, form.total_q)
        if form.max_q_len is not None and max(q_lens) > form.max_q_len:
            raise invalid("max_q_len", form.max_q_len, f"at least the longest, {max(q_lens)}")
    if args.cum_seq_lens_q is not None:
        _check_q_len_per_req(args, form, q_lens)
    if q_lens is not None and args.mask is not None and form.max_q_len is None:
        _check_mask_width(args.mask, max(q_lens))
    if not on_host:
        return q_lens
    if args.mask is not None:
        lens = q_lens or (form.max_q_len or 1,) * form.batch
        masks.validate(args.mask, lens, max_q_len=form.max_q_len)
    lengths = args.seq_lens.tolist()
    if min(lengths) < 0:
        raise invalid("seq_lens", min(lengths), "0 or more")
    if max(lengths) > capacity:
        supported = f"up to {capacity}, which block_tables can name"
        raise invalid("seq_lens", max(lengths), supported)
    for length, table in zip(lengths, args.block_tables, strict=True):
        used = table[..., : -(-length // form.page_size)]
        # a table of both names pages of either
        rows = used if used.dim() == 2 else used.expand(2, -1)
        for row, end in zip(rows, pages, strict=True):
            if row.numel() and (int(row.min()) < 0 or int(row.max()) >= end):
                raise invalid("block_tables", row.tolist(), f"page ids from 0 to {end - 1}")
    return q_lens


def _check_q_len_per_req(args: GqaArgs, form: GqaForm, q_lens: tuple[int, ...] | None) -> None:
    """Prefix sums give the query lengths; q_len_per_req beside them is the longest or a bound."""
    q_len = args.q_len_per_req
    if q_len in (None, 1, form.max_q_len):
        return
    if q_lens is None and q_len * form.batch == form.total_q:
        return
    if q_lens is not None and q_len == max(q_lens):
        return
    other = f"the longest, {max(q_lens)}" if q_lens else f"max_q_len, {form.max_q_len}"
    raise invalid("q_len_per_req", q_len, f"None or 1 with cum_seq_lens_q, or {other}")


def _check_mask_width(mask: Tensor, longest: int) -> None:
    """A mask row has a bit for each draft column of the longest request."""
    words = masks.words_per_row(longest)
    if mask.shape[-1] != words:
        got = f"shape {list(mask.shape)}"
        raise invalid("mask", got, f"{words} words a row: {longest} columns, whole 32-bit words")
