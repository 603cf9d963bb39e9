"""KV tokens gathered from their pages and converted to the computing dtype.

The buffers stand for a kernel's shared memory: one chunk of tokens at a time, always at the same
address and with the same strides, so that no product's bits depend on where pages lie.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...call.bind import Call
from ...core import kv_cache as formats
from ...core.dims import LATENT_DIM


class Stage:
    """Buffers for one chunk of tokens of one call.

    columns: number of leading columns: all, or the latent ones alone for values in pages of their
    own, whose rope columns are unused.
    """

    def __init__(self, call: Call, tokens: int, columns: int, dtype: torch.dtype) -> None:
        pages = call.pages
        if pages.dtype in (torch.float8_e4m3fn, torch.int8):
            pages = pages.view(torch.uint8)
        self.packed = call.problem.kv_format == "fp8_656"
        width = pages.shape[-1] if self.packed else columns
        self.source = _by_address(pages, width)
        self.stored = torch.empty(tokens, width, dtype=pages.dtype, device=pages.device)
        self.wide = self.stored
        if pages.dtype is not dtype:
            self.wide = torch.empty(tokens, columns, dtype=dtype, device=pages.device)
        self.e4m3 = None
        if pages.dtype is torch.uint8:
            self.e4m3 = _E4m3(tokens * min(width, columns), dtype, pages.device)

    def load(self, addresses: Tensor) -> Tensor:
        """The tokens at `addresses`, [n, columns] of the computing dtype, until the next load."""
        n = len(addresses)
        stored, wide = self.stored[:n], self.wide[:n]
        torch.index_select(self.source, 0, addresses, out=stored)
        if self.e4m3 is None:
            return stored if wide.dtype is stored.dtype else wide.copy_(stored)
        if not self.packed:
            return self.e4m3.decode(stored)
        latent_dim = LATENT_DIM
        _, scales, rope = formats.split_656(stored)
        latent = self.e4m3.decode(stored[:, :latent_dim]).unflatten(1, (-1, formats.SCALE_GROUP))
        by_group = wide[:, :latent_dim].unflatten(1, latent.shape[1:])
        torch.mul(latent, scales.unsqueeze(2), out=by_group)
        wide[:, latent_dim:].copy_(rope[:, : wide.shape[1] - latent_dim])
        return wide


class _E4m3:
    """e4m3 bytes to values through a table of all 256.

    torch's own cast takes 1.75 ns a value on one Zen 4 core, the table a fifth of that.
    """

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        codes = torch.arange(256, dtype=torch.uint8, device=device)
        self.table = codes.view(torch.float8_e4m3fn).to(dtype)
        self.codes = torch.empty(size, dtype=torch.int32, device=device)
        self.values = torch.empty(size, dtype=dtype, device=device)

    def decode(self, stored: Tensor) -> Tensor:
        """uint8 of any shape -> its values, in a buffer that the next call overwrites."""
        n = stored.numel()
        codes, values = self.codes[:n], self.values[:n]
        codes.view(stored.shape).copy_(stored)
        torch.index_select(self.table, 0, codes, out=values)
        return values.view(stored.shape)


def _by_address(pages: Tensor, width: int) -> Tensor:
    """The cache as overlapping rows of `width` elements, row a of which begins at element a."""
    last = (pages.shape[0] - 1) * pages.stride(0) + (pages.shape[1] - 1) * pages.shape[2]
    return pages.as_strided((last + 1, width), (1, 1))


class Addresses:
    """Where the tokens of a call lie in its cache, as element numbers (int64)."""

    def __init__(self, call: Call) -> None:
        pages = call.pages
        self.page_size = pages.shape[1]
        self.page_stride = pages.stride(0)
        self.offsets = torch.arange(self.page_size, device=pages.device) * pages.shape[2]

    def positions(self, table: Tensor, begin: int, end: int) -> Tensor:
        """Tokens at KV positions [begin, end) of the request with page ids `table` [max_pages]."""
        first = begin // self.page_size
        ids = table[first : -(-end // self.page_size)].long()
        addresses = (ids * self.page_stride).unsqueeze(1) + self.offsets
        return addresses.view(-1)[begin - first * self.page_size : end - first * self.page_size]

    def slots(self, slots: Tensor) -> Tensor:
        """Tokens at slots (page x page_size + offset); those of -1 are left out."""
        chosen = slots[slots >= 0].long()
        page = chosen // self.page_size
        return page * self.page_stride + self.offsets[chosen - page * self.page_size]
