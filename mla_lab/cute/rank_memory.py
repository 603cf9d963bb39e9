"""A rank's memory for `rank_exchange`, as the kernel and the host, which allocates it, both see it.
Imports no cutlass.
"""

from __future__ import annotations

from ..core.dims import LATENT_DIM

#: SMs of a card, at least: all CTAs of a launch are on it at once
SMS = 132
#: a word of 4 bytes that no rank has written
EMPTY = 0x80008000 - 2**32
#: bytes of a row: its out, of 16 bits, and its lse
OUT_BYTES, LSE_BYTES = 2 * LATENT_DIM, 4


def buffer_rows(most_rows: int) -> int:
    """Rows of a buffer for calls of up to `most_rows`: a multiple of 4, so that the second half of
    a rank's memory begins at a multiple of 16 bytes."""
    return -(-most_rows // 4) * 4


def peer_bytes(ranks: int, rows: int) -> int:
    """Bytes of a rank's memory with buffers of `rows`: two halves, each with a buffer a rank."""
    return 2 * ranks * rows * (OUT_BYTES + LSE_BYTES)
