"""Decode context parallel as a draft mask: what a rank's rows see of its own tokens.

Local token j of rank r is at position j x world + r of its request. The last q_len local tokens are
the draft columns of a kernel's mask, and all before them precede every draft token, so that a
packed mask made from both lengths says all that the positions do. Where `seq_lens` counts tokens
behind the request's end, which no row sees, the kernel gets the length without them. Both are made
on the device in each launch, on a Hopper card by one kernel; no length is read on the host.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..call.bind import Call
from ..call.decode_args import DecodeArgs
from ..call.form import Features
from ..core import masks
from ..core.errors import invalid_type
from . import rank_kernels
from .base import Replay, fill_longer_with_nan

#: query tokens of a ragged call without a mask of its own up to which masks have a column for each
#: of them, so that a bound of a request's query tokens may be too small: 128 KiB of masks
MOST_TOKENS = 1024


def masked(features: Features) -> Features:
    """What a kernel is selected by for a call of `features`."""
    if not features.context_parallel:
        return features
    return replace(features, context_parallel=False, causal=False, mask=True)


@dataclass(frozen=True)
class RankMask:
    """Makes the masks of calls of one form."""

    #: query tokens of each request; None where `cum_seq_lens_q` holds them
    q_len: int | None
    total_q: int
    columns: int

    @classmethod
    def of(cls, call: Call) -> RankMask:
        """Of a checked call; where `width_was_read`, for its own lengths alone."""
        form, longest = call.form, max(call.form.bounds.q_lens)
        if not form.features.ragged:
            return cls(longest, form.total_q, longest)
        if width_was_read(call):
            return cls(None, form.total_q, max(call.lengths.q_lens or (1,)))
        narrow = call.args.mask is not None or form.total_q > MOST_TOKENS
        return cls(None, form.total_q, longest if narrow else form.total_q)

    def __call__(self, args: DecodeArgs) -> DecodeArgs:
        """`args` with what the kernel reads: mask, and lengths up to the end of each request.

        Raises InvalidType for a mask of another dtype than uint16, which a repeated call may have.
        """
        if args.mask is not None and args.mask.dtype is not torch.uint16:
            raise invalid_type("mask", args.mask.dtype, torch.uint16)
        if not rank_kernels.can_mask(args):
            return self.by_torch(args)
        held, words = rank_kernels.mask_of(args, self.q_len, self.total_q, self.columns)
        return replace(args, seq_lens=held, mask=self._shaped(words))

    def hide_longer(self, args: DecodeArgs, out: Tensor, lse: Tensor | None) -> None:
        """NaN in the rows of requests that have more query tokens than a mask has columns."""
        if self.q_len is None and self.columns < self.total_q:
            fill_longer_with_nan(args, self.columns, out, lse)

    def by_torch(self, args: DecodeArgs) -> DecodeArgs:
        """What a call of this object returns, by some forty kernels of PyTorch, on any device."""
        of_all: Tensor = args.causal_seqlens_kv_global  # type: ignore[assignment]
        # without a sum, which would overflow for a length near 2^31
        before_end = of_all // args.cp_world + (of_all % args.cp_world > args.cp_rank)
        held = torch.minimum(args.seq_lens, before_end.clamp(min=0))
        return replace(args, seq_lens=held, mask=self._words(args, held))

    def _words(self, args: DecodeArgs, kv_lens: Tensor) -> Tensor:
        """The mask, where the rank holds `kv_lens` tokens of each request: uint16 [batch, q_len,
        words], ragged [total_q, words]."""
        device = args.query.device
        token = torch.arange(self.total_q, dtype=torch.int32, device=device)
        request, row, q_len = self._places(args, token)
        # of each token of the query, as a column of what follows
        held = kv_lens[request].unsqueeze(1)
        of_all: Tensor = args.causal_seqlens_kv_global  # type: ignore[assignment]
        first_draft = (of_all[request] - q_len).unsqueeze(1)
        row, q_len = row.unsqueeze(1), q_len.unsqueeze(1)
        column = torch.arange(self.columns, dtype=torch.int32, device=device)
        draft = (held - q_len + column) * args.cp_world + args.cp_rank - first_draft
        seen = (draft < 0) | self._drafts(args, draft, row)
        return self._shaped(masks.pack(seen & (column < q_len)))

    def _shaped(self, words: Tensor) -> Tensor:
        return words if self.q_len is None else words.view(-1, self.q_len, words.shape[-1])

    def _places(self, args: DecodeArgs, token: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Request, row in it and its query tokens, of each token of the query."""
        if self.q_len is not None:
            request = token // self.q_len
            return request, token % self.q_len, torch.full_like(token, self.q_len)
        begins: Tensor = args.cum_seq_lens_q  # type: ignore[assignment]
        request = torch.searchsorted(begins, token, right=True, out_int32=True) - 1
        # tokens past a sum that ends early have no request of their own
        request = request.clamp(0, len(begins) - 2)
        return request, token - begins[request], begins[request + 1] - begins[request]

    def _drafts(self, args: DecodeArgs, draft: Tensor, row: Tensor) -> Tensor:
        """Whether a row sees draft columns (of all ranks): by the caller's mask, or causally."""
        if args.mask is None:
            return draft <= row
        seen = masks.unpack(args.mask.view(self.total_q, -1), self.columns)
        return seen.gather(1, draft.clamp(0, self.columns - 1).long())


def width_was_read(call: Call) -> bool:
    """Whether masks are as wide as query tokens that were read for this call alone, so that no
    other call may repeat its launch.
    """
    form = call.form
    if not form.features.ragged or form.max_q_len is not None:
        return False
    made = form.features.context_parallel and form.total_q > MOST_TOKENS
    return call.args.mask is not None or made


def with_mask(call: Call) -> Call:
    """The call with a mask in place of context parallel, for a kernel's first launch."""
    args = replace(
        RankMask.of(call)(call.args),
        enable_dcp=False,
        cp_world=1,
        cp_rank=0,
        causal_seqlens_kv_global=None,
    )
    return replace(call, form=replace(call.form, features=masked(call.features)), args=args)


def repeated(call: Call, launch: Replay) -> Replay:
    """`launch`, made for `with_mask(call)`, for the arguments of calls like `call`. NaN in rows of
    requests with more query tokens than a mask has columns, as bounds that are too small allow.
    """
    mask_of = RankMask.of(call)

    def again(args: DecodeArgs, out: Tensor, lse: Tensor | None) -> None:
        launch(mask_of(args), out, lse)
        mask_of.hide_longer(args, out, lse)

    return again
