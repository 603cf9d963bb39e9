"""One decode call between its checks and its launch.

    Arguments   what the caller gave, by the contract's names
    Features    what a call uses beyond plain decode; backends refuse by them
    Form        everything that shapes, dtypes, strides and flags tell; shared by equal calls
    Call        one form with one set of tensors, results allocated

A `Form` never depends on a tensor's values, so it can be remembered, and choosing a backend by
it gives one answer for all lengths: a captured CUDA graph stays right when they change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.problem import LATENT_DIM, ROPE_DIM, Problem
from ..plan.tile import Plan


class Arguments(NamedTuple):
    """The arguments of one call, unchecked; names and meanings are `decode`'s."""

    query: Tensor
    kv_cache: Tensor
    block_tables: Tensor
    seq_lens: Tensor
    max_seq_len: int | None = None
    workspace_buffer: Tensor | None = None
    kv_lora_rank: int = LATENT_DIM
    qk_rope_head_dim: int = ROPE_DIM
    sparse_mla_top_k: int = 0
    out: Tensor | None = None
    bmm1_scale: float | Tensor = 1.0
    bmm2_scale: float | Tensor = 1.0
    sinks: Tensor | Sequence[Tensor] | None = None
    skip_softmax_threshold_scale_factor: float | None = None
    enable_pdl: bool | None = None
    is_var_seq: bool = True
    uses_shared_paged_kv_idx: bool = True
    lse: Tensor | None = None
    return_lse: bool = False
    return_lse_base: str | None = None
    cum_seq_lens_q: Tensor | None = None
    max_q_len: int | None = None
    enable_dcp: bool = False
    cp_world: int = 1
    cp_rank: int = 0
    causal_seqlens_kv_global: Tensor | None = None
    mask: Tensor | None = None
    batch_invariant: bool = False
    plan: Plan | None = None


@dataclass(frozen=True)
class Features:
    """What a call uses beyond one query token a request over one paged bf16 cache.

    Dtypes, dims, heads and page size are in `Problem`, which stands beside this everywhere.
    """

    ragged: bool = False
    #: more than one query token a request is possible, under the causal rule
    causal: bool = False
    #: a packed draft mask takes the causal rule's place
    mask: bool = False
    sinks: bool = False
    lse: bool = False
    sparse: bool = False
    #: with a factor above 0: one of 0 leaves out nothing
    skip_softmax: bool = False
    #: a scale is a tensor on the device
    tensor_scales: bool = False
    #: bmm1_scale is a number that is not above 0
    nonpositive_scale: bool = False
    separate_tables: bool = False
    context_parallel: bool = False
    batch_invariant: bool = False
    #: pages of the cache do not follow each other without a gap
    strided_pages: bool = False
    #: rows of the block table do not follow each other without a gap
    strided_tables: bool = False
    #: programmatic dependent launch is demanded, not left to the device
    pdl: bool = False
    #: or is ruled out
    no_pdl: bool = False
    #: the caller brings a plan
    planned: bool = False

    def names(self) -> tuple[str, ...]:
        """The features in use."""
        return tuple(name for name, used in vars(self).items() if used)


@dataclass(frozen=True, eq=False)
class Form:
    """All that is known of a call without reading a tensor. Compares and hashes by identity."""

    features: Features
    #: the call with every length at its bound: q_len, and the tokens a block table can name
    bounds: Problem
    device: torch.device
    #: query tokens in all
    total_q: int
    #: tokens of each request; of a ragged call the given bound, or None where it must be read
    max_q_len: int | None
    out_shape: tuple[int, ...]
    out_dtype: torch.dtype
    lse_shape: tuple[int, ...]
    #: lengths can be read without a synchronisation
    on_host: bool
    #: plans found to fit these bounds, by (id, max_seq_len); kept alive, or an id could return
    fitting_plans: dict[tuple[int, int | None], Plan] = field(default_factory=dict, repr=False)


class Lengths(NamedTuple):
    """Lengths that were read on the host; None where they stay on the device."""

    q_lens: tuple[int, ...] | None
    kv_lens: tuple[int, ...] | None


@dataclass(frozen=True, eq=False)
class Call:
    """A checked call. `given` holds the caller's tensors as they are; nothing was copied."""

    form: Form
    given: Arguments
    lengths: Lengths
    #: in the caller's shape: query.shape[:-1] + (latent,)
    out: Tensor
    #: fp32, in the caller's shape; None where no one asked for it
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
        if self.given.max_seq_len is not None:
            kv_bounds = tuple(min(n, self.given.max_seq_len) for n in kv_bounds)
        return Problem(
            q_lens=bounds.q_lens if self.lengths.q_lens is None else self.lengths.q_lens,
            kv_lens=kv_bounds if self.lengths.kv_lens is None else self.lengths.kv_lens,
            heads=bounds.heads,
            latent_dim=bounds.latent_dim,
            rope_dim=bounds.rope_dim,
            q_dtype=bounds.q_dtype,
            kv_format=bounds.kv_format,
            out_dtype=bounds.out_dtype,
            page_size=bounds.page_size,
            top_k=bounds.top_k,
        )

    @property
    def query_rows(self) -> Tensor:
        """View [total_q x heads, head_dim]."""
        return self.given.query.view(-1, self.given.query.shape[-1])

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
        cache = self.given.kv_cache
        return cache[:, 0] if cache.dim() == 4 else cache

    @property
    def key_table(self) -> Tensor:
        """View [batch, max_pages] of the pages that the scores read; if sparse [total_q, top_k]."""
        table = self.given.block_tables
        if self.features.sparse:
            return table.view(self.form.total_q, -1)
        return table[:, 0] if self.features.separate_tables else table

    @property
    def value_table(self) -> Tensor:
        """View [batch, max_pages] of the pages that the values read."""
        return self.given.block_tables[:, 1] if self.features.separate_tables else self.key_table

    @property
    def sink(self) -> Tensor | None:
        """fp32 [heads], or None."""
        sinks = self.given.sinks
        return sinks if sinks is None or isinstance(sinks, Tensor) else sinks[0]

    @property
    def mask_rows(self) -> Tensor | None:
        """View uint16 [total_q, words], or None."""
        mask = self.given.mask
        return None if mask is None else mask.view(-1, mask.shape[-1])
