"""What shapes, dtypes, strides and flags tell of a call; equal calls share one `Form`.

A `Form` does not depend on a tensor's values, so that it can be kept, and a backend chosen by it
runs calls of any lengths: a captured CUDA graph stays right when they change.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ..core.problem import Problem
from ..plan.tile import Plan


@dataclass(frozen=True)
class Features:
    """What a call uses beyond one query token a request over one paged bf16 cache.

    Dtypes, dims, heads and page size are in the `Problem` that goes with it.
    """

    ragged: bool = False
    #: a request may have more than one query token, under the causal rule
    causal: bool = False
    #: a packed draft mask replaces the causal rule
    mask: bool = False
    sinks: bool = False
    lse: bool = False
    sparse: bool = False
    #: how many slots of a query token count
    top_k_lens: bool = False
    #: with a factor above 0: a factor of 0 skips nothing
    skip_softmax: bool = False
    #: a scale is a tensor on the device
    tensor_scales: bool = False
    #: bmm1_scale is a number that is not above 0
    nonpositive_scale: bool = False
    separate_tables: bool = False
    context_parallel: bool = False
    batch_invariant: bool = False
    #: there are gaps between the rows of the query
    strided_query: bool = False
    #: there are gaps between the pages of the cache
    strided_pages: bool = False
    #: there are gaps between the rows of the block table
    strided_tables: bool = False
    #: programmatic dependent launch is required, not left to the device
    pdl: bool = False
    #: programmatic dependent launch is excluded
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
