"""From a block table to the boxes that the tensor memory accelerator fetches.

A kernel reads a request's cache in tiles of 64 tokens. A tile is one or more *boxes*: runs of
rows inside one page. A box has min(page, tile) rows and is always fetched whole: rows after the
request's last token are loaded too, and masked. Pages after the last token are never read. Each box
is nine bulk copies of 64 columns (128 bytes, one swizzle row).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..core.errors import invalid

TILE_KV = 64
#: bulk copies of 64 columns in a row of 576
COPIES_PER_BOX = 9


class Box(NamedTuple):
    """Rows [row, row + rows) of page `page`, which become rows [at, at + rows) of tile `tile`."""

    tile: int
    at: int
    page: int
    row: int
    rows: int


def boxes(table: list[int], kv_len: int, page_size: int) -> list[Box]:
    """The boxes of one request, tile after tile.

    table: its page ids, in token order. page_size must divide TILE_KV or be a multiple of it.
    """
    if page_size % TILE_KV and TILE_KV % page_size:
        raise invalid("page_size", page_size, f"a divisor or a multiple of {TILE_KV}")
    if len(table) * page_size < kv_len:
        raise invalid("table", f"{len(table)} pages", f"enough for {kv_len} tokens")
    height = min(page_size, TILE_KV)
    return [
        Box(token // TILE_KV, token % TILE_KV, table[token // page_size], token % page_size, height)
        for token in range(0, kv_len, height)
    ]


def gather(cache: np.ndarray, fetched: list[Box], kv_len: int) -> np.ndarray:
    """Rows [kv_len, width] that the boxes load from `cache` [pages, page_size, width]."""
    tiles = 1 + max((box.tile for box in fetched), default=-1)
    out = np.full((tiles * TILE_KV, cache.shape[2]), np.nan, cache.dtype)
    for box in fetched:
        first = box.tile * TILE_KV + box.at
        out[first : first + box.rows] = cache[box.page, box.row : box.row + box.rows]
    return out[:kv_len]


@dataclass(frozen=True)
class Traffic:
    """Memory traffic of loading one request."""

    boxes: int
    copies: int
    #: loaded rows after the last token
    wasted_rows: int
    #: slots of the pages that hold no token: memory, not traffic
    unused_slots: int


def traffic(kv_len: int, page_size: int) -> Traffic:
    """Counts for a request of `kv_len` tokens on pages of `page_size`."""
    pages = -(-kv_len // page_size)
    fetched = boxes(list(range(pages)), kv_len, page_size)
    rows = sum(box.rows for box in fetched)
    unused = pages * page_size - kv_len
    return Traffic(len(fetched), len(fetched) * COPIES_PER_BOX, rows - kv_len, unused)


def random_table(kv_len: int, page_size: int, total_pages: int, seed: int) -> list[int]:
    """Distinct page ids in random order, as a server's allocator leaves them."""
    pages = -(-kv_len // page_size)
    if pages > total_pages:
        raise invalid("total_pages", total_pages, f"at least {pages}")
    return [int(p) for p in np.random.default_rng(seed).permutation(total_pages)[:pages]]
