"""Visibility of a chunk's keys to the rows of a work tile."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from ...call.bind import Call
from ...core import masks


class Visibility:
    """The causal rule, bottom-right; a packed mask; positions of context-parallel ranks.

    Position p of a request is its draft column p - (length - q_len); a negative column is the
    prefix, visible to every row. On rank r of a context-parallel call the local token j is at
    position j x world + r, and lengths are those over all ranks.
    """

    def __init__(self, call: Call) -> None:
        problem, args = call.problem, call.args
        self.heads = problem.heads
        self.q_lens = problem.q_lens
        #: first query token of each request in the call
        self.q_begin = (0, *accumulate(problem.q_lens))
        self.device = call.form.device
        mask = call.mask_rows
        # torch cannot index uint16 on every device
        self.mask = None if mask is None else mask.view(torch.int16)
        self.world, self.rank, self.lengths = args.cp_world, args.cp_rank, problem.kv_lens
        if args.causal_seqlens_kv_global is not None:
            self.lengths = tuple(args.causal_seqlens_kv_global.tolist())

    def hidden(self, request: int, rows: tuple[int, int], keys: tuple[int, int]) -> Tensor | None:
        """bool [rows, keys], true where a key is hidden from a row; None where none is.

        rows and keys are ranges inside the request.
        """
        prefix = self.lengths[request] - self.q_lens[request]
        last_column = (keys[1] - 1) * self.world + self.rank - prefix
        first_token = rows[0] // self.heads
        if last_column < 0 or (self.mask is None and last_column <= first_token):
            return None
        token = torch.arange(*rows, device=self.device) // self.heads
        column = torch.arange(*keys, device=self.device) * self.world + (self.rank - prefix)
        if self.mask is None:
            return column > token.unsqueeze(1)
        q_len = self.q_lens[request]
        words = self.mask[self.q_begin[request] + token].view(torch.uint16)
        seen = masks.unpack(words, q_len)[:, column.clamp(0, q_len - 1)]
        return (column >= 0) & ~(seen & (column < q_len))
