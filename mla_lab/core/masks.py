"""Packed uint16 masks for speculative decoding: visibility between draft tokens.

A request's q_len new tokens are its *draft*: row r is a draft query, column c the draft key at
KV position seq_len - q_len + c. The tokens before the draft (the prefix) are always visible.
Bit c of row r, least significant first, says that row r may see column c; a row takes
ceil(columns / 32) * 2 words of 16 bits, and bits past the last column are zero. The layout is
that of FlashInfer's XQA mask.

Visibility is bool, packed words are uint16; everything is computed on the tensor's own device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .errors import invalid, invalid_type

WORD_BITS = 16


def words_per_row(columns: int) -> int:
    """16-bit words of a packed row; rows are padded to whole 32-bit words."""
    return -(-columns // 32) * 2


def chain(q_len: int, device: torch.device | str = "cpu") -> Tensor:
    """Visibility of a chain, bool [q_len, q_len]: each token sees itself and those before."""
    return torch.ones(q_len, q_len, dtype=torch.bool, device=device).tril()


def tree(parents: Sequence[int] | Sequence[Sequence[int]] | Tensor) -> Tensor:
    """Visibility of a draft tree: each token sees itself and its ancestors.

    parents: [..., q_len]; the parent of each token, an earlier token, or -1 for a root (whose
    parent is the prefix). Returns bool [..., q_len, q_len].

    Raises InvalidInput for a parent that does not come earlier (a tensor on a GPU is copied to
    the host for this check).
    """
    parent = torch.as_tensor(parents, dtype=torch.long)
    q_len = parent.shape[-1]
    token = torch.arange(q_len, device=parent.device)
    if bool(((parent < -1) | (parent >= token)).any()):
        raise invalid("parents", parent.tolist(), "for token t a value from -1 to t - 1")
    is_parent = parent.unsqueeze(-1) == token
    reach = (is_parent | torch.eye(q_len, dtype=torch.bool, device=parent.device)).float()
    for _ in range((q_len - 1).bit_length()):  # each squaring doubles the generations seen
        reach = ((reach @ reach) > 0).float()
    return reach > 0


def random_parents(q_len: int, random: torch.Generator) -> Tensor:
    """Parents of a random draft tree, int64 [q_len]: -1 or any earlier token, equally likely."""
    choices = torch.arange(1, q_len + 1, device=random.device)
    draw = torch.rand(q_len, generator=random, device=random.device)
    return (draw * choices).long().clamp_max(choices - 1) - 1


def pack(visible: Tensor) -> Tensor:
    """Bool [..., columns] -> uint16 [..., ceil(columns / 32) * 2], on the same device."""
    words = words_per_row(visible.shape[-1])
    padding = words * WORD_BITS - visible.shape[-1]
    bits = torch.nn.functional.pad(visible.to(torch.int32), (0, padding))
    bits = bits.unflatten(-1, (words, WORD_BITS))
    weights = 1 << torch.arange(WORD_BITS, dtype=torch.int32, device=visible.device)
    packed = (bits * weights).sum(-1, dtype=torch.int32)
    # torch has few uint16 kernels: keep the low half of each int32 by reinterpreting it
    return packed.to(torch.int16).view(torch.uint16)


def unpack(mask: Tensor, columns: int) -> Tensor:
    """uint16 [..., words] -> bool [..., columns]; padding bits are cut off."""
    words = mask.view(torch.int16).to(torch.int32).unsqueeze(-1)
    shifts = torch.arange(WORD_BITS, dtype=torch.int32, device=mask.device)
    return ((words >> shifts) & 1).bool().flatten(-2)[..., :columns]


def pack_ragged(visible: Sequence[Tensor], max_q_len: int | None = None) -> Tensor:
    """One bool [q_len, q_len] for each request -> uint16 [total_q, words of max_q_len].

    max_q_len: the value that the call will be given; by default the longest of them.
    """
    longest = max(v.shape[-1] for v in visible)
    columns = longest if max_q_len is None else max_q_len
    if columns < longest:
        raise invalid("max_q_len", columns, f"at least the longest draft, {longest}")
    pad = torch.nn.functional.pad
    return pack(torch.cat([pad(v, (0, columns - v.shape[-1])) for v in visible]))


def validate(mask: Tensor, q_lens: Sequence[int], *, max_q_len: int | None = None) -> None:
    """Checks a packed mask against the draft lengths of its batch.

    mask: dense uint16 [batch, q_len, words] or ragged [total_q, words].
    Raises InvalidInput on a wrong dtype, shape or set padding bit (the bits are copied to the
    host to tell).
    """
    if mask.dtype is not torch.uint16:
        raise invalid_type("mask", mask.dtype, torch.uint16)
    columns = max(q_lens) if max_q_len is None else max_q_len
    dense = mask.dim() == 3
    rows = (len(q_lens), columns) if dense else (sum(q_lens),)
    shape = (*rows, words_per_row(columns))
    if tuple(mask.shape) != shape:
        raise invalid("mask", f"shape {tuple(mask.shape)}", shape)
    bits = unpack(mask, mask.shape[-1] * WORD_BITS).flatten(0, -2)
    lengths = torch.tensor(q_lens, device=mask.device)
    rows_of = torch.full_like(lengths, columns) if dense else lengths
    own_columns = lengths.repeat_interleave(rows_of).unsqueeze(-1)
    padding = torch.arange(bits.shape[-1], device=mask.device) >= own_columns
    bad = (bits & padding).nonzero()
    if len(bad):
        row, column = bad[0].tolist()
        raise invalid("mask", f"bit {column} of row {row} set", "padding bits of zero")


def picture(visible: Tensor) -> str:
    """Text of one request's visibility, bool [q_len, q_len]: a row a line, # sees, . does not."""
    return "\n".join("".join("#" if v else "." for v in row) for row in visible.tolist())
