"""Checks of values: numbers, addresses, lengths, prefix sums, page ids, mask bits.

On the host every value is read that could lead a read outside a tensor. On a GPU reading a tensor
synchronises: it is done where a backend plans on the host, where a ragged call has no max_q_len,
and in debug mode, which reads everything and says so in the log.
"""

from __future__ import annotations

import logging
import math
from itertools import pairwise

import torch

from ...core import masks
from ...core.errors import InvalidInput, describe, invalid, invalid_type, unsupported
from ...plan import Plan
from ..decode_args import PARAMETERS, DecodeArgs
from ..form import Form, Lengths
from ..slots import slots_of_rows, unused_slots
from . import tensors as argument
from .capture import is_captured

_LOG = logging.getLogger("mla_lab")
_LOGGED: set[str] = set()


def check_numbers(args: DecodeArgs) -> None:
    """What may change between calls of one form: the bound, both scales, and what a plan is."""
    if args.plan is not None and not isinstance(args.plan, Plan):
        raise invalid_type("plan", type(args.plan).__name__, "a mla_lab Plan")
    if args.max_seq_len is not None or not args.native:
        argument.integer("max_seq_len", args.max_seq_len, 0)
    for name in ("bmm1_scale", "bmm2_scale"):
        scale = getattr(args, name)
        if not isinstance(scale, torch.Tensor):
            argument.scale(name, scale)


def check_places(args: DecodeArgs) -> None:
    """Addresses are multiples of what a kernel's vector loads need."""
    for p in PARAMETERS:
        value = getattr(args, p.name)
        if p.arg.alignment > 1 and isinstance(value, torch.Tensor):
            address = value.data_ptr()
            if address % p.arg.alignment:
                supported = f"multiples of {p.arg.alignment} bytes, as vector loads need"
                raise invalid(p.name, f"address 0x{address:x}", supported)


def read_lengths(args: DecodeArgs, form: Form, reads: bool) -> Lengths:
    """Lengths where they may be read; reads: the caller accepts a synchronisation."""
    reads = reads or form.on_host
    if form.device.type == "meta" and (reads or form.max_q_len is None):
        raise unsupported("query", "tensors on meta, which have no values", "a CPU or a GPU")
    if form.max_q_len is None and not reads and is_captured(form.device):
        got = "None during the capture of a CUDA graph, in which nothing is read"
        raise invalid("max_q_len", got, "a bound of the query tokens of a request")
    q_lens = None if form.features.ragged else form.bounds.q_lens
    if args.cum_seq_lens_q is not None and (reads or form.max_q_len is None):
        q_lens = read_q_lens(args.cum_seq_lens_q, form.total_q)
    if q_lens is not None and args.mask is not None:
        _check_mask_width(args, q_lens)
    if not reads:
        return Lengths(q_lens, None)
    kv_lens = tuple(args.seq_lens.tolist())
    lengths = Lengths(q_lens, kv_lens)
    _check_kv_lens(kv_lens, form)
    _check_ranks(args, form, kv_lens)
    if form.on_host:
        _check_tables(args, form, kv_lens)
        _check_mask_bits(args, lengths)
    return lengths


def check_debug(args: DecodeArgs, form: Form, lengths: Lengths) -> None:
    """Everything that debug mode checks beyond what is always checked on the host."""
    if "debug" not in _LOGGED:
        _LOGGED.add("debug")
        _LOG.warning("debug mode copies lengths, tables and masks to the host: every call syncs")
    q_lens, kv_lens = lengths
    if q_lens is None or kv_lens is None:
        raise InvalidInput(describe("debug", "lengths that were not read", "lengths on the host"))
    longest = max(kv_lens)
    if args.max_seq_len is not None and longest > args.max_seq_len:
        raise invalid("max_seq_len", args.max_seq_len, f"at least the longest, {longest}")
    if form.max_q_len is not None and max(q_lens) > form.max_q_len:
        raise invalid("max_q_len", form.max_q_len, f"at least the longest, {max(q_lens)}")
    scale = args.bmm1_scale
    if isinstance(scale, torch.Tensor) and not math.isfinite(number := float(scale.detach())):
        raise invalid("bmm1_scale", f"a tensor of {number}", "a finite value")
    if not form.on_host:
        _check_tables(args, form, kv_lens)
        _check_mask_bits(args, lengths)


