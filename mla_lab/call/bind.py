"""Checked arguments -> a call: values read where they may be, results allocated."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from ..core.problem import Problem
from .checks.capture import check_streams, is_captured
from .checks.overlap import check_overlap
from .checks.values import check_debug, check_numbers, check_places, read_lengths
from .decode_args import PARAMETERS, DecodeArgs
from .form import Features, Form, Lengths
from .slots import slots_of_rows, unused_slots


@dataclass(frozen=True, eq=False)
class Call:
    """A checked call. `args` holds the caller's tensors as they are; nothing was copied."""

    form: Form
    args: DecodeArgs
    lengths: Lengths
    #: in the caller's shape: query.shape[:-1] + (latent,)
    out: Tensor
    #: fp32, in the caller's shape; None where it is not wanted
    lse: Tensor | None

    @property
    def features(self) -> Features:
        return self.form.features

    @property
    def lengths_known(self) -> bool:
        """Whether `problem` holds this call's lengths, and not their bounds."""
        return self.lengths.q_lens is not None and self.lengths.kv_lens is not None

    @cached_property
    def problem(self) -> Problem:
        """This call as numbers; bounds where lengths stay on the device."""
        bounds = self.form.bounds
        kv_bounds = bounds.kv_lens
        if self.args.max_seq_len is not None:
            kv_bounds = tuple(min(n, self.args.max_seq_len) for n in kv_bounds)
        q_lens = bounds.q_lens if self.lengths.q_lens is None else self.lengths.q_lens
        kv_lens = kv_bounds if self.lengths.kv_lens is None else self.lengths.kv_lens
        return replace(bounds, q_lens=q_lens, kv_lens=kv_lens)

    @property
    def query_rows(self) -> Tensor:
        """View [total_q x heads, head_dim]; a copy where tokens and heads do not lie evenly."""
        return self.args.query.reshape(-1, self.args.query.shape[-1])

    @property
    def out_rows(self) -> Tensor:
        """View [total_q x heads, latent]."""
        return self.out.view(-1, self.out.shape[-1])

    @property
    def lse_rows(self) -> Tensor | None:
        """View [total_q x heads], or None."""
        return None if self.lse is None else self.lse.view(-1)

    @property
    def pages(self) -> Tensor:
        """View [pages, page_size, width] of the cache."""
        cache = self.args.kv_cache
        return cache[:, 0] if cache.dim() == 4 else cache

    @property
    def key_table(self) -> Tensor:
        """View [batch, max_pages] of the pages that the scores read. If sparse [total_q, top_k],
        with `sparse_mla_top_k_lens` a copy that has -1 in slots that do not count.
        """
        table = self.args.block_tables
        if self.features.sparse:
            table = table.view(self.form.total_q, -1)
            counts = slots_of_rows(self.args, self.form.total_q)
            return table if counts is None else table.masked_fill(unused_slots(table, counts), -1)
        return table[:, 0] if self.features.separate_tables else table

    @property
    def value_table(self) -> Tensor:
        """View [batch, max_pages] of the pages that the values read."""
        return self.args.block_tables[:, 1] if self.features.separate_tables else self.key_table

    @property
    def mask_rows(self) -> Tensor | None:
        """View uint16 [total_q, words], or None."""
        mask = self.args.mask
        return None if mask is None else mask.view(-1, mask.shape[-1])


def bind(args: DecodeArgs, form: Form, *, reads_lengths: bool, debug: bool) -> Call:
    """The call of arguments whose form is checked.

    reads_lengths: the backend plans on the host; on a GPU that is a synchronisation.
    debug: every value is checked, which on a GPU synchronises too; in the capture of a graph the
    streams of a workspace are.
    """
    check_numbers(args)
    check_overlap(args, PARAMETERS)
    if not reads_lengths:
        check_places(args)
    if debug and is_captured(form.device):
        check_streams(args.workspace_buffer)
        debug = False  # the rest would read values
    lengths = read_lengths(args, form, reads_lengths or debug)
    if debug:
        check_debug(args, form, lengths)
    out, lse = args.out, args.lse
    if out is None:
        out = torch.empty(form.out_shape, dtype=form.out_dtype, device=form.device)
    if lse is None and args.return_lse:
        lse = torch.empty(form.lse_shape, dtype=torch.float32, device=form.device)
    return Call(form, args, lengths, out, lse)
