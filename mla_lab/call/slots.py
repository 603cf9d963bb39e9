"""How many of a query token's slots count in a sparse call."""

from __future__ import annotations

import torch
from torch import Tensor

from .decode_args import DecodeArgs


def slots_of_rows(args: DecodeArgs, total_q: int) -> Tensor | None:
    """int32 [total_q] from `sparse_mla_top_k_lens`, which may be of requests; None: all count.

    Reads no value on the host. As many requests as query tokens: the lengths are of query tokens.
    """
    lens = args.sparse_mla_top_k_lens
    if lens is None or len(lens) == total_q:
        return lens
    if args.cum_seq_lens_q is None:
        return lens.repeat_interleave(total_q // len(lens), output_size=total_q)
    return lens.repeat_interleave(args.cum_seq_lens_q.diff(), output_size=total_q)


def unused_slots(tables: Tensor, counts: Tensor) -> Tensor:
    """bool [total_q, top_k], true for the slots of `tables` behind those that count."""
    column = torch.arange(tables.shape[-1], dtype=torch.int32, device=tables.device)
    return column >= counts.unsqueeze(-1)
