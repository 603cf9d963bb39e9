"""The arguments of a GQA or MQA decode call, and what shapes, dtypes and flags tell of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class GqaArguments:
    """As the caller gave them, unchecked; names and meanings are those of `contract_gqa`."""

    query: Tensor
    kv_cache: Tensor | tuple[Tensor, Tensor]
    workspace_buffer: Tensor | None
    block_tables: Tensor
    seq_lens: Tensor
    max_seq_len: int
    bmm1_scale: float | Tensor = 1.0
    bmm2_scale: float | Tensor = 1.0
    window_left: int = -1
    out: Tensor | None = None
    out_dtype: Any = None
    sinks: Tensor | Sequence[Tensor] | None = None
    kv_layout: str = "HND"
    enable_pdl: bool | None = None
    q_len_per_req: int | None = 1
    o_scale: float | None = 1.0
    mask: Tensor | None = None
    max_q_len: int | None = None
    cum_seq_lens_q: Tensor | None = None
    skip_softmax_threshold_scale_factor: float | None = None
    uses_shared_paged_kv_idx: bool = True
    lse: Tensor | None = None
    return_lse: bool = False
    batch_invariant: bool = False


@dataclass(frozen=True)
class GqaForm:
    """What is known of a checked call without reading a tensor; lengths are bounds."""

    batch: int
    total_q: int
    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    q_dtype: str
    kv_format: str
    out_dtype: str
    #: tokens that a row of the block table can name, or max_seq_len where that is less
    longest: int
    #: query tokens of a request, or their bound; None where it must be read
    max_q_len: int | None
    device: torch.device
    ragged: bool
    #: what the call uses beyond plain decode, for a backend to refuse
    features: frozenset[str]

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.heads // self.kv_heads


@dataclass(frozen=True, eq=False)
class CheckedGqaCall:
    """A checked call, its results allocated."""

    form: GqaForm
    given: GqaArguments
    #: each [pages, kv_heads, page_size, head_dim], or with tokens before heads, as kv_layout says
    keys: Tensor
    values: Tensor
    #: query tokens of each request where they were read
    q_lens: tuple[int, ...] | None
    out: Tensor
    lse: Tensor | None

    @property
    def sink(self) -> Tensor | None:
        """fp32 [heads], or None."""
        sinks = self.given.sinks
        return sinks if sinks is None or isinstance(sinks, Tensor) else sinks[0]
