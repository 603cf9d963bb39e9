"""Which rows of a work tile see which of a chunk's keys."""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from ...call.decode_args import Call
from ...core import masks


class Visibility:
    """The causal rule, bottom-right; a packed mask; positions dealt out to ranks.

    Position p of a request is its draft column p - (length - q_len); a negative column is the
    prefix, which everyone sees. On rank r of a context-parallel call the local token j stands at
    position j x world + r, and lengths are those over all ranks.
    """

    def __init__(self, call: Call) -> None:
        problem, given = call.problem, call.given
        self.heads = problem.heads
        self.q_lens = problem.q_lens
        #: first query token of each request in the call
        self.q_begin = (0, *accumulate(problem.q_lens))
        self.device = call.form.device
        mask = call.mask_rows
        # torch indexes int16 everywhere, uint16 not
        self.mask = None if mask is None else mask.view(torch.int16)
        self.world, self.rank, self.lengths = given.cp_world, given.cp_rank, problem.kv_lens
        if given.causal_seqlens_kv_global is not None:
            self.lengths = tuple(given.causal_seqlens_kv_global.tolist())

    def hidden(self, request: int, rows: tuple[int, int], keys: tuple[int, int]) -> Tensor | None:
        """bool [rows, keys], true where a row must not see a key; None where all is seen.

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