def _check_mask_width(args: DecodeArgs, q_lens: tuple[int, ...]) -> None:
    """A mask row has a bit for each draft column: of max_q_len, or of the longest draft."""
    longest, columns = max(q_lens), args.max_q_len
    if columns is not None and longest > columns:
        raise invalid("max_q_len", columns, f"at least the longest draft, {longest}")
    words = masks.words_per_row(longest if columns is None else columns)
    if args.mask is not None and args.mask.shape[-1] != words:
        got = f"shape {list(args.mask.shape)}"
        raise invalid("mask", got, f"{words} words a row: {longest} columns, whole 32-bit words")


def _check_mask_bits(args: DecodeArgs, lengths: Lengths) -> None:
    if args.mask is not None and lengths.q_lens is not None:
        masks.validate(args.mask, lengths.q_lens, max_q_len=args.max_q_len)


def read_q_lens(prefix_sums: torch.Tensor, total_q: int) -> tuple[int, ...]:
    """Query tokens of each request, by one host copy. Raises InvalidInput for sums that are none of
    `total_q`.
    """
    name, sums = "cum_seq_lens_q", prefix_sums.tolist()
    q_lens = tuple(after - before for before, after in pairwise(sums))
    if sums[0] != 0:
        raise invalid(name, f"first entry {sums[0]}", 0)
    if min(q_lens) < 0:
        raise invalid(name, f"a step of {min(q_lens)}", "sums that never decrease")
    if sums[-1] != total_q:
        raise invalid(name, f"last entry {sums[-1]}", f"the query's {total_q} tokens")
    return q_lens


def _check_kv_lens(kv_lens: tuple[int, ...], form: Form) -> None:
    if min(kv_lens) < 0:
        raise invalid("seq_lens", min(kv_lens), "0 or more")
    capacity = form.bounds.kv_lens[0]
    if not form.features.sparse and max(kv_lens) > capacity:
        pages = capacity // form.bounds.page_size
        supported = f"up to {capacity}: {pages} pages of {form.bounds.page_size} in block_tables"
        raise invalid("seq_lens", max(kv_lens), supported)


def _check_ranks(args: DecodeArgs, form: Form, kv_lens: tuple[int, ...]) -> None:
    """A rank holds every token of its share. Tokens behind the end of a request are hidden where
    lengths of all decide what a row sees; elsewhere no kernel reads those, and there are none.
    """
    name, world, rank = "causal_seqlens_kv_global", args.cp_world, args.cp_rank
    if args.causal_seqlens_kv_global is None:
        return
    of_all = args.causal_seqlens_kv_global.tolist()
    if min(of_all) < 0:
        raise invalid(name, min(of_all), "0 or more")
    shares = [len(range(rank, n, world)) for n in of_all]
    hides = form.features.context_parallel
    pairs = zip(kv_lens, shares, strict=True)
    if all(held == share or (hides and held > share) for held, share in pairs):
        return
    if world == 1:
        raise invalid(name, of_all, f"seq_lens with cp_world 1: {list(kv_lens)}")
    most = "no more than " if hides else ""
    shown = f"lengths of which rank {rank} of {world} holds {most}seq_lens, {list(kv_lens)}"
    raise invalid(name, f"{of_all}, {shares} of them here", shown)


def _check_tables(args: DecodeArgs, form: Form, kv_lens: tuple[int, ...]) -> None:
    """Used page ids, or token slots, lie inside the cache; unused entries hold anything."""
    tables = args.block_tables
    pages = args.kv_cache.shape[0]
    if form.features.sparse:
        _check_top_k_lens(args)
        counts = slots_of_rows(args, form.total_q)
        if counts is not None:
            tables = tables.flatten(0, -2)
            tables = tables[~unused_slots(tables, counts)]
        _check_range(tables, -1, pages * form.bounds.page_size, "token slots")
        return
    used = [-(-n // form.bounds.page_size) for n in kv_lens]
    counts = torch.tensor(used, device=tables.device).view(-1, *(1,) * (tables.dim() - 1))
    column = torch.arange(tables.shape[-1], device=tables.device)
    _check_range(tables[(column < counts).expand(tables.shape)], 0, pages, "page ids")


def _check_top_k_lens(args: DecodeArgs) -> None:
    lens = args.sparse_mla_top_k_lens
    if lens is not None and lens.numel():
        low, high = (int(v) for v in torch.aminmax(lens))
        if low < 0 or high > args.sparse_mla_top_k:
            got = low if low < 0 else high
            raise invalid("sparse_mla_top_k_lens", got, f"0 to {args.sparse_mla_top_k}")


def _check_range(ids: torch.Tensor, least: int, end: int, what: str) -> None:
    if not ids.numel():
        return
    low, high = (int(v) for v in torch.aminmax(ids))
    if low < least or high >= end:
        wrong = low if low < least else high
        raise invalid("block_tables", wrong, f"{what} from {least} to {end - 1}")
