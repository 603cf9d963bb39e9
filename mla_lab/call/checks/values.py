"""Checks that read values: lengths, prefix sums, page ids, mask bits.

On the host they cost nothing to look at, and what could lead a read outside a tensor is always
checked. On a GPU every look is a synchronisation: it happens where a backend plans on the host,
where ragged lengths are wanted and no max_q_len is given, and in debug mode, which looks at
everything and says so.
"""

from __future__ import annotations

import logging
from itertools import pairwise

import torch

from ...core import masks
from ...core.errors import InvalidInput, describe, invalid
from ..decode_args import Arguments, Form, Lengths

_LOG = logging.getLogger("mla_lab")
_SAID: set[str] = set()


def read_lengths(given: Arguments, form: Form, reads: bool) -> Lengths:
    """Lengths where they may be read: `reads` says that a synchronisation is accepted."""
    reads = reads or form.on_host
    q_lens = _read_q_lens(given, form) if reads or form.max_q_len is None else None
    if q_lens is None and not form.features.ragged:
        q_lens = form.bounds.q_lens
    if q_lens is not None and given.mask is not None:
        _check_mask_width(given, q_lens)
    if not reads:
        return Lengths(q_lens, None)
    kv_lens = tuple(given.seq_lens.tolist())
    lengths = Lengths(q_lens, kv_lens)
    _check_kv_lens(kv_lens, form)
    _check_one_rank(given, kv_lens)
    if form.on_host:
        _check_tables(given, form, kv_lens)
        _check_mask_bits(given, lengths)
    return lengths


def check_debug(given: Arguments, form: Form, lengths: Lengths) -> None:
    """Everything that debug mode checks beyond what is always checked on the host."""
    if "debug" not in _SAID:
        _SAID.add("debug")
        _LOG.warning("debug mode copies lengths, tables and masks to the host: every call syncs")
    q_lens, kv_lens = lengths
    if q_lens is None or kv_lens is None:
        raise InvalidInput(describe("debug", "lengths that were not read", "lengths on the host"))
    longest = max(kv_lens)
    if given.max_seq_len is not None and longest > given.max_seq_len:
        raise invalid("max_seq_len", given.max_seq_len, f"at least the longest, {longest}")
    if form.max_q_len is not None and max(q_lens) > form.max_q_len:
        raise invalid("max_q_len", form.max_q_len, f"at least the longest, {max(q_lens)}")
    if not form.on_host:
        _check_tables(given, form, kv_lens)
        _check_mask_bits(given, lengths)


def _check_mask_width(given: Arguments, q_lens: tuple[int, ...]) -> None:
    """Every draft has its columns, and no max_q_len given is no reason for others."""
    longest, columns = max(q_lens), given.max_q_len
    if columns is not None and longest > columns:
        raise invalid("max_q_len", columns, f"at least the longest draft, {longest}")
    words = masks.words_per_row(longest if columns is None else columns)
    if given.mask is not None and given.mask.shape[-1] != words:
        got = f"shape {list(given.mask.shape)}"
        raise invalid("mask", got, f"{words} words a row: {longest} columns, whole 32-bit words")


def _check_mask_bits(given: Arguments, lengths: Lengths) -> None:
    if given.mask is not None and lengths.q_lens is not None:
        masks.validate(given.mask, lengths.q_lens, max_q_len=given.max_q_len)


def _read_q_lens(given: Arguments, form: Form) -> tuple[int, ...]:
    """Query tokens of each request, from one host copy of the prefix sums."""
    if given.cum_seq_lens_q is None:
        return form.bounds.q_lens
    name = "cum_seq_lens_q"
    sums = given.cum_seq_lens_q.tolist()
    q_lens = tuple(after - before for before, after in pairwise(sums))
    if sums[0] != 0:
        raise invalid(name, f"first entry {sums[0]}", 0)
    if min(q_lens) < 0:
        raise invalid(name, f"a step of {min(q_lens)}", "sums that never decrease")
    if sums[-1] != form.total_q:
        raise invalid(name, f"last entry {sums[-1]}", f"the query's {form.total_q} tokens")
    return q_lens


def _check_kv_lens(kv_lens: tuple[int, ...], form: Form) -> None:
    if min(kv_lens) < 0:
        raise invalid("seq_lens", min(kv_lens), "0 or more")
    capacity = form.bounds.kv_lens[0]
    if not form.features.sparse and max(kv_lens) > capacity:
        pages = capacity // form.bounds.page_size
        supported = f"up to {capacity}: {pages} pages of {form.bounds.page_size} in block_tables"
        raise invalid("seq_lens", max(kv_lens), supported)


def _check_one_rank(given: Arguments, kv_lens: tuple[int, ...]) -> None:
    """The only rank has every token."""
    of_all = given.causal_seqlens_kv_global
    if of_all is not None and given.cp_world == 1 and tuple(of_all.tolist()) != kv_lens:
        supported = f"seq_lens with cp_world 1: {list(kv_lens)}"
        raise invalid("causal_seqlens_kv_global", of_all.tolist(), supported)


def _check_tables(given: Arguments, form: Form, kv_lens: tuple[int, ...]) -> None:
    """Used page ids, or token slots, lie inside the cache; unused entries hold anything."""
    tables = given.block_tables
    pages = given.kv_cache.shape[0]
    if form.features.sparse:
        _check_range(tables, -1, pages * form.bounds.page_size, "token slots")
        return
    used = [-(-n // form.bounds.page_size) for n in kv_lens]
    counts = torch.tensor(used, device=tables.device).view(-1, *(1,) * (tables.dim() - 1))
    column = torch.arange(tables.shape[-1], device=tables.device)
    _check_range(tables[(column < counts).expand(tables.shape)], 0, pages, "page ids")


def _check_range(ids: torch.Tensor, least: int, end: int, what: str) -> None:
    if not ids.numel():
        return
    low, high = (int(v) for v in torch.aminmax(ids))
    if low < least or high >= end:
        wrong = low if low < least else high
        raise invalid("block_tables", wrong, f"{what} from {least} to {end - 1}")
