"""Two mainloops in one kernel: the length of a single request, on the device, says which of them
runs.

The gate is the number of its blocks from which on keep_ab runs; below it each CTA runs swap_ab.
It is the upper half of the launch argument that has `Costs.packed` below; 0 where a kernel has one
mainloop."""

from __future__ import annotations

from ..core.errors import invalid

#: the greatest gate
MOST_BLOCKS = (1 << 15) - 1
#: query rows of swap_ab's row tiles in a dual build of keep_ab (`cute.keep_ab_sm90.dual`)
DUAL_ROWS = 16
#: by the value of the option `dual` (1: one query token, 2: several), KV tiles of a CTA up to which
#: swap_ab is the quicker of the two. 128 rows of one token: of 2, 3 and 4 tiles it takes 8.8, 10.8
#: and 12.8 us, keep_ab 11.0, 12.4 and 12.5; of two tokens of 128 heads: of 2 and 4 tiles 8.9 and
#: 14.6, keep_ab 10.8 and 11.8 (H200, 2026-11-24, `data/notes/kernel_attempts.jsonl`)
DUAL_TILES = {1: 3, 2: 2}
#: by the same value, the least that keep_ab's longest piece may have, in blocks. 128 rows of one
#: token have 66 bundles of CTAs: 49 to 66 blocks in pieces of two take 0.96 to 0.99 of the time of
#: pieces of one, whose merges have twice as many partials, in a step 0.96 to 0.98. 256 and 512 rows
#: have 33 and 16 bundles, and take 1.03 to 1.11 (H200, 2026-11-30,
#: `data/notes/kernel_attempts.jsonl`)
LEAST_BLOCKS = {1: 2, 2: 1}
#: query rows of a request up to which a dual build is taken: beyond, swap_ab has too few splits
MOST_DUAL_ROWS = 512
#: query rows, two tiles of keep_ab, from which on it is taken whichever mainloop is priced lower
#: for all lengths together: each length gets the quicker one. On an H100 the prices for 128 rows
#: are within 0.2 % of each other, and 65,536 tokens took 83.4 us by swap_ab alone, FlashInfer 58.1
#: (2026-11-26, `data/notes/kernel_attempts.jsonl`)
LEAST_DUAL_ROWS = 128


def dual_gate(dual: int, rows: int, workers: int) -> int:
    """Blocks from which on keep_ab runs a single request of so many query rows in a dual build."""
    return DUAL_TILES[dual] * (workers // -(-rows // DUAL_ROWS)) + 1


def gated(word: int, gate: int) -> int:
    """A launch argument of 16 bits with a gate above it, as int32."""
    if not 0 <= gate <= MOST_BLOCKS:
        raise invalid("gate", gate, f"0 to {MOST_BLOCKS} blocks")
    if not 0 <= word < 1 << 16:
        raise invalid("word", word, "0 to 65535")
    return (gate << 16) | word
